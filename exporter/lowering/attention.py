"""Canonical ``Attention`` -> what a target runs best.

- ``com.microsoft.Attention``: input projections, heads and attention in one kernel (CPU).
- ``com.microsoft.MultiHeadAttention``: attention alone (CUDA; CPU where the projections cannot be packed).
- MatMul and Softmax: anything that knows no attention operator (ai.onnx below opset 23).
- ``Attention`` itself with a mask that every known runtime takes (ai.onnx from opset 23).

A mask reaches the kernels as a finite additive bias. Rows that no key may be attended from would then be
averages; the canonical node gives zeros there, so the output is multiplied by whether the row has a key
(only where such a row is possible at all).
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ..fusion import MEANING, Arg, Example, Fusion, NearMiss
from ..guards import Refuse, attributes_of, constant, ints, of_type, rank, static, weight
from ..raising.attention_form import plain
from .masks import as_bias, zero_dead_rows

CONTRIB = "com.microsoft"
_TWO_HEADS = {"Attention": {"q_num_heads": 2, "kv_num_heads": 2}}


def _heads(node: ir.Node) -> int:
    """The head count: from the attribute (3-D) or from axis 1 (4-D). Grouped heads are refused."""
    q, k, _ = node.inputs[:3]
    assert q is not None and k is not None
    if rank(q) == 4:
        heads, keys = static(q, 1, "Q"), static(k, 1, "K")
    else:
        heads, keys = (node.attributes.get_int(f"{side}_num_heads", 0) for side in ("q", "kv"))
    if heads < 1 or heads != keys:
        raise Refuse(f"Q has {heads} heads and K {keys}, wanted equal numbers", q)
    return heads


def _types(node: ir.Node, *allowed: ir.DataType) -> None:
    """Refuses element types that the kernels lack, and float masks of another type than the queries."""
    q, mask = node.inputs[0], node.inputs[3] if len(node.inputs) > 3 else None
    of_type(q, "Q", *allowed)
    if q is not None and q.dtype is not None and mask is not None:
        of_type(mask, "mask", ir.DataType.BOOL, q.dtype)


def _scale(node: ir.Node) -> dict[str, float]:
    return {"scale": node.attributes.get_float("scale", 0.0)} if "scale" in node.attributes else {}


def _merged(op: Any, x: ir.Value, name: str) -> ir.Value:
    """(B, H, S, d) -> (B, S, H * d)."""
    width = static(x, 1, name) * static(x, 3, name)
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), ints(op, 0, 0, width))


def _split(op: Any, x: ir.Value, heads: int) -> ir.Value:
    """(B, S, H * d) -> (B, H, S, d)."""
    return op.Transpose(op.Reshape(x, ints(op, 0, 0, heads, -1)), perm=[0, 2, 1, 3])


class _Lowering(Fusion):
    """Lowers any canonical attention node, with or without a mask, in its 3-D or its 4-D form."""

    meaning = "attention"
    types: ClassVar[tuple[ir.DataType, ...]] = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
    variants = tuple({"masked": masked, "many": many} for masked, many in itertools.product((True, False), repeat=2))
    tolerance = 3e-6

    def __init__(self, masked: bool = True, many: bool = False) -> None:
        super().__init__()
        self._masked = masked
        self._many = many  # Only the example differs: the pattern takes both forms.

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return op.Attention(q, k, v, *([mask] if self._masked else []), _outputs=["y"])

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return {} if self._many else _TWO_HEADS

    def check(self, op: Any, y: ir.Value, **_: Any) -> None:
        if self._many != (rank(plain(y).inputs[0]) == 4):
            raise Refuse()  # The other variant's.
        node = plain(y)
        _heads(node)
        _types(node, *self.types)
        if self._many:
            for value, name in zip(node.inputs[:3], "QKV", strict=False):
                assert value is not None
                static(value, 3, name)

    def example(self) -> Example:
        shape = ("B", 2, "S", 8) if self._many else ("B", "S", 16)
        return {"q": Arg(shape), "k": Arg(shape), "v": Arg(shape), "mask": Arg(("B", 1, 1, "S"), "bool")}


_NEAR_MISSES = (
    NearMiss(
        "causal",
        "is_causal is 1",
        build=lambda op, q, k, v, mask: op.Attention(q, k, v, mask, q_num_heads=2, kv_num_heads=2, is_causal=1),
    ),
    NearMiss(
        "a soft cap",
        "softcap is 5",
        build=lambda op, q, k, v, mask: op.Attention(q, k, v, mask, q_num_heads=2, kv_num_heads=2, softcap=5.0),
    ),
    NearMiss(
        "grouped queries",
        "Q has 4 heads and K 2",
        {"k": Arg(("B", "S", 8)), "v": Arg(("B", "S", 8))},
        build=lambda op, q, k, v, mask: op.Attention(q, k, v, mask, q_num_heads=4, kv_num_heads=2),
    ),
)


class MultiHeadAttention(_Lowering):
    """``Attention(q, k, v, mask)`` -> ``com.microsoft.MultiHeadAttention(q, k, v, bias)``."""

    result = (CONTRIB, "MultiHeadAttention")
    types = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    near_misses = _NEAR_MISSES

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, y: ir.Value, mask: ir.Value | None = None
    ) -> ir.Value:
        node = plain(y)
        heads = _heads(node)
        merged = [_merged(op, x, name) if self._many else x for x, name in ((q, "Q"), (k, "K"), (v, "V"))]
        inputs: list[ir.Value | None] = [*merged]
        if mask is not None:
            inputs += [None, None, as_bias(op, mask, q, k, spread=True)]
        out = op.MultiHeadAttention(*inputs, num_heads=heads, **_scale(node), _domain=CONTRIB)
        if self._many:
            out = _split(op, out, heads)
        return out if mask is None else zero_dead_rows(op, out, mask, q, None if self._many else heads)


class AttentionPrimitives(_Lowering):
    """``Attention(q, k, v, mask)`` -> ``MatMul(Softmax(MatMul(q, k^T) * scale + bias), v)``; of halves in fp32."""

    result = ("", "Softmax")
    near_misses = _NEAR_MISSES

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, y: ir.Value, mask: ir.Value | None = None
    ) -> ir.Value:
        node = plain(y)
        heads = _heads(node)
        size = static(q, -1, "Q") // (1 if self._many else heads)
        scale = node.attributes.get_float("scale", size**-0.5)
        if not self._many:
            q4, v4 = _split(op, q, heads), _split(op, v, heads)
            k_t = op.Transpose(op.Reshape(k, ints(op, 0, 0, heads, -1)), perm=[0, 2, 3, 1])
        else:
            q4, k_t, v4 = q, op.Transpose(k, perm=[0, 1, 3, 2]), v
        kind = q.dtype or ir.DataType.FLOAT
        if kind == ir.DataType.FLOAT16:
            scores, wide = _wide_scores(op, q4, k_t, scale)
        else:
            scores, wide = op.Mul(op.MatMul(q4, k_t), op.Constant(value=ir.tensor(np.array(scale, kind.numpy())))), kind
        if mask is not None:
            scores = op.Add(scores, as_bias(op, mask, q, k, spread=False, kind=wide))
        context = op.MatMul(_back(op, op.Softmax(scores, axis=-1), kind, wide), v4)
        # Not the last node: when this is raised again, what follows the product stays outside.
        context.producer().metadata_props[MEANING] = self.meaning
        if mask is not None:
            context = zero_dead_rows(op, context, mask, q)
        if self._many:
            return context
        return op.Reshape(op.Transpose(context, perm=[0, 2, 1, 3]), ints(op, 0, 0, static(v, -1, "V")))


def _wide_scores(op: Any, q4: ir.Value, k_t: ir.Value, scale: float) -> tuple[ir.Value, ir.DataType]:
    """Scores of halves: scaled first, then masked and normalized in fp32, so that nothing overflows."""
    factor = op.Constant(value=ir.tensor(np.array(scale, np.float16)))
    return op.Cast(op.MatMul(op.Mul(q4, factor), k_t), to=ir.DataType.FLOAT), ir.DataType.FLOAT


def _back(op: Any, weights: ir.Value, kind: ir.DataType, wide: ir.DataType) -> ir.Value:
    return weights if wide == kind else op.Cast(weights, to=kind)


class AttentionMask(_Lowering):
    """``Attention(q, k, v, mask)`` -> the same node with a finite additive mask over all queries.

    onnxruntime's CPU kernel wants the mask spread over the queries; engines differ on rows without a key.
    """

    result = ("", "Attention")
    variants = ({"masked": True, "many": False}, {"masked": True, "many": True})

    def check(self, op: Any, y: ir.Value, **bindings: Any) -> None:
        mask = bindings["mask"]
        if mask.metadata_props.get(_SPREAD):
            raise Refuse()
        super().check(op, y=y, **bindings)

    def rewrite(
        self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, y: ir.Value, mask: ir.Value | None = None
    ) -> ir.Value:
        assert mask is not None
        node = plain(y)
        bias = as_bias(op, mask, q, k, spread=True, clamp=True)
        bias.metadata_props[_SPREAD] = "1"
        out = op.Attention(q, k, v, bias, **attributes_of(node))
        return zero_dead_rows(op, out, mask, q, None if self._many else _heads(node))

    near_misses = _NEAR_MISSES


_SPREAD = "tfx.spread"


class PackedAttention(Fusion):
    """``Attention(x Wq + bq, x Wk + bk, x Wv + bv, mask)`` -> ``com.microsoft.Attention(x, [Wq Wk Wv], bias)``."""

    meaning = "attention"
    result = (CONTRIB, "Attention")
    tolerance = 5e-6
    variants = tuple(
        {"masked": masked, "biased": biased} for masked, biased in itertools.product((True, False), repeat=2)
    )

    def __init__(self, masked: bool = True, biased: bool = True) -> None:
        super().__init__()
        self._masked = masked
        self._biased = biased

    def pattern(self, op: Any, x: Any, w_q: Any, w_k: Any, w_v: Any, b_q: Any, b_k: Any, b_v: Any, mask: Any) -> Any:
        projected = []
        for name, matrix, bias in (("q", w_q, b_q), ("k", w_k, b_k), ("v", w_v, b_v)):
            y = op.MatMul(x, matrix, _outputs=[name if not self._biased else f"{name}_product"])
            projected.append(op.Add(y, bias, _outputs=[name]) if self._biased else y)
        return op.Attention(*projected, *([mask] if self._masked else []), _outputs=["y"])

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return _TWO_HEADS

    def check(
        self, op: Any, x: ir.Value, w_q: ir.Value, w_k: ir.Value, w_v: ir.Value, y: ir.Value, **bindings: Any
    ) -> None:
        node = plain(y)
        heads = _heads(node)
        _types(node, ir.DataType.FLOAT)
        if rank(x) != 3:
            raise Refuse(f"input has rank {rank(x)}, wanted (batch, sequence, d)", x)
        widths = []
        for matrix, name in ((w_q, "Wq"), (w_k, "Wk"), (w_v, "Wv")):
            if matrix.const_value is None or matrix.is_graph_input() or rank(matrix) != 2:
                raise Refuse(f"{name} is not a constant matrix", matrix)
            widths.append(static(matrix, 1, name))
        if widths[0] != widths[1] or widths[2] % heads:
            raise Refuse(f"Q, K and V are {widths} wide, wanted Q and K equal and V a multiple of {heads}", x)
        if self._biased:
            for side, width in zip("qkv", widths, strict=False):
                if constant(bindings[f"b_{side}"], f"b{side}").shape != (width,):
                    raise Refuse(f"b{side} has another shape than [{width}]", bindings[f"b_{side}"])

    def rewrite(
        self,
        op: Any,
        x: ir.Value,
        w_q: ir.Value,
        w_k: ir.Value,
        w_v: ir.Value,
        q: ir.Value,
        y: ir.Value,
        b_q: ir.Value | None = None,
        b_k: ir.Value | None = None,
        b_v: ir.Value | None = None,
        mask: ir.Value | None = None,
        **_: Any,
    ) -> ir.Value:
        node = plain(y)
        heads = _heads(node)
        packed = _joined(op, [w_q, w_k, w_v], 1)
        inputs: list[ir.Value | None] = [x, packed]
        if b_q is not None and b_k is not None and b_v is not None:
            inputs.append(_joined(op, [b_q, b_k, b_v], 0))
        else:
            # The schema calls the bias optional; onnxruntime 1.31's CPU kernel crashes without one.
            width = sum(static(w, 1, "W") for w in (w_q, w_k, w_v))
            kind = (x.dtype or ir.DataType.FLOAT).numpy()
            inputs.append(
                weight(op, x, f"zeros_{width}", f"zeros {kind} {width}", lambda: ir.tensor(np.zeros(width, kind)))
            )
        if mask is not None:
            # Sizes from x: q goes with the projections.
            inputs += [None, None, as_bias(op, mask, x, x, spread=True)]
        attributes: dict[str, Any] = {"num_heads": heads, **_scale(node)}
        widths = [static(w, 1, "W") for w in (w_q, w_k, w_v)]
        if widths[2] != widths[0]:
            attributes["qkv_hidden_sizes"] = widths
        out = op.Attention(*inputs, **attributes, _domain=CONTRIB)
        return out if mask is None else zero_dead_rows(op, out, mask, q, heads)

    def example(self) -> Example:
        rng = np.random.default_rng(0)

        def drawn(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

        matrices = {f"w_{side}": drawn(16, 16) for side in "qkv"}
        vectors = {f"b_{side}": drawn(16) for side in "qkv"}
        return {"x": Arg(("B", "S", 16)), **matrices, **vectors, "mask": Arg(("B", 1, 1, "S"), "bool")}

    near_misses = (
        NearMiss(
            "K narrower than Q", "Q, K and V are", {"w_k": np.ones((16, 8), np.float32), "b_k": np.ones(8, np.float32)}
        ),
        NearMiss("a bias per token", "b. has another shape", {"b_v": np.ones((1, 1, 16), np.float32)}),
    )


def _joined(op: Any, parts: list[ir.Value], axis: int) -> ir.Value:
    """Constants side by side as one initializer, computed when it is written (the weights are large)."""
    tensors = [part.const_value for part in parts if part.const_value is not None]
    shape = list(tensors[0].shape.numpy())
    shape[axis] = sum(int(tensor.shape.numpy()[axis]) for tensor in tensors)
    names = "/".join(part.name or "" for part in parts)
    name = _whole(parts) or f"{parts[0].name}_packed_{zlib.crc32(names.encode()):08x}"

    def make() -> ir.LazyTensor:
        return ir.LazyTensor(
            lambda: ir.tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis)),
            dtype=tensors[0].dtype,
            shape=ir.Shape(shape),
            name=name,
        )

    return weight(op, parts[0], name, f"packed {names}", make)


def _whole(parts: list[ir.Value]) -> str | None:
    """The name of what was cut into these parts when it was raised: put together again, it is called as before."""
    stems = {(part.name or "").removesuffix(f"_{side}") for part, side in zip(parts, "qkv", strict=False)}
    named = all((part.name or "").endswith(f"_{side}") for part, side in zip(parts, "qkv", strict=False))
    return stems.pop() if named and len(stems) == 1 else None
