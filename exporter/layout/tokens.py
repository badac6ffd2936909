"""The vectors that a ragged graph is built around: which tokens are kept, and where they come from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["KEYS", "LENGTH", "PADDED", "SEQUENCES", "TOKENS", "Builder", "Tokens"]

TOKENS, PADDED, SEQUENCES, LENGTH, KEYS = (
    f"tfx_{name}" for name in ("tokens", "padded", "sequences", "length", "keys")
)
"""Names of axes of packed values. onnxruntime reuses memory by these names, so a user's own must not meet them."""


class Builder:
    """Writes nodes with known types in front of a node.

    Args:
        graph: Where they go.
        before: The node in front of which they go; ``None`` appends.
        prefix: What their names begin with.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node | None, prefix: str = "ragged") -> None:
        self.graph = graph
        self.before = before
        self._prefix = prefix
        self._ints: dict[tuple[int, ...], ir.Value] = {}

    def __call__(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        dtype: ir.DataType | None = None,
        shape: Sequence[int | str] | None = None,
        name: str | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """One node of one output; its type is the first input's unless given."""
        node = ir.node(op_type, inputs, attributes)
        out = node.outputs[0]
        first = next((value for value in inputs if value is not None), None)
        kind = dtype if dtype is not None else first.dtype if first is not None else None
        out.type = None if kind is None else ir.TensorType(kind)
        out.shape = None if shape is None else ir.Shape(shape)
        out.name = None if name is None else f"{self._prefix}.{name}"
        self.add(node)
        return out

    def add(self, node: ir.Node) -> None:
        """Puts a node into its place."""
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)

    def ints(self, *values: int) -> ir.Value:
        """An int64 vector."""
        if values not in self._ints:
            self._ints[values] = self.constant(np.array(values, np.int64))
        return self._ints[values]

    def constant(self, array: np.ndarray) -> ir.Value:
        """A constant."""
        node = ir.node("Constant", [], {"value": ir.tensor(array)})
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        self.add(node)
        return node.outputs[0]


class Tokens:
    """Which tokens of a padded batch are computed.

    Row by row, in order of their positions. A row without any attended position has no tokens.

    Args:
        graph: The graph; vectors that nothing uses go when it is tidied.
        mask: Its mask input, (batch, sequence), integer, bool or float.
        ignored: Whether the mask is true (not 0) where a position is *not* attended.
        first: Keep position 0 of every row that has tokens, attended or not: the model's output reads it.
    """

    def __init__(self, graph: ir.Graph, mask: ir.Value, *, ignored: bool, first: bool) -> None:
        self._op = op = Builder(graph, next(iter(graph), None))
        assert mask.shape is not None
        self._axes = [str(size) for size in mask.shape]
        attended = op("Cast", mask, dtype=ir.DataType.BOOL, shape=self._axes, to=ir.DataType.BOOL)
        if ignored:
            attended = op("Not", attended, shape=self._axes)
        self._attended, self._mask, self.first = attended, mask, first

    @functools.cached_property
    def sequence(self) -> ir.Value:
        """The padded length, 0-d."""
        op = self._op
        size = op("Shape", self._mask, dtype=ir.DataType.INT64, shape=[1], start=1, end=2)
        return op("Squeeze", size, op.ints(0), shape=[])

    @functools.cached_property
    def _counted(self) -> ir.Value:
        """Attended positions per row, int64 (batch,)."""
        return self._count(self._attended)

    def _count(self, kept: ir.Value) -> ir.Value:
        op = self._op
        ones = op("Cast", kept, dtype=ir.DataType.INT64, shape=self._axes, to=ir.DataType.INT64)
        return op("ReduceSum", ones, op.ints(1), shape=self._axes[:1], keepdims=0)

    @functools.cached_property
    def _kept(self) -> ir.Value:
        """The positions that are computed, bool (batch, sequence)."""
        op = self._op
        if not self.first:
            return self._attended
        zero = op.constant(np.array(0, np.int64))
        places = op("Range", zero, self.sequence, op.constant(np.array(1, np.int64)), shape=self._axes[1:])
        head = op("Equal", places, zero, dtype=ir.DataType.BOOL, shape=self._axes[1:])
        alive = op("Greater", self._counted, zero, dtype=ir.DataType.BOOL, shape=self._axes[:1])
        alive = op("Unsqueeze", alive, op.ints(1), shape=[self._axes[0], 1])
        return op("Or", self._attended, op("And", alive, head, shape=self._axes), shape=self._axes)

    @functools.cached_property
    def index(self) -> ir.Value:
        """Where the tokens stand in the flattened batch, int64 (tokens,)."""
        op = self._op
        flat = op("Reshape", self._kept, op.ints(-1))
        where = op("NonZero", flat, dtype=ir.DataType.INT64, shape=[1, TOKENS])
        return op("Squeeze", where, op.ints(0), shape=[TOKENS], name="index")

    @functools.cached_property
    def position(self) -> ir.Value:
        """The position of each token in its padded row, int64 (tokens,)."""
        return self._op("Mod", self.index, self.sequence, shape=[TOKENS], name="position")

    @functools.cached_property
    def row(self) -> ir.Value:
        """The row of each token, int64 (tokens,)."""
        return self._op("Div", self.index, self.sequence, shape=[TOKENS], name="row")

    @functools.cached_property
    def rows(self) -> ir.Value:
        """The rows that have tokens, int64 (sequences,)."""
        op = self._op
        where = op("NonZero", self._counted, shape=[1, SEQUENCES])
        return op("Squeeze", where, op.ints(0), shape=[SEQUENCES], name="rows")

    @functools.cached_property
    def _lengths(self) -> ir.Value:
        """Tokens of each row that has some, int64 (sequences,)."""
        op = self._op
        counted = self._count(self._kept) if self.first else self._counted
        return op("Gather", counted, self.rows, shape=[SEQUENCES], name="lengths")

    @functools.cached_property
    def ends(self) -> ir.Value:
        """Behind the last token of each row that has some, int64 (sequences,)."""
        op = self._op
        return op("CumSum", self._lengths, op.constant(np.array(0, np.int64)), shape=[SEQUENCES], name="ends")

    @functools.cached_property
    def starts(self) -> ir.Value:
        """The first token of each row that has some, int64 (sequences,)."""
        return self._op("Sub", self.ends, self._lengths, shape=[SEQUENCES], name="starts")

    @functools.cached_property
    def key_starts(self) -> ir.Value:
        """The first attended token of each row: a first position that is kept all the same is no key."""
        op = self._op
        if not self.first:
            return self.starts
        attended = op("Gather", self._counted, self.rows, shape=[SEQUENCES])
        return op("Sub", self.ends, attended, shape=[SEQUENCES], name="key_starts")

    @functools.cached_property
    def count(self) -> ir.Value:
        """How many rows have tokens, int64, 0-d."""
        return self._op("Size", self.rows, shape=[], name="sequences")

    @functools.cached_property
    def _longest(self) -> ir.Value:
        op = self._op
        # Of no rows there is no longest one.
        padded = op("Concat", self._lengths, op.ints(0), axis=0)
        return op("ReduceMax", padded, shape=[], keepdims=0)

    @functools.cached_property
    def even(self) -> ir.Value:
        """Whether there are tokens, all rows have equally many, and all of them are keys; bool, 0-d."""
        op, boolean = self._op, ir.DataType.BOOL
        total = op("Size", self.index, shape=[])
        level = op("Equal", op("Mul", self._longest, self.count, shape=[]), total, dtype=boolean, shape=[])
        some = op("Greater", total, op.constant(np.array(0, np.int64)), dtype=boolean, shape=[])
        level = op("And", level, some, shape=[])
        if self.first:
            keys = op("ReduceSum", self._counted, shape=[], keepdims=0)
            level = op("And", level, op("Equal", keys, total, dtype=boolean, shape=[]), shape=[])
        return level

    @functools.cached_property
    def even_shape(self) -> ir.Value:
        """(sequences, length, -1), to see packed tokens as a batch when rows are equally long."""
        op = self._op
        sizes = [op("Unsqueeze", size, op.ints(0), shape=[1]) for size in (self.count, self._longest)]
        return op("Concat", *sizes, op.ints(-1), shape=[3], axis=0, name="even_shape")

    @functools.cached_property
    def padded_size(self) -> ir.Value:
        """Rows times positions, int64 (1,)."""
        op = self._op
        return op("Size", self._mask, dtype=ir.DataType.INT64, shape=[], name="padded")

    @functools.cached_property
    def scatter(self) -> ir.Value:
        """``index`` as ScatterND takes it, (tokens, 1)."""
        op = self._op
        return op("Unsqueeze", self.index, op.ints(1), shape=[TOKENS, 1], name="scatter")

    @functools.cached_property
    def sizes(self) -> Mapping[str, ir.Value]:
        """The sizes of the two padded axes by name, int64 (1,) each."""
        op = self._op
        return {
            name: op("Shape", self._mask, dtype=ir.DataType.INT64, shape=[1], start=axis, end=axis + 1)
            for axis, name in enumerate(self._axes)
        }
