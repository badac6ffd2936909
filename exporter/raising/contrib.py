"""onnxruntime's own operators (``com.microsoft``) -> canonical nodes: what other tools, or our lowering, have made.

An operator with an input or attribute that the canonical node cannot say is left alone. Attention has a file of its
own, :mod:`.contrib_attention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Derived, Example, Fusion, NearMiss
from ..guards import Refuse, axis_of, fixed, ints, producer, rank, same_axis, static
from .gelu import QUICK

CONTRIB = "com.microsoft"


def usual(node: ir.Node, *names: str) -> None:
    """Refuses attributes that say anything but the usual."""
    for name in names:
        found = node.attributes.get_int(name, 0)
        if found:
            raise Refuse(f"{name} is {found}, wanted 0", node.outputs[0])


def like(y: ir.Value, x: ir.Value, *axes: Any) -> ir.Value:
    """Tells rules that come after the type of ``y``, and its shape where axes are given."""
    y.dtype = x.dtype or ir.DataType.FLOAT
    if axes:
        y.shape = ir.Shape(list(axes))
    return y


class _Gelu(Fusion):
    """One of onnxruntime's GELUs, with or without a bias."""

    meaning = "gelu"
    result = ("", "Gelu")
    tolerance = 2e-6
    operator: ClassVar[str]
    approximate = "none"

    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        self._biased = biased

    def pattern(self, op: Any, x: Any, bias: Any) -> Any:
        inputs = (x, bias) if self._biased else (x,)
        return getattr(op, self.operator)(*inputs, _domain=CONTRIB)

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value | None = None) -> ir.Value:
        inner = x if bias is None else like(op.Add(x, bias), x, *(x.shape or ()))
        return op.Gelu(inner, approximate=self.approximate)

    def example(self) -> Example:
        return {"x": Arg(("B", "S", 16), scale=3.0), "bias": np.linspace(-1, 1, 16, dtype=np.float32)}


class ContribBiasGelu(_Gelu):
    """``com.microsoft.BiasGelu(x, b)`` -> ``Gelu(x + b)``."""

    operator = "BiasGelu"
    variants = ({"biased": True},)


class ContribErfGelu(_Gelu):
    """``com.microsoft.Gelu(x)`` -> ``Gelu(x)``."""

    operator = "Gelu"


class ContribFastGelu(_Gelu):
    """``com.microsoft.FastGelu(x, b)`` -> ``Gelu(x + b, approximate="tanh")``."""

    operator = "FastGelu"
    approximate = "tanh"
    variants = ({"biased": True}, {"biased": False})


class ContribQuickGelu(Fusion):
    """``com.microsoft.QuickGelu(x, alpha=1.702)`` -> ``x * sigmoid(1.702 x)``, marked as GELU."""

    meaning = "gelu"
    result = ("", "Sigmoid")
    marks = True
    tolerance = 2e-6
    near_misses = (
        NearMiss("SiLU", None, build=lambda op, x: op.QuickGelu(x, alpha=1.0, _domain=CONTRIB)),
        NearMiss("another factor", None, build=lambda op, x: op.QuickGelu(x, alpha=1.6, _domain=CONTRIB)),
    )

    def pattern(self, op: Any, x: Any) -> Any:
        return op.QuickGelu(x, _domain=CONTRIB, _outputs=["y"])

    def check(self, op: Any, x: ir.Value, y: ir.Value) -> None:
        if not abs(producer(y).attributes.get_float("alpha", QUICK) - QUICK) <= 1e-5 * QUICK:
            raise Refuse()

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value) -> ir.Value:
        factor = op.Constant(value=ir.tensor(np.array(QUICK, (x.dtype or ir.DataType.FLOAT).numpy())))
        return op.Mul(x, op.Sigmoid(op.Mul(x, factor)))

    def example(self) -> Example:
        return {"x": Arg(("B", "S", 16), scale=3.0)}


class ContribRotaryEmbedding(Fusion):
    """``com.microsoft.RotaryEmbedding(x, positions, cos, sin)`` -> ``RotaryEmbedding(x, cos, sin, positions)``.

    Where the positions are the one number 0, the first rows of the tables are taken as they are.
    """

    meaning = "rotary"
    result = ("", "RotaryEmbedding")
    tolerance = 2e-6
    variants = tuple(
        {"counted": counted, "interleaved": interleaved, "flat": flat}
        for counted, interleaved, flat in itertools.product((True, False), (0, 1), (False, True))
    )

    def __init__(self, counted: bool = True, interleaved: int = 0, flat: bool = False) -> None:
        super().__init__()
        self._counted = counted
        self._interleaved = interleaved
        self._flat = flat

    @classmethod
    def orders(cls, options: Mapping[str, Any]) -> list[Fusion]:
        return [cls()] if options == cls.variants[0] else []

    def pattern(self, op: Any, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
        return op.RotaryEmbedding(x, positions, cos, sin, _domain=CONTRIB, _outputs=["y"])

    def unfused(self, op: Any, x: Any, positions: Any, cos: Any, sin: Any) -> Any:
        """The operator as the variant has it."""
        given = {"interleaved": self._interleaved}
        return op.RotaryEmbedding(x, positions, cos, sin, **given, _domain=CONTRIB)

    def check(self, op: Any, x: ir.Value, positions: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value) -> None:
        node = producer(y)
        usual(node, "is_packed_batching")
        scale = node.attributes.get_float("scale", 1.0)
        if scale != 1.0:
            raise Refuse(f"scale is {scale:g}, wanted 1", y)
        if rank(x) not in (3, 4):
            raise Refuse(f"input has rank {rank(x)}, wanted 3 or 4", x)
        for table in (cos, sin):
            if rank(table) != 2:
                raise Refuse(f"a table has rank {rank(table)}, wanted (rows, d/2)", table)
        if rank(positions) != 2:
            found = fixed(positions)
            if found is None or found.size != 1 or np.any(found.numpy()):
                raise Refuse("positions are one number, wanted 0 or (batch, sequence)", positions)
        _heads(node, x, cos)

    def rewrite(self, op: Any, x: ir.Value, positions: ir.Value, cos: ir.Value, sin: ir.Value, y: ir.Value) -> ir.Value:
        node = producer(y)
        heads = _heads(node, x, cos)
        attributes = {"interleaved": node.attributes.get_int("interleaved", 0)}
        part = node.attributes.get_int("rotary_embedding_dim", 0)
        attributes |= {"rotary_embedding_dim": part} if part else {}
        attributes |= {"num_heads": heads} if rank(x) == 3 else {}
        if rank(positions) == 2:
            return like(op.RotaryEmbedding(x, cos, sin, positions, **attributes), x, *(x.shape or ()))
        place = 2 if rank(x) == 4 else 1
        length = axis_of(x, place)
        tables = []
        for table in (cos, sin):
            rows = table
            if not same_axis(axis_of(table, 0), length):
                rows = op.Slice(table, ints(op, 0), op.Shape(x, start=place, end=place + 1), ints(op, 0))
            tables.append(like(op.Unsqueeze(rows, ints(op, 0)), table, 1, length, axis_of(table, 1)))
        return like(op.RotaryEmbedding(x, *tables, **attributes), x, *(x.shape or ()))

    def example(self) -> Example:
        rows = (40, 4)
        x = ("B", "S", 16) if self._flat else ("B", 2, "S", 8)
        positions = Derived(lambda op, given: _counted(op, given["x"])) if self._counted else np.array([0], np.int64)
        return {"x": Arg(x), "positions": positions, "cos": Arg(rows), "sin": Arg(rows)}

    near_misses = (
        NearMiss("positions from 3 on", "positions are one number", {"positions": np.array([3], np.int64)},
                 {"counted": False, "interleaved": 0, "flat": False}),
        NearMiss(
            "a scale",
            "scale is 2",
            build=lambda op, x, positions, cos, sin: op.RotaryEmbedding(
                x, positions, cos, sin, scale=2.0, _domain=CONTRIB),
        ),
    )  # fmt: skip


def _heads(node: ir.Node, x: ir.Value, cos: ir.Value) -> int:
    """The head count; without the attribute a head is as wide as the tables say."""
    if rank(x) == 4:
        return static(x, 1, "input")
    heads = node.attributes.get_int("num_heads", 0)
    return heads or static(x, 2, "input") // (2 * static(cos, 1, "cos"))


def _counted(op: Any, x: Any) -> Any:
    """Positions (B, S) that differ between the rows of the batch, for x (B, H, S, d) or (B, S, H * d)."""
    zero, one = (op.Constant(value=ir.tensor(np.array(i, np.int64))) for i in (0, 1))
    place = len(x.shape) - 2
    batch, sequence = (op.Squeeze(op.Shape(x, start=i, end=i + 1)) for i in (0, place))
    rows = op.Unsqueeze(op.Range(zero, batch, one), ints(op, 1))
    return op.Add(rows, op.Range(zero, sequence, one))
