"""GELU written in pieces -> one ``Gelu`` (ai.onnx, since opset 20).

Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016 (arXiv 1606.08415): the exact form with erf,
and the approximation with tanh. They differ by up to 4.7e-4, so each becomes its own ``approximate``.
``x * sigmoid(1.702 x)`` (quick GELU) is a third function, up to 2e-2 from both; ai.onnx has no operator for it, so the
pieces are written in one form and remember what they stand for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import MEANING, NEEDED_ELSEWHERE, Arg, Example, Fusion, NearMiss
from ..guards import Refuse, expect, fixed, producer, scalar

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715
QUICK = 1.702


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


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and not node.domain


def _scaled(value: ir.Value | None, x: ir.Value) -> tuple[ir.Value, float, list[ir.Value]] | None:
    """``value`` as ``x`` times a number: the constant, the number, and what is computed in between."""
    node = value.producer() if value is not None else None
    if node is None or node.domain or value is None:
        return None
    if node.op_type == "Neg" and node.inputs[0] is not None:
        found = _scaled(node.inputs[0], x)
        return (found[0], -found[1], [value, *found[2]]) if found else None
    if node.op_type not in ("Mul", "Div") or fixed(node.inputs[1]) is None or node.inputs[0] is None:
        return None
    number, base, sign, between = node.inputs[1], node.inputs[0], 1.0, [value]
    if base is not x:
        negated = base.producer()
        if negated is None or not _is(negated, "Neg") or negated.inputs[0] is not x:
            return None
        sign, between = -1.0, [value, base]
    factor = scalar(number, "factor", x) * sign
    if number is None or factor == 0:
        return None
    return number, factor if node.op_type == "Mul" else 1 / factor, between


def _gate(value: ir.Value | None, x: ir.Value) -> tuple[ir.Value, float, list[ir.Value]] | None:
    """``value`` as ``sigmoid(factor * x)``: the constant, the factor, and what is computed in between."""
    node = value.producer() if value is not None else None
    if node is None or value is None:
        return None
    found = None
    if _is(node, "Sigmoid"):
        found = _scaled(node.inputs[0], x)
    elif _is(node, "Reciprocal"):
        found = _divisor(node.inputs[0], x)
    elif _is(node, "Div") and fixed(node.inputs[0]) is not None:
        found = _divisor(node.inputs[1], x)
        if found:
            expect(node.inputs[0], 1.0, "numerator", x)
    elif _is(node, "Mul") and fixed(node.inputs[1]) is not None:  # torch writes 1 / a as Reciprocal(a) * 1
        found = _gate(node.inputs[0], x)
        if found:
            expect(node.inputs[1], 1.0, "numerator", x)
    return (found[0], found[1], [value, *found[2]]) if found else None


def _divisor(value: ir.Value | None, x: ir.Value) -> tuple[ir.Value, float, list[ir.Value]] | None:
    """``value`` as ``1 + exp(-factor * x)``."""
    node = value.producer() if value is not None else None
    if node is None or value is None or not _is(node, "Add") or fixed(node.inputs[1]) is None:
        return None
    power = node.inputs[0].producer() if node.inputs[0] is not None else None
    if power is None or not _is(power, "Exp"):
        return None
    found = _scaled(power.inputs[0], x)
    if found is None:
        return None
    expect(node.inputs[1], 1.0, "one", x)
    return found[0], -found[1], [value, power.outputs[0], *found[2]]


def read_quick(y: ir.Value) -> ir.Value:
    """``x`` of ``y = x * sigmoid(1.702 x)`` in any spelling.

    Raises:
        Refuse: ``y`` is nothing like it (without a reason), or the numbers are others.
    """
    node = producer(y)
    a, b = node.inputs
    assert a is not None and b is not None
    pairs = [(a, b)] if node.op_type == "Div" else [(a, b), (b, a)]
    for x, gate in pairs:
        found = _divisor(gate, x) if node.op_type == "Div" else _gate(gate, x)
        if found is None:
            continue
        number, factor, between = found
        half = number.dtype is not None and number.dtype.itemsize == 2
        if not abs(factor - QUICK) <= (1e-3 if half else 1e-5) * QUICK:
            raise Refuse(f"factor is {factor:.6g}, wanted {QUICK}", number)
        inside = {node, *(each.producer() for each in between)}
        for value in between:
            if value.is_graph_output() or any(user not in inside for user, _ in value.uses()):
                raise Refuse(NEEDED_ELSEWHERE, value)
        return x
    raise Refuse()


class QuickGelu(Fusion):
    """``x * sigmoid(1.702 x)`` -> the same in one form, marked as GELU.

    Written so, or as ``x / (1 + exp(-1.702 x))`` or ``x * (1 / (1 + exp(-1.702 x)))``. What is marked already is left.
    """

    meaning = "gelu"
    result = ("", "Sigmoid")
    marks = True
    tolerance = 2e-6
    variants = tuple(
        {"spelling": name} for name in ("sigmoid", "reciprocal", "once", "over", "divided", "negated", "divisor")
    )
    near_misses = (
        NearMiss("SiLU", None, build=lambda op, x, **_: op.Mul(x, op.Sigmoid(x))),
        NearMiss("another factor", "factor is 1.6,", {"factor": _f32(1.6)}),
        NearMiss("a factor per channel", "factor has shape", {"factor": np.full(16, QUICK, np.float32)}),
        NearMiss("the factor upside down", "factor is 0.587544", {"factor": _f32(1 / QUICK)}),
        NearMiss("the gate of another value", None, build=lambda op, x, factor, one: op.Mul(
            x, op.Sigmoid(op.Mul(op.Add(x, one), factor)))),
        NearMiss("1.5 + exp", "one is 1.5", {"one": _f32(1.5)}, {"spelling": "divided"}),
    )  # fmt: skip

    def __init__(self, spelling: str = "sigmoid") -> None:
        super().__init__()
        self._spelling = spelling

    def _end(self) -> str:
        return "Div" if self._spelling in ("divided", "negated") else "Mul"

    @classmethod
    def orders(cls, options: Mapping[str, Any]) -> list[Fusion]:
        # The pattern is the last operator: one spelling of each end stands for all.
        return super().orders(options) if options["spelling"] in ("sigmoid", "divided") else []

    def pattern(self, op: Any, a: Any, b: Any) -> Any:
        return getattr(op, self._end())(a, b, _outputs=["y"])

    def unfused(self, op: Any, x: Any, factor: Any, one: Any) -> Any:
        """The spelling in full."""
        if self._spelling == "sigmoid":
            return op.Mul(x, op.Sigmoid(op.Mul(x, factor)))
        if self._spelling == "divisor":
            return op.Mul(x, op.Sigmoid(op.Div(x, op.Constant(value_float=1 / QUICK))))
        scaled = op.Mul(op.Neg(x), factor) if self._spelling == "negated" else op.Neg(op.Mul(x, factor))
        divisor = op.Add(op.Exp(scaled), one)
        if self._spelling == "reciprocal":
            return op.Mul(x, op.Reciprocal(divisor))
        if self._spelling == "once":
            return op.Mul(x, op.Mul(op.Reciprocal(divisor), one))
        return op.Mul(x, op.Div(one, divisor)) if self._spelling == "over" else op.Div(x, divisor)

    def check(self, op: Any, y: ir.Value, **_: Any) -> None:
        if MEANING in producer(y).metadata_props:
            raise Refuse()
        read_quick(y)

    def rewrite(self, op: Any, y: ir.Value, **_: Any) -> ir.Value:
        x = read_quick(y)
        factor = op.Constant(value=ir.tensor(np.array(QUICK, (x.dtype or ir.DataType.FLOAT).numpy())))
        return op.Mul(x, op.Sigmoid(op.Mul(x, factor)))

    def example(self) -> Example:
        return {"x": Arg(("B", "S", 16), scale=3.0), "factor": _f32(QUICK), "one": _f32(1)}
