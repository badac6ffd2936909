"""Attention of halves: every target lowers it, and no mask makes a NaN or gives padding a weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tfx.exporter import pipeline, targets

from .running import parse, run

LOWEST = float(np.finfo(np.float16).min)
TARGETS = [("cpu", None), ("cuda", None), ("portable", 17), ("portable", 20), ("portable", 23)]
ROWS = np.array([[1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1, 0]], bool)


def _model(mask: str, many: bool) -> ir.Model:
    shape, heads = ("B,2,S,8", "") if many else ("B,S,16", "<q_num_heads = 2, kv_num_heads = 2>")
    inputs = "".join(f"float16[{shape}] {name}, " for name in "qkv")
    return parse(
        f'<ir_version: 10, opset_import: ["" : 23]> half ({inputs} {mask}[B,1,1,S] mask) => (float16[{shape}] y) '
        f"{{ y = Attention {heads} (q, k, v, mask) }}"
    )


def _feeds(mask: np.ndarray, many: bool, size: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (3, 2, 7, 8) if many else (3, 7, 16)
    feeds = {name: (size * rng.standard_normal(shape)).astype(np.float16) for name in "qkv"}
    return {**feeds, "mask": mask[:, None, None, :]}


def _wanted(feeds: dict[str, np.ndarray], keep: np.ndarray, many: bool) -> np.ndarray:
    """Softmax over the kept keys, in double precision; zeros without any."""
    q, k, v = (feeds[name].astype(np.float64) for name in "qkv")
    if not many:
        q, k, v = (each.reshape(3, 7, 2, 8).transpose(0, 2, 1, 3) for each in (q, k, v))
    scores = np.where(keep[:, None, None, :], q @ k.swapaxes(-1, -2) * 8**-0.5, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = weights @ v
    return out if many else out.transpose(0, 2, 1, 3).reshape(3, 7, 16)


def _lowered(model: ir.Model, target: str, opset: int | None) -> ir.Model:
    pipeline.lower_model(model, targets.get(target), pipeline.raise_model(model), opset=opset)
    onnx.checker.check_model(ir.to_proto(model))
    return model


@pytest.mark.parametrize("many", [False, True], ids=["merged heads", "separate heads"])
@pytest.mark.parametrize(("target", "opset"), TARGETS)
def test_every_target_lowers_it_whatever_the_mask_fills_with(target: str, opset: int | None, many: bool):
    rows = ROWS.copy()
    rows[0] = False
    answers: dict[str, Any] = {"bool": run(_lowered(_model("bool", many), target, opset))}
    answers["float16"] = run(_lowered(_model("float16", many), target, opset))
    for fill, keep in ((None, ROWS), (None, rows), (-np.inf, ROWS), (-np.inf, rows), (LOWEST, ROWS), (-1e4, ROWS)):
        for size in (1.0, 6.0):  # Of scores near 100, beside which the lowest half would overflow.
            mask = keep if fill is None else np.where(keep, 0, fill).astype(np.float16)
            feeds = _feeds(mask, many, size)
            found = answers["bool" if fill is None else "float16"](feeds)["y"]
            assert found.dtype == np.float16
            np.testing.assert_allclose(found, _wanted(feeds, keep, many), rtol=4e-3, atol=1e-2 * size)


@pytest.mark.parametrize(("target", "opset"), TARGETS)
def test_a_row_of_nothing_but_lowest_halves_stays_finite(target: str, opset: int | None):
    answer = run(_lowered(_model("float16", False), target, opset))
    mask = np.full((3, 7), LOWEST, np.float16)
    feeds = _feeds(mask, False, 6.0)
    found = answer(feeds)["y"]
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= np.abs(feeds["v"]).max(), "an average of the values"


def test_the_operators_came_of_the_targets_own_domains():
    kinds = {}
    for target, opset in TARGETS:
        model = _lowered(_model("bool", False), target, opset)
        kinds[target, opset] = {n.op_type for n in model.graph} & {"Attention", "MultiHeadAttention", "Softmax"}
    assert kinds == {
        ("cpu", None): {"MultiHeadAttention"},
        ("cuda", None): {"MultiHeadAttention"},
        ("portable", 17): {"Softmax"},
        ("portable", 20): {"Softmax"},
        ("portable", 23): {"Attention"},
    }
