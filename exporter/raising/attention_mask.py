"""Masks of Attention nodes -> their plainest form: not spread over what broadcasts, none where nothing is masked."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, attributes_of, axis_of, constant, fixed, producer, rank, same_axis
from .attention_form import plain


class AttentionMaskExpand(Fusion):
    """``Attention(q, k, v, Expand(mask, shape))`` -> ``Attention(q, k, v, mask)``: the node broadcasts itself."""

    result = ("", "Attention")
    meaning = "attention"
    keeps_inner = True

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any, shape: Any) -> Any:
        return op.Attention(q, k, v, op.Expand(mask, shape, _outputs=["expanded"]), _outputs=["y"])

    def check(self, op: Any, mask: ir.Value, expanded: ir.Value, y: ir.Value, **_: Any) -> None:
        plain(y)  # A node that stays as it is keeps the form that its runtime takes.
        found, wanted = rank(mask), rank(expanded)
        if found is None or found < 2 or (wanted is not None and wanted > 4) or found not in (wanted, 4, 2):
            raise Refuse(f"mask of rank {found} is expanded to rank {wanted}, wanted 2 or 4 kept", mask)
        if wanted == 3:
            raise Refuse("a mask of rank 3 aligns with the heads, not with the batch", mask)

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value, y: ir.Value, **_: Any
    ) -> ir.Value:
        node = producer(y)
        return op.Attention(q, k, v, mask, **attributes_of(node))

    def example(self) -> Example:
        return {
            "q": Arg(("B", 2, "S", 8)),
            "k": Arg(("B", 2, "S", 8)),
            "v": Arg(("B", 2, "S", 8)),
            "mask": Arg(("B", 1, 1, "S"), "bool"),
            "shape": np.array([1, 2, 1, 1]),
        }

    near_misses = (
        NearMiss("a vector per key", "mask of rank 1", {"mask": Arg(("S",), "bool")}),
        NearMiss(
            "a causal node",
            "is_causal is 1",
            build=lambda op, q, k, v, mask, shape: op.Attention(q, k, v, op.Expand(mask, shape), is_causal=1),
        ),
    )


class AttentionOpenMask(Fusion):
    """``Attention(q, k, v, mask)`` with a constant mask of true or of 0 alone -> ``Attention(q, k, v)``.

    transformers writes one for models that take no mask. A single key stands for all of them, as in torch and in
    onnxruntime, though the operator's reference would pad it.
    """

    result = ("", "Attention")
    meaning = "attention"

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return op.Attention(q, k, v, mask, _outputs=["y"])

    def check(self, op: Any, q: ir.Value, k: ir.Value, mask: ir.Value, y: ir.Value, **_: Any) -> None:
        plain(y)
        if fixed(mask) is None:
            raise Refuse()
        array = constant(mask, "mask")
        neutral = np.all(array) if array.dtype == np.bool_ else not np.any(array)
        if not neutral:
            raise Refuse()
        many = rank(q) == 4
        scores = (
            axis_of(q, 0),
            axis_of(q, 1) if many else producer(y).attributes.get_int("q_num_heads", 0),
            axis_of(q, -2),
            axis_of(k, -2),
        )
        for axis, size in enumerate(reversed(array.shape), 1):
            if size != 1 and not same_axis(size, scores[-axis]):
                raise Refuse(f"an open mask has {size} on axis {-axis}, the scores {scores[-axis]}", mask)

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, y: ir.Value, **_: Any) -> ir.Value:
        return op.Attention(q, k, v, **attributes_of(producer(y)))

    def example(self) -> Example:
        keys = ("B", 2, 5, 8)
        return {"q": Arg(("B", 2, "S", 8)), "k": Arg(keys), "v": Arg(keys), "mask": np.ones((1, 2, 1, 5), np.bool_)}

    near_misses = (
        NearMiss("one key is masked", None, {"mask": np.arange(5).reshape(1, 1, 1, 5) != 3}),
        NearMiss("it makes more rows", "an open mask has 3 on axis -4", {"mask": np.ones((3, 1, 1, 1), np.bool_)}),
    )
