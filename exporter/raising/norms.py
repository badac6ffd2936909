"""Reads ``d / sqrt(mean(d^2) + eps)``, the heart of layer norm and RMS norm, from the product outward.

People divide by the root, multiply with its reciprocal, or raise to a power of -0.5, and the weight may stand at
any place of the product. So the product is taken apart into factors with powers, and those are compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ..fusion import NEEDED_ELSEWHERE, Fusion
from ..guards import Refuse, constant, expect, fixed, producer, rank, scalar, static, weight

_DEPTH = 6
_POWERS = (0.5, -0.5, -1.0)


@dataclasses.dataclass(frozen=True)
class Norm:
    """``x`` normalised over its last ``axes`` axes, times ``scales``.

    Attributes:
        x: The input, before it is centred.
        axes: How many axes are normalised, counted from the last.
        epsilon: A positive constant, or zero.
        scales: The constants that the quotient is multiplied with.
        inner: What the graph computes on the way.
    """

    x: ir.Value
    axes: int
    epsilon: float
    scales: tuple[ir.Value, ...]
    inner: frozenset[ir.Value]


def read_norm(y: ir.Value, *, centred: bool) -> Norm:
    """Reads a norm back from the product that it ends in.

    Args:
        y: The product.
        centred: Whether the mean is subtracted first: layer norm, else RMS norm.

    Raises:
        Refuse: ``y`` is no norm (without a reason), or one that the operator does not compute.
    """
    for total, power in _factors(y, None, set()):
        add = total.producer()
        if power != -0.5 or add is None or (add.op_type, add.domain) != ("Add", ""):
            continue
        variance, epsilon = add.inputs
        if variance is None or fixed(epsilon) is None:
            continue
        found = _deviation(variance, centred)
        if found is None:
            continue
        deviation, inner = found
        inner |= {total, variance}
        scales = _scales(y, total, deviation, centred, inner)
        if scales is None:
            continue
        x, mean = _centre(deviation) if centred else (deviation, None)
        assert x is not None
        axes = _axes(producer(variance), x, "variance" if centred else "mean of squares")
        if mean is not None and _axes(producer(mean), x, "mean") != axes:
            raise Refuse(f"mean and variance reduce different axes, wanted {axes} for both", mean)
        number = scalar(epsilon, "epsilon", x)
        if not 0 <= number < 1:
            raise Refuse(f"epsilon is {number:g}, wanted 0 <= epsilon < 1", total)
        return Norm(x, axes, number, scales, frozenset(inner - {y, x}))
    raise Refuse()


def _factors(
    value: ir.Value, stop: ir.Value | None, inner: set[ir.Value], power: float = 1.0, depth: int = _DEPTH
) -> Iterator[tuple[ir.Value, float]]:
    """The factors of a product, each with its power; the products in between go into ``inner``."""
    node = value.producer()
    parts: list[tuple[ir.Value | None, float]] = []
    if node is not None and not node.domain and depth and not (stop is not None and _same(value, stop)):
        inputs = node.inputs
        if node.op_type == "Mul":
            parts = [(inputs[0], power), (inputs[1], power)]
        elif node.op_type == "Div":
            parts = [(inputs[0], power), (inputs[1], -power)]
        elif node.op_type == "Reciprocal":
            parts = [(inputs[0], -power)]
        elif node.op_type == "Sqrt":
            parts = [(inputs[0], power / 2)]
        elif node.op_type == "Pow" and (exponent := _number(inputs[1])) in _POWERS:
            parts = [(inputs[0], power * exponent)]
    if not parts:
        yield value, power
        return
    inner.add(value)
    for part, its in parts:
        if part is not None:
            yield from _factors(part, stop, inner, its, depth - 1)


def _number(value: ir.Value | None) -> float:
    """The number in a constant of one element, else NaN."""
    tensor = fixed(value)
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else float("nan")


def _scales(
    y: ir.Value, total: ir.Value, deviation: ir.Value, centred: bool, inner: set[ir.Value]
) -> tuple[ir.Value, ...] | None:
    """What ``deviation / sqrt(total)`` is multiplied with to give ``y``; ``None`` if that is not all of it."""
    scales: list[ir.Value] = []
    deviations = roots = 0
    for value, power in _factors(y, deviation, inner):
        if value is total and power == -0.5:
            roots += 1
        elif _same(value, deviation) and power == 1:
            deviations += 1
            if centred:
                inner |= {value, *_means(value)}
        elif power == 1 and fixed(value) is not None:
            if _number(value) != 1 or (rank(value) or 0) > 1:
                scales.append(value)
        else:
            return None
    return tuple(scales) if (roots, deviations) == (1, 1) else None


def _deviation(variance: ir.Value, centred: bool) -> tuple[ir.Value, set[ir.Value]] | None:
    """``d`` of ``mean(d^2)``, and the values in between."""
    node = variance.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Sub" and centred and _two_pass(node):
        raise Refuse(
            "the variance is mean(x^2) - mean(x)^2, wanted the mean of the squared differences: "
            "they differ where the mean is large",
            variance,
        )
    square = node.inputs[0] if node.op_type == "ReduceMean" else None
    deviation = _root_of(square)
    if square is None or deviation is None:
        return None
    if (_centre(deviation)[0] is not None) != centred:
        return None  # The other rule's.
    inner = {square}
    if centred:
        for side in producer(square).inputs:
            if side is not None and _same(side, deviation):
                inner |= {side, *_means(side)}
    return deviation, inner


def _root_of(square: ir.Value | None) -> ir.Value | None:
    """``d`` of ``d * d`` or ``pow(d, 2)``."""
    node = square.producer() if square is not None else None
    if node is None or node.domain or node.op_type not in ("Mul", "Pow") or node.inputs[0] is None:
        return None
    a, b = node.inputs
    if node.op_type == "Pow":
        if fixed(b) is None:
            return None
        expect(b, 2.0, "exponent", a)
        return a
    return a if a is not None and b is not None and _same(a, b) else None


def _two_pass(node: ir.Node) -> bool:
    """Whether a subtraction is ``mean(x^2) - mean(x)^2``."""
    first = node.inputs[0].producer() if node.inputs[0] is not None else None
    if first is None or first.op_type != "ReduceMean":
        return False
    try:
        x, mean = _root_of(first.inputs[0]), _root_of(node.inputs[1])
    except Refuse:
        return False
    reduced = mean.producer() if mean is not None else None
    return reduced is not None and reduced.op_type == "ReduceMean" and reduced.inputs[0] is x


def _centre(value: ir.Value) -> tuple[ir.Value | None, ir.Value | None]:
    """``x`` and its mean, of ``x - mean(x)``."""
    node = value.producer()
    if node is None or node.op_type != "Sub" or node.domain or node.inputs[1] is None:
        return None, None
    mean = node.inputs[1].producer()
    if mean is None or mean.op_type != "ReduceMean" or mean.inputs[0] is not node.inputs[0]:
        return None, None
    return node.inputs[0], node.inputs[1]


def _means(deviation: ir.Value) -> list[ir.Value]:
    mean = _centre(deviation)[1]
    return [] if mean is None else [mean]


def _same(a: ir.Value, b: ir.Value) -> bool:
    """One value, or the same input centred twice."""
    if a is b:
        return True
    (x, mean), (other, its) = _centre(a), _centre(b)
    if x is None or x is not other or mean is None or its is None:
        return False
    try:
        return _axes(producer(mean), x, "mean") == _axes(producer(its), x, "mean")
    except Refuse:
        return False


def _axes(node: ir.Node, x: ir.Value, what: str) -> int:
    """How many axes a ReduceMean reduces, the last ones and no other, each of which it keeps."""
    given = node.attributes.get_ints("axes") if "axes" in node.attributes else None
    if given is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        given = constant(node.inputs[1], f"{what} axes").ravel().tolist()
    size = rank(x)
    axes = sorted(axis - size if axis >= 0 and size is not None else axis for axis in given or ())
    if not axes or axes != list(range(-len(axes), 0)):
        raise Refuse(f"{what} reduces axes {given}, wanted the last ones", x)
    if node.attributes.get_int("keepdims", 1) != 1:
        raise Refuse(f"{what} drops the axis, wanted keepdims=1", x)
    return len(axes)


def _dead(value: ir.Value, depth: int = 4) -> bool:
    """Whether nothing uses a value, as far as a few steps show."""
    return (
        bool(depth)
        and not value.is_graph_output()
        and all(all(_dead(output, depth - 1) for output in user.outputs) for user, _ in value.uses())
    )


def fits(value: ir.Value | None, norm: Norm, what: str) -> tuple[int, ...]:
    """Refuses unless a weight has one number per element of the normalised axes.

    Returns:
        The sizes of those axes.
    """
    sizes = tuple(static(norm.x, axis, "input") for axis in range(-norm.axes, 0))
    if value is not None:
        tensor = fixed(value)
        if tensor is None:
            raise Refuse(f"{what} is not a constant", value)
        shape = tuple(tensor.shape.numpy())
        extra = len(shape) - norm.axes
        if extra < 0 or any(axis != 1 for axis in shape[:extra]) or shape[extra:] != sizes:
            raise Refuse(f"{what} has shape {list(shape)}, wanted {list(sizes)}", value)
        if len(shape) > (rank(norm.x) or 1):
            raise Refuse(f"{what} has rank {len(shape)}, wanted {rank(norm.x)} at most", value)
    return sizes


def parameter(op: Any, value: ir.Value | None, sizes: tuple[int, ...], like: ir.Value) -> ir.Value:
    """A weight in the shape of the normalised axes; ones where the model has none (the operator wants a scale)."""
    if value is None:
        kind = (like.dtype or ir.DataType.FLOAT).numpy()
        name = "_".join(map(str, ("ones", *sizes)))
        return weight(op, like, name, f"ones {kind} {sizes}", lambda: ir.tensor(np.ones(sizes, kind)))
    if rank(value) == len(sizes):
        return value
    flat = constant(value, "weight").reshape(sizes)
    return weight(op, like, f"{value.name}_vector", f"vector {value.name}", lambda: ir.tensor(flat))


# How the quotient and the square are written: in full, and with the weight inside of the product.
SPELLINGS = ("div", "div_mul", "reciprocal", "over_mul", "power", "root_power_mul")
INSIDE = ("early_div", "early_reciprocal", "beside_over")


def spellings(*affine: str) -> tuple[dict[str, str], ...]:
    """The variants of a rule: every spelling with each of the affine parts, the largest first."""
    made = []
    for part in affine:
        names = SPELLINGS if part == "none" else (*SPELLINGS, *INSIDE)
        made += [{"affine": part, "spelling": name} for name in names]
    return tuple(made)


class NormPieces(Fusion):
    """What the two rules share: ``d / sqrt(mean(d^2) + eps) * scale + bias``.

    The pattern is the last operator alone, so the spellings of one end share it; ``check`` reads the rest. Only
    the barest variant gives reasons: the others leave the graph to it.
    """

    centred: ClassVar[bool]

    def __init__(self, affine: str = "scale", spelling: str = "div") -> None:
        super().__init__()
        self._affine = affine
        self._spelling = spelling

    def _end(self) -> tuple[str, str]:
        if self._affine == "both":
            return self._affine, "Add"
        inside = self._affine == "none" or self._spelling in INSIDE
        divided = self._spelling in ("div", "div_mul", "root_power_mul", "early_div")
        return self._affine, "Div" if inside and divided else "Mul"

    @classmethod
    def orders(cls, options: Mapping[str, Any]) -> list[Fusion]:
        before = itertools.takewhile(lambda each: each != options, cls.variants)
        end = cls(**options)._end()
        return [] if any(cls(**each)._end() == end for each in before) else super().orders(options)

    def pattern(self, op: Any, a: Any, b: Any) -> Any:
        return getattr(op, self._end()[1])(a, b, _outputs=["y"])

    def check(self, op: Any, y: ir.Value, **_: Any) -> None:
        if _dead(y):
            raise Refuse()  # left over from a larger variant
        try:
            self.read(y)
        except Refuse as refusal:
            raise (refusal if self._affine == "none" else Refuse()) from None

    def read(self, y: ir.Value) -> tuple[Norm, ir.Value | None, ir.Value | None]:
        """The norm, its scale and its bias."""
        product, bias = y, None
        if self._affine == "both":
            (product, bias) = producer(y).inputs
            if product is None or fixed(bias) is None:
                raise Refuse()
        elif self._affine == "none" and producer(y).op_type == "Mul" and fixed(producer(y).inputs[1]) is not None:
            raise Refuse()  # A weight behind the norm, which is there for itself.
        norm = read_norm(product, centred=self.centred)
        for scale in norm.scales:
            fits(scale, norm, "scale")
        if len(norm.scales) > 1 or (self._affine == "scale" and not norm.scales):
            raise Refuse()
        fits(bias, norm, "bias")
        removed = {producer(value) for value in (*norm.inner, product, y)}
        for value in {*norm.inner, product} - {y}:
            if value.is_graph_output() or any(user not in removed for user, _ in value.uses()):
                raise Refuse(NEEDED_ELSEWHERE, value)
        if self._affine == "none" and norm.scales:
            raise Refuse()
        return norm, norm.scales[0] if norm.scales else None, bias

    def write(self, op: Any, d: Any, axes: Any, two: Any, epsilon: Any, one: Any, half: Any, scale: Any) -> Any:
        """The product in this spelling."""
        squared = op.Mul(d, d) if "mul" in self._spelling else op.Pow(d, two)
        total = op.Add(op.ReduceMean(squared, axes), epsilon)
        way = self._spelling.removeprefix("early_").removeprefix("beside_").removesuffix("_mul")
        if self._spelling.startswith("early"):
            d = op.Mul(d, scale)
        if way == "div":
            y = op.Div(d, op.Sqrt(total))
        elif way == "root_power":
            y = op.Div(d, op.Pow(total, half))
        else:
            if way == "reciprocal":
                factor = op.Reciprocal(op.Sqrt(total))
            elif way == "over":
                factor = op.Div(one, op.Sqrt(total))
            else:
                factor = op.Pow(total, op.Constant(value_float=-0.5))
            y = op.Mul(d, op.Mul(factor, scale) if self._spelling.startswith("beside") else factor)
        return y if self._affine == "none" or self._spelling in INSIDE else op.Mul(y, scale)
