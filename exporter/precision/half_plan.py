"""Which nodes of a graph compute in half precision, and why the others do not.

In half precision a node runs that has kernels for it, whose inputs and outputs stay far from 65504 on the calibration
samples, and whose constants survive it. The rest stays in fp32:

- softmax, reductions, powers, logarithms, sines: operators that sum or stretch. (LayerNormalization and attention
  kernels sum in fp32 themselves.)
- whatever holds or reads a value that would overflow: residual streams of some models, products before they are scaled.
- norms over large values: a kernel that squares in half precision overflows from 256 on.
- arithmetic on masks and positions, which has values such as -1e30: it is small, and is clamped where it meets halves.
- float islands that the source itself cast to and back from.
- cheap operators between such nodes, so that values are not cast back and forth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ..guards import fixed
from .ranges import Range

__all__ = ["DERIVED", "LIMIT", "Plan", "attention_inputs", "is_movement", "plan"]

LIMIT = 65504 / 4
"""Largest absolute value on the samples that may become a half: other texts will hold larger ones."""

_NORM_LIMIT = 128.0
"""Largest element of a norm's input: squares of what is twice as large still are halves."""

_LARGE = 1024  # elements; a smaller constant may be stored in two precisions

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16

_MOVES = frozenset(
    {
        "Concat", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad", "Reshape",
        "ScatterND", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
_CHEAP = frozenset({"Abs", "Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Relu", "Sub", "Where"})
_PRODUCTS = frozenset({"Conv", "Einsum", "FusedMatMul", "Gemm", "MatMul", "MatMulNBits"})
_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
_SKIP_NORMS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
_ATTENTION = frozenset({"Attention", "MultiHeadAttention", "PackedMultiHeadAttention"})
_ACTIVATIONS = frozenset({"BiasGelu", "Erf", "FastGelu", "Gelu", "QuickGelu", "Sigmoid", "Tanh"})
_PACKING = frozenset({"RemovePadding", "RestorePadding", "RotaryEmbedding", "GatherBlockQuantized"})

HALVES = _MOVES | _CHEAP | _PRODUCTS | _NORMS | _SKIP_NORMS | _ATTENTION | _ACTIVATIONS | _PACKING | {"ConstantOfShape"}
"""Operators that runtimes have half kernels for, and that lose nothing but digits in them."""

NEUTRAL = frozenset({"Constant", "Shape", "Size"})
"""Operators that take any type and do not look at the elements, and constants, which are stored as they are wanted."""

DERIVED = ("feeds nothing but fp32", "divides by fp32")
"""Reasons that follow from another node's."""


@dataclasses.dataclass
class Plan:
    """What stays in fp32.

    Attributes:
        kept: Node -> why it stays.
        plain: Nodes that know of no weights and no tokens: masks, positions, lengths.
    """

    kept: dict[ir.Node, str]
    plain: set[ir.Node]

    def is_half(self, node: ir.Node | None) -> bool:
        """Whether a node's float inputs and outputs are halves."""
        return node is not None and node not in self.kept and node.op_type not in NEUTRAL


def is_movement(node: ir.Node) -> bool:
    """Whether a node only moves elements."""
    return not node.domain and node.op_type in _MOVES


def attention_inputs(graph: ir.Graph) -> dict[ir.Node, tuple[ir.Value, ir.Value, int, float]]:
    """Queries, keys, heads in their last axis, and scale of every attention operator that takes them apart."""
    found: dict[ir.Node, tuple[ir.Value, ir.Value, int, float]] = {}
    for node in graph:
        if node.op_type not in _ATTENTION or len(node.inputs) < 3:
            continue
        q, k = node.inputs[:2]
        if q is None or k is None or q.shape is None or (node.op_type == "Attention" and node.domain):
            continue
        heads = 1 if len(q.shape) == 4 else node.attributes.get_int("num_heads" if node.domain else "q_num_heads", 0)
        width = q.shape[-1]
        if isinstance(width, int) and heads:
            found[node] = (q, k, heads, node.attributes.get_float("scale", 0.0) or (width / heads) ** -0.5)
    return found


def plan(model: ir.Model, ranges: Mapping[str, Range], norms: Mapping[str, float]) -> Plan:
    """Decides what stays in fp32.

    Args:
        model: Element types known.
        ranges: Of every float value of the main graph, by name.
        norms: Largest norm of a head's row of queries and keys, by name.
    """
    nodes = list(model.graph)
    made = Plan({}, _plain(model.graph, ranges))
    attention = attention_inputs(model.graph)
    for node in nodes:
        if not _floats(node) or node.op_type in NEUTRAL:
            continue
        reason = _reason(node, made, ranges)
        if not reason and node in attention:
            q, k, _, scale = attention[node]
            bound = norms.get(str(q.name), 0.0) * norms.get(str(k.name), 0.0) * scale
            reason = f"scores may reach {bound:.3g}" if bound > LIMIT else ""
        if reason:
            made.kept[node] = reason
    for node in _islands(model.graph):
        made.kept.setdefault(node, "a float island of the source")
    _grow(nodes, made)
    return made


def _floats(node: ir.Node) -> list[ir.Value]:
    return [v for v in (*node.inputs, *node.outputs) if v is not None and v.dtype == FLOAT]


def _reason(node: ir.Node, made: Plan, ranges: Mapping[str, Range]) -> str:
    """Why a node on its own has to stay, empty where it has not."""
    if any(isinstance(value.type, ir.SequenceType) for value in _floats(node)):
        return "works on sequences of tensors"
    if _has_body(node):
        return "has a body of its own"
    if node.op_type not in HALVES:
        return f"{node.op_type} computes in fp32"
    if node in made.plain:
        if is_movement(node) or _small_whole(node, ranges):
            return ""
        return "arithmetic on masks or positions"
    for value in _floats(node):
        peak = ranges[str(value.name)].peak if str(value.name) in ranges else 0.0
        # A mask is clamped where it comes in.
        if peak > LIMIT and not _plain_input(value, made.plain, ranges):
            return f"{'reaches' if value.producer() is node else 'reads'} {peak:.3g}"
    if node.op_type in _NORMS | _SKIP_NORMS:
        sides = node.inputs[: 2 if node.op_type in _SKIP_NORMS else 1]
        peak = sum(ranges[str(v.name)].peak for v in sides if v is not None and str(v.name) in ranges)
        if peak > _NORM_LIMIT:
            return f"a norm over values up to {peak:.3g}"
    return _constants(node)


def _has_body(node: ir.Node) -> bool:
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attributes.values())


def _constants(node: ir.Node) -> str:
    """Which constant would not survive, empty when all do."""
    for value in node.inputs:
        tensor = fixed(value) if value is not None and value.dtype == FLOAT else None
        if tensor is None:
            continue
        array = tensor.numpy()
        finite = np.abs(array[np.isfinite(array)])
        top = float(finite.max()) if finite.size else 0.0
        if top > LIMIT:
            return f"a constant of {top:.3g}"
        if array.size == 1 and top and abs(float(np.float16(top)) / top - 1) > 1e-2:
            return f"a constant of {top:.3g}"
    return ""


def _small_whole(node: ir.Node, ranges: Mapping[str, Range]) -> bool:
    """Whether a Cast turns truth values or masks of 0 and 1 into floats, or a node writes one number all over."""
    source, found = node.inputs[0] if node.inputs else None, ranges.get(str(node.outputs[0].name))
    if node.op_type == "ConstantOfShape":
        return found is None or found.peak <= LIMIT
    if node.op_type != "Cast" or source is None or source.dtype is None:
        return False
    return source.dtype == ir.DataType.BOOL or (source.dtype.is_integer() and found is not None and found.peak <= 1)


def _plain(graph: ir.Graph, ranges: Mapping[str, Range]) -> set[ir.Node]:
    """Nodes with float outputs that come of whole numbers, truth values and small constants alone."""
    plain: set[ir.Node] = set()
    for node in graph:
        table = fixed(node.inputs[0]) if node.op_type == "Gather" else None
        if _has_body(node):  # It may read anything.
            continue
        if not any(value.dtype == FLOAT for value in node.outputs) or node.op_type in _PRODUCTS or table is not None:
            continue
        floats = [value for value in node.inputs if value is not None and value.dtype == FLOAT]
        if all(_plain_input(value, plain, ranges) for value in floats):
            plain.add(node)
    return plain


def _plain_input(value: ir.Value, plain: set[ir.Node], ranges: Mapping[str, Range]) -> bool:
    tensor, found = fixed(value), ranges.get(str(value.name))
    if value.is_graph_input():  # An additive mask, if it is filled with such numbers.
        return found is not None and found.low < -LIMIT and found.high <= 1
    return tensor.size < _LARGE if tensor is not None else value.producer() in plain


def _islands(graph: ir.Graph) -> set[ir.Node]:
    """Nodes on float values between a Cast up from halves and a Cast down to halves."""

    def reached(from_node: Callable[[ir.Node], bool], step: Callable[[ir.Node], Any]) -> set[ir.Node]:
        found: set[ir.Node] = set()
        ahead = [node for node in graph if from_node(node)]
        while ahead:
            for value in step(ahead.pop()):
                for node in value:
                    if node is not None and node not in found and node.graph is graph:
                        found.add(node)
                        ahead.append(node)
        return found

    def up(node: ir.Node) -> bool:
        source = node.inputs[0] if node.inputs else None
        return node.op_type == "Cast" and source is not None and source.dtype == HALF and node.outputs[0].dtype == FLOAT

    def down(node: ir.Node) -> bool:
        source = node.inputs[0] if node.inputs else None
        return node.op_type == "Cast" and source is not None and source.dtype == FLOAT and node.outputs[0].dtype == HALF

    after = reached(up, lambda n: [[use.node for use in v.uses()] for v in n.outputs if v.dtype == FLOAT])
    before = reached(down, lambda n: [[v.producer()] for v in n.inputs if v is not None and v.dtype == FLOAT])
    starts = {node for node in graph if up(node)}
    return (after | starts) & before


def _grow(nodes: list[ir.Node], made: Plan) -> None:
    """Keeps cheap nodes whose results only nodes in fp32 read, and divisions by what is in fp32."""
    before = -1
    while before != len(made.kept):
        before = len(made.kept)
        for node in reversed(nodes):
            if node in made.kept or node.domain or not _floats(node):
                continue
            users = [use.node for value in node.outputs for use in value.uses()]
            ends = any(value.is_graph_output() for value in node.outputs)
            sources = [value.producer() for value in node.inputs if value is not None and value.dtype == FLOAT]
            between = is_movement(node) and all(source in made.kept for source in sources)
            if (between or node.op_type in _CHEAP) and users and not ends and all(user in made.kept for user in users):
                made.kept[node] = DERIVED[0]
        for node in nodes:
            divisor = node.inputs[1] if node.op_type == "Div" else None
            if divisor is not None and node not in made.kept and divisor.producer() in made.kept:
                made.kept[node] = DERIVED[1]
