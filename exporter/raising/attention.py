"""Scaled dot-product attention in pieces -> one ``Attention`` (ai.onnx, since opset 23).

``softmax(Q K^T * scale + mask) V`` (Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762).

The canonical node's mask is what the graph says: a float is added, a bool keeps the scores where it is
true. A row that no key may be attended from gives zeros, as in torch's ``scaled_dot_product_attention``
and in the operator's reference implementation.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Fusion, NearMiss, Refuse, absorbing, rank, same_axis, scalar, static

FILL_LIMIT = -1e4
"""A fill value above this leaves a masked key some weight; the additive form would then differ."""


class AttentionPieces(Fusion):
    """``MatMul(Softmax(mask(MatMul(q, k^T) * scale)), v)`` -> ``Attention(q, k, v, mask)``.

    The mask comes after the scale and is one of

    - ``add``: ``scores + mask``; the mask tensor is used as it is.
    - ``fill``: ``where(masked, value, scores)``, torch's ``masked_fill``; ``keep``: ``where(kept, scores,
      value)``. With ``value = -inf`` the condition itself becomes the bool mask. A finite ``value`` becomes
      an additive mask of 0 and -1e30: that absorbs any score, so a masked key gets
      weight 0 beside a visible one and a fully masked row stays uniform, exactly as with the value in the
      graph (adding -1e9 would not: it rounds scores to multiples of 64). A value above -1e4 is refused.
    - ``none``.

    ``guarded``: the exporter's ``where(isnan(p), 0, p)`` around the softmax, which is what the canonical
    node does for a fully masked row.
    """

    meaning = "attention"
    result = ("", "Attention")
    tolerance = 2e-6
    places = 1
    variants = tuple(
        {"scale": scale, "mask": mask, "guarded": guarded}
        for scale, mask, guarded in itertools.product(
            ("mul", "div", "none"), ("add", "fill", "keep", "none"), (True, False)
        )
    )

    def __init__(self, scale: str = "div", mask: str = "fill", guarded: bool = False) -> None:
        super().__init__()
        self._scale = scale
        self._mask = mask
        self._guarded = guarded

    def pattern(
        self, op: Any, q: Any, k_t: Any, v: Any, factor: Any, mask: Any, value: Any, zero: Any
    ) -> Any:
        scores = op.MatMul(q, k_t, _outputs=["products"])
        if self._scale != "none":
            scores = op.Mul(scores, factor) if self._scale == "mul" else op.Div(scores, factor)
        if self._mask == "add":
            scores = self.either(op.Add, 0, scores, mask)
        elif self._mask == "fill":
            scores = op.Where(mask, value, scores)
        elif self._mask == "keep":
            scores = op.Where(mask, scores, value)
        weights = op.Softmax(scores, _outputs=["weights"])
        if self._guarded:
            weights = op.Where(op.IsNaN(weights), zero, weights)
        return op.MatMul(weights, v)

    def check(
        self,
        op: Any,
        q: ir.Value,
        k_t: ir.Value,
        v: ir.Value,
        products: ir.Value,
        weights: ir.Value,
        factor: ir.Value | None = None,
        mask: ir.Value | None = None,
        value: ir.Value | None = None,
        zero: ir.Value | None = None,
    ) -> None:
        ranks = [rank(q), rank(k_t), rank(v)]
        if ranks not in ([4, 4, 4], [3, 3, 3]):
            raise Refuse(f"Q, K^T and V have ranks {ranks}, wanted all 4 or all 3", q)
        for axis in range(len(q.shape or ()) - 2):
            for other, name in ((k_t, "K"), (v, "V")):
                if not same_axis(_axis(q, axis), _axis(other, axis)):
                    raise Refuse(
                        f"axis {axis} of Q is {_axis(q, axis)}, of {name} {_axis(other, axis)}; "
                        "wanted them equal",
                        q,
                    )
        static(q, -1, "Q")
        node = weights.producer()
        assert node is not None
        axis = node.attributes.get_int("axis", -1)
        if axis not in (-1, len(q.shape or ()) - 1):
            raise Refuse(f"softmax runs over axis {axis}, wanted the last", weights)
        if self._scale != "none":
            self._factor(factor)
        if self._mask != "none":
            _mask_axes(mask, (*list(q.shape or ())[:-1], _axis(k_t, -1)))
        if self._mask in ("fill", "keep"):
            found = scalar(value, "mask value")
            if found > FILL_LIMIT:
                raise Refuse(f"mask value is {found:g}, wanted at most {FILL_LIMIT:g}", *([value] if value else []))
        if self._guarded and scalar(zero, "replacement of NaN") != 0:
            raise Refuse(f"NaN becomes {scalar(zero, 'replacement of NaN'):g}, wanted 0")

    def _factor(self, factor: ir.Value | None) -> float:
        found = scalar(factor, "scale")
        if not (math.isfinite(found) and found > 0):
            raise Refuse(f"scale is {found:g}, wanted a positive number", *([factor] if factor else []))
        return found if self._scale == "mul" else 1.0 / found

    def rewrite(
        self,
        op: Any,
        q: ir.Value,
        k_t: ir.Value,
        v: ir.Value,
        factor: ir.Value | None = None,
        mask: ir.Value | None = None,
        value: ir.Value | None = None,
        **_: Any,
    ) -> ir.Value:
        many = rank(q) == 4
        attributes: dict[str, Any] = {
            "scale": 1.0 if self._scale == "none" else self._factor(factor)
        }
        if not many:
            attributes |= {"q_num_heads": 1, "kv_num_heads": 1}
        k = op.Transpose(k_t, perm=[0, 1, 3, 2] if many else [0, 2, 1])
        k.dtype = k_t.dtype
        if k_t.shape is not None:
            k.shape = ir.Shape([*list(k_t.shape)[:-2], k_t.shape[-1], k_t.shape[-2]])
        inputs = [q, k, v]
        if self._mask != "none":
            assert mask is not None
            bias = mask
            if self._mask != "add":
                bias = _additive(op, mask, scalar(value, "mask value"), self._mask == "fill", q.dtype)
            inputs.append(_aligned(op, bias, mask, rank(q) or 4))
        return op.Attention(*inputs, **attributes)

    def example(self) -> dict[str, Arg | np.ndarray]:
        kind = "float32" if self._mask == "add" else "bool"
        return {
            "q": Arg(("B", 2, "S", 8)),
            "k_t": Arg(("B", 2, 8, "S")),
            "v": Arg(("B", 2, "S", 4)),
            "factor": np.array(8**0.5 if self._scale == "div" else 8**-0.5, np.float32),
            "mask": Arg(("B", 1, 1, "S"), kind),
            "value": np.array(-1e9, np.float32),
            "zero": np.array(0, np.float32),
        }

    near_misses = (
        NearMiss("masked keys keep weight", "mask value is -10,", {"value": np.array(-10, np.float32)}),
        NearMiss("a scale per head", "scale has shape", {"factor": np.full((1, 2, 1, 1), 8, np.float32)}),
        NearMiss("a negative scale", "scale is -8", {"factor": np.array(-8, np.float32)}),
        NearMiss("NaN becomes one", "NaN becomes 1", {"zero": np.array(1, np.float32)}, {"guarded": True}),
        NearMiss(
            "softmax over the queries",
            "softmax runs over axis 2",
            build=lambda op, q, k_t, v, factor, mask, value, zero: op.MatMul(
                op.Softmax(op.Where(mask, value, op.Div(op.MatMul(q, k_t), factor)), axis=2), v
            ),
        ),
        NearMiss("a mask with a batch of its own", "mask axis 0", {"mask": Arg(("M", 1, 1, "S"), "bool")}),
        NearMiss("keys shared by all heads", "axis 1 of Q is 2, of K 1", {"k_t": Arg(("B", 1, 8, "S"))}),
    )


def _axis(value: ir.Value, axis: int) -> Any:
    return value.shape[axis] if value.shape is not None else None


def _mask_axes(mask: ir.Value | None, scores: tuple[Any, ...]) -> None:
    """Refuses a mask that would broadcast the scores to more rows than they have."""
    if mask is None or mask.shape is None:
        raise Refuse("mask has unknown shape, wanted one that broadcasts to the scores")
    if len(mask.shape) > len(scores):
        raise Refuse(f"mask has rank {len(mask.shape)}, the scores {len(scores)}", mask)
    offset = len(scores) - len(mask.shape)
    for axis, size in enumerate(mask.shape):
        if size != 1 and not same_axis(size, scores[axis + offset]):
            raise Refuse(f"mask axis {axis} is {size}, the scores have {scores[axis + offset]} there", mask)


def _additive(op: Any, condition: ir.Value, value: float, masked: bool, dtype: Any) -> ir.Value:
    """The mask of ``where``: bool for -inf, else 0 and a value that absorbs any score."""
    if value == -math.inf:
        kept = op.Not(condition) if masked else condition
        kept.dtype, kept.shape = ir.DataType.BOOL, condition.shape
        return kept
    kind = (dtype or ir.DataType.FLOAT).numpy()
    lowest = op.Constant(value=ir.tensor(absorbing(kind)))
    zero = op.Constant(value=ir.tensor(np.array(0, kind)))
    bias = op.Where(condition, lowest, zero) if masked else op.Where(condition, zero, lowest)
    bias.dtype, bias.shape = dtype, condition.shape
    return bias


def _aligned(op: Any, bias: ir.Value, mask: ir.Value, scores_rank: int) -> ir.Value:
    """The mask in rank 2 to 4 so that it broadcasts to (batch, heads, queries, keys)."""
    shape = list(mask.shape or ())
    axes: list[int] = []
    if scores_rank == 3 and len(shape) == 3:
        axes = [1]  # (batch, queries, keys) -> (batch, 1, queries, keys)
    elif len(shape) < 2:
        axes = list(range(2 - len(shape)))
    if not axes:
        return bias
    widened = op.Unsqueeze(bias, op.Constant(value=ir.tensor(np.array(axes, np.int64))))
    for axis in axes:
        shape.insert(axis, 1)
    widened.dtype, widened.shape = bias.dtype, ir.Shape(shape)
    return widened


class AttentionScale(Fusion):
    """``Attention(Q * c, K, V; scale=s)`` -> ``Attention(Q, K, V; scale=s c)``; likewise on K, or with Div."""

    result = ("", "Attention")
    meaning = "attention"
    tolerance = 2e-6
    variants = tuple(
        {"side": side, "form": form, "masked": masked}
        for side, form, masked in itertools.product("qk", ("mul", "div"), (False, True))
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
        pair = (scaled, k) if self._side == "q" else (q, scaled)
        rest = (mask,) if self._masked else ()
        return op.Attention(*pair, v, *rest, _outputs=["y"])

    def check(self, op: Any, factor: ir.Value, **_: Any) -> None:
        found = scalar(factor, "scale")
        if not (math.isfinite(found) and found > 0):
            raise Refuse(f"scale is {found:g}, wanted a positive number", factor)

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, factor: ir.Value, y: ir.Value,
        mask: ir.Value | None = None,
    ) -> ir.Value:
        node = y.producer()
        assert node is not None
        found = scalar(factor, "scale")
        attributes = {name: attr.value for name, attr in node.attributes.items()}
        if "scale" not in attributes:
            attributes["scale"] = head_size(node) ** -0.5
        attributes["scale"] *= found if self._form == "mul" else 1 / found
        return op.Attention(q, k, v, *([mask] if self._masked else []), **attributes)

    def example(self) -> dict[str, Arg | np.ndarray]:
        return {
            "q": Arg(("B", 2, "S", 8)),
            "k": Arg(("B", 2, "S", 8)),
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
        return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), merge, _outputs=["merged"])

    def check(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, q4: ir.Value, k4: ir.Value, v4: ir.Value,
        merged: ir.Value, **_: Any,
    ) -> None:
        heads = [_heads(a, b, name) for a, b, name in ((q, q4, "Q"), (k, k4, "K"), (v, v4, "V"))]
        if len(set(heads)) != 1:
            raise Refuse(f"Q, K and V have {heads} heads, wanted equal numbers", q)
        if rank(merged) != 3 or merged.shape is None:
            raise Refuse(f"heads are merged to rank {rank(merged)}, wanted (batch, sequence, d)", merged)
        width = heads[0] * static(v4, -1, "V")
        if merged.shape[-1] != width or not same_axis(merged.shape[0], _axis(q4, 0)):
            raise Refuse(f"heads are merged to {merged.shape}, wanted [{_axis(q4, 0)}, sequence, {width}]", merged)

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, q4: ir.Value, y: ir.Value,
        mask: ir.Value | None = None, **_: Any,
    ) -> ir.Value:
        node = y.producer()
        assert node is not None
        attributes = {name: attr.value for name, attr in node.attributes.items()}
        heads = static(q4, 2, "Q")
        attributes |= {"q_num_heads": heads, "kv_num_heads": heads}
        return op.Attention(q, k, v, *([mask] if self._masked else []), **attributes)

    def example(self) -> dict[str, Arg | np.ndarray]:
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
        if not same_axis(_axis(whole, axis), _axis(split, axis)):
            raise Refuse(
                f"{name} axis {axis} is {_axis(whole, axis)} before and {_axis(split, axis)} after the heads "
                "are split; wanted it unchanged",
                whole,
            )
    heads, size = static(split, 2, name), static(split, 3, name)
    if static(whole, -1, name) != heads * size:
        raise Refuse(f"{name} has width {_axis(whole, -1)}, wanted {heads} heads of {size}", whole)
    return heads


class AttentionMaskExpand(Fusion):
    """``Attention(q, k, v, Expand(mask, shape))`` -> ``Attention(q, k, v, mask)``: the node broadcasts itself."""

    result = ("", "Attention")
    meaning = "attention"
    keeps_inner = True

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any, shape: Any) -> Any:
        return op.Attention(q, k, v, op.Expand(mask, shape, _outputs=["expanded"]), _outputs=["y"])

    def check(self, op: Any, mask: ir.Value, expanded: ir.Value, **_: Any) -> None:
        found, wanted = rank(mask), rank(expanded)
        if found is None or found < 2 or (wanted is not None and wanted > 4) or found not in (wanted, 4, 2):
            raise Refuse(f"mask of rank {found} is expanded to rank {wanted}, wanted 2 or 4 kept", mask)
        if wanted == 3:
            raise Refuse("a mask of rank 3 aligns with the heads, not with the batch", mask)

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, y: ir.Value, **_: Any
    ) -> ir.Value:
        node = y.producer()
        assert node is not None
        return op.Attention(q, k, v, mask, **{name: attr.value for name, attr in node.attributes.items()})

    def example(self) -> dict[str, Arg | np.ndarray]:
        return {
            "q": Arg(("B", 2, "S", 8)),
            "k": Arg(("B", 2, "S", 8)),
            "v": Arg(("B", 2, "S", 8)),
            "mask": Arg(("B", 1, 1, "S"), "bool"),
            "shape": np.array([1, 2, 1, 1]),
        }

    near_misses = (NearMiss("a vector per key", "mask of rank 1", {"mask": Arg(("S",), "bool")}),)
