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

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, absorbing, axis_of, of_type, positive, producer, rank, same_axis, scalar, static, transpose

FILL_LIMIT = -1e6
"""A fill value above this could leave a masked key some weight, or be no lower than real scores.

The additive form assumes that every score is above the value in the graph (-1e9, the lowest float ...).
"""


class AttentionPieces(Fusion):
    """``MatMul(Softmax(mask(MatMul(q, k^T) * scale)), v)`` -> ``Attention(q, k, v, mask)``.

    The mask comes after the scale and is one of

    - ``add``: ``scores + mask``; the mask tensor is used as it is.
    - ``fill``: ``where(masked, value, scores)``, torch's ``masked_fill``; ``keep``: ``where(kept, scores,
      value)``. With ``value = -inf`` the condition itself becomes the bool mask. A finite ``value`` becomes
      an additive mask of 0 and -1e30: that absorbs any score, so a masked key gets
      weight 0 beside a visible one and a fully masked row stays uniform, exactly as with the value in the
      graph (adding -1e9 would not: it rounds scores to multiples of 64). A value above -1e6 is refused, and so
      is half precision, which has no number that absorbs every score.
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

    def pattern(self, op: Any, q: Any, k_t: Any, v: Any, factor: Any, mask: Any, value: Any, zero: Any) -> Any:
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
                if not same_axis(axis_of(q, axis), axis_of(other, axis)):
                    raise Refuse(
                        f"axis {axis} of Q is {axis_of(q, axis)}, of {name} {axis_of(other, axis)}; wanted them equal",
                        q,
                    )
        static(q, -1, "Q")
        node = producer(weights)
        axis = node.attributes.get_int("axis", -1)
        if axis not in (-1, len(q.shape or ()) - 1):
            raise Refuse(f"softmax runs over axis {axis}, wanted the last", weights)
        if self._scale != "none":
            self._factor(factor, q)
        if self._mask != "none":
            _mask_axes(mask, (*list(q.shape or ())[:-1], axis_of(k_t, -1)))
        if self._mask in ("fill", "keep"):
            found = scalar(value, "mask value", q)
            if found > -math.inf:
                of_type(q, "Q", ir.DataType.FLOAT, ir.DataType.DOUBLE)
            if found > FILL_LIMIT:
                raise Refuse(f"mask value is {found:g}, wanted at most {FILL_LIMIT:g}", *([value] if value else []))
        if self._guarded and scalar(zero, "replacement of NaN", q) != 0:
            raise Refuse(f"NaN becomes {scalar(zero, 'replacement of NaN'):g}, wanted 0")

    def _factor(self, factor: ir.Value | None, q: ir.Value) -> float:
        found = positive(factor, "scale", q)
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
        attributes: dict[str, Any] = {"scale": 1.0 if self._scale == "none" else self._factor(factor, q)}
        if not many:
            attributes |= {"q_num_heads": 1, "kv_num_heads": 1}
        k = transpose(op, k_t, (0, 1, 3, 2) if many else (0, 2, 1))
        inputs = [q, k, v]
        if self._mask != "none":
            assert mask is not None
            bias = mask
            if self._mask != "add":
                bias = _additive(op, mask, scalar(value, "mask value", q), self._mask == "fill", q.dtype)
            inputs.append(_aligned(op, bias, mask, rank(q) or 4))
        return op.Attention(*inputs, **attributes)

    def example(self) -> Example:
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
