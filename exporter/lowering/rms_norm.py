"""Canonical ``RMSNormalization`` -> the pieces where the opset has no such operator (below 23)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, of_type, producer, rank

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class RmsNormPrimitives(Fusion):
    """``RMSNormalization(x, scale)`` -> ``x / sqrt(mean(pow(x, 2)) + eps) * scale``.

    Written as ``pow`` and a division: onnxruntime makes its fused kernel of that when it loads a file, and not of
    ``x * x``. Half floats are squared as floats, as the operator does it.
    """

    meaning = "rms_norm"
    result = ("", "Sqrt")
    tolerance = 4e-6
    marks = True
    near_misses = (
        NearMiss(
            "an integer kind of stash",
            "stash_type is 11",
            build=lambda op, x, scale: op.RMSNormalization(x, scale, axis=-1, epsilon=1e-6, stash_type=11),
        ),
    )

    def pattern(self, op: Any, x: Any, scale: Any) -> Any:
        return op.RMSNormalization(x, scale, _outputs=["y"])

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return {"RMSNormalization": {"axis": -1, "epsilon": 1e-6}}

    def check(self, op: Any, x: ir.Value, y: ir.Value, **_: Any) -> None:
        node = producer(y)
        of_type(x, "RMS norm", ir.DataType.FLOAT, ir.DataType.DOUBLE, *_HALVES)
        if node.attributes.get_int("stash_type", 1) != 1:
            raise Refuse(f"stash_type is {node.attributes.get_int('stash_type', 1)}, wanted 1", y)
        if node.attributes.get_int("axis", -1) >= 0 and rank(x) is None:
            raise Refuse(f"the rank is unknown, wanted to count axis {node.attributes.get_int('axis', -1)}", x)

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, y: ir.Value, **_: Any) -> ir.Value:
        attributes = producer(y).attributes
        axis = attributes.get_int("axis", -1)
        first = axis - (rank(x) or 0) if axis >= 0 else axis
        half = x.dtype in _HALVES
        kind = np.dtype(np.float64 if x.dtype == ir.DataType.DOUBLE else np.float32)

        def number(value: float) -> ir.Value:
            return op.Constant(value=ir.tensor(np.array(value, kind)))

        d = op.Cast(x, to=ir.DataType.FLOAT) if half else x
        axes = op.Constant(value=ir.tensor(np.arange(first, 0, dtype=np.int64)))
        mean = op.ReduceMean(op.Pow(d, number(2.0)), axes, keepdims=1)
        normed = op.Div(d, op.Sqrt(op.Add(mean, number(attributes.get_float("epsilon", 1e-5)))))
        return op.Mul(op.Cast(normed, to=x.dtype) if half else normed, scale)

    def example(self) -> Example:
        return {"x": Arg(("B", "S", 16)), "scale": np.linspace(0.5, 1.5, 16, dtype=np.float32)}
