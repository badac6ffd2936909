"""Which additive masks can hold -inf, judged from the nodes that made them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tfx.exporter.fusion import GraphWriter
from tfx.exporter.lowering.masks import may_be_minus_inf

LOWEST = float(np.finfo(np.float32).min)


def _const(value: float, name: str) -> ir.Value:
    return ir.val(name, const_value=ir.tensor(np.array(value, np.float32), name=name))


def _mask(form: str) -> ir.Value:
    op: Any = GraphWriter()
    ids = ir.val("mask", ir.DataType.INT64, ir.Shape(["B", "S"]))
    keep = ir.val("keep", ir.DataType.BOOL, ir.Shape(["B", "S"]))
    given = ir.val("given", ir.DataType.FLOAT, ir.Shape(["B", "S"]))
    cast, kept = op.Cast(ids, to=ir.DataType.FLOAT), op.Cast(keep, to=ir.DataType.FLOAT)
    one, low, zero, inf = _const(1, "one"), _const(LOWEST, "low"), _const(0, "zero"), _const(-np.inf, "inf")
    inverted = op.Mul(op.Sub(one, kept), low)
    narrow = op.Cast(op.Mul(kept, _const(-1e30, "deep")), to=ir.DataType.FLOAT16)
    narrow.dtype = ir.DataType.FLOAT16
    return {
        "lowest where padded": lambda: op.Where(keep, zero, low),
        "(1 - keep) * lowest": lambda: inverted,
        "whole numbers times a large one": lambda: op.Mul(cast, _const(-1e38, "large")),
        "too deep for half precision": lambda: op.Cast(narrow, to=ir.DataType.FLOAT),
        "unsqueezed": lambda: op.Unsqueeze(inverted, _const(1, "axes")),
        "clamped": lambda: op.Max(given, low),
        "-inf where padded": lambda: op.Where(keep, zero, inf),
        "two masks of lowest": lambda: op.Add(inverted, op.Where(keep, zero, low)),
        "a float input": lambda: given,
        "log of the mask": lambda: op.Log(cast),
        "-inf times zero": lambda: op.Mul(cast, inf),
    }[form]()


@pytest.mark.parametrize("form", ["lowest where padded", "(1 - keep) * lowest", "unsqueezed", "clamped"])
def test_finite_masks_are_proven_finite(form: str):
    assert not may_be_minus_inf(_mask(form))


@pytest.mark.parametrize(
    "form",
    [
        "-inf where padded",
        "two masks of lowest",
        "a float input",
        "log of the mask",
        "-inf times zero",
        "whole numbers times a large one",
        "too deep for half precision",
    ],
)
def test_whatever_is_not_proven_finite_may_hold_minus_inf(form: str):
    assert may_be_minus_inf(_mask(form))


def test_shared_values_are_judged_once():
    op: Any = GraphWriter()
    value = op.Cast(ir.val("keep", ir.DataType.BOOL, ir.Shape(["S"])), to=ir.DataType.FLOAT)
    for _ in range(60):  # 2 ** 60 paths
        value = op.Add(value, value)
    assert not may_be_minus_inf(value)
