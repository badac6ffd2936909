"""Sums over positions are the same in any company, and the same sums."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tfx.exporter.precision.steady import steady_sums
from tfx.exporter.precision.writing import Writer

from ..running import parse, run

HEAD = """<ir_version: 8, opset_import: ["" : 17]>
g (float[B, S, 384] x) => ({y} y) {{ {line} }}"""


@pytest.mark.parametrize("kept", [0, 1])
def test_the_same_sums_in_any_company(kept: int):
    y, axes = ("float[B, 1, 384]" if kept else "float[B, 384]"), {"axes": np.array([1])}
    model = parse(HEAD.format(y=y, line=f"y = ReduceSum <keepdims = {kept}> (x, axes)"), axes)
    before = run(model)
    assert steady_sums(model, Writer(model)) == 1
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    after = run(model)
    random, moved = np.random.default_rng(0), False
    for length in (1, 2, 3, 15, 35, 64, 203):
        x = random.standard_normal((4, length, 384)).astype(np.float32)
        alone, together = {"x": x[:1]}, {"x": x}
        padded = {"x": np.pad(x[:1], ((0, 0), (0, length + 1), (0, 0)))}
        assert after(alone)["y"].shape == before(alone)["y"].shape
        np.testing.assert_allclose(after(together)["y"], x.astype(float).sum(axis=1, keepdims=bool(kept)), atol=1e-4)
        np.testing.assert_array_equal(after(together)["y"][:1], after(alone)["y"])
        np.testing.assert_array_equal(after(padded)["y"], after(alone)["y"])
        moved |= bool((before(together)["y"][:1] != before(alone)["y"]).any())
    assert moved  # else there is nothing to cure any more


def test_other_sums_are_left():
    for axes, y in (([2], "float[B, S]"), ([0, 1], "float[384]")):
        model = parse(HEAD.format(y=y, line="y = ReduceSum <keepdims = 0> (x, axes)"), {"axes": np.array(axes)})
        assert steady_sums(model, Writer(model)) == 0
