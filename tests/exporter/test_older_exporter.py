"""Norms and activations in files of torch's TorchScript exporter, and in files that others have worked on."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from tfx.exporter.foreign import load, to_canonical_opset
from tfx.exporter.metadata import count

from . import handwritten as written
from .running import assert_close, lowered, nodes_of, parse, run
from .test_handwritten import EPSILONS, meant, norm_feeds, raised


def torchscript(module: nn.Module, folder: Path, opset: int, *tensors: torch.Tensor, sequence: int = 2) -> ir.Model:
    """A file of torch's TorchScript exporter, as `tfx optimize` takes it: at opset 23, nothing raised yet."""
    path = folder / "model.onnx"
    axes = {f"x{i}": {0: "batch", sequence: "sequence"} for i in range(len(tensors))}
    outputs = list(module(*tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tensors, str(path), dynamo=False, opset_version=opset, input_names=list(axes),
            output_names=outputs, dynamic_axes=axes,
        )  # fmt: skip
    model = load(path)
    to_canonical_opset(model, path.name)
    return model


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("ways", ["GELU_ERF", "GELU_TANH", "GELU_QUICK", "GATED"])
def test_a12_the_older_exporters_gelus_are_told_apart(ways: str, opset: int, tmp_path: Path) -> None:
    written_ways = getattr(written, ways)
    module = (written.Gates if ways == "GATED" else written.Activations)(written_ways).eval()
    rng = np.random.default_rng(0)
    shape = (2, len(written_ways), 50)
    tensors = [torch.tensor(2 * rng.standard_normal(shape), dtype=torch.float32) for _ in range(1 + (ways == "GATED"))]
    model = torchscript(module, tmp_path, opset, *tensors)
    feeds = {f"x{i}": tensor.numpy() for i, tensor in enumerate(tensors)}
    wanted = {name: value.numpy() for name, value in module(*tensors).items()}
    for target, asked in (("cpu", None), ("portable", 17), ("portable", 20)):
        fused, report = lowered(model, target, asked)
        assert report.counts["gelu"] == meant(fused)["gelu"] == len(written_ways)
        assert report.refusals == []
        assert_close(run(fused)(feeds), wanted, atol=5e-6 if ways == "GATED" else 1e-6)


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize(("ways", "kind"), [("LAYER_NORM", "LayerNormalization"), ("RMS_NORM", "RMSNormalization")])
def test_a11_the_older_exporters_norms_keep_their_epsilons(ways: str, kind: str, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # The exporter has no rms_norm; the function is what the others write out.
    named = {
        name: way for name, way in getattr(written, ways).items() if ways != "RMS_NORM" or "functional" not in name
    }
    module = written.Norms(named, EPSILONS).eval()
    feeds = norm_feeds(len(module.ways))
    with torch.no_grad():
        model = torchscript(module, tmp_path, opset, torch.tensor(feeds["x"]))
    feeds = {"x0": feeds["x"]}
    before = run(model)(feeds)
    raw, report = raised(model)
    assert report.refusals == []
    assert len(nodes_of(raw, kind)) == len(module.ways)
    for value, (_, epsilon) in zip(raw.graph.outputs, module.ways.values(), strict=True):
        node = value.producer()
        assert node is not None and node.op_type == kind, value.name
        assert node.attributes.get_float("epsilon", 1e-5) == pytest.approx(epsilon, rel=1e-6), value.name
    for target in ("cpu", "portable"):
        assert_close(run(lowered(model, target)[0])(feeds), before, atol=2e-5)


class TwoAxes(nn.Module):
    """Layer norm over the last two axes, with weights for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, written.D) + 0.5)
        self.bias = nn.Parameter(torch.rand(4, written.D))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x (B, S, 4, D) -> the same."""
        centred = x - x.mean((-2, -1), keepdim=True)
        variance = centred.pow(2).mean((-2, -1), keepdim=True)
        return {"y": self.scale * (centred / torch.sqrt(variance + 1e-4)) + self.bias}


@pytest.mark.parametrize("opset", [13, 17])
def test_a_norm_over_two_axes_is_one_node(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TwoAxes().eval()
    x = torch.randn(2, 3, 4, written.D)
    with torch.no_grad():
        model, wanted = torchscript(module, tmp_path, opset, x, sequence=1), {"y": module(x)["y"].numpy()}
    (node,) = nodes_of(raised(model)[0], "LayerNormalization")
    assert node.attributes.get_int("axis", 0) == -2
    for target in ("cpu", "cuda", "portable"):
        assert_close(run(lowered(model, target)[0])({"x0": x.numpy()}), wanted, atol=4e-6)


@pytest.mark.parametrize("opset", [13, 17])
def test_half_floats_are_still_squared_as_floats(opset: int, tmp_path: Path) -> None:
    """The casts around a norm stay; 300 squared is no half float."""

    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            rms = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            centred = x.float() - x.float().mean(-1, keepdim=True)
            norm = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
            return {"rms": rms.half(), "norm": norm.half()}

    x = (300 * torch.randn(2, 3, 5, written.D)).half()
    model = torchscript(Half(), tmp_path, opset, x)
    for target in ("cpu", "portable"):
        fused, report = lowered(model, target)
        assert (report.counts["rms_norm"], report.counts["layer_norm"], report.refusals) == (1, 1, [])
        wanted = {name: value.numpy() for name, value in Half()(x).items()}
        assert_close(run(fused)({"x0": x.numpy()}), wanted, atol=2e-3)  # one step of a half float at 2


def test_others_quick_gelu_counts_by_its_factor() -> None:
    model = parse("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[B, 3] x) => (float[B, 3] y) {
        a = com.microsoft.QuickGelu<alpha = 1.702>(x)
        b = com.microsoft.QuickGelu<alpha = 1.0>(a)
        y = com.microsoft.QuickGelu(b)
    }""")
    assert count(model)["gelu"] == 2  # with a factor of 1 it is SiLU
    assert raised(model)[1].counts["gelu"] == 2


def test_a_layer_norm_that_is_there_stays() -> None:
    model = parse(
        """<ir_version: 10, opset_import: ["" : 23]> g (float[B, 3, 16] x) => (float[B, 3, 16] y) {
        n = LayerNormalization<axis = -1, epsilon = 0.003>(x, w, w)
        y = RMSNormalization<axis = -1, epsilon = 0.002>(n, w)
    }""",
        {"w": np.linspace(0.5, 1.5, 16, dtype=np.float32)},
    )
    found, report = raised(model)
    assert [node.op_type for node in found.graph] == ["LayerNormalization", "RMSNormalization"]
    assert (report.fired, report.counts["layer_norm"], report.counts["rms_norm"]) == ({}, 1, 1)
    x = {"x": np.random.default_rng(0).standard_normal((2, 3, 16)).astype(np.float32)}
    assert_close(run(lowered(model, "cpu")[0])(x), run(model)(x), atol=4e-6)
