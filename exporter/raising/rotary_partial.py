"""Rotary position embedding of the first channels of a head alone -> one ``RotaryEmbedding`` of the whole head."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, attributes_of, producer, rank, static, transpose
from .rotary_parts import alone, cut, joins_last


class RotaryPartial(Fusion):
    """``Concat(RotaryEmbedding(x[..., :r]), x[..., r:])`` -> ``RotaryEmbedding(x; rotary_embedding_dim=r)``.

    With Transposes around the node where heads come after the sequence.
    """

    result = ("", "RotaryEmbedding")
    meaning = "rotary"
    variants = ({"layout": "bshd"}, {"layout": "bhsd"})

    def __init__(self, layout: str = "bhsd") -> None:
        super().__init__()
        self._swaps = layout == "bshd"

    def pattern(self, op: Any, part: Any, cos: Any, sin: Any, rest: Any) -> Any:
        many = op.Transpose(part, perm=[0, 2, 1, 3]) if self._swaps else part
        turn = op.RotaryEmbedding(many, cos, sin, _outputs=["turned"])
        back = op.Transpose(turn, perm=[0, 2, 1, 3]) if self._swaps else turn
        return op.Concat(back, rest, _outputs=["y"])

    def unfused(self, op: Any, x: Any, cos: Any, sin: Any, last: Any, zero: Any, four: Any, end: Any) -> Any:
        part = op.Slice(x, zero, four, last)
        many = op.Transpose(part, perm=[0, 2, 1, 3]) if self._swaps else part
        turn = op.RotaryEmbedding(many, cos, sin)
        back = op.Transpose(turn, perm=[0, 2, 1, 3]) if self._swaps else turn
        return op.Concat(back, op.Slice(x, four, end, last), axis=-1)

    def check(self, op: Any, part: ir.Value, rest: ir.Value, turned: ir.Value, y: ir.Value, **_: Any) -> None:
        one, other = cut(part), cut(rest)
        if one is None or other is None or one[0] is not other[0] or not joins_last(producer(y)):
            raise Refuse()
        x, start, stop = one
        width = static(x, -1, "rotated tensor")
        if rank(x) != 4 or start != 0 or other[1] != stop or other[2] != width:
            raise Refuse(f"channels {start} to {stop} are turned, {other[1]} to {other[2]} are not, of {width}", x)
        static(x, 2 if self._swaps else 1, "rotated tensor")
        alone([turned])

    def rewrite(self, op: Any, part: ir.Value, cos: ir.Value, sin: ir.Value, turned: ir.Value, **_: Any) -> ir.Value:
        found = cut(part)
        assert found is not None
        x, _start, stop = found
        node = producer(turned)
        attributes = attributes_of(node)
        attributes["rotary_embedding_dim"] = node.attributes.get_int("rotary_embedding_dim", 0) or stop
        attributes.setdefault("num_heads", static(x, 2 if self._swaps else 1, "rotated tensor"))
        if not self._swaps:
            return op.RotaryEmbedding(x, cos, sin, **attributes)
        many = transpose(op, x, (0, 2, 1, 3))
        y = op.RotaryEmbedding(many, cos, sin, **attributes)
        y.dtype, y.shape = many.dtype, many.shape
        return transpose(op, y, (0, 2, 1, 3))

    def example(self) -> Example:
        return {
            "x": Arg(("B", "S", 2, 8) if self._swaps else ("B", 2, "S", 8)),
            "cos": Arg(("B", "S", 2)),
            "sin": Arg(("B", "S", 2)),
            "last": np.array([-1]),
            "zero": np.array([0]),
            "four": np.array([4]),
            "end": np.array([2**62]),
        }

    near_misses = (
        NearMiss(
            "channels are left out",
            "channels 0 to 4 are turned, 6 to 8 are not, of 8",
            variant={"layout": "bhsd"},
            build=lambda op, x, cos, sin, last, zero, four, end: op.Concat(
                op.RotaryEmbedding(op.Slice(x, zero, four, last), cos, sin),
                op.Slice(x, op.Constant(value=ir.tensor(np.array([6]))), end, last),
                axis=-1,
            ),
        ),
    )
