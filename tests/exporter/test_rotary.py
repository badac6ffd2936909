"""Rotary embedding in every way that people write it, by every exporter; ModernBERT and NomicBERT on every mask."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from torch import Tensor, nn

from tfx.exporter.capture import Positional, capture, dynamic_axes
from tfx.exporter.foreign import load, to_canonical_opset
from tfx.exporter.metadata import count, restore_metadata
from tfx.exporter.pipeline import Report, raise_model
from tfx.exporter.probe import inference
from tfx.exporter.quiet import quiet
from tfx.exporter.sources import Source
from tfx.runtime.tensors import MASK_PATTERNS, attended_positions, make_feeds

from . import rotary_ways as written
from .running import MASK, Arrays, assert_close, evaluate, lowered, nodes_of, parse, run, source_of, torch_answers

ROUTES = ("capture", "dynamo 18", "torchscript 17")
TARGETS = [("cpu", None), ("cuda", None), ("portable", 17), ("portable", 18), ("portable", 20), ("portable", 23)]
WAYS = {**written.HEADS_FIRST, **written.HEADS_LAST}
WAYS_BY_ROUTE = {
    # torch.export takes a second for each way. Both of its routes write a way alike; they differ in what is folded.
    "capture": [*WAYS][::2],
    "dynamo 18": [*WAYS][1::2],
    "torchscript 17": [*WAYS],
}
CONTRIB = "com.microsoft"


def exported(source: Source, route: str, folder: Path, feeds: Mapping[str, np.ndarray]) -> ir.Model:
    """The graph as `tfx optimize` takes it: at opset 23, nothing raised yet."""
    if route == "capture":
        return capture(source)
    path, tensors = folder / "model.onnx", tuple(torch.from_numpy(array) for array in feeds.values())
    names: dict[str, Any] = {"input_names": list(feeds), "output_names": list(torch_answers(source, feeds))}
    with inference(source.module), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if route.startswith("dynamo"):
            program = torch.export.export(
                Positional(source), tensors, dynamic_shapes=(dynamic_axes(source.inputs),), strict=False
            )
            made = torch.onnx.export(program, dynamo=True, opset_version=18, verbose=False, **names)
            assert made is not None
            made.save(path)
        else:
            axes = {name: {0: "batch", 1: "sequence"} for each in names.values() for name in each}
            axes |= {
                spec.name: {i: a for i, a in enumerate(spec.shape) if isinstance(a, str)} for spec in source.inputs
            }
            torch.onnx.export(
                Positional(source), tensors, str(path), dynamo=False, opset_version=17, dynamic_axes=axes, **names
            )
    model = load(path)
    to_canonical_opset(model, path.name)
    return model


# --- written by hand


def feeds_of(batch: int, sequence: int) -> Arrays:
    """Positions that are not in order, and other ones in each row."""
    rng = np.random.default_rng(batch)
    rows = [rng.permutation(written.ROWS)[:sequence] for _ in range(batch)]
    width = written.HEADS * written.SIZE
    x: np.ndarray = rng.standard_normal((batch, sequence, width)).astype(np.float32)
    return {"x": x, "position_ids": np.stack(rows)}


@dataclasses.dataclass(frozen=True)
class Made:
    """A module, its raised graph and what raising said; how many ways or layers it has."""

    source: Source
    canonical: ir.Model
    report: Report
    ways: list[str] = dataclasses.field(default_factory=list)
    layers: int = 0


@functools.cache
def rotations(route: str) -> Made:
    ways = WAYS_BY_ROUTE[route]
    source = source_of(
        written.Rotations({name: WAYS[name] for name in ways}),
        f"x:float32:batch,sequence,{written.HEADS * written.SIZE}", "position_ids:int64:batch,sequence",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = exported(source, route, Path(folder), feeds_of(3, 7))
    return Made(source, model, raise_model(model), ways)


@pytest.mark.parametrize("route", ROUTES)
def test_every_way_is_one_node(route: str) -> None:
    made = rotations(route)
    model, report, ways = made.canonical, made.report, made.ways
    assert report.counts["rotary"] == len(nodes_of(model, "RotaryEmbedding")) == len(ways)
    assert report.refusals == []
    assert not nodes_of(model, "Neg") and not nodes_of(model, "Sub")
    found: dict[str, tuple[int, int]] = {}
    for name, value in zip(ways, model.graph.outputs, strict=True):
        node = value.producer()
        while node is not None and node.op_type != "RotaryEmbedding":
            node = node.inputs[0].producer() if node.inputs[0] is not None else None
        assert node is not None, name
        found[name] = (node.attributes.get_int("interleaved", 0), node.attributes.get_int("rotary_embedding_dim", 0))
    neighbours = ("roformer", "pairs", "neighbours", "gptj")
    assert found == {
        name: (int(any(n in name for n in neighbours)), written.PART if "partial" in name else 0) for name in ways
    }


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("target", "opset"), TARGETS)
def test_every_way_is_right(route: str, target: str, opset: int | None) -> None:
    made = rotations(route)
    model, report = lowered(made.canonical, target, opset, made.report)
    counted, ways = model.clone(), len(made.ways)
    restore_metadata(counted)
    assert count(counted)["rotary"] == report.counts["rotary"] == ways
    kernels = len(nodes_of(model, "RotaryEmbedding", CONTRIB if opset is None else ""))
    assert kernels == (ways if opset in (None, 23) else 0)
    assert (model.opset_imports[""] == 17) == (opset in (None, 17))
    runners = [run(model), run(model, optimized=True), *([evaluate(model)] if opset else [])]
    for batch, sequence in ((1, 1), (1, 7), (3, 1), (3, 7)):
        feeds = feeds_of(batch, sequence)
        wanted = torch_answers(made.source, feeds)
        for answer in runners:
            assert_close(answer(feeds), wanted, atol=2e-6)


@pytest.mark.parametrize(
    ("route", "target", "opset"),
    [
        ("capture", "cpu", None), ("dynamo 18", "portable", 17),
        *(("torchscript 17", target, opset) for target, opset in (("cpu", None), ("portable", 17), ("portable", 23))),
    ],
)  # fmt: skip
def test_lowered_graphs_are_raised_and_lowered_to_themselves(route: str, target: str, opset: int | None) -> None:
    made = rotations(route)
    model, _ = lowered(made.canonical, target, opset, made.report)
    again = ir.from_proto(ir.to_proto(model))
    restore_metadata(again)
    to_canonical_opset(again, "again")
    twice, report = lowered(again, target, opset)
    assert report.counts["rotary"] == len(made.ways)
    assert report.refusals == []
    for op_type in ("RotaryEmbedding", "Sub", "Mul", "Concat"):
        domain = CONTRIB if op_type == "RotaryEmbedding" and target == "cpu" else ""
        assert len(nodes_of(twice, op_type, domain)) == len(nodes_of(model, op_type, domain)), op_type
    feeds = feeds_of(3, 7)
    assert_close(run(twice)(feeds), run(model)(feeds), atol=2e-6)


@pytest.mark.parametrize("route", ["capture", "torchscript 17"])
def test_what_is_no_rotary_embedding_stays(route: str, tmp_path: Path) -> None:
    source = source_of(
        written.Rotations(written.OTHERS),
        f"x:float32:batch,sequence,{written.HEADS * written.SIZE}", "position_ids:int64:batch,sequence",
    )  # fmt: skip
    made = exported(source, route, tmp_path, feeds_of(3, 7))
    model, report = lowered(made, "cpu")
    assert report.counts["rotary"] == 0
    reasons = " ".join(refusal.reason for refusal in report.refusals)
    for wanted in ("in both halves", "in both neighbours", "not negated alone", "wanted the sequence in both"):
        assert wanted in reasons
    for batch, sequence in ((1, 7), (3, 7)):
        feeds = feeds_of(batch, sequence)
        assert_close(run(model)(feeds), torch_answers(source, feeds), atol=2e-6)


# --- nodes that are in the file already


def node_of(rank: int, tables: str, options: str, positions: bool) -> ir.Model:
    """Heads 2, channels 8: tables of (B, S, d/2), of batch 1, or of 40 rows that are picked."""
    x = "float[B,2,S,8] x" if rank == 4 else "float[B,S,16] x"
    picked = ", int64[B,S] p" if positions else ""
    return parse(f"""<ir_version: 10, opset_import: ["" : 23]>
        g ({x}, float[{tables}] cos, float[{tables}] sin{picked}) => ({x.replace(" x", " y")})
        {{ y = RotaryEmbedding<{options}>(x, cos, sin{", p" if positions else ""}) }}""")


@pytest.mark.parametrize(("target", "opset"), [("cpu", None), ("portable", 17), ("portable", 23)])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("tables", ["B,S", "1,S", "40"])
@pytest.mark.parametrize("rank", [3, 4])
def test_nodes_of_others_are_lowered(
    rank: int, tables: str, part: int, interleaved: int, target: str, opset: int | None
) -> None:
    half, positions = (part or 8) // 2, tables == "40"
    options = f"interleaved={interleaved}, num_heads=2" + (f", rotary_embedding_dim={part}" if part else "")
    model = node_of(rank, f"{tables},{half}", options, positions)
    wanted = evaluate(model)
    fused, report = lowered(model, target, opset)
    assert report.counts["rotary"] == 1
    assert report.refusals == []
    assert len(nodes_of(fused, "RotaryEmbedding", CONTRIB)) == (target == "cpu")
    assert len(nodes_of(fused, "RotaryEmbedding")) == (opset == 23)
    for batch, sequence in ((1, 1), (3, 7)):
        rng = np.random.default_rng(0)
        shape = (batch, 2, sequence, 8) if rank == 4 else (batch, sequence, 16)
        rows = {"B,S": (batch, sequence), "1,S": (1, sequence), "40": (40,)}[tables]
        feeds: Arrays = {name: rng.standard_normal(size).astype(np.float32)
                 for name, size in (("x", shape), ("cos", (*rows, half)), ("sin", (*rows, half)))}  # fmt: skip
        if positions:
            feeds["p"] = rng.integers(0, 40, (batch, sequence))
        assert_close(run(fused)(feeds), wanted(feeds), atol=2e-6)


# --- whole encoders

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 80, "initializer_range": 0.2,
}  # fmt: skip
MODERN = {
    **SIZES, "num_hidden_layers": 2, "local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
ENCODERS = {"ModernBert": (MODERN, 2), "NomicBert": ({**SIZES, "num_hidden_layers": 2, "type_vocab_size": 2}, 2)}


class Text(nn.Module):
    """An encoder that takes ids and a mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Ids and mask (B, S) -> last_hidden_state (B, S, d)."""
        return {"last_hidden_state": self.model(input_ids=input_ids, attention_mask=attention_mask)[0]}


@functools.cache
def encoder(kind: str, implementation: str) -> Source:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**ENCODERS[kind][0])
    config._attn_implementation = implementation
    model = getattr(transformers, f"{kind}Model")(config)
    return source_of(Text(model), "input_ids:int64:batch,sequence", MASK)


def text_feeds(source: Source, batch: int, sequence: int, pattern: str) -> Arrays:
    return make_feeds(source.inputs, batch=batch, sequence=sequence, pattern=pattern, seed=batch)


@pytest.fixture(scope="module", params=[
    ("ModernBert", "sdpa", "capture"), ("ModernBert", "eager", "dynamo 18"), ("ModernBert", "eager", "torchscript 17"),
    ("NomicBert", "sdpa", "capture"), ("NomicBert", "eager", "torchscript 17"),
], ids=str)  # fmt: skip
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    kind, implementation, route = request.param
    source = encoder(kind, implementation)
    model = exported(source, route, tmp_path_factory.mktemp("encoders"), text_feeds(source, 3, 7, "right"))
    return Made(source, model, raise_model(model), layers=ENCODERS[kind][1])


@pytest.mark.parametrize(("target", "opset"), TARGETS)
def test_encoders_are_right_on_every_mask(made: Made, target: str, opset: int | None) -> None:
    source, layers = made.source, made.layers
    model, report = lowered(made.canonical, target, opset, made.report)
    assert report.counts["rotary"] == 2 * layers
    assert report.counts["attention"] == layers
    if opset is None:
        assert len(nodes_of(model, "RotaryEmbedding", CONTRIB)) == 2 * layers
        # The projections are turned first: the kernel that holds them does not fit.
        assert len(nodes_of(model, "MultiHeadAttention", CONTRIB)) == layers
    runners = [run(model), *([run(model, optimized=True)] if opset != 23 else [evaluate(model)])]
    for batch in (1, 3):
        for pattern in MASK_PATTERNS:
            feeds = text_feeds(source, batch, 11, pattern)
            wanted = torch_answers(source, feeds)["last_hidden_state"]
            attended = attended_positions(source.inputs, feeds)
            assert attended is not None
            for answer in runners:
                found = answer(feeds)["last_hidden_state"]
                assert found.shape == wanted.shape
                np.testing.assert_allclose(found[attended], wanted[attended], rtol=0, atol=1e-5)


def test_layers_share_their_tables(made: Made) -> None:
    model, _ = lowered(made.canonical, "portable", 23, made.report)
    caches = {value for node in nodes_of(model, "RotaryEmbedding") for value in node.inputs[1:3]}
    # ModernBERT's global and local layers turn by different angles.
    assert len(caches) == (4 if "modernbert" in type(made.source.module.model).__name__.lower() else 2)
