"""Modules written by hand in every way raise to the expected counts, and every lowering gives torch's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from tfx.exporter.capture import capture
from tfx.exporter.metadata import count, restore_metadata
from tfx.exporter.pipeline import Report, raise_model
from tfx.exporter.sources import Source
from tfx.runtime.tensors import MASK_PATTERNS, make_feeds

from . import handwritten as written
from .running import MASK, Arrays, assert_close, evaluate, lowered, masks, nodes_of, run, source_of, torch_answers

SEVERAL = [("cpu", None), ("cuda", None), ("portable", 17), ("portable", 20), ("portable", 23)]
EPSILONS = (1e-12, 1e-6, 1e-3)
Made = tuple[Source, ir.Model]


def made(module: nn.Module, *inputs: str) -> Made:
    source = source_of(module, *inputs)
    return source, capture(source)


def raised(captured: ir.Model) -> tuple[ir.Model, Report]:
    model = captured.clone()
    return model, raise_model(model)


def fully_masked(source: Source) -> Arrays:
    feeds = make_feeds(source.inputs, batch=3, sequence=7, pattern="right", seed=9)
    feeds["attention_mask"][1] = 0
    return feeds


@functools.cache
def made_once(make: Callable[[], nn.Module], *inputs: str) -> Made:
    """As ``made``; torch.export takes seconds, and all targets start with the same graph."""
    torch.manual_seed(0)
    return made(make(), *inputs)


@functools.cache
def lowered_once(captured: ir.Model, target: str, opset: int | None) -> tuple[ir.Model, Report]:
    return lowered(captured, target, opset)


# --- attention


@pytest.fixture(scope="module")
def attentions() -> Made:
    torch.manual_seed(0)
    return made(written.Attentions(written.ATTENTION), f"x:float32:batch,sequence,{written.D}", MASK)


@pytest.fixture(scope="module")
def infinite() -> Made:
    torch.manual_seed(0)
    return made(written.Attentions(written.INFINITE), f"x:float32:batch,sequence,{written.D}", MASK)


def test_every_way_of_writing_attention_is_one_node(attentions: Made, infinite: Made) -> None:
    for (_, captured), ways in ((attentions, written.ATTENTION), (infinite, written.INFINITE)):
        model, report = raised(captured)
        assert report.counts["attention"] == len(nodes_of(model, "Attention")) == len(ways)
        assert report.refusals == []
        assert not nodes_of(model, "Softmax")
        # The heads are the node's own: no Transpose is left around it.
        assert not nodes_of(model, "Transpose")


def test_the_scale_is_read_from_the_graph(attentions: Made) -> None:
    model, _ = raised(attentions[1])
    scales = {}
    for name, value in zip(written.ATTENTION, model.graph.outputs, strict=True):
        node = value.producer()
        assert node is not None and node.op_type == "Attention", name
        scales[name] = node.attributes.get_float("scale", written.SIZE**-0.5)
    odd = {"no_scale": 1.0, "another_scale": 0.3}
    assert scales == pytest.approx({name: odd.get(name, written.SIZE**-0.5) for name in scales})


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_every_way_of_writing_attention_is_right(attentions: Made, target: str, opset: int | None) -> None:
    source, captured = attentions
    model, report = lowered_once(captured, target, opset)
    assert report.counts["attention"] == len(written.ATTENTION)
    runners = [
        run(model),
        *([run(model, optimized=True)] if opset != 23 else []),
        *([evaluate(model)] if opset else []),
    ]
    for pattern in MASK_PATTERNS:
        feeds = make_feeds(source.inputs, batch=3, sequence=7, pattern=pattern, seed=3)
        wanted = torch_answers(source, feeds)
        for answer in runners:
            assert_close(answer(feeds), wanted, atol=1e-5)


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_a08_a_row_without_a_key_is_what_torch_makes_of_it(attentions: Made, target: str, opset: int | None) -> None:
    """A finite fill leaves an average; a boolean mask of scaled_dot_product_attention leaves zeros."""
    source, captured = attentions
    model, _ = lowered_once(captured, target, opset)
    feeds = fully_masked(source)
    wanted = torch_answers(source, feeds)
    assert not wanted["sdpa_bool"][1].any() and wanted["scores_divided"][1].any()
    assert_close(run(model)(feeds), wanted, atol=1e-5)


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_a08_infinite_masks_never_give_nan(infinite: Made, target: str, opset: int | None) -> None:
    source, captured = infinite
    model, _ = lowered_once(captured, target, opset)
    answer = run(model)
    for pattern in MASK_PATTERNS:
        feeds = make_feeds(source.inputs, batch=3, sequence=7, pattern=pattern, seed=3)
        assert_close(answer(feeds), torch_answers(source, feeds), atol=1e-5)
    feeds = fully_masked(source)
    found, wanted = answer(feeds), torch_answers(source, feeds)
    assert not wanted["sdpa"][1].any()
    for name, expected in wanted.items():
        # Where torch itself gives NaN, the canonical node's zeros stand.
        assert_close({name: found[name]}, {name: np.nan_to_num(expected, nan=0.0)}, atol=1e-5)


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_a10_the_mask_value_is_the_graphs_own(attentions: Made, infinite: Made, target: str, opset: int | None) -> None:
    """Scores beyond +-50, one sample half masked and one wholly; a fused -1e4 or a mask of another size would show."""
    mask = masks("1111000", "0000000", "1111111")
    for source, captured in (attentions, infinite):
        feeds = {"x": 4 * np.random.default_rng(2).standard_normal((3, 7, written.D)), "attention_mask": mask}
        feeds["x"] = feeds["x"].astype(np.float32)
        module = source.module
        assert isinstance(module, written.Attentions)
        q, k, _ = next(iter(module.projections.values()))(torch.tensor(feeds["x"])).detach().chunk(3, -1)
        scores = q[..., : written.SIZE] @ k[..., : written.SIZE].mT / written.SIZE**0.5
        assert scores.max() > 50 and scores.min() < -50
        wanted = {name: np.nan_to_num(array, nan=0.0) for name, array in torch_answers(source, feeds).items()}
        # Values are about 10 in size, and a score of 100 is known to 1e-5 in float32.
        assert_close(run(lowered_once(captured, target, opset)[0])(feeds), wanted, atol=2e-4)


class Layers(nn.Module):
    """nn.TransformerEncoder told what to ignore."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu", **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for parameter in self.encoder.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=attention_mask == 0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_own_encoder_with_a_padding_mask(norm_first: bool) -> None:
    torch.manual_seed(0)
    source, captured = made(Layers(norm_first=norm_first), "x:float32:batch,sequence,16", MASK)
    for target, opset in SEVERAL:
        model, report = lowered_once(captured, target, opset)
        assert report.counts == {"attention": 2, "layer_norm": 4, "rms_norm": 0, "gelu": 2, "rotary": 0}
        assert report.refusals == [], target
        answer = run(model)
        for feeds in (
            make_feeds(source.inputs, batch=2, sequence=9, pattern="holes", seed=1),
            make_feeds(source.inputs, batch=3, sequence=5, pattern="left", seed=2),
            fully_masked(source),
        ):
            assert_close(answer(feeds), torch_answers(source, feeds), atol=1e-5)


def meant(model: ir.Model) -> dict[str, int]:
    """What a written file counts as: before IR version 10 the model's metadata says what nodes stand for."""
    model = model.clone()
    restore_metadata(model)
    return count(model)


# --- GELU


def activations(ways: dict) -> Made:
    return made(written.Activations(ways), f"x:float32:batch,{len(ways)},sequence")


def quick_gelus() -> nn.Module:
    return written.Activations(written.GELU_QUICK)


def gates() -> nn.Module:
    return written.Gates(written.GATED)


@pytest.mark.parametrize(
    ("ways", "approximate"), [(written.GELU_ERF, "none"), (written.GELU_TANH, "tanh")], ids=["erf", "tanh"]
)
def test_a12_every_way_of_writing_gelu_is_its_own_node_and_right(ways: dict, approximate: str) -> None:
    source, captured = activations(ways)
    model, report = raised(captured)
    assert [node.attributes.get_string("approximate", "none") for node in nodes_of(model, "Gelu")] == [
        approximate
    ] * len(ways)
    assert report.refusals == []
    feeds = {"x": np.linspace(-6, 6, 2 * len(ways) * 50, dtype=np.float32).reshape(2, len(ways), 50)}
    unfused = run(captured)(feeds)
    for target, opset in SEVERAL:
        fused, _ = lowered_once(captured, target, opset)
        found = run(fused)(feeds)
        assert_close(found, unfused, atol=1e-6)
        assert_close(found, torch_answers(source, feeds), atol=1e-6)


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_a12_quick_gelu_is_counted_in_every_spelling_and_lowering(target: str, opset: int | None) -> None:
    source, captured = made_once(quick_gelus, f"x:float32:batch,{len(written.GELU_QUICK)},sequence")
    model, report = lowered_once(captured, target, opset)
    ways = len(written.GELU_QUICK)
    assert report.counts["gelu"] == meant(model)["gelu"] == ways
    assert report.refusals == []
    kernels = nodes_of(model, "QuickGelu", "com.microsoft")
    assert len(kernels) == (0 if target == "portable" else ways)
    assert [node.attributes.get_float("alpha", 0) for node in kernels] == pytest.approx([1.702] * len(kernels))
    feeds = {"x": np.linspace(-6, 6, 2 * ways * 50, dtype=np.float32).reshape(2, ways, 50)}
    assert_close(run(model)(feeds), torch_answers(source, feeds), atol=1e-6)


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_a_gelu_is_found_beside_another_factor(target: str, opset: int | None) -> None:
    ways = len(written.GATED)
    shape = f"float32:batch,{ways},sequence"
    source, captured = made_once(gates, f"x:{shape}", f"gate:{shape}")
    model, report = lowered_once(captured, target, opset)
    assert report.counts["gelu"] == ways
    assert report.refusals == []
    rng = np.random.default_rng(0)
    feeds = {name: 2 * rng.standard_normal((2, ways, 50)).astype(np.float32) for name in ("x", "gate")}
    assert_close(run(model)(feeds), torch_answers(source, feeds), atol=5e-6)


def test_a12_what_is_not_gelu_stays_as_it_is() -> None:
    source, captured = activations(written.NOT_GELU)
    model, report = raised(captured)
    assert report.counts["gelu"] == 0
    assert {(refusal.rule, refusal.reason) for refusal in report.refusals} >= {
        ("gelu_tanh", "cubic coefficient is 0.05, wanted 0.044715"),
        ("quick_gelu", "factor is 1.6, wanted 1.702"),
    }
    assert nodes_of(model, "Erf") and nodes_of(model, "Tanh")
    feeds = {"x": np.linspace(-6, 6, 5 * 50, dtype=np.float32).reshape(1, 5, 50)}
    assert_close(run(model)(feeds), torch_answers(source, feeds), atol=1e-6)


# --- layer norm


@pytest.fixture(scope="module")
def norms() -> Made:
    torch.manual_seed(0)
    module = written.Norms(written.LAYER_NORM, EPSILONS)
    return made(module, f"x:float32:batch,{len(module.ways)},sequence,{written.D}")


def norm_feeds(count: int) -> Arrays:
    """Rows with a variance of 1, of 1e-6 and of 1e-12, some far from zero."""
    x = np.random.default_rng(0).standard_normal((2, count, 5, written.D))
    x *= np.array([1, 1e-3, 1e-6, 3, 1])[:, None]
    x[:, :, 3] += 8
    return {"x": x.astype(np.float32)}


def test_every_way_of_writing_layer_norm_keeps_its_epsilon(norms: Made) -> None:
    model, report = raised(norms[1])
    assert report.refusals == []
    assert report.counts["layer_norm"] == len(model.graph.outputs) == len(written.LAYER_NORM) + 2
    for value in model.graph.outputs:
        node = value.producer()
        assert node is not None and node.op_type == "LayerNormalization", value.name
        wanted = float(str(value.name).rpartition("_")[2].replace("m", "-"))
        assert node.attributes.get_float("epsilon", 1e-5) == pytest.approx(wanted, rel=1e-6), value.name


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_every_way_of_writing_layer_norm_is_right(norms: Made, target: str, opset: int | None) -> None:
    source, captured = norms
    model, _ = lowered_once(captured, target, opset)
    feeds = norm_feeds(len(written.LAYER_NORM) + 2)
    # Against float64: at an epsilon of 1e-12 two float32 formulas differ by more than either from the truth.
    x = feeds["x"].astype(np.float64)
    found = run(model)(feeds)
    module = source.module
    assert isinstance(module, written.Norms)
    for i, (name, (_, epsilon)) in enumerate(module.ways.items()):
        rows = x[:, i]
        centred = rows - rows.mean(-1, keepdims=True)
        wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        way = name.rpartition("_")[0]
        if "bare" not in way:
            wanted = wanted * module.scales[i].detach().numpy()
        if "bare" not in way and way not in ("no_bias", "scale_only"):
            wanted = wanted + module.biases[i].detach().numpy()
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2e-5, err_msg=name)


def test_what_is_not_layer_norm_stays_as_it_is() -> None:
    ways = len(written.NOT_LAYER_NORM)
    module = written.Norms(written.NOT_LAYER_NORM, (1e-5,))
    source, captured = made(module, f"x:float32:batch,{ways},sequence,{written.D}")
    model, report = raised(captured)
    assert report.counts["layer_norm"] == report.counts["rms_norm"] == 0
    assert [r for r in report.refusals if r.rule == "layer_norm_pieces" and "the variance is mean(x^2)" in r.reason]
    feeds = {"x": np.random.default_rng(0).standard_normal((2, ways, 5, written.D)).astype(np.float32)}
    assert_close(run(model)(feeds), torch_answers(source, feeds), atol=1e-5)


def rms_norms() -> written.Norms:
    return written.Norms(written.RMS_NORM, EPSILONS)


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_every_way_of_writing_rms_norm_is_one_node_and_right(target: str, opset: int | None) -> None:
    ways = len(rms_norms().ways)
    source, captured = made_once(rms_norms, f"x:float32:batch,{ways},sequence,{written.D}")
    module = source.module
    assert isinstance(module, written.Norms)
    raw, report = raised(captured)
    assert report.refusals == []
    assert report.counts["rms_norm"] == len(nodes_of(raw, "RMSNormalization")) == ways
    for node, (_, epsilon) in zip(nodes_of(raw, "RMSNormalization"), module.ways.values(), strict=True):
        assert node.attributes.get_float("epsilon", 1e-5) == pytest.approx(epsilon, rel=1e-6)

    model, _ = lowered_once(captured, target, opset)
    assert len(nodes_of(model, "RMSNormalization")) == (ways if opset == 23 else 0)
    assert model.opset_imports[""] == (opset or 17)
    assert meant(model)["rms_norm"] == ways
    feeds = norm_feeds(ways)
    x = feeds["x"].astype(np.float64)
    for answer in (run(model), run(model, optimized=True)):
        found = answer(feeds)
        for i, (name, (_, epsilon)) in enumerate(module.ways.items()):
            scale = module.scales[i].detach().numpy() + ("zero" in name)
            wanted = x[:, i] / np.sqrt((x[:, i] ** 2).mean(-1, keepdims=True) + epsilon)
            wanted = wanted if "bare" in name else wanted * scale
            np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2e-5, err_msg=name)


def test_a12_the_two_gelus_are_told_apart_by_their_numbers() -> None:
    """Otherwise the tests above would not see one taken for the other."""
    x = torch.linspace(-6, 6, 500)
    gap = written.GELU_ERF["functional"](x) - written.GELU_TANH["functional"](x)
    assert gap.abs().max() > 1e-4
