"""Canonical ``RotaryEmbedding`` -> what a target runs.

The operator takes tables of the input's batch; onnxruntime refuses others, though torch.onnx writes tables of batch 1
for any input. All forms here take both.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Derived, Example, Fusion, NearMiss
from ..guards import Refuse, attributes_of, axis_of, ints, of_type, producer, rank, same_axis, static

CONTRIB = "com.microsoft"


_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _form(y: ir.Value) -> tuple[ir.Value, int, int, bool]:
    """(input, heads, channels that are turned, interleaved) of a node that the rules here take."""
    node = producer(y)
    x = node.inputs[0]
    assert x is not None
    picks = _positions(node) is not None
    for table in node.inputs[1:3]:
        if rank(table) != (2 if picks else 3):
            wanted = "(rows, d/2) with position_ids" if picks else "(batch, sequence, d/2)"
            raise Refuse(f"a table has rank {rank(table)}, wanted {wanted}", x)
    if rank(x) == 4:
        heads, width = static(x, 1, "input"), static(x, 3, "input")
    else:
        heads = node.attributes.get_int("num_heads", 0)
        if heads < 1:
            raise Refuse("input has rank 3 and num_heads is not given", x)
        width = static(x, 2, "input") // heads
    part = node.attributes.get_int("rotary_embedding_dim", 0) or width
    return x, heads, part, bool(node.attributes.get_int("interleaved", 0))


def _positions(node: ir.Node) -> ir.Value | None:
    """The rows of the tables that a node picks, where it does."""
    return node.inputs[3] if len(node.inputs) > 3 else None


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
    """Lowers a node with tables by position, or with tables whose rows it picks by ``position_ids``."""

    meaning = "rotary"
    tolerance = 2e-6
    types: ClassVar[tuple[ir.DataType, ...]]
    variants = (
        *({"picks": picks, "interleaved": i} for picks in (True, False) for i in (0, 1)),
        *({"picks": picks, "interleaved": i, "part": 4} for picks in (True, False) for i in (0, 1)),
        {"picks": False, "flat": True},
        {"picks": False, "flat": True, "part": 4},
        {"picks": False, "batch": 1},
    )

    def __init__(
        self, picks: bool = False, interleaved: int = 0, part: int = 0, flat: bool = False, batch: int | str = "B"
    ) -> None:
        super().__init__()
        self._flat = flat
        self._batch = batch
        self._picks = picks
        self._interleaved = interleaved
        self._part = part

    @classmethod
    def orders(cls, options: Any) -> list[Fusion]:
        """One pattern for each form of the tables: otherwise only the examples differ."""
        return [cls(**options)] if options == {"picks": options["picks"], "interleaved": 0} else []

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any, positions: Any) -> Any:
        return op.RotaryEmbedding(x, cos, sin, *([positions] if self._picks else []), _outputs=["y"])

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        part = {"rotary_embedding_dim": self._part} if self._part else {}
        heads = {"num_heads": 2} if self._part or self._flat else {}
        return {"RotaryEmbedding": {"interleaved": self._interleaved, **part, **heads}}

    def check(self, op: Any, x: ir.Value, y: ir.Value, **_: Any) -> None:
        if self._picks != (_positions(producer(y)) is not None):
            raise Refuse()  # The other variant's.
        of_type(x, "input", *self.types)
        _form(y)

    def example(self) -> Example:
        half = (self._part or 8) // 2
        rows = (40, half) if self._picks else (self._batch, "S", half)
        counted = Derived(lambda op, given: _counted(op, given["x"]))
        x = ("B", "S", 16) if self._flat else ("B", 2, "S", 8)
        return {"x": Arg(x), "cos": Arg(rows), "sin": Arg(rows), "positions": counted}

    near_misses = (
        NearMiss(
            "one table of two axes and no positions",
            "a table has rank 2, wanted",
            {"sin": Arg((9, 4))},
            {"picks": False, "interleaved": 0},
        ),
    )


def _counted(op: Any, x: Any) -> Any:
    """Positions (B, S) that differ between the rows of the batch, for x (B, H, S, d)."""

    def number(*values: int) -> Any:
        return op.Constant(value=ir.tensor(np.array(values, np.int64).reshape(() if len(values) == 1 else -1)))

    batch, sequence = (op.Squeeze(op.Shape(x, start=i, end=i + 1)) for i in (0, 2))
    rows, columns = (op.Range(number(0), size, number(1)) for size in (batch, sequence))
    return op.Add(op.Unsqueeze(rows, ints(op, 1)), columns)


class ContribRotary(_Rotary):
    """``RotaryEmbedding(x, cos, sin)`` -> ``com.microsoft.RotaryEmbedding(x, positions, cos, sin)``.

    Its tables have one row per position: those of batch 1 as they are, others with the rows of the whole batch
    below each other.
    """

    result = (CONTRIB, "RotaryEmbedding")
    types = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    near_misses = (
        *_Rotary.near_misses,
        NearMiss(
            "one table of batch 1, the other of the batch",
            "cos has batch 1 and sin B",
            {"cos": Arg((1, "S", 4))},
            {"picks": False, "interleaved": 0},
        ),
    )

    def check(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value, **_: Any) -> None:
        super().check(op, x=x, y=y)
        batches = [axis_of(table, 0) for table in (cos, sin)]
        if not self._picks and (batches[0] == 1) != (batches[1] == 1):
            raise Refuse(f"cos has batch {batches[0]} and sin {batches[1]}, wanted one batch for both", y)

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value, **_: Any) -> ir.Value:
        x, heads, part, interleaved = _form(y)
        whole = static(x, -1, "input") // (1 if rank(x) == 4 else heads)
        positions, tables = _positions(producer(y)), [cos, sin]
        singles = [_single(table) for table in tables]
        if positions is None and singles[0] is not None and singles[1] is not None:
            tables = [op.Squeeze(each, ints(op, 0)) for each in singles]
            positions = ints(op, 0)
        elif positions is None:
            tables = [op.Reshape(each, ints(op, -1, part // 2)) for each in tables]
            rows = op.Shape(cos, start=0, end=2)
            count = op.Squeeze(op.ReduceProd(rows, keepdims=1), ints(op, 0))
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
    types = (ir.DataType.FLOAT, *_HALVES)

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value, **_: Any) -> ir.Value:
        x, heads, part, interleaved = _form(y)
        flat, positions = rank(x) == 3, _positions(producer(y))
        rows = [op.Gather(each, positions) if positions is not None else _single(each) or each for each in (cos, sin)]
        tables = [op.Unsqueeze(each, ints(op, 2 if flat else 1)) for each in rows]
        many = op.Reshape(x, ints(op, 0, 0, heads, -1)) if flat else x
        width = static(x, -1, "input") // (heads if flat else 1)
        step = (0, part, 2), (1, part, 2)
        if not interleaved:
            step = (0, part // 2, 1), (part // 2, part, 1)
        first, second = (op.Slice(many, ints(op, a), ints(op, b), ints(op, -1), ints(op, c)) for a, b, c in step)
        real = op.Sub(op.Mul(first, tables[0]), op.Mul(second, tables[1]))
        imag = op.Add(op.Mul(second, tables[0]), op.Mul(first, tables[1]))
        parts = [real, imag]
        if interleaved:
            pair = [op.Unsqueeze(each, ints(op, -1)) for each in parts]
            parts = [op.Reshape(op.Concat(*pair, axis=-1), ints(op, 0, 0, 0, part))]
        if part < width:
            parts.append(op.Slice(many, ints(op, part), ints(op, width), ints(op, -1)))
        # The last node carries the meaning.
        out = op.Concat(*parts, axis=-1) if len(parts) > 1 else parts[0]
        return op.Reshape(out, op.Shape(x)) if flat else out


class RotaryTables(Fusion):
    """``RotaryEmbedding(x, cos, sin)`` -> the same node with tables of the input's batch."""

    result = ("", "RotaryEmbedding")
    meaning = "rotary"

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any) -> Any:
        return op.RotaryEmbedding(x, cos, sin, _outputs=["y"])

    def check(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value) -> None:
        if _positions(producer(y)) is not None:
            raise Refuse()
        if any(rank(table) != 3 for table in (cos, sin)):
            raise Refuse(f"tables have ranks {rank(cos)} and {rank(sin)}, wanted (batch, sequence, d/2)", x)
        if axis_of(x, 0) == 1 or all(axis_of(table, 0) != 1 for table in (cos, sin)):
            raise Refuse()

    def rewrite(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value) -> ir.Value:
        target = op.Concat(op.Shape(x, start=0, end=1), ints(op, 1), ints(op, 1), axis=0)
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
