"""onnxruntime's own operators (``com.microsoft``) -> canonical nodes: what other tools, or our lowering, have made.

An operator with an input or attribute that the canonical node cannot say is left alone.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Derived, Example, Fusion, NearMiss
from ..guards import Refuse, axis_of, constant, fixed, ints, producer, rank, same_axis, static, weight
from .gelu import QUICK

CONTRIB = "com.microsoft"


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


def _zero(node: ir.Node, *names: str) -> None:
    """Refuses attributes that say anything but the usual."""
    for name in names:
        found = node.attributes.get_int(name, 0)
        if found:
            raise Refuse(f"{name} is {found}, wanted 0", node.outputs[0])


def _like(y: ir.Value, x: ir.Value, *axes: Any) -> ir.Value:
    """Tells rules that come after the type of ``y``, and its shape where axes are given."""
    y.dtype = x.dtype or ir.DataType.FLOAT
    if axes:
        y.shape = ir.Shape(list(axes))
    return y


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
        _zero(node, "unidirectional")
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
                value if part is None else _like(op.Add(value, part), value, *(value.shape or ()))
                for value, part in zip(sides, parts, strict=True)
            ]
        attributes = {"q_num_heads": heads, "kv_num_heads": heads, **_scale(node)}
        out = op.Attention(*sides, *([mask] if mask is not None else []), **attributes)
        return _like(out, q, axis_of(q, 0), axis_of(q, 1), axis_of(v, 2))

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
        _zero(node, "unidirectional", "do_rotary", "past_present_share_buffer")
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
            side = _like(op.MatMul(x, matrix), x, *shape)
            sides.append(side if vector is None else _like(op.Add(side, vector), x, *shape))
        heads = node.attributes.get_int("num_heads", 0)
        attributes = {"q_num_heads": heads, "kv_num_heads": heads, **_scale(node)}
        out = op.Attention(*sides, *([mask] if mask is not None else []), **attributes)
        return _like(out, x, axis_of(x, 0), axis_of(x, 1), widths[2])

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
        inner = x if bias is None else _like(op.Add(x, bias), x, *(x.shape or ()))
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
    near_misses = (NearMiss("SiLU", None, build=lambda op, x: op.QuickGelu(x, alpha=1.0, _domain=CONTRIB)),)

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
        _zero(node, "is_packed_batching")
        if node.attributes.get_float("scale", 1.0) != 1.0:
            raise Refuse(f"scale is {node.attributes.get_float('scale', 1.0):g}, wanted 1", y)
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
            return _like(op.RotaryEmbedding(x, cos, sin, positions, **attributes), x, *(x.shape or ()))
        place = 2 if rank(x) == 4 else 1
        length = axis_of(x, place)
        tables = []
        for table in (cos, sin):
            rows = table
            if not same_axis(axis_of(table, 0), length):
                rows = op.Slice(table, ints(op, 0), op.Shape(x, start=place, end=place + 1), ints(op, 0))
            tables.append(_like(op.Unsqueeze(rows, ints(op, 0)), table, 1, length, axis_of(table, 1)))
        return _like(op.RotaryEmbedding(x, *tables, **attributes), x, *(x.shape or ()))

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
