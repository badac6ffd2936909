"""The whole pipeline on the reference encoder: every target and opset, counts, numbers, idempotence."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tfx.errors import CountError
from tfx.exporter import foreign
from tfx.exporter.fusion import MEANING, ORIGIN
from tfx.exporter.metadata import CANONICAL, count, restore_metadata
from tfx.exporter.pipeline import Report, check_counts, optimize, raise_model
from tfx.exporter.save import save
from tfx.exporter.sources import Source
from tfx.exporter.targets import get
from tfx.runtime.tensors import MASK_PATTERNS, make_feeds

from .running import LOWERINGS, Arrays, assert_close, encoder, evaluate, lowered, run, torch_answers, weights

CONFIGS: dict[str, dict[str, Any]] = {
    "post-gelu-add-sinusoidal": {},
    "pre-gelu_tanh-concat-learned": {
        "norm": "pre", "activation": "gelu_tanh", "combine": "concat", "positions": "learned", "pooling": "mean",
        "normalize": True, "layer_norm_eps": 1e-12,
    },
    "post-relu-concat-sinusoidal": {"activation": "relu", "combine": "concat", "pooling": "cls"},
    "pre-gelu-add-learned": {"norm": "pre", "positions": "learned", "d_model": 15, "heads": 3},
}  # fmt: skip
# The first sum of a pre-norm encoder adds one position table to every row; the kernel wants equal shapes.
BROADCAST_POSITIONS = {("pre-gelu-add-learned", "cuda"): ["layers.0.norm_1"]}
SOME_LOWERINGS = [("cpu", None), ("cuda", None), ("portable", 17), ("portable", 20), ("portable", 23)]
ENCODERS = pytest.mark.parametrize("name", CONFIGS)
TARGETS = pytest.mark.parametrize(
    ("target", "opset"), LOWERINGS, ids=[target + (str(opset) if opset else "") for target, opset in LOWERINGS]
)


def wanted_counts(options: dict[str, Any]) -> dict[str, int]:
    return {
        "attention": 2,
        "layer_norm": 5 if options.get("norm") == "pre" else 4,
        "rms_norm": 0,
        "gelu": 0 if options.get("activation") == "relu" else 2,
        "rotary": 0,
    }


@functools.cache
def calls(name: str) -> list[tuple[Arrays, Arrays]]:
    """Feeds and torch's answers: four mask patterns at three shapes, and a batch with a row that attends to nothing."""
    source, _ = encoder(**CONFIGS[name])
    return [(feeds, torch_answers(source, feeds)) for feeds in _feeds(source)]


@functools.cache
def lowered_encoder(name: str, target: str, opset: int | None) -> tuple[ir.Model, Report]:
    return lowered(encoder(**CONFIGS[name])[1], target, opset)


def _feeds(source: Source, seed: int = 0) -> Iterator[Arrays]:
    for batch, sequence in ((1, 1), (3, 16), (2, 40)):
        for pattern in MASK_PATTERNS:
            yield make_feeds(source.inputs, batch=batch, sequence=sequence, pattern=pattern, seed=seed)
            seed += 1
    feeds = make_feeds(source.inputs, batch=3, sequence=7, pattern="right", seed=seed)
    feeds["attention_mask"][1] = 0
    yield feeds


@TARGETS
@ENCODERS
def test_counts_are_exact_and_every_number_is_torchs(name: str, target: str, opset: int | None) -> None:
    model, report = lowered_encoder(name, target, opset)

    assert report.counts == wanted_counts(CONFIGS[name])
    assert [refusal.origin for refusal in report.refusals] == BROADCAST_POSITIONS.get((name, target), [])
    assert model.opset_imports[""] == (opset or 17)
    own = target in ("cpu", "cuda") or (target == "web" and report.counts["gelu"] > 0)
    assert {node.domain for node in model.graph} == ({"", "com.microsoft"} if own else {""})
    runners = [run(model), run(model, optimized=True)]
    if target == "portable":
        runners.append(evaluate(model))
    for feeds, wanted in calls(name):
        for answer in runners:
            assert_close(answer(feeds), wanted, atol=3e-6)


@pytest.mark.parametrize(("target", "opset"), SOME_LOWERINGS)
@pytest.mark.parametrize("name", ["pre-gelu_tanh-concat-learned", "pre-gelu-add-learned"])
def test_its_own_output_comes_back_unchanged(name: str, target: str, opset: int | None, tmp_path, caplog) -> None:
    model, report = lowered_encoder(name, target, opset)
    save(model, tmp_path / "model.onnx")

    again = foreign.load(tmp_path / "model.onnx")
    assert count(again) == report.counts
    foreign.to_canonical_opset(again, "model.onnx")
    second = optimize(again, get(target), opset=opset)

    assert foreign.operators(again) == foreign.operators(model)
    assert (again.opset_imports, again.ir_version) == (model.opset_imports, model.ir_version)
    assert second.counts == report.counts
    assert [(r.rule, r.origin) for r in second.refusals] == [(r.rule, r.origin) for r in report.refusals]
    assert not caplog.records
    feeds, wanted = calls(name)[-2]
    assert_close(run(again)(feeds), wanted, atol=3e-6)


@ENCODERS
def test_the_canonical_graph_is_a_model_of_its_own(name: str) -> None:
    model = encoder(**CONFIGS[name])[1].clone()

    report = raise_model(model)

    assert report.counts == wanted_counts(CONFIGS[name])
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert {node.domain for node in model.graph} == {""}
    kinds = [CANONICAL.get(node.op_identifier()[:2]) for node in model.graph]
    assert {kind: kinds.count(kind) for kind in report.counts} == report.counts
    assert not {"Softmax", "Erf", "Tanh", "ReduceMean"} & {node.op_type for node in model.graph}
    answer = evaluate(model)
    for feeds, wanted in calls(name):
        assert_close(answer(feeds), wanted, atol=3e-6)


def test_nodes_remember_the_module_that_they_came_from() -> None:
    _, captured = encoder()
    for target, opset in SOME_LOWERINGS:
        model = captured.clone()
        optimize(model, get(target), opset=opset)
        restore_metadata(model)
        origins = [
            node.metadata_props.get(ORIGIN)
            for node in model.graph
            if (CANONICAL.get(node.op_identifier()[:2]) or node.metadata_props.get(MEANING)) == "attention"
        ]
        assert origins == ["layers.0.attention", "layers.1.attention"], (target, opset)


def test_a_refusal_names_rule_node_reason_and_module() -> None:
    model, report = lowered_encoder("pre-gelu-add-learned", "cuda", None)

    (refusal,) = report.refusals
    assert (refusal.rule, refusal.origin) == ("skip_layer_norm", "layers.0.norm_1")
    assert refusal.where in {node.name for node in model.graph}
    # Not the other variant's "an inner value feeds another node", which is true and beside the point.
    assert refusal.reason == "one side of the sum is [1,sequence,15], wanted [batch,sequence,15] as the other"


def test_counts_that_differ_are_told_all_at_once() -> None:
    found = {"attention": 1, "gelu": 2, "layer_norm": 4}
    check_counts(found, {"gelu": 2})
    check_counts(found, {"rotary": 0})
    with pytest.raises(CountError, match=r"attention: found 1, wanted 2; layer_norm: found 4, wanted 5$"):
        check_counts(found, {"attention": 2, "gelu": 2, "layer_norm": 5})


def test_the_pipeline_is_deterministic() -> None:
    _, captured = encoder()
    one, other = (ir.to_proto(lowered(captured, "cpu")[0]).SerializeToString(deterministic=True) for _ in range(2))
    assert one == other


def test_lowering_does_not_change_the_captured_weights() -> None:
    _, captured = encoder()
    before = weights(captured)
    lowered(captured, "cpu")
    after = weights(captured)
    assert list(after) == list(before)
    assert all(np.array_equal(after[name], before[name]) for name in before)
