"""onnxruntime's own attention operators -> canonical ``Attention``, with the projections they hold beside it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, axis_of, constant, fixed, ints, producer, rank, static, weight
from .contrib import CONTRIB, like, usual


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if len(node.inputs) > place else None


def _only(node: ir.Node, kept: Mapping[int, str]) -> None:
    """Refuses inputs at other places than those of ``kept``, and outputs beside the first."""
    for place, value in enumerate(node.inputs):
        if value is not None and place not in kept:
            raise Refuse(f"{node.op_type} has an input {value.name} at {place}, wanted only {', '.join(kept.values())}")
    used = [value for value in node.outputs[1:] if value.uses() or value.is_graph_output()]
    if used:
        raise Refuse(f"{node.op_type} also gives {used[0].name}, which is used")


def _bias_mask(node: ir.Node, place: int) -> ir.Value | None:
    """The additive mask at an input."""
    mask = _input(node, place)
    if mask is not None and rank(mask) not in (None, 4):
        raise Refuse(f"the attention bias has rank {rank(mask)}, wanted (batch, heads, queries, keys)", mask)
    return mask


def _scale(node: ir.Node) -> dict[str, float]:
    """The scale; 0 is how these operators say that it is the usual one."""
    scale = node.attributes.get_float("scale", 0.0)
    return {"scale": scale} if scale else {}


class ContribMultiHeadAttention(Fusion):
    """``com.microsoft.MultiHeadAttention(q, k, v, bias, mask)`` -> ``Attention(q + bq, k + bk, v + bv, mask)``.

    A mask of lengths or of keys is left alone: the operator adds another number than minus infinity for it.
    """

    meaning = "attention"
    result = ("", "Attention")
    tolerance = 3e-6
    variants = tuple(
        {"masked": masked, "biased": biased} for masked, biased in itertools.product((True, False), repeat=2)
    )

    def __init__(self, masked: bool = True, biased: bool = False) -> None:
        super().__init__()
        self._masked = masked
        self._biased = biased

    @classmethod
    def orders(cls, options: Mapping[str, Any]) -> list[Fusion]:
        return [cls()] if options == cls.variants[0] else []  # One pattern: what else there is, is read.

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        return op.MultiHeadAttention(q, k, v, _domain=CONTRIB, _allow_other_inputs=True, _outputs=["y"])

    def unfused(self, op: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        """The operator with all that the variant has."""
        rest = [bias if self._biased else None, None, mask] if self._masked else [bias] * self._biased
        return op.MultiHeadAttention(q, k, v, *rest, num_heads=2, _domain=CONTRIB)

    def check(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, y: ir.Value) -> None:
        node = producer(y)
        _only(node, {0: "query", 1: "key", 2: "value", 3: "bias", 5: "attention_bias"})
        usual(node, "unidirectional")
        for value, name in ((q, "query"), (k, "key"), (v, "value")):
            if rank(value) != 3:
                raise Refuse(f"{name} has rank {rank(value)}, wanted (batch, sequence, d)", value)
            static(value, 2, name)
        bias = _input(node, 3)
        if bias is not None:
            wanted = sum(static(value, 2, "input") for value in (q, k, v))
            if constant(bias, "bias").shape != (wanted,):
                raise Refuse(f"bias has another shape than [{wanted}]", bias)
        _bias_mask(node, 5)

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, y: ir.Value) -> ir.Value:
        node = producer(y)
        heads, bias, mask = node.attributes.get_int("num_heads", 0), _input(node, 3), _input(node, 5)
        sides = [q, k, v]
        if bias is not None:
            parts = _parts(op, q, bias, [static(value, 2, "input") for value in sides])
            sides = [
                value if part is None else like(op.Add(value, part), value, *(value.shape or ()))
                for value, part in zip(sides, parts, strict=True)
            ]
        attributes = {"q_num_heads": heads, "kv_num_heads": heads, **_scale(node)}
        out = op.Attention(*sides, *([mask] if mask is not None else []), **attributes)
        return like(out, q, axis_of(q, 0), axis_of(q, 1), axis_of(v, 2))

    def example(self) -> Example:
        arguments: Example = {name: Arg(("B", "S", 16)) for name in "qkv"}
        bias = np.linspace(-1, 1, 48, dtype=np.float32)
        return {**arguments, "bias": bias, "mask": Arg(("B", 1, "S", "S"))}

    near_misses = (
        NearMiss(
            "a mask of keys",
            "has an input .* at 4",
            build=lambda op, q, k, v, bias, mask: op.MultiHeadAttention(
                q, k, v, None, op.Cast(op.Greater(op.ReduceMax(q, ints(op, 2), keepdims=0), op.Constant(
                    value_float=0.0)), to=6), num_heads=2, _domain=CONTRIB),
        ),
        NearMiss(
            "causal",
            "unidirectional is 1",
            build=lambda op, q, k, v, bias, mask: op.MultiHeadAttention(
                q, k, v, num_heads=2, unidirectional=1, _domain=CONTRIB),
        ),
        NearMiss("a bias of another size", "bias has another shape than", {"v": Arg(("B", "S", 8))},
                 {"masked": False, "biased": True}),
    )  # fmt: skip


class ContribAttention(Fusion):
    """``com.microsoft.Attention(x, [Wq Wk Wv], b, mask)`` -> ``Attention(x Wq + bq, x Wk + bk, x Wv + bv, mask)``.

    A bias of zeros, which the operator wants where there is none, is dropped.
    """

    meaning = "attention"
    result = ("", "Attention")
    tolerance = 5e-6
    variants = tuple(
        {"masked": masked, "biased": biased, "narrow": narrow}
        for masked, biased, narrow in itertools.product((True, False), (True, False), (False, True))
    )

    def __init__(self, masked: bool = True, biased: bool = True, narrow: bool = False) -> None:
        super().__init__()
        self._masked = masked
        self._biased = biased
        self._narrow = narrow

    @classmethod
    def orders(cls, options: Mapping[str, Any]) -> list[Fusion]:
        return [cls()] if options == cls.variants[0] else []

    def pattern(self, op: Any, x: Any, w: Any) -> Any:
        return op.Attention(x, w, _domain=CONTRIB, _allow_other_inputs=True, _outputs=["y"])

    def unfused(self, op: Any, x: Any, w: Any, bias: Any, mask: Any) -> Any:
        """The operator with all that the variant has; V half as wide as Q and K where it is narrow."""
        sizes = {"qkv_hidden_sizes": [16, 16, 8]} if self._narrow else {}
        rest = [None, None, mask] if self._masked else []
        return op.Attention(x, w, bias, *rest, num_heads=2, **sizes, _domain=CONTRIB)

    def check(self, op: Any, x: ir.Value, w: ir.Value, y: ir.Value) -> None:
        node = producer(y)
        _only(node, {0: "input", 1: "weights", 2: "bias", 5: "attention_bias"})
        usual(node, "unidirectional", "do_rotary", "past_present_share_buffer")
        if rank(x) != 3:
            raise Refuse(f"input has rank {rank(x)}, wanted (batch, sequence, d)", x)
        if w.const_value is None or w.is_graph_input() or rank(w) != 2:
            raise Refuse("weights are no constant matrix", w)
        widths = _widths(node)
        bias = _input(node, 2)
        if bias is not None and constant(bias, "bias").shape != (sum(widths),):
            raise Refuse(f"bias has another shape than [{sum(widths)}]", bias)
        _bias_mask(node, 5)

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value, y: ir.Value) -> ir.Value:
        node = producer(y)
        widths, bias, mask = _widths(node), _input(node, 2), _input(node, 5)
        matrices = _parts(op, x, w, widths, keep_zeros=True)
        vectors = [None] * 3 if bias is None else _parts(op, x, bias, widths)
        sides = []
        for matrix, vector, width in zip(matrices, vectors, widths, strict=True):
            shape = (axis_of(x, 0), axis_of(x, 1), width)
            side = like(op.MatMul(x, matrix), x, *shape)
            sides.append(side if vector is None else like(op.Add(side, vector), x, *shape))
        heads = node.attributes.get_int("num_heads", 0)
        attributes = {"q_num_heads": heads, "kv_num_heads": heads, **_scale(node)}
        out = op.Attention(*sides, *([mask] if mask is not None else []), **attributes)
        return like(out, x, axis_of(x, 0), axis_of(x, 1), widths[2])

    def example(self) -> Example:
        width = 40 if self._narrow else 48
        drawn = np.random.default_rng(0).standard_normal((16, width)) / 4
        bias = np.linspace(-1, 1, width, dtype=np.float32) if self._biased else np.zeros(width, np.float32)
        return {"x": Arg(("B", "S", 16)), "w": drawn.astype(np.float32), "bias": bias, "mask": Arg(("B", 1, "S", "S"))}

    near_misses = (
        NearMiss(
            "a mask of lengths",
            "has an input .* at 3",
            build=lambda op, x, w, bias, mask: op.Attention(x, w, bias, op.Cast(op.ReduceMax(
                x, ints(op, 1, 2), keepdims=0), to=6), num_heads=2, _domain=CONTRIB),
        ),
        NearMiss(
            "causal",
            "unidirectional is 1",
            build=lambda op, x, w, bias, mask: op.Attention(
                x, w, bias, num_heads=2, unidirectional=1, _domain=CONTRIB),
        ),
        NearMiss("computed weights", "weights are no constant matrix", {"w": Arg((16, 48))}),
    )  # fmt: skip


def _widths(node: ir.Node) -> list[int]:
    """How wide Q, K and V are."""
    given = list(node.attributes.get_ints("qkv_hidden_sizes") or ()) if "qkv_hidden_sizes" in node.attributes else []
    weights = node.inputs[1]
    assert weights is not None
    width = static(weights, 1, "weights")
    sizes = [int(size) for size in given] or [width // 3] * 3
    if len(sizes) != 3 or sum(sizes) != width or sizes[0] != sizes[1]:
        raise Refuse(f"Q, K and V are {sizes} wide, wanted three that make {width}, Q as K", weights)
    return sizes


def _parts(
    op: Any, beside: ir.Value, whole: ir.Value, widths: list[int], *, keep_zeros: bool = False
) -> list[ir.Value | None]:
    """A constant cut along its last axis; ``None`` for a part of zeros, unless they are kept."""
    tensor = whole.const_value if whole.const_value is not None else fixed(whole)
    assert tensor is not None
    found: list[ir.Value | None] = []
    start = 0
    for side, width in zip("qkv", widths, strict=True):
        place = slice(start, start + width)
        start += width
        if not keep_zeros and not np.any(tensor.numpy()[..., place]):
            found.append(None)
            continue
        shape = [*tensor.shape.numpy()[:-1], width]
        # Two weights may have one name in two files that were joined; a part is known by all that it is made of.
        name = f"{whole.name}_{side}"

        def make(place: slice = place, shape: list[int] = shape, name: str = name) -> ir.LazyTensor:
            return ir.LazyTensor(
                lambda: ir.tensor(np.ascontiguousarray(tensor.numpy()[..., place])),
                dtype=tensor.dtype,
                shape=ir.Shape(shape),
                name=name,
            )

        content = f"part {whole.name} {place.start} {zlib.crc32(repr(widths).encode()):08x}"
        found.append(weight(op, beside, name, content, make))
    return found
