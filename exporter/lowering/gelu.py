"""Canonical ``Gelu`` -> fused kernels, or the pieces where the opset has no Gelu (below 20)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, axis_of, of_type, producer, rank, same_axis
from ..raising.gelu import CUBIC, QUICK, SQRT_2_OVER_PI, SQRT_HALF, read_quick
from .attention import CONTRIB

_STANDARD = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


def _approximate(y: ir.Value) -> str:
    node = producer(y)
    return node.attributes.get_string("approximate", "none")


class _Gelu(Fusion):
    """A rule on one of the two functions; the other one is another rule's, so that is no refusal."""

    meaning = "gelu"
    tolerance = 2e-6
    approximate = "none"
    types: ClassVar[tuple[ir.DataType, ...]] = (ir.DataType.FLOAT,)

    def check(self, op: Any, y: ir.Value, **_: Any) -> None:
        if _approximate(y) != self.approximate:
            raise Refuse()
        of_type(y, "GELU", *self.types)

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return {"Gelu": {"approximate": self.approximate}}

    def example(self) -> Example:
        return {"x": Arg(("B", "S", 16), scale=3.0)}


class _Unbiased(_Gelu):
    def pattern(self, op: Any, x: Any) -> Any:
        return op.Gelu(x, _outputs=["y"])


class _Biased(_Gelu):
    near_misses = (
        NearMiss("a residual, not a bias", "bias has rank 3", {"bias": Arg(("B", "S", 16))}),
        NearMiss("a bias for one token", "bias has rank 2", {"bias": np.ones((1, 16), np.float32)}),
        NearMiss("one number for all channels", "bias has 1 elements", {"bias": np.ones(1, np.float32)}),
        NearMiss("a bias that widens the input", "bias has 16 elements", {"x": Arg(("B", "S", 1))}),
    )

    def pattern(self, op: Any, x: Any, bias: Any) -> Any:
        return op.Gelu(op.Add(x, bias), _outputs=["y"])

    def check(self, op: Any, y: ir.Value, **bindings: Any) -> None:
        super().check(op, y)
        x, bias = bindings["x"], bindings["bias"]
        if rank(bias) != 1:
            raise Refuse(f"bias has rank {rank(bias)}, wanted a vector", bias)
        if not same_axis(axis_of(x, -1), axis_of(bias, 0)):
            raise Refuse(f"bias has {axis_of(bias, 0)} elements, wanted {axis_of(x, -1)} as the input", bias)

    def example(self) -> Example:
        return {**super().example(), "bias": np.linspace(-1, 1, 16, dtype=np.float32)}


class BiasGelu(_Biased):
    """``Gelu(x + b)`` -> ``com.microsoft.BiasGelu(x, b)`` (erf)."""

    result = (CONTRIB, "BiasGelu")

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> ir.Value:
        return op.BiasGelu(x, bias, _domain=CONTRIB)


class FastBiasGelu(_Biased):
    """``Gelu(x + b, approximate="tanh")`` -> ``com.microsoft.FastGelu(x, b)``."""

    approximate = "tanh"
    result = (CONTRIB, "FastGelu")

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> ir.Value:
        return op.FastGelu(x, bias, _domain=CONTRIB)


class ContribGelu(_Unbiased):
    """``Gelu(x)`` -> ``com.microsoft.Gelu(x)`` (erf), which needs no opset 20."""

    result = (CONTRIB, "Gelu")

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> ir.Value:
        return op.Gelu(x, _domain=CONTRIB)


class FastGelu(_Unbiased):
    """``Gelu(x, approximate="tanh")`` -> ``com.microsoft.FastGelu(x)``."""

    approximate = "tanh"
    result = (CONTRIB, "FastGelu")

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> ir.Value:
        return op.FastGelu(x, _domain=CONTRIB)


class ContribQuickGelu(Fusion):
    """``x * sigmoid(1.702 x)`` -> ``com.microsoft.QuickGelu(x, alpha=1.702)``."""

    meaning = "gelu"
    result = (CONTRIB, "QuickGelu")
    tolerance = 2e-6
    near_misses = (
        NearMiss("another factor", "factor is 1.6,", {"factor": np.array(1.6, np.float32)}),
        NearMiss("SiLU", None, build=lambda op, x, **_: op.Mul(x, op.Sigmoid(x))),
        NearMiss(
            "double",
            "GELU is DOUBLE",
            {"x": Arg(("B", "S", 16), dtype="float64"), "factor": np.array(QUICK, np.float64)},
        ),
    )

    def pattern(self, op: Any, a: Any, b: Any) -> Any:
        return op.Mul(a, b, _outputs=["y"])

    def unfused(self, op: Any, x: Any, factor: Any) -> Any:
        """The canonical form."""
        return op.Mul(x, op.Sigmoid(op.Mul(x, factor)))

    def check(self, op: Any, y: ir.Value, **_: Any) -> None:
        of_type(read_quick(y), "GELU", ir.DataType.FLOAT)

    def rewrite(self, op: Any, y: ir.Value, **_: Any) -> ir.Value:
        return op.QuickGelu(read_quick(y), alpha=QUICK, _domain=CONTRIB)

    def example(self) -> Example:
        return {"x": Arg(("B", "S", 16), scale=3.0), "factor": np.array(QUICK, np.float32)}


def _number(op: Any, x: ir.Value, value: float) -> ir.Value:
    return op.Constant(value=ir.tensor(np.array(value, (x.dtype or ir.DataType.FLOAT).numpy())))


class GeluErfPrimitives(_Unbiased):
    """``Gelu(x)`` -> ``x * 0.5 * (1 + erf(x * sqrt(1/2)))``."""

    result = ("", "Erf")
    types = _STANDARD
    marks = True

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> ir.Value:
        erf = op.Erf(op.Mul(x, _number(op, x, SQRT_HALF)))
        return op.Mul(op.Mul(x, _number(op, x, 0.5)), op.Add(erf, _number(op, x, 1.0)))


class GeluTanhPrimitives(_Unbiased):
    """``Gelu(x, approximate="tanh")`` -> ``x * 0.5 * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``."""

    approximate = "tanh"
    result = ("", "Tanh")
    types = _STANDARD
    marks = True

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> ir.Value:
        cube = op.Mul(op.Mul(x, x), x)
        inner = op.Mul(op.Add(x, op.Mul(cube, _number(op, x, CUBIC))), _number(op, x, SQRT_2_OVER_PI))
        return op.Mul(op.Mul(x, _number(op, x, 0.5)), op.Add(op.Tanh(inner), _number(op, x, 1.0)))
