"""GELU written in pieces -> one ``Gelu`` (ai.onnx, since opset 20).

Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016 (arXiv 1606.08415): the exact form with erf,
and the approximation with tanh. They differ by up to 4.7e-4, so each becomes its own ``approximate``.
``x * sigmoid(1.702 x)`` (quick GELU) is a third function; no rule here touches it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import expect

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def _outer(rule: Fusion, op: Any, order: str, x: Any, gate: Any, half: Any, one: Any) -> Any:
    """``x * 0.5 * (1 + gate)`` in the orders people write it."""
    if order == "half_last":
        return op.Mul(rule.either(op.Mul, 0, x, op.Add(gate, one)), half)
    if order == "half_x":
        return rule.either(op.Mul, 0, op.Mul(x, half), op.Add(gate, one))
    if order == "half_gate":
        return rule.either(op.Mul, 0, x, op.Mul(op.Add(gate, one), half))
    return rule.either(op.Mul, 0, x, op.Add(op.Mul(gate, half), half))  # "cdf": x * (0.5 * gate + 0.5)


_ORDERS = ("half_last", "half_x", "half_gate", "cdf")


def _f32(value: float) -> np.ndarray:
    return np.array(value, np.float32)


class GeluErf(Fusion):
    """``0.5 x (1 + erf(x / sqrt(2)))`` -> ``Gelu(x, approximate="none")``."""

    meaning = "gelu"
    result = ("", "Gelu")
    places = 1
    variants = tuple({"order": order, "divide": divide} for order, divide in itertools.product(_ORDERS, (True, False)))
    near_misses = (
        NearMiss("erf of x", "divisor is 1,", {"root": _f32(1.0)}),
        NearMiss("divisor 1.702", "divisor is 1.702", {"root": _f32(1.702)}),
        NearMiss("halved twice", "half is 0.25", {"half": _f32(0.25)}),
        NearMiss("1 - erf ...", "one is -1", {"one": _f32(-1.0)}),
        NearMiss("a divisor per channel", "divisor has shape", {"root": np.full(16, 2**0.5, np.float32)}),
    )

    def __init__(self, order: str = "half_last", divide: bool = True) -> None:
        super().__init__()
        self._order = order
        self._divide = divide

    def pattern(self, op: Any, x: Any, root: Any, half: Any, one: Any) -> Any:
        inner = op.Div(x, root) if self._divide else op.Mul(x, root)
        return _outer(self, op, self._order, x, op.Erf(inner), half, one)

    def check(self, op: Any, x: ir.Value, root: ir.Value, half: ir.Value, one: ir.Value) -> None:
        if self._divide:
            expect(root, 1 / SQRT_HALF, "divisor", x)
        else:
            expect(root, SQRT_HALF, "factor", x)
        expect(half, 0.5, "half", x)
        if self._order != "cdf":
            expect(one, 1.0, "one", x)

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> ir.Value:
        return op.Gelu(x, approximate="none")

    def example(self) -> Example:
        root = 1 / SQRT_HALF if self._divide else SQRT_HALF
        return {"x": Arg(("B", "S", 16), scale=3.0), "root": _f32(root), "half": _f32(0.5), "one": _f32(1)}


class GeluTanh(Fusion):
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` -> ``Gelu(x, approximate="tanh")``.

    The cube is written ``pow(x, 3)``, ``x * x * x`` or, from the left, ``0.044715 * x * x * x``; the polynomial is
    written as above or as ``sqrt(2/pi) x (1 + 0.044715 x x)``.
    """

    meaning = "gelu"
    result = ("", "Gelu")
    tolerance = 2e-6
    places = 3
    variants = tuple(
        {"order": order, "cube": cube}
        for order, cube in itertools.product(_ORDERS, ("pow", "product", "chain", "factored"))
    )
    near_misses = (
        NearMiss("another cubic", "cubic coefficient is 0.05", {"cubic": _f32(0.05)}),
        NearMiss("another root", "root is 0.8", {"root": _f32(0.8)}),
        NearMiss("a square for the cube", "exponent is 2", {"power": _f32(2.0)}),
        NearMiss("half of a half", "half is 0.25", {"half": _f32(0.25)}),
    )

    def __init__(self, order: str = "half_last", cube: str = "pow") -> None:
        super().__init__()
        self._order = order
        self._cube = cube

    def pattern(self, op: Any, x: Any, power: Any, cubic: Any, root: Any, half: Any, one: Any) -> Any:
        if self._cube == "factored":
            square = self.either(op.Mul, 1, op.Mul(x, cubic), x)
            inner = self.either(op.Mul, 2, op.Mul(x, root), op.Add(square, one))
        else:
            if self._cube == "chain":
                square = self.either(op.Mul, 1, op.Mul(x, cubic), x)
                term = self.either(op.Mul, 1, square, x)
            else:
                cube = op.Pow(x, power) if self._cube == "pow" else self.either(op.Mul, 1, op.Mul(x, x), x)
                term = op.Mul(cube, cubic)
            inner = op.Mul(self.either(op.Add, 2, x, term), root)
        return _outer(self, op, self._order, x, op.Tanh(inner), half, one)

    def check(
        self,
        op: Any,
        x: ir.Value,
        power: ir.Value | None,
        cubic: ir.Value,
        root: ir.Value,
        half: ir.Value,
        one: ir.Value | None,
    ) -> None:
        if self._cube == "pow":
            expect(power, 3.0, "exponent", x)
        expect(cubic, CUBIC, "cubic coefficient", x)
        expect(root, SQRT_2_OVER_PI, "root", x)
        expect(half, 0.5, "half", x)
        if self._order != "cdf" or self._cube == "factored":
            expect(one, 1.0, "one", x)

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> ir.Value:
        return op.Gelu(x, approximate="tanh")

    def example(self) -> Example:
        return {
            "x": Arg(("B", "S", 16), scale=3.0),
            "power": _f32(3),
            "cubic": _f32(CUBIC),
            "root": _f32(SQRT_2_OVER_PI),
            "half": _f32(0.5),
            "one": _f32(1),
        }
