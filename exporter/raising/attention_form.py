"""Attention nodes -> their plainest form: scale in the attribute, heads in the node."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import NEEDED_ELSEWHERE, Arg, Derived, Example, Fusion, NearMiss
from ..guards import Refuse, attributes_of, axis_of, positive, producer, rank, same_axis, static, transpose


class SwapLastAxes(Fusion):
    """``Reshape(Transpose(Reshape(x, (-1, S, d)), (0, 2, 1)), (B, H, d, S))`` -> ``Transpose(x, (0, 1, 3, 2))``.

    torch.onnx transposes the keys this way below opset 23.
    """

    result = ("", "Transpose")

    def pattern(self, op: Any, x: Any, flat: Any, whole: Any) -> Any:
        folded = op.Reshape(x, flat, _outputs=["folded"])
        return op.Reshape(op.Transpose(folded, perm=[0, 2, 1]), whole, _outputs=["y"])

    def check(self, op: Any, x: ir.Value, folded: ir.Value, y: ir.Value, **_: Any) -> None:
        if rank(x) != 4 or rank(y) != 4:
            raise Refuse()
        wanted = [axis_of(x, axis) for axis in (0, 1, 3, 2)]
        kept = all(same_axis(axis_of(folded, axis), axis_of(x, axis)) for axis in (-2, -1))
        if not kept or not all(same_axis(axis_of(y, i), size) for i, size in enumerate(wanted)):
            raise Refuse(f"{x.shape} becomes {y.shape}, wanted the last two axes swapped", x)

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> ir.Value:
        return op.Transpose(x, perm=[0, 1, 3, 2])

    def example(self) -> Example:
        def sizes(op: Any, x: ir.Value, *order: int) -> Any:
            return op.Concat(*(op.Shape(x, start=axis, end=axis + 1) for axis in order), axis=0)

        def flat(op: Any, given: Mapping[str, Any]) -> Any:
            return op.Concat(given["fold"], sizes(op, given["x"], 2, 3), axis=0)

        return {
            "x": Arg(("B", 2, "S", 8)),
            "fold": np.array([-1]),
            "flat": Derived(flat),
            "whole": Derived(lambda op, given: sizes(op, given["x"], 0, 1, 3, 2)),
        }

    near_misses = (
        NearMiss(
            "a reshape that only has the size",
            "wanted the last two axes swapped",
            {
                "whole": Derived(lambda op, given: op.Concat(given["rest"], given["tail"], axis=0)),
                "rest": np.array([-1, 2]),
                "tail": np.array([8, 1]),
            },
        ),
    )


class AttentionScale(Fusion):
    """``Attention(Q * c, K, V; scale=s)`` -> ``Attention(Q, K, V; scale=s c)``; likewise on K or K^T, or with Div."""

    result = ("", "Attention")
    meaning = "attention"
    tolerance = 2e-6
    variants = tuple(
        {"side": side, "form": form, "masked": masked}
        for side, form, masked in itertools.product(("q", "k", "k_t"), ("mul", "div"), (False, True))
    )
    near_misses = (
        NearMiss("a factor per channel", "scale has shape", {"factor": np.full(8, 0.5, np.float32)}),
        NearMiss("a negative factor", "scale is -2", {"factor": np.array(-2, np.float32)}),
    )

    def __init__(self, side: str = "q", form: str = "mul", masked: bool = False) -> None:
        super().__init__()
        self._side = side
        self._form = form
        self._masked = masked

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any, factor: Any) -> Any:
        scaled = q if self._side == "q" else k
        scaled = op.Mul(scaled, factor) if self._form == "mul" else op.Div(scaled, factor)
        if self._side == "k_t":
            scaled = op.Transpose(scaled, perm=[0, 1, 3, 2])
        pair = (scaled, k) if self._side == "q" else (q, scaled)
        rest = (mask,) if self._masked else ()
        return op.Attention(*pair, v, *rest, _outputs=["y"])

    def check(self, op: Any, q: ir.Value, k: ir.Value, factor: ir.Value, **_: Any) -> None:
        positive(factor, "scale", q if self._side == "q" else k)

    def rewrite(
        self,
        op: Any,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        factor: ir.Value,
        y: ir.Value,
        mask: ir.Value | None = None,
    ) -> ir.Value:
        node = producer(y)
        found = positive(factor, "scale", q if self._side == "q" else k)
        attributes = attributes_of(node)
        if "scale" not in attributes:
            attributes["scale"] = head_size(node) ** -0.5
        attributes["scale"] *= found if self._form == "mul" else 1 / found
        if self._side == "k_t":
            k = transpose(op, k, (0, 1, 3, 2))
        return op.Attention(q, k, v, *([mask] if self._masked else []), **attributes)

    def example(self) -> Example:
        return {
            "q": Arg(("B", 2, "S", 8)),
            "k": Arg(("B", 2, 8, "S") if self._side == "k_t" else ("B", 2, "S", 8)),
            "v": Arg(("B", 2, "S", 8)),
            "mask": Arg(("B", 1, 1, "S"), "bool"),
            "factor": np.array(0.5, np.float32),
        }


def head_size(node: ir.Node) -> int:
    """The head size d_k of an Attention node's queries: (B, H, S, d_k) or (B, S, H * d_k)."""
    q = node.inputs[0]
    assert q is not None
    width = static(q, -1, "Q")
    return width if rank(q) == 4 else width // node.attributes.get_int("q_num_heads", 1)


class AttentionHeads(Fusion):
    """Heads split and merged around the node -> the node's own 3-D form.

    ``Reshape(Transpose(Attention(heads(q), heads(k), heads(v))))`` -> ``Attention(q, k, v; q_num_heads=H,
    kv_num_heads=H)`` with ``heads(x) = Transpose(Reshape(x, (B, S, H, d)), (0, 2, 1, 3))``.
    """

    result = ("", "Attention")
    meaning = "attention"
    keeps_inner = True  # the heads of Q and K may meet position embeddings too (DeBERTa)
    variants = ({"masked": False}, {"masked": True})

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self._masked = masked

    def pattern(
        self, op: Any, q: Any, k: Any, v: Any, mask: Any, split_q: Any, split_k: Any, split_v: Any, merge: Any
    ) -> Any:
        q4 = op.Reshape(q, split_q, _outputs=["q4"])
        k4 = op.Reshape(k, split_k, _outputs=["k4"])
        v4 = op.Reshape(v, split_v, _outputs=["v4"])
        heads = [op.Transpose(x, perm=[0, 2, 1, 3]) for x in (q4, k4, v4)]
        y = op.Attention(*heads, *([mask] if self._masked else []), _outputs=["y"])
        return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3], _outputs=["y4"]), merge, _outputs=["merged"])

    def check(
        self,
        op: Any,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        q4: ir.Value,
        k4: ir.Value,
        v4: ir.Value,
        y: ir.Value,
        y4: ir.Value,
        merged: ir.Value,
        **_: Any,
    ) -> None:
        if any(value.is_graph_output() or len(value.uses()) > 1 for value in (y, y4)):
            raise Refuse(NEEDED_ELSEWHERE, y)  # attention would be computed twice
        heads = [_heads(a, b, name) for a, b, name in ((q, q4, "Q"), (k, k4, "K"), (v, v4, "V"))]
        if len(set(heads)) != 1:
            raise Refuse(f"Q, K and V have {heads} heads, wanted equal numbers", q)
        if rank(merged) != 3 or merged.shape is None:
            raise Refuse(f"heads are merged to rank {rank(merged)}, wanted (batch, sequence, d)", merged)
        width = heads[0] * static(v4, -1, "V")
        if merged.shape[-1] != width or not same_axis(merged.shape[0], axis_of(q4, 0)):
            raise Refuse(f"heads are merged to {merged.shape}, wanted [{axis_of(q4, 0)}, sequence, {width}]", merged)

    def rewrite(
        self,
        op: Any,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        q4: ir.Value,
        y: ir.Value,
        mask: ir.Value | None = None,
        **_: Any,
    ) -> ir.Value:
        attributes = attributes_of(producer(y))
        heads = static(q4, 2, "Q")
        attributes |= {"q_num_heads": heads, "kv_num_heads": heads}
        return op.Attention(q, k, v, *([mask] if self._masked else []), **attributes)

    def example(self) -> Example:
        split, narrow = np.array([0, 0, 4, 8]), np.array([0, 0, 4, 2])
        return {
            "q": Arg(("B", "S", 32)),
            "k": Arg(("B", "S", 32)),
            "v": Arg(("B", "S", 8)),
            "mask": Arg(("B", 1, 1, "S"), "bool"),
            "split_q": split,
            "split_k": split,
            "split_v": narrow,
            "merge": np.array([0, 0, 8]),
        }

    near_misses = (
        NearMiss("fewer heads in K", "heads", {"split_k": np.array([0, 0, 2, 16])}),
        NearMiss("heads merged per sample", "merged to rank 2", {"merge": np.array([0, -1])}),
    )


def _heads(whole: ir.Value, split: ir.Value, name: str) -> int:
    """The head count of a reshape (B, S, H * d) -> (B, S, H, d)."""
    if rank(whole) != 3 or rank(split) != 4:
        raise Refuse(f"{name} is split from rank {rank(whole)} to {rank(split)}, wanted 3 to 4", whole)
    for axis in (0, 1):
        if not same_axis(axis_of(whole, axis), axis_of(split, axis)):
            raise Refuse(
                f"{name} axis {axis} is {axis_of(whole, axis)} before and {axis_of(split, axis)} after the heads "
                "are split; wanted it unchanged",
                whole,
            )
    heads, size = static(split, 2, name), static(split, 3, name)
    if static(whole, -1, name) != heads * size:
        raise Refuse(f"{name} has width {axis_of(whole, -1)}, wanted {heads} heads of {size}", whole)
    return heads


def plain(y: ir.Value) -> ir.Node:
    """The Attention node behind a value; refuses what no kernel of the targets offers.

    That is a causal mask, a soft cap and a key-value cache.
    """
    node = producer(y)
    if node.attributes.get_int("is_causal", 0):
        raise Refuse("is_causal is 1, wanted a bidirectional encoder's 0")
    if node.attributes.get_float("softcap", 0.0) != 0.0:
        raise Refuse(f"softcap is {node.attributes.get_float('softcap', 0.0):g}, wanted 0")
    if any(value is not None for value in node.inputs[4:]):
        raise Refuse("the node has a key-value cache, wanted a plain encoder")
    return node
