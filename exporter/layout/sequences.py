"""Attention over packed tokens: sequence by sequence, without a mask.

::

    if all sequences are equally long:                     one call, tokens seen as (sequences, length, d)
    else: for i in sequences (Loop):  out += Attention(q[start:end], k[start:end], v[start:end])

No key of another sequence and no padding is ever looked at, so no mask is needed and no score is thrown away. What a
mask holds besides padding (learned biases, local windows) is gathered at the sequence's own positions and handed on.

Other forms and what they cost are in ``benchmarks/README.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..guards import attributes_of
from .steps import named
from .tokens import KEYS, LENGTH, SEQUENCES, TOKENS, Builder, Tokens

__all__ = ["attend"]


def attend(
    node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value, heads: int, bias: ir.Value | None, tokens: Tokens
) -> ir.Value:
    """Writes the attention of a node over packed tokens, in front of it.

    Args:
        node: The padded ``Attention`` node; its scale is kept.
        q: (tokens, heads * d_k).
        k: (tokens, heads * d_k).
        v: (tokens, heads * d_v).
        heads: Number of heads.
        bias: A mask of rank 4 whose values at attended positions matter; ``None`` where they do not.
        tokens: The tokens of the graph.

    Returns:
        (tokens, heads * d_v).
    """
    assert isinstance(node.graph, ir.Graph) and v.shape is not None
    attributes: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": heads}
    if "scale" in node.attributes:
        attributes["scale"] = attributes_of(node)["scale"]
    width, name = v.shape[-1], node.name or "attention"
    loop = _loop(node, q, k, v, attributes, bias, tokens, name)
    if bias is not None:
        op = Builder(node.graph, node, name)
        return _looped(op, loop, tokens, v, width)
    even = _even(node, q, k, v, attributes, tokens, name)
    otherwise = ir.Graph([], [], nodes=[], name=f"{name}.ragged")
    inner = Builder(otherwise, None, f"{name}.ragged")
    otherwise.outputs.append(_looped(inner, loop, tokens, v, width))
    chosen = ir.node("If", [tokens.even], {"then_branch": even, "else_branch": otherwise}, name=f"{name}.sequences")
    chosen.metadata_props.update(node.metadata_props)
    node.graph.insert_before(node, chosen)
    out = chosen.outputs[0]
    out.type, out.shape = v.type, ir.Shape([TOKENS, width])
    return out


def _even(
    node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value, attributes: dict[str, Any], tokens: Tokens, name: str
) -> ir.Graph:
    """All sequences at once."""
    graph = ir.Graph([], [], nodes=[], name=f"{name}.even")
    op = Builder(graph, None, f"{name}.even")
    sides = [
        op("Reshape", x, tokens.even_shape, shape=[SEQUENCES, LENGTH, _width(x)], name=side)
        for x, side in ((q, "q"), (k, "k"), (v, "v"))
    ]
    out = _attention(op, node, sides, None, attributes, [SEQUENCES, LENGTH, _width(v)])
    graph.outputs.append(op("Reshape", out, op.ints(-1, _width(v)), shape=[TOKENS, _width(v)], name="packed"))
    return graph


def _attention(
    op: Builder,
    node: ir.Node,
    sides: list[ir.Value],
    bias: ir.Value | None,
    attributes: dict[str, Any],
    shape: list[int | str],
) -> ir.Value:
    out = op("Attention", *sides, *([] if bias is None else [bias]), shape=shape, name="attended", **attributes)
    made = out.producer()
    assert made is not None
    made.metadata_props.update(node.metadata_props)
    return out


def _looped(op: Builder, body: ir.Graph, tokens: Tokens, v: ir.Value, width: Any) -> ir.Value:
    """Runs the body once per sequence and joins what it collects."""
    assert v.dtype is not None
    kind = ir.SequenceType(ir.TensorType(v.dtype))
    # An empty first part: a batch without any token joins to (0, d) then.
    none = op.constant(np.zeros((0, width), v.dtype.numpy()))
    parts = op("SequenceConstruct", none, shape=None)
    parts.type = kind
    joined = op("Loop", tokens.count, op.constant(np.ones((), np.bool_)), parts, body=body)
    joined.type, joined.shape = kind, None
    return op("ConcatFromSequence", joined, dtype=v.dtype, shape=[TOKENS, width], name="joined", axis=0)


def _loop(
    node: ir.Node,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    attributes: dict[str, Any],
    bias: ir.Value | None,
    tokens: Tokens,
    name: str,
) -> ir.Graph:
    """One sequence: (number, condition, parts) -> (condition, parts)."""
    assert v.dtype is not None
    number = ir.Value(name=f"{name}.number", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    condition = ir.Value(name=f"{name}.condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    parts = ir.Value(name=f"{name}.parts", type=ir.SequenceType(ir.TensorType(v.dtype)))
    graph = ir.Graph([number, condition, parts], [], nodes=[], name=f"{name}.sequence")
    op = Builder(graph, None, f"{name}.sequence")
    one, first = op("Unsqueeze", number, op.ints(0), shape=[1]), op.ints(0)
    start, end, key_start = (
        op("Gather", vector, one, shape=[1], axis=0) for vector in (tokens.starts, tokens.ends, tokens.key_starts)
    )
    sides = []
    for x, begin, length in ((q, start, LENGTH), (k, key_start, KEYS), (v, key_start, KEYS)):
        cut = op("Slice", x, begin, end, first, shape=[length, _width(x)])
        sides.append(op("Unsqueeze", cut, first, shape=[1, length, _width(x)]))
    cut_bias = None
    if bias is not None:
        cut_bias = _cut_bias(op, bias, one, start, key_start, end, tokens)
    out = _attention(op, node, sides, cut_bias, attributes, [1, LENGTH, _width(v)])
    row = op("Squeeze", out, first, shape=[LENGTH, _width(v)])
    longer = op("SequenceInsert", parts, row)
    longer.type, longer.shape = parts.type, None
    graph.outputs.extend([op("Identity", condition, shape=[]), longer])
    return graph


def _cut_bias(
    op: Builder, bias: ir.Value, one: ir.Value, start: ir.Value, key_start: ir.Value, end: ir.Value, tokens: Tokens
) -> ir.Value:
    """The mask of one sequence at its own positions, (1, heads or 1, length, keys)."""
    assert bias.shape is not None and len(bias.shape) == 4
    batch, heads, queries, keys = bias.shape
    if batch != 1:
        row = op("Gather", tokens.rows, one, shape=[1], axis=0)
        bias = op("Gather", bias, row, shape=[1, *named([heads, queries, keys])], axis=0)
    for axis, begin, length, size in ((3, key_start, KEYS, keys), (2, start, LENGTH, queries)):
        if size == 1:
            continue
        places = op("Slice", tokens.position, begin, end, op.ints(0), shape=[length])
        assert bias.shape is not None
        shape = named(list(bias.shape))
        shape[axis] = length
        bias = op("Gather", bias, places, shape=shape, axis=axis)
    return bias


def _width(x: ir.Value) -> int:
    width = None if x.shape is None else x.shape[-1]
    assert isinstance(width, int)
    return width
