"""Ragged attention as one operator a layer: ``com.microsoft.PackedMultiHeadAttention``, which only CUDA has.

The sequence by sequence form of :mod:`.sequences` is made of control flow, which a GPU waits for. This operator takes
packed tokens as they are::

    out (tokens, d) = PackedMultiHeadAttention(q, k, v, -, token_offset, cumulative_sequence_length)

It wants padding on the right. Attention does not depend on where a sequence's tokens stood, so here every sequence
begins at the left of its row, whatever the mask was: ``token_offset`` (sequences, longest) lists the places of the
tokens in that form and then those of the gaps, ``cumulative_sequence_length`` (sequences + 1) where each one begins.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ..fusion import MEANING
from .tokens import Builder

__all__ = ["to_packed"]

_CONTRIB = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class _Ragged:
    """What an attention by sequences reads: (tokens, d) three times, and where the sequences begin and end."""

    node: ir.Node
    inner: ir.Node
    sides: tuple[ir.Value, ...]
    starts: ir.Value
    ends: ir.Value


def to_packed(model: ir.Model) -> int:
    """Puts one operator in the place of each attention by sequences, in place.

    Attentions with a bias, and those whose first token is no key, stay as they are.

    Args:
        model: With the ragged layout.

    Returns:
        How many were replaced.
    """
    found = [each for each in map(_read, model.graph) if each is not None]
    vectors: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}
    for each in found:
        op = Builder(model.graph, each.node, each.node.name or "packed")
        key = each.starts, each.ends
        if key not in vectors:
            vectors[key] = _vectors(op, *key)
        out = each.node.outputs[0]
        attributes = {"num_heads": each.inner.attributes.get_int("q_num_heads", 1)}
        scale = {"scale": each.inner.attributes.get_float("scale", 0.0)} if "scale" in each.inner.attributes else {}
        made = ir.node(
            "PackedMultiHeadAttention", [*each.sides, None, *vectors[key]], {**attributes, **scale}, domain=_CONTRIB
        )
        made.metadata_props.update(each.inner.metadata_props)
        made.metadata_props[MEANING] = "attention"
        new = made.outputs[0]
        new.type, new.shape, new.name = out.type, out.shape, out.name
        model.graph.insert_before(each.node, made)
        out.replace_all_uses_with(new, replace_graph_outputs=True)
        model.graph.remove(each.node, safe=True)
    if found:
        model.graph.opset_imports[_CONTRIB] = 1
        passes.RemoveUnusedNodesPass()(model)
    return len(found)


def _read(node: ir.Node) -> _Ragged | None:
    """Reads the form that :func:`.sequences.attend` writes where there is no bias; ``None`` for anything else."""
    if node.op_type != "If" or node.domain:
        return None
    even, ragged = (node.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    inner = [each for each in even if each.op_type == "Attention" and not each.domain]
    loops = [each for each in ragged if each.op_type == "Loop"]
    if len(inner) != 1 or len(loops) != 1 or len(inner[0].inputs) != 3:
        return None
    sides = [value.producer() for value in inner[0].inputs if value is not None]
    outer = [each.inputs[0] if each is not None and each.op_type == "Reshape" else None for each in sides]
    cuts = [each for each in loops[0].attributes["body"].as_graph() if each.op_type == "Slice"]
    if len(outer) != 3 or [cut.inputs[0] for cut in cuts] != outer:
        return None
    bounds = {(_vector(cut.inputs[1]), _vector(cut.inputs[2])) for cut in cuts}
    if len(bounds) != 1:  # The keys begin elsewhere than the queries.
        return None
    ((starts, ends),) = bounds
    if starts is None or ends is None:
        return None
    return _Ragged(node, inner[0], tuple(value for value in outer if value is not None), starts, ends)


def _vector(value: ir.Value | None) -> ir.Value | None:
    """What a number per sequence is gathered from."""
    made = None if value is None else value.producer()
    return made.inputs[0] if made is not None and made.op_type == "Gather" else None


def _vectors(op: Builder, starts: ir.Value, ends: ir.Value) -> tuple[ir.Value, ir.Value]:
    """``token_offset`` and ``cumulative_sequence_length``, int32."""
    narrow, boolean = ir.DataType.INT32, ir.DataType.BOOL
    zero, one = (op.constant(np.array(number, np.int64)) for number in (0, 1))
    bounds = op("Concat", op.ints(0), ends, axis=0)
    bounds = op("Cast", bounds, dtype=narrow, to=narrow, name="bounds")
    lengths = op("Sub", ends, starts, shape=["sequences"])
    longest = op("ReduceMax", op("Concat", lengths, op.ints(0), axis=0), shape=[], keepdims=0)
    places = op("Unsqueeze", op("Range", zero, longest, one, shape=["longest"]), op.ints(0), shape=[1, "longest"])
    grid = ["sequences", "longest"]
    taken = op("Less", places, op("Unsqueeze", lengths, op.ints(1), shape=["sequences", 1]), dtype=boolean, shape=grid)
    flat = op("Reshape", taken, op.ints(-1))
    order = [op("NonZero", each, dtype=ir.DataType.INT64) for each in (flat, op("Not", flat))]
    places = op("Concat", *order, axis=1)
    places = op("Reshape", places, op("Shape", taken, dtype=ir.DataType.INT64, shape=[2]), shape=grid)
    return op("Cast", places, dtype=narrow, shape=grid, to=narrow, name="token_offset"), bounds
