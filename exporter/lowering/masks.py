"""Attention masks as kernels want them: finite, additive, of rank 4."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ..guards import absorbing, fixed, rank, same_axis

_THROUGH = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Identity", "Slice", "Gather"})

Interval = tuple[float, float]

_UNKNOWN: Interval = (-math.inf, math.inf)
_DEPTH = 64


def may_be_minus_inf(mask: ir.Value) -> bool:
    """Whether a float mask can hold -inf: false only where the graph shows that it cannot."""
    return not _interval(mask, {}, _DEPTH)[0] > -math.inf  # NaN is unknown too


def _interval(value: ir.Value | None, known: dict[ir.Value, Interval], depth: int) -> Interval:
    """Bounds of a value's elements, by interval arithmetic on the nodes that masks are made of.

    Bounds that the element type cannot hold are infinite, as the elements would be.
    """
    if value is None or depth == 0:
        return _UNKNOWN
    if value not in known:
        low, high = _bounds(value, known, depth)
        kind = value.dtype or ir.DataType.FLOAT
        if kind.is_floating_point() and kind != ir.DataType.BFLOAT16:
            limits = np.finfo(kind.numpy())
            low = -math.inf if low < float(limits.min) else low
            high = math.inf if high > float(limits.max) else high
        known[value] = (low, high)
    return known[value]


def _bounds(value: ir.Value, known: dict[ir.Value, Interval], depth: int) -> Interval:
    tensor = fixed(value)
    if tensor is not None:
        array = tensor.numpy()
        return (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if value.dtype == ir.DataType.BOOL:
        return 0.0, 1.0
    node = value.producer()
    if node is None or node.domain:
        return _UNKNOWN
    bounds = [_interval(each, known, depth - 1) for each in node.inputs]
    if node.op_type in _THROUGH or node.op_type == "Cast":
        return bounds[0]
    if node.op_type == "Where":
        return min(low for low, _ in bounds[1:]), max(high for _, high in bounds[1:])
    if node.op_type in ("Max", "Min"):
        pick = max if node.op_type == "Max" else min
        return pick(low for low, _ in bounds), pick(high for _, high in bounds)
    if node.op_type == "Neg":
        return -bounds[0][1], -bounds[0][0]
    if node.op_type == "Add":
        return bounds[0][0] + bounds[1][0], bounds[0][1] + bounds[1][1]
    if node.op_type == "Sub":
        return bounds[0][0] - bounds[1][1], bounds[0][1] - bounds[1][0]
    if node.op_type == "Mul":
        products = [a * b for a in bounds[0] for b in bounds[1]]
        return _UNKNOWN if any(math.isnan(each) for each in products) else (min(products), max(products))
    return _UNKNOWN


def _below_every_fill(kind: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """What float masks are raised to, and what stands for -inf: both below :func:`absorbing`, in this order.

    So values that fill keep their order, for rows in which no key is attended. In half precision the lower one
    leaves room for a score of 16000 below it.
    """
    half = kind == np.float16
    return np.array(-40960 if half else -1e38, kind), np.array(-49152 if half else -2e38, kind)


def as_bias(
    op: Any,
    mask: ir.Value,
    q: ir.Value,
    k: ir.Value,
    *,
    spread: bool,
    clamp: bool = False,
    kind: ir.DataType | None = None,
) -> ir.Value:
    """The mask as a finite additive float.

    Args:
        op: The rewriter's builder.
        mask: Bool (true = attend) or additive float, broadcastable to (batch, heads, queries, keys).
        q: The queries, (B, S, H * d) or (B, H, S, d).
        k: The keys, likewise.
        spread: Rank 4 with the query and key axes in full, as the fused kernels want it.
        clamp: Keep float masks off the lowest float, even where they are finite, unless the graph shows that they
            are no lower than -1e38. In half precision they always are: beside the lowest one a score overflows.
        kind: Element type of the result; that of the queries when ``None``.

    Returns:
        (B or 1, H or 1, S or 1, T or 1), or with ``spread`` (B or 1, H or 1, S, T).
    """
    kind = kind or q.dtype or ir.DataType.FLOAT
    element = np.dtype(kind.numpy())
    lowest, (bottom, never) = absorbing(element), _below_every_fill(element)
    if mask.dtype not in (ir.DataType.BOOL, kind):
        shape, mask = mask.shape, op.Cast(mask, to=kind)
        mask.dtype, mask.shape = kind, shape
    bias = mask
    if mask.dtype == ir.DataType.BOOL:
        zero = op.Constant(value=ir.tensor(np.array(0, element)))
        bias = op.Where(mask, zero, op.Constant(value=ir.tensor(lowest)))
    elif may_be_minus_inf(mask):
        # A key at -inf stays below one at the lowest float, which a row of such keys would still attend to.
        finite = op.Max(mask, op.Constant(value=ir.tensor(bottom)))
        bias = op.Where(_is_minus_inf(op, mask), op.Constant(value=ir.tensor(never)), finite)
    elif (clamp or element == np.float16) and not _interval(mask, {}, _DEPTH)[0] >= float(never):
        bias = op.Max(mask, op.Constant(value=ir.tensor(bottom)))
    missing = 4 - (rank(mask) or 4)
    if missing and spread:
        bias = op.Unsqueeze(bias, op.Constant(value=ir.tensor(np.arange(missing, dtype=np.int64))))
    return _spread(op, bias, mask, q, k) if spread else bias


def _is_minus_inf(op: Any, mask: ir.Value) -> ir.Value:
    """IsInf takes halves from opset 20 on only; no half is below the lowest one but -inf."""
    if mask.dtype != ir.DataType.FLOAT16:
        return op.IsInf(mask, detect_positive=0)
    return op.Equal(mask, op.Constant(value=ir.tensor(np.array(-math.inf, np.float16))))


def _spread(op: Any, bias: ir.Value, mask: ir.Value, q: ir.Value, k: ir.Value) -> ir.Value:
    axes = list(mask.shape or ())
    queries = axes[-2] if len(axes) > 1 else 1
    keys = axes[-1] if axes else 1
    one = op.Constant(value=ir.tensor(np.array([1], np.int64)))
    length, width = _sequence(q), _sequence(k)
    full_queries, full_keys = same_axis(queries, length), same_axis(keys, width)
    if full_queries and full_keys:
        return bias

    def size(of: ir.Value) -> ir.Value:
        axis = 2 if rank(of) == 4 else 1
        # From the mask where it can be: then all layers share one expanded mask.
        if same_axis(_sequence(of), keys) and keys != 1:
            return op.Shape(mask, start=len(axes) - 1, end=len(axes))
        return op.Shape(of, start=axis, end=axis + 1)

    target = op.Concat(one, one, one if full_queries else size(q), one if full_keys or keys != 1 else size(k), axis=0)
    return op.Expand(bias, target)


def _sequence(x: ir.Value) -> Any:
    return x.shape[2 if len(x.shape) == 4 else 1] if x.shape is not None else None


def zero_dead_rows(op: Any, out: ir.Value, mask: ir.Value, q: ir.Value, merged_heads: int | None = None) -> ir.Value:
    """Zeros the output rows whose queries may attend to no key; ``out`` itself where none can exist.

    Args:
        op: The rewriter's builder.
        out: (B, H, S, d), or (B, S, H * d) with ``merged_heads``.
        mask: The mask before :func:`as_bias`.
        q: The queries, of the output's element type.
        merged_heads: H where the heads stand side by side in the last axis.
    """
    kind = q.dtype or ir.DataType.FLOAT
    last = op.Constant(value=ir.tensor(np.array([-1], np.int64)))
    if mask.dtype == ir.DataType.BOOL:
        alive = op.ReduceMax(op.Cast(mask, to=kind), last, keepdims=1)
    elif may_be_minus_inf(mask):
        bottom = np.array(-math.inf, (mask.dtype or kind).numpy())
        top = op.ReduceMax(mask, last, keepdims=1)
        alive = op.Cast(op.Greater(top, op.Constant(value=ir.tensor(bottom))), to=kind)
    else:
        return out
    if merged_heads is None:
        return op.Mul(out, alive)
    axes = list(mask.shape or ())
    if len(axes) == 3:  # (heads, queries, keys)
        alive = op.Unsqueeze(alive, op.Constant(value=ir.tensor(np.array([0], np.int64))))
        axes = [1, *axes]
    if len(axes) == 4 and axes[1] != 1:
        # One row per head: (B, H, S, 1) meets (B, S, H, d).
        split = op.Reshape(out, op.Constant(value=ir.tensor(np.array([0, 0, merged_heads, -1], np.int64))))
        kept = op.Mul(split, op.Transpose(alive, perm=[0, 2, 1, 3]))
        return op.Reshape(kept, op.Shape(out))
    if len(axes) == 4:
        alive = op.Squeeze(alive, op.Constant(value=ir.tensor(np.array([1], np.int64))))
    return op.Mul(out, alive)
