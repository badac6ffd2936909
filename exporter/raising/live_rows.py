"""A bool mask that a lowering has made finite -> the bool mask again."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Derived, Example, Fusion, NearMiss
from ..guards import Refuse, absorbing, attributes_of, axis_of, constant, fixed, ints, rank, scalar
from .attention_form import plain


class AttentionLiveRows(Fusion):
    """``Attention(q, k, v, Where(mask, 0, -1e30)) * any(mask)`` -> ``Attention(q, k, v, mask)``.

    The product zeroes the rows that attend to nothing, which the node does by itself for a bool mask.
    """

    meaning = "attention"
    result = ("", "Attention")
    tolerance = 2e-6
    places = 1
    keeps_inner = True  # All layers share one bias.
    variants = ({"many": False}, {"many": True})

    def __init__(self, many: bool = False) -> None:
        super().__init__()
        self._many = many

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any, kept: Any, hidden: Any, alive: Any) -> Any:
        bias = op.Where(mask, kept, hidden)
        return self.either(op.Mul, 0, op.Attention(q, k, v, bias, _outputs=["a"]), alive)

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return {} if self._many else {"Attention": {"q_num_heads": 2, "kv_num_heads": 2}}

    def check(
        self,
        op: Any,
        q: ir.Value,
        mask: ir.Value,
        kept: ir.Value,
        hidden: ir.Value,
        alive: ir.Value,
        a: ir.Value,
        **_: Any,
    ) -> None:
        plain(a)
        if self._many != (rank(q) == 4):
            raise Refuse()  # The other variant's.
        if _any_of(alive, mask, squeezed=not self._many) is None:
            raise Refuse()
        if rank(mask) != 4 or axis_of(mask, 1) != 1:
            raise Refuse(f"mask is {mask.shape}, wanted (batch, 1, queries, keys)", mask)
        if scalar(kept, "what is added to attended scores", mask) != 0:
            raise Refuse("something is added to attended scores, wanted 0", kept)
        kind = constant(hidden, "what hides a score").dtype
        if not scalar(hidden, "what hides a score", mask) <= float(absorbing(kind)):
            raise Refuse(f"{scalar(hidden, 'what hides a score'):g} hides a score, wanted {absorbing(kind):g}", hidden)

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, a: ir.Value, **_: Any) -> Any:
        out = op.Attention(q, k, v, mask, **attributes_of(plain(a)))
        out.dtype, out.shape = a.dtype, a.shape
        return out

    def example(self) -> Example:
        shape = ("B", 2, "S", 8) if self._many else ("B", "S", 16)
        return {
            "q": Arg(shape),
            "k": Arg(shape),
            "v": Arg(shape),
            "mask": Arg(("B", 1, 1, "S"), "bool"),
            "kept": np.array(0, np.float32),
            "hidden": np.array(-1e30, np.float32),
            "alive": Derived(lambda op, given: self._alive(op, given["mask"])),
        }

    def _alive(self, op: Any, mask: Any) -> Any:
        top = op.ReduceMax(op.Cast(mask, to=1), ints(op, -1), keepdims=1)
        return top if self._many else op.Squeeze(top, ints(op, 1))

    near_misses = (
        NearMiss("a mask per head", "mask is", {"mask": Arg(("B", 2, 1, "S"), "bool"), "alive": Derived(
            lambda op, given: op.ReduceMax(op.Cast(given["mask"], to=1), ints(op, -1), keepdims=1))}, {"many": True}),
        NearMiss("a value that scores can reach", "-1000 hides a score", {"hidden": np.array(-1e3, np.float32)}),
        NearMiss("a reward for attending", "something is added", {"kept": np.array(1, np.float32)}),
        NearMiss("a factor of another kind", None, {"alive": Arg(("B", "S", 1))}),
        NearMiss("the rows of another mask", None, {"alive": Derived(lambda op, given: op.Squeeze(op.ReduceMax(op.Cast(
            op.Not(given["mask"]), to=1), ints(op, -1), keepdims=1), ints(op, 1)))}),
        NearMiss("all in place of any", None, {"alive": Derived(lambda op, given: op.Squeeze(op.ReduceMin(op.Cast(
            given["mask"], to=1), ints(op, -1), keepdims=1), ints(op, 1)))}),
    )  # fmt: skip


def _any_of(alive: ir.Value, mask: ir.Value, *, squeezed: bool) -> ir.Value | None:
    """``mask`` where ``alive`` says by 0 and 1 whether its last axis holds a true; else ``None``."""
    node = alive.producer()
    if squeezed:
        if not _is(node, "Squeeze") or _axes(node) != [1]:
            return None
        node = node.inputs[0].producer() if node is not None and node.inputs[0] is not None else None
    if not _is(node, "ReduceMax") or _axes(node) not in ([-1], [3]) or node is None:
        return None
    if node.attributes.get_int("keepdims", 1) != 1 or node.inputs[0] is None:
        return None
    cast = node.inputs[0].producer()
    return mask if cast is not None and _is(cast, "Cast") and cast.inputs[0] is mask else None


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and not node.domain


def _axes(node: ir.Node | None) -> list[int] | None:
    axes = node.inputs[1] if node is not None and len(node.inputs) > 1 else None
    found = fixed(axes)
    return None if found is None else [int(axis) for axis in found.numpy().reshape(-1)]
