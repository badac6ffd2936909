"""What one element of a value is, where some positions are attended and others are not.

A mask is a graph of its own: comparisons of positions, gathers over grids of indices, fills. To know what it does, a
value is read backwards at one element ``[b, h, q, k]``: every operator maps the indices of its output to those of its
inputs, down to the mask that the caller gives, to positions (``Range``) and to constants. Numbers are intervals, so
that what is not known (a learned bias, a hidden state) still tells that it is finite.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..guards import fixed
from .steps import ints_of

__all__ = ["Elements", "Index", "Interval"]

_DEPTH = 200
_UNSIGNED = (ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A number between two others, both included where they are finite; never NaN.

    Attributes:
        low: Lower bound.
        high: Upper bound.
        index: ``(name, offset)`` where it is an index of the element plus a constant.
    """

    low: float
    high: float
    index: tuple[str, int] | None = None

    @property
    def known(self) -> float | None:
        """The number itself where there is only one."""
        return self.low if self.low == self.high else None


_ANY = Interval(-math.inf, math.inf)
_TRUTH, _TRUE, _FALSE = Interval(0, 1), Interval(1, 1), Interval(0, 0)

Index = int | str | tuple[str, int]
"""A place along an axis: a number, a name for any place, or such a name and an offset."""


class Elements:
    """Reads elements of a graph's values.

    Args:
        mask: The graph's mask input, (batch, sequence).
        attended: What the mask holds where a position is attended, and where not.
        state: For each name of a position whether it is attended.
        batch: The name that stands for the row.
    """

    def __init__(
        self, mask: ir.Value, attended: tuple[float, float], state: Mapping[str, bool], batch: str = "b"
    ) -> None:
        self._mask = mask
        self._attended = attended
        self._state = state
        self._batch = batch
        self._known: dict[tuple[Any, ...], Interval] = {}

    def at(self, value: ir.Value | None, index: Sequence[Index], depth: int = _DEPTH) -> Interval:
        """The element of a value at an index, one entry per axis."""
        if value is None or depth == 0:
            return _ANY
        key = (value, tuple(index))
        if key not in self._known:
            self._known[key] = self._read(value, tuple(index), depth - 1)
        return self._known[key]

    def broadcast(self, value: ir.Value | None, index: Sequence[Index], depth: int = _DEPTH) -> Interval:
        """The element that meets ``index`` of a larger value: axes align from the right, size 1 repeats."""
        if value is None or value.shape is None or len(value.shape) > len(index):
            return _ANY
        aligned = index[len(index) - len(value.shape) :]
        return self.at(value, [0 if size == 1 else i for size, i in zip(value.shape, aligned, strict=True)], depth)

    def _read(self, value: ir.Value, index: tuple[Index, ...], depth: int) -> Interval:
        if value is self._mask:
            return self._masked(index)
        tensor = fixed(value)
        if tensor is not None:
            return _constant(tensor, index)
        node = value.producer()
        if node is None or node.domain:
            return _ANY
        if node.op_type in _ARITHMETIC:
            if node.op_type in ("Sub", "Neg") and value.dtype in _UNSIGNED:
                return _ANY  # below 0 it begins again at the top
            return _ARITHMETIC[node.op_type](*(self.broadcast(x, index, depth) for x in node.inputs))
        reader = getattr(self, f"_{node.op_type.lower()}", None)
        return _ANY if reader is None else reader(node, index, depth)

    def _masked(self, index: tuple[Index, ...]) -> Interval:
        row, place = index
        if row == self._batch and isinstance(place, str) and place in self._state:
            number = self._attended[0] if self._state[place] else self._attended[1]
            return Interval(number, number)
        return Interval(min(self._attended), max(self._attended))

    def _cast(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        x = self.at(node.inputs[0], index, depth)
        if node.attributes.get_int("to", 0) == ir.DataType.BOOL:
            return (
                (_TRUE if x.known else _FALSE) if x.known is not None else _TRUE if x.low > 0 or x.high < 0 else _TRUTH
            )
        return x

    def _range(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        start, step = (self.at(node.inputs[i], (), depth).known for i in (0, 2))
        if start is None or step != 1:
            return _ANY
        found = _at(index[0])
        return dataclasses.replace(_plus(found, Interval(start, start)), high=math.inf) if found.index else found

    def _where(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        condition, yes, no = (self.broadcast(x, index, depth) for x in node.inputs)
        if condition.known is not None:
            return yes if condition.known else no
        return Interval(min(yes.low, no.low), max(yes.high, no.high))

    def _unsqueeze(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        axes = ints_of(node, 1)
        if axes is None:
            return _ANY
        dropped = {axis % len(index) for axis in axes}
        return self.at(node.inputs[0], [i for axis, i in enumerate(index) if axis not in dropped], depth)

    def _squeeze(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        return self._reshape(node, index, depth)

    def _reshape(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        """Follows only what adds or drops axes of size 1."""
        before, after = node.inputs[0], node.outputs[0]
        if before is None or before.shape is None or after.shape is None:
            return _ANY
        left = [(str(size), i) for size, i in zip(after.shape, index, strict=True) if size != 1]
        sizes = [str(size) for size in before.shape if size != 1]
        if [size for size, _ in left] != sizes:
            return _ANY
        places = iter(i for _, i in left)
        return self.at(before, [0 if size == 1 else next(places) for size in before.shape], depth)

    def _expand(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        return self.broadcast(node.inputs[0], index, depth)

    def _identity(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        return self.at(node.inputs[0], index, depth)

    def _transpose(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        perm = node.attributes.get_ints("perm") or range(len(index) - 1, -1, -1)
        inner: list[Index] = [0] * len(index)
        for axis, i in zip(perm, index, strict=True):
            inner[axis] = i
        return self.at(node.inputs[0], inner, depth)

    def _slice(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        starts, steps = ints_of(node, 1), ints_of(node, 4) if len(node.inputs) > 4 else [1]
        axes = ints_of(node, 3) if len(node.inputs) > 3 else None
        if starts is None or steps is None or any(step != 1 for step in steps) or any(start < 0 for start in starts):
            return _ANY
        inner = list(index)
        for axis, start in zip(axes if axes is not None else range(len(starts)), starts, strict=True):
            inner[axis] = _shifted(inner[axis], start)
        return self.at(node.inputs[0], inner, depth)

    def _concat(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        axis = node.attributes.get_int("axis", 0) % len(index)
        place = index[axis]
        for x in node.inputs:
            size = None if x is None or x.shape is None else x.shape[axis]
            if not isinstance(place, int) or not isinstance(size, int):
                return _ANY
            if place < size:
                return self.at(x, [*index[:axis], place, *index[axis + 1 :]], depth)
            place -= size
        return _ANY

    def _gathernd(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        data, indices = node.inputs
        rank = 0 if indices is None or indices.shape is None else len(indices.shape)
        width = indices.shape[-1] if rank and indices is not None and indices.shape is not None else None
        if node.attributes.get_int("batch_dims", 0) or not isinstance(width, int):
            return _ANY
        found = [_as_index(self.at(indices, [*index[: rank - 1], j], depth)) for j in range(width)]
        if any(each is None for each in found):
            return _ANY
        return self.at(data, [*(each for each in found if each is not None), *index[rank - 1 :]], depth)

    def _gather(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        data, indices = node.inputs
        if data is None or data.shape is None or indices is None or indices.shape is None:
            return _ANY
        axis = node.attributes.get_int("axis", 0) % len(data.shape)
        many = len(indices.shape)
        found = _as_index(self.at(indices, index[axis : axis + many], depth))
        if found is None:
            tensor = fixed(data)
            return _ANY if tensor is None else _bounds(tensor.numpy())
        return self.at(data, [*index[:axis], found, *index[axis + many :]], depth)

    def _constantofshape(self, node: ir.Node, index: tuple[Index, ...], depth: int) -> Interval:
        del index, depth
        value = node.attributes.get_tensor("value")
        return Interval(0, 0) if value is None else _bounds(value.numpy())


def _constant(tensor: ir.TensorProtocol, index: tuple[Index, ...]) -> Interval:
    array = tensor.numpy()
    if array.ndim != len(index):
        return _ANY
    numbers = tuple(i for i in index if isinstance(i, int))
    if numbers == index and all(i < size for i, size in zip(numbers, array.shape, strict=True)):
        array = array[numbers]
    return _bounds(array)


def _bounds(array: Any) -> Interval:
    if not np.size(array) or np.asarray(array).dtype.kind not in "biuf" or np.isnan(array).any():
        return _ANY
    return Interval(float(np.min(array)), float(np.max(array)))


def _at(place: Index) -> Interval:
    if isinstance(place, int):
        return Interval(place, place)
    name, offset = (place, 0) if isinstance(place, str) else place
    return Interval(offset, math.inf, (name, offset))


def _as_index(number: Interval) -> Index | None:
    if number.index is not None:
        name, offset = number.index
        # Below 0 an index counts from the end.
        return None if offset < 0 else (name, offset) if offset else name
    return int(number.low) if _whole(number.known) and number.low >= 0 else None


def _shifted(place: Index, by: int) -> Index:
    if by == 0:
        return place
    if isinstance(place, int):
        return place + by
    name, offset = (place, 0) if isinstance(place, str) else place
    return name, offset + by


def _whole(number: float | None) -> bool:
    return number is not None and math.isfinite(number) and number == int(number)


def _sum(a: float, b: float) -> float | None:
    return None if math.isinf(a) and math.isinf(b) and a != b else a + b


def _plus(a: Interval, b: Interval, *_: Any) -> Interval:
    for x, y in ((a, b), (b, a)):
        # Infinity itself; a bound that is infinite only says that the number is not known.
        if x.known is not None and math.isinf(x.known) and y.known != -x.known:
            return x
    index = None
    if a.index is not None and _whole(b.known):
        index = (a.index[0], a.index[1] + int(b.low))
    elif b.index is not None and _whole(a.known):
        index = (b.index[0], b.index[1] + int(a.low))
    low, high = _sum(a.low, b.low), _sum(a.high, b.high)
    return _ANY if low is None or high is None else Interval(low, high, index)


def _minus(a: Interval, b: Interval, *_: Any) -> Interval:
    if a.index is not None and b.index is not None and a.index[0] == b.index[0]:
        return Interval(a.index[1] - b.index[1], a.index[1] - b.index[1])
    return _plus(a, _negative(b))


def _negative(a: Interval) -> Interval:
    return Interval(-a.high, -a.low)


def _times(a: Interval, b: Interval, *_: Any) -> Interval:
    if a.known == 1 or b.known == 1:
        return b if a.known == 1 else a
    # A bound may be infinite where the number is not: 0 times it is 0.
    ends = [0.0 if 0 in (x, y) else x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(ends), max(ends))


def _absolute(a: Interval) -> Interval:
    ends = (abs(a.low), abs(a.high))
    return Interval(0.0 if a.low <= 0 <= a.high else min(ends), max(ends))


def _compared(less: Callable[[float, float], bool]) -> Callable[[Interval, Interval], Interval]:
    """``less(a, b)`` with ``less`` one of ``<`` and ``<=``; the same index twice compares by its offsets."""

    def compare(a: Interval, b: Interval) -> Interval:
        if a.index is not None and b.index is not None and a.index[0] == b.index[0]:
            return _TRUE if less(a.index[1], b.index[1]) else _FALSE
        if less(a.high, b.low):
            return _TRUE
        return _FALSE if not less(a.low, b.high) else _TRUTH

    return compare


def _equal(a: Interval, b: Interval) -> Interval:
    if a.known is not None and b.known is not None:
        return _TRUE if a.known == b.known else _FALSE
    return _FALSE if a.high < b.low or b.high < a.low else _TRUTH


def _not(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low) if a.low >= 0 and a.high <= 1 else _TRUTH


def _all(a: Interval, b: Interval) -> Interval:
    return Interval(min(a.low, b.low), min(a.high, b.high)) if _truths(a, b) else _TRUTH


def _any(a: Interval, b: Interval) -> Interval:
    return Interval(max(a.low, b.low), max(a.high, b.high)) if _truths(a, b) else _TRUTH


def _truths(*values: Interval) -> bool:
    return all(value.low >= 0 and value.high <= 1 for value in values)


def _least(*values: Interval) -> Interval:
    return Interval(min(v.low for v in values), min(v.high for v in values))


def _most(*values: Interval) -> Interval:
    return Interval(max(v.low for v in values), max(v.high for v in values))


_LESS, _LESS_OR_EQUAL = _compared(operator.lt), _compared(operator.le)

_ARITHMETIC: Mapping[str, Callable[..., Interval]] = {
    "Add": _plus,
    "Sub": _minus,
    "Mul": _times,
    "Neg": _negative,
    "Abs": _absolute,
    "Min": _least,
    "Max": _most,
    "Less": _LESS,
    "LessOrEqual": _LESS_OR_EQUAL,
    "Greater": lambda a, b: _LESS(b, a),
    "GreaterOrEqual": lambda a, b: _LESS_OR_EQUAL(b, a),
    "Equal": _equal,
    "Not": _not,
    "And": _all,
    "Or": _any,
}
