"""Canonical ``RotaryEmbedding`` -> what a target runs.

The operator takes tables of the input's batch; onnxruntime refuses others, though torch.onnx writes tables of batch 1
for any input. All forms here take both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, attributes_of, axis_of, of_type, producer, rank, same_axis, static

CONTRIB = "com.microsoft"


def _form(y: ir.Value) -> tuple[ir.Value, int, int, bool]:
    """(input, heads, channels that are turned, interleaved) of a node that the rules here take."""
    node = producer(y)
    x = node.inputs[0]
    assert x is not None
    of_type(x, "input", ir.DataType.FLOAT)
    for table in node.inputs[1:3]:
        if rank(table) != 3:
            raise Refuse(f"a table has rank {rank(table)}, wanted (batch, sequence, d/2)", x)
    if rank(x) == 4:
        heads, width = static(x, 1, "input"), static(x, 3, "input")
    else:
        heads = node.attributes.get_int("num_heads", 0)
        if heads < 1:
            raise Refuse("input has rank 3 and num_heads is not given", x)
        width = static(x, 2, "input") // heads
    part = node.attributes.get_int("rotary_embedding_dim", 0) or width
    return x, heads, part, bool(node.attributes.get_int("interleaved", 0))


def _ints(op: Any, *values: int) -> ir.Value:
    return op.Constant(value=ir.tensor(np.array(values, np.int64)))


def _single(table: ir.Value) -> ir.Value | None:
    """The table of batch 1 behind one that was expanded to the batch; ``None`` where rows differ."""
    if axis_of(table, 0) == 1:
        return table
    node = table.producer()
    if node is None or node.op_type != "Expand" or node.domain or node.inputs[0] is None:
        return None
    inner = node.inputs[0]
    kept = rank(inner) == 3 and all(same_axis(axis_of(inner, i), axis_of(table, i)) for i in (1, 2))
    return inner if kept and axis_of(inner, 0) == 1 else None


class _Rotary(Fusion):
    """Lowers a node with tables by position."""

    meaning = "rotary"
    tolerance = 2e-6
    variants = (
        *({"interleaved": a, "part": b} for a in (0, 1) for b in (0, 4)),
        {"flat": True},
        {"flat": True, "part": 4},
        {"batch": 1},
    )

    def __init__(self, interleaved: int = 0, part: int = 0, flat: bool = False, batch: int | str = "B") -> None:
        super().__init__()
        self._interleaved = interleaved
        self._part = part
        self._flat = flat
        self._batch = batch

    @classmethod
    def orders(cls, options: Any) -> list[Fusion]:
        """One pattern takes all: only the examples differ."""
        return [cls(**options)] if options == cls.variants[0] else []

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        return op.RotaryEmbedding(x, cos, sin, _outputs=["y"])

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        part = {"rotary_embedding_dim": self._part} if self._part else {}
        heads = {"num_heads": 2} if self._part or self._flat else {}
        return {"RotaryEmbedding": {"interleaved": self._interleaved, **part, **heads}}

    def check(self, op: Any, y: ir.Value, **_: Any) -> None:
        _form(y)

    def example(self) -> Example:
        table = (self._batch, "S", (self._part or 8) // 2)
        x = ("B", "S", 16) if self._flat else ("B", 2, "S", 8)
        return {"x": Arg(x), "cos": Arg(table), "sin": Arg(table)}

    near_misses = (
        NearMiss(
            "half precision",
            "input is FLOAT16, wanted FLOAT",
            {name: Arg(shape, "float16") for name, shape in
             (("x", ("B", 2, "S", 8)), ("cos", ("B", "S", 4)), ("sin", ("B", "S", 4)))},
        ),
        NearMiss(
            "rows picked by position",
            None,
            {"cos": Arg((9, 4)), "sin": Arg((9, 4))},
            build=lambda op, x, cos, sin: op.RotaryEmbedding(
                x, cos, sin, op.Constant(value=ir.tensor(np.zeros((1, 1), np.int64)))
            ),
        ),
    )  # fmt: skip


class ContribRotary(_Rotary):
    """``RotaryEmbedding(x, cos, sin)`` -> ``com.microsoft.RotaryEmbedding(x, positions, cos, sin)``.

    Its tables have one row per position: those of batch 1 as they are, others with the rows of the whole batch
    below each other.
    """

    result = (CONTRIB, "RotaryEmbedding")

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value) -> ir.Value:
        x, heads, part, interleaved = _form(y)
        whole = static(x, -1, "input") // (1 if rank(x) == 4 else heads)
        singles = [_single(table) for table in (cos, sin)]
        if singles[0] is not None and singles[1] is not None:
            tables = [op.Squeeze(each, _ints(op, 0)) for each in singles]
            positions = _ints(op, 0)
        else:
            tables = [op.Reshape(each, _ints(op, -1, part // 2)) for each in (cos, sin)]
            rows = op.Shape(cos, start=0, end=2)
            count = op.Squeeze(op.ReduceProd(rows, keepdims=1), _ints(op, 0))
            zero, one = (op.Constant(value=ir.tensor(np.array(i, np.int64))) for i in (0, 1))
            positions = op.Reshape(op.Range(zero, count, one), rows)
        attributes: dict[str, Any] = {"interleaved": int(interleaved)}
        if part != whole:
            attributes |= {"rotary_embedding_dim": part, "num_heads": heads}
        return op.RotaryEmbedding(x, positions, *tables, _domain=CONTRIB, **attributes)


class RotaryPrimitives(_Rotary):
    """``RotaryEmbedding(x, cos, sin)`` -> ``[x1 cos - x2 sin, x2 cos + x1 sin]``."""

    result = ("", "Sub")
    marks = True

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value) -> ir.Value:
        x, heads, part, interleaved = _form(y)
        flat = rank(x) == 3
        tables = [op.Unsqueeze(_single(table) or table, _ints(op, 2 if flat else 1)) for table in (cos, sin)]
        many = op.Reshape(x, _ints(op, 0, 0, heads, -1)) if flat else x
        width = static(x, -1, "input") // (heads if flat else 1)
        step = (0, part, 2), (1, part, 2)
        if not interleaved:
            step = (0, part // 2, 1), (part // 2, part, 1)
        first, second = (op.Slice(many, _ints(op, a), _ints(op, b), _ints(op, -1), _ints(op, c)) for a, b, c in step)
        real = op.Sub(op.Mul(first, tables[0]), op.Mul(second, tables[1]))
        imag = op.Add(op.Mul(second, tables[0]), op.Mul(first, tables[1]))
        parts = [real, imag]
        if interleaved:
            pair = [op.Unsqueeze(each, _ints(op, -1)) for each in parts]
            parts = [op.Reshape(op.Concat(*pair, axis=-1), _ints(op, 0, 0, 0, part))]
        if part < width:
            parts.append(op.Slice(many, _ints(op, part), _ints(op, width), _ints(op, -1)))
        # The last node carries the meaning.
        out = op.Concat(*parts, axis=-1) if len(parts) > 1 else parts[0]
        return op.Reshape(out, op.Shape(x)) if flat else out


class RotaryTables(Fusion):
    """``RotaryEmbedding(x, cos, sin)`` -> the same node with tables of the input's batch."""

    result = ("", "RotaryEmbedding")
    meaning = "rotary"

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        return op.RotaryEmbedding(x, cos, sin, _outputs=["y"])

    def check(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, **_: Any) -> None:
        if any(rank(table) != 3 for table in (cos, sin)):
            raise Refuse(f"tables have ranks {rank(cos)} and {rank(sin)}, wanted (batch, sequence, d/2)", x)
        if axis_of(x, 0) == 1 or all(axis_of(table, 0) != 1 for table in (cos, sin)):
            raise Refuse()

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value) -> ir.Value:
        target = op.Concat(op.Shape(x, start=0, end=1), _ints(op, 1), _ints(op, 1), axis=0)
        tables = []
        for table in (cos, sin):
            wide = op.Expand(table, target)
            wide.dtype = table.dtype
            wide.shape = ir.Shape([axis_of(x, 0), axis_of(table, 1), axis_of(table, 2)])
            tables.append(wide)
        return op.RotaryEmbedding(x, *tables, **attributes_of(producer(y)))

    def example(self) -> Example:
        return {"x": Arg(("B", 2, "S", 8)), "cos": Arg((1, "S", 4)), "sin": Arg((1, "S", 4))}

    near_misses = (
        NearMiss("tables without a batch", "tables have ranks 2 and 2", {"cos": Arg(("S", 4)), "sin": Arg(("S", 4))}),
    )
