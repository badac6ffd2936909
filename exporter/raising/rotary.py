"""Rotary position embedding in pieces -> one ``RotaryEmbedding`` per rotated tensor (ai.onnx, since opset 23).

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv 2104.09864): each pair of
channels is turned by an angle that grows with the position,

    real = x1 cos - x2 sin,    imag = x2 cos + x1 sin,

where the pairs are the two halves of a head (GPT-NeoX, Llama, BERTs) or neighbours (``interleaved``: GPT-J, RoFormer).
The canonical node takes the tables as (B, S, d/2), whatever made them; a table of batch 1 is expanded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Derived, Example, Fusion, NearMiss
from ..guards import Refuse, axis_of, ints, of_type, producer, rank, same_axis, static, transpose
from .rotary_parts import alone, equal_halves, factors, joins_last, joins_pairs, rows_for, same_shape, source, turned

_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LAYOUTS = ("bhsd", "bshd")


def _sequence_axis(x: ir.Value, table: ir.Value, width: int) -> int:
    """The axis of x (2 in (B, H, S, d), 1 in (B, S, H, d)) that a table turns by; refuses other tables."""
    of_type(x, "rotated tensor", *_TYPES)
    if rank(x) != 4:
        raise Refuse(f"rotated tensor has rank {rank(x)}, wanted 4", x)
    shape = [1] * (4 - (rank(table) or 0)) + list(table.shape or ())
    if rank(table) == 1 or len(shape) != 4 or shape[3] != width:
        raise Refuse(f"table has shape {table.shape}, wanted (batch or 1, 1, sequence, {width})", table)
    if shape[0] != 1 and not same_axis(shape[0], axis_of(x, 0)):
        raise Refuse(f"table has batch {shape[0]}, the rotated tensor {axis_of(x, 0)}", table)
    for axis, other in ((2, 1), (1, 2)):
        if shape[other] == 1 and rows_for(shape[axis], axis_of(x, axis)):
            return axis
    raise Refuse(f"table has shape {table.shape}, the rotated tensor {x.shape}; wanted the sequence in both", table)


def _tables(op: Any, x: ir.Value, tables: Sequence[ir.Value], axis: int, step: int) -> list[ir.Value]:
    """Tables of x's rank or less as (B, S, d/2); ``step`` 1 takes the first half of each, 2 every other one, 0 all."""
    made: list[ir.Value] = []
    for table in tables:
        y: Any
        y, half = table, table.shape[-1] if table.shape is not None else None
        if step:
            assert isinstance(half, int)
            ends = half // 2 if step == 1 else half
            half //= 2
            y = op.Slice(y, *(op.Constant(value=ir.tensor(np.array([i], np.int64))) for i in (0, ends, -1, step)))
        depth = rank(table) or 0
        if depth == 4:
            y = op.Squeeze(y, op.Constant(value=ir.tensor(np.array([3 - axis], np.int64))))
        elif depth == 3 and axis == 1:  # (S, 1, d)
            y = op.Transpose(y, perm=[1, 0, 2])
        elif depth == 2:
            y = op.Unsqueeze(y, op.Constant(value=ir.tensor(np.array([0], np.int64))))
        batch = table.shape[0] if depth == 4 and table.shape is not None else 1
        y.dtype, y.shape = table.dtype, ir.Shape([batch, axis_of(x, axis), half])
        if batch == 1 and axis_of(x, 0) != 1:
            one = op.Constant(value=ir.tensor(np.array([1], np.int64)))
            y = op.Expand(y, op.Concat(op.Shape(x, start=0, end=1), one, one, axis=0))
            y.dtype, y.shape = table.dtype, ir.Shape([axis_of(x, 0), axis_of(x, axis), half])
        made.append(y)
    return made


def _node(op: Any, x: ir.Value, tables: Sequence[ir.Value], axis: int, step: int, interleaved: bool) -> ir.Value:
    caches = _tables(op, x, tables, axis, step)
    many = x if axis == 2 else transpose(op, x, (0, 2, 1, 3))
    y = op.RotaryEmbedding(many, *caches, interleaved=int(interleaved))
    if axis == 2:
        return y
    y.dtype, y.shape = many.dtype, many.shape
    return transpose(op, y, (0, 2, 1, 3))


class _Rotary(Fusion):
    result = ("", "RotaryEmbedding")
    meaning = "rotary"
    tolerance = 2e-6

    def __init__(self, layout: str = "bhsd", interleaved: bool = False) -> None:
        super().__init__()
        self._layout = layout
        self._interleaved = interleaved

    @classmethod
    def orders(cls, options: Any) -> list[Fusion]:
        """One pattern for both layouts."""
        return super().orders(options) if options["layout"] == "bhsd" else []

    def _examples(self, width: int) -> Example:
        many = self._layout == "bhsd"

        def table(name: str) -> Derived:
            def write(op: Any, given: Any) -> Any:
                angles = given["half"]
                if width == 8 and self._interleaved:
                    pair = [op.Unsqueeze(angles, given["last"]) for _ in range(2)]
                    angles = op.Reshape(op.Concat(*pair, axis=-1), given["shape"])
                elif width == 8:
                    angles = op.Concat(angles, angles, axis=-1)
                return getattr(op, name)(angles)

            return Derived(write)

        shape = (1, 1, "S") if many else (1, "S", 1)
        return {
            "x": Arg(("B", 2, "S", 8) if many else ("B", "S", 2, 8)),
            "half": Arg((*shape, 4)),
            "last": np.array([-1]),
            "shape": np.array([0, 0, 0, -1]),
            "cos": table("Cos"),
            "sin": table("Sin"),
            "zero": np.array([0]),
            "four": np.array([4]),
            "one": np.array([1]),
            "two": np.array([2]),
            "end": np.array([2**62]),
        }

    def _pieces(
        self, op: Any, x: Any, last: Any, zero: Any, four: Any, one: Any, two: Any, end: Any
    ) -> tuple[Any, Any]:
        if self._interleaved:
            return op.Slice(x, zero, end, last, two), op.Slice(x, one, end, last, two)
        return op.Slice(x, zero, four, last), op.Slice(x, four, end, last)

    def _together(self, op: Any, real: Any, imag: Any, last: Any, shape: Any) -> Any:
        if self._interleaved:
            pair = [op.Unsqueeze(part, last) for part in (real, imag)]
            return op.Reshape(op.Concat(*pair, axis=-1), shape)
        return op.Concat(real, imag, axis=-1)


_VARIANTS = tuple({"layout": a, "interleaved": b} for a, b in itertools.product(_LAYOUTS, (False, True)))


class RotarySum(_Rotary):
    """``x cos + turned(x) sin`` -> ``RotaryEmbedding(x, cos, sin)``, with ``turned(x) = [-x2, x1]``.

    The tables are as wide as a head, and each angle must be shown to stand there twice.
    """

    one_pattern = True
    variants = tuple(each for each in _VARIANTS if each["layout"] == "bhsd" or not each["interleaved"])

    def pattern(self, op: Any, left: Any, right: Any) -> Any:
        return op.Add(left, right, _outputs=["y"])

    def unfused(self, op: Any, x: Any, cos: Any, sin: Any, shape: Any, last: Any, zero: Any, four: Any,
                one: Any, two: Any, end: Any) -> Any:  # fmt: skip
        first, second = self._pieces(op, x, last, zero, four, one, two, end)
        turn = self._together(op, op.Neg(second), first, last, shape)
        return op.Add(op.Mul(x, cos), op.Mul(turn, sin))

    def check(self, op: Any, left: ir.Value, right: ir.Value, **_: Any) -> None:
        x, cos, sin, interleaved, inner = self._read(left, right)
        width = static(x, -1, "rotated tensor")
        axis = _sequence_axis(x, cos, width)
        if _sequence_axis(x, sin, width) != axis:
            raise Refuse("cos and sin turn by different axes", cos, sin)
        for table, name in ((cos, "cos"), (sin, "sin")):
            if not equal_halves(table, interleaved):
                where = "neighbours" if interleaved else "halves"
                raise Refuse(f"{name} cannot be shown to hold the same angles in both {where}", table)
        alone(inner)

    def _read(self, left: ir.Value, right: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, bool, list[ir.Value]]:
        for straight, other in ((left, right), (right, left)):
            for turn, sin in factors(other):
                found = turned(turn)
                if found is None:
                    continue
                x, interleaved, inner = found
                for same, cos in factors(straight):
                    if same is x:
                        return x, cos, sin, interleaved, [straight, other, *inner]
                raise Refuse("what is turned is not what is added", x)
        raise Refuse()

    def rewrite(self, op: Any, left: ir.Value, right: ir.Value, **_: Any) -> ir.Value:
        x, cos, sin, interleaved, _inner = self._read(left, right)
        axis = _sequence_axis(x, cos, static(x, -1, "rotated tensor"))
        return _node(op, x, (cos, sin), axis, 2 if interleaved else 1, interleaved)

    def example(self) -> Example:
        return self._examples(8)

    near_misses = (
        NearMiss(
            "turned the other way",
            "the first part is not negated|turned",
            build=lambda op, x, cos, sin, last, zero, four, end, **_: op.Add(
                op.Mul(x, cos),
                op.Mul(op.Concat(op.Slice(x, four, end, last), op.Neg(op.Slice(x, zero, four, last)), axis=-1), sin),
            ),
        ),
        NearMiss(
            "angles that differ between the halves",
            "cos cannot be shown",
            {"cos": Arg((1, 1, "S", 8)), "sin": Arg((1, 1, "S", 8))},
        ),
        NearMiss(
            "another tensor is turned",
            "not what is added",
            build=lambda op, x, cos, sin, last, zero, four, end, **_: op.Add(
                op.Mul(op.Neg(x), cos),
                op.Mul(op.Concat(op.Neg(op.Slice(x, four, end, last)), op.Slice(x, zero, four, last), axis=-1), sin),
            ),
        ),
        NearMiss("a table per head", "wanted the sequence in both", {"half": Arg((1, 2, "S", 4))}),
    )


def _rotated(op: Any, first: Any, second: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    return op.Sub(op.Mul(first, cos), op.Mul(second, sin)), op.Add(op.Mul(second, cos), op.Mul(first, sin))


class RotaryParts(_Rotary):
    """``[x1 cos - x2 sin, x2 cos + x1 sin]`` -> ``RotaryEmbedding(x, cos, sin)``, with tables of half the width."""

    places = 1  # the sum; products are read
    variants = (*_VARIANTS, *({"layout": layout, "interleaved": False, "rest": True} for layout in _LAYOUTS))

    def __init__(self, layout: str = "bhsd", interleaved: bool = False, rest: bool = False) -> None:
        super().__init__(layout, interleaved)
        self._rest = rest  # What is not turned is joined at once.

    def pattern(self, op: Any, real: Any, a: Any, b: Any, last: Any, shape: Any, rest: Any) -> Any:
        imag = self.either(op.Add, 0, a, b)
        if self._interleaved:
            pair = [op.Unsqueeze(real, last), op.Unsqueeze(imag, last)]
            return op.Reshape(op.Concat(*pair, _outputs=["pairs"]), shape, _outputs=["y"])
        return op.Concat(real, imag, *([rest] if self._rest else []), _outputs=["y"])

    def unfused(self, op: Any, x: Any, cos: Any, sin: Any, shape: Any, last: Any, zero: Any, four: Any,
                one: Any, two: Any, end: Any, rest: Any) -> Any:  # fmt: skip
        first, second = self._pieces(op, x, last, zero, four, one, two, end)
        real, imag = _rotated(op, first, second, cos, sin)
        return op.Concat(real, imag, rest, axis=-1) if self._rest else self._together(op, real, imag, last, shape)

    def check(self, op: Any, real: ir.Value, a: ir.Value, b: ir.Value, y: ir.Value, **rest: Any) -> None:
        x, cos, sin, inner = self._read(real, a, b)
        if not (joins_pairs(producer(rest["pairs"])) if self._interleaved else joins_last(producer(y))):
            raise Refuse()
        if self._interleaved:
            if not same_shape(x, y):
                raise Refuse(f"pairs end in shape {y.shape}, wanted {x.shape}", x)
            inner = [*inner, rest["pairs"]]
        width = static(x, -1, "rotated tensor") // 2
        if _sequence_axis(x, cos, width) != _sequence_axis(x, sin, width):
            raise Refuse("cos and sin turn by different axes", cos, sin)
        alone(inner)

    def _read(self, real: ir.Value, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, list[ir.Value]]:
        node = real.producer()
        if node is None or node.op_type != "Sub" or node.domain or node.inputs[0] is None or node.inputs[1] is None:
            raise Refuse()
        plus, minus = node.inputs[0], node.inputs[1]
        kinds = ("even", "odd") if self._interleaved else ("first", "second")
        for (first, cos), (second, sin) in itertools.product(factors(plus), factors(minus)):
            pieces = [source(first), source(second)]
            if any(piece is None for piece in pieces) or [p[1] for p in pieces if p] != list(kinds):
                continue
            if pieces[0] is None or pieces[1] is None or pieces[0][0] is not pieces[1][0]:
                continue
            wanted = {frozenset((second, cos)), frozenset((first, sin))}
            if {frozenset(pair) for each in (a, b) for pair in factors(each)} == wanted:
                return pieces[0][0], cos, sin, [plus, minus, real, a, b]
        raise Refuse()

    def rewrite(self, op: Any, real: ir.Value, a: ir.Value, b: ir.Value, **rest: Any) -> ir.Value:
        x, cos, sin, _inner = self._read(real, a, b)
        axis = _sequence_axis(x, cos, static(x, -1, "rotated tensor") // 2)
        y: Any = _node(op, x, (cos, sin), axis, 0, self._interleaved)
        if not self._rest:
            return y
        y.dtype, y.shape = x.dtype, x.shape
        return op.Concat(y, rest["rest"], axis=-1)

    def example(self) -> Example:
        other = ("B", 2, "S", 6) if self._layout == "bhsd" else ("B", "S", 2, 6)
        return {**self._examples(4), "rest": Arg(other)}

    near_misses = (
        NearMiss("a table per head", "wanted the sequence in both", {"half": Arg((1, 2, "S", 4))}),
        NearMiss(
            "double precision, which the operator does not take",
            "rotated tensor is DOUBLE, wanted FLOAT or FLOAT16",
            {"x": Arg(("B", 2, "S", 8), "float64"), "half": Arg((1, 1, "S", 4), "float64")},
        ),
        NearMiss(
            "parts beside each other in another axis",
            None,
            build=lambda op, x, cos, sin, last, zero, four, end, **_: op.Concat(
                *_rotated(op, op.Slice(x, zero, four, last), op.Slice(x, four, end, last), cos, sin), axis=1
            ),
        ),
        NearMiss(
            "parts of pairs behind each other instead of in turn",
            None,
            variant={"interleaved": True},
            build=lambda op, x, cos, sin, last, zero, one, two, end, shape, **_: op.Reshape(
                op.Concat(
                    *(
                        op.Unsqueeze(part, ints(op, -2))
                        for part in _rotated(
                            op, op.Slice(x, zero, end, last, two), op.Slice(x, one, end, last, two), cos, sin
                        )
                    ),
                    axis=-1,
                ),
                shape,
            ),
        ),
        NearMiss(
            "both parts subtract",
            None,
            build=lambda op, x, cos, sin, last, zero, four, end, **_: op.Concat(
                op.Sub(op.Mul(op.Slice(x, zero, four, last), cos), op.Mul(op.Slice(x, four, end, last), sin)),
                op.Sub(op.Mul(op.Slice(x, four, end, last), cos), op.Mul(op.Slice(x, zero, four, last), sin)),
                axis=-1,
            ),
        ),
    )
