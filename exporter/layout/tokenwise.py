"""Operators that compute every token from that token alone, and how each is written on packed tokens.

Whether a node is token-wise is decided from what its operator means (ai.onnx specification) and from shapes, never
from names of layers: an elementwise operator is, a MatMul with a matrix is, a reduction is as long as it leaves rows
and positions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from ..guards import attributes_of
from . import moves, rotary
from .steps import Rule, Step, Views, Writer, alone, fits, ints_of
from .views import Axes, View

__all__ = ["step"]

# fmt: off
_ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual",
    "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu",
    "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh",
    "ThresholdedRelu", "Where", "Xor",
})
# fmt: on
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_SOFTMAX = frozenset({"Softmax", "LogSoftmax"})
_REDUCTIONS = frozenset(
    {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceL2", "ReduceSumSquare"}
)


def step(node: ir.Node, views: Views, names: Axes) -> Step | None:
    """How a node works on packed tokens.

    Args:
        node: Of the padded graph.
        views: The view of a value that has tokens, ``None`` for others.
        names: The token axes.

    Returns:
        The step, or ``None`` for a node that mixes tokens or has none.
    """
    if node.domain or not any(views(value) for value in node.inputs):
        return None
    if node.op_type in _ELEMENTWISE:
        return _elementwise(node, views, names)
    if node.op_type in _NORMS:
        return _norm(node, views)
    if node.op_type in _SOFTMAX:
        return _softmax(node, views)
    if node.op_type in _REDUCTIONS:
        return _reduction(node, views)
    rule = _RULES.get(node.op_type)
    return None if rule is None else rule(node, views, names)


def _elementwise(node: ir.Node, views: Views, names: Axes) -> Step | None:
    given = [value for value in node.inputs if value is not None]
    rank = max(len(value.shape) if value.shape is not None else 99 for value in given)
    if rank == 99:
        return None
    whole = next((view for value in given if (view := views(value)) and len(view.axes) == rank), None)
    if whole is None:
        return None
    axes = list(whole.axes)
    for value in given:
        view = views(value)
        if view is None:
            if not fits(value, whole, names):
                return None
            sizes = [(size,) if isinstance(size, int) else (1,) for size in value.shape or ()]
        else:
            sizes = list(view.axes)
        for axis, atoms in enumerate(sizes, rank - len(sizes)):
            if view is not None and atoms != axes[axis] and not (view.plain(axis - rank) and whole.plain(axis)):
                return None  # tokens stand elsewhere
            if whole.plain(axis) and axes[axis] == (1,):
                axes[axis] = tuple(atoms)
    out = View(tuple(axes))
    if not out.whole:
        return None

    def write(writer: Writer) -> list[ir.Value]:
        inputs = [
            None if value is None else writer.tokens(value) if views(value) else writer.beside(value, out)
            for value in node.inputs
        ]
        depth = len(out.rest)
        inputs = [
            _widened(writer, value, views(old), depth) if old is not None and value is not None else value
            for old, value in zip(node.inputs, inputs, strict=True)
        ]
        return writer.node(node.op_type, inputs, attributes_of(node))

    return Step((out,), write)


def _widened(writer: Writer, value: ir.Value, view: View | None, depth: int) -> ir.Value:
    """Axes that broadcasting adds on the left, behind the tokens."""
    if view is None or len(view.rest) == depth:
        return value
    return writer.node("Reshape", [value, writer.ints([0, *[1] * (depth - len(view.rest)), *view.rest])], {})[0]


def _like(
    node: ir.Node, x: ir.Value, attributes: Mapping[str, Any] | None = None
) -> Callable[[Writer], list[ir.Value]]:
    """Writes the same operator on packed tokens beside the same other inputs."""

    def write(writer: Writer) -> list[ir.Value]:
        inputs = [writer.tokens(x), *node.inputs[1:]]
        return writer.node(node.op_type, inputs, attributes_of(node) if attributes is None else attributes)

    return write


def _norm(node: ir.Node, views: Views) -> Step | None:
    found = alone(node, views)
    if found is None or len(node.outputs) > 1:
        return None
    x, view = found
    rank = len(view.axes)
    axis = node.attributes.get_int("axis", -1) % rank
    if not all(view.plain(i) for i in range(axis, rank)):
        return None
    for weights in node.inputs[1:]:
        shape = None if weights is None else weights.shape
        if weights is not None and (shape is None or len(shape) > rank - axis or not shape.is_static()):
            return None
    return Step((view,), _like(node, x, {**attributes_of(node), "axis": axis - rank}))


def _softmax(node: ir.Node, views: Views) -> Step | None:
    found = alone(node, views)
    if found is None:
        return None
    x, view = found
    axis = node.attributes.get_int("axis", -1) % len(view.axes)
    if not view.plain(axis):
        return None
    return Step((view,), _like(node, x, {**attributes_of(node), "axis": view.packed(axis)}))


def _reduction(node: ir.Node, views: Views) -> Step | None:
    found, axes = alone(node, views), ints_of(node, 1)
    if found is None or not axes:
        return None
    x, view = found
    chosen = sorted(axis % len(view.axes) for axis in axes)
    if not all(view.plain(axis) for axis in chosen):
        return None
    keep = bool(node.attributes.get_int("keepdims", 1))
    kept = [(1,) if i in chosen else axis for i, axis in enumerate(view.axes) if keep or i not in chosen]

    def write(writer: Writer) -> list[ir.Value]:
        inputs = [writer.tokens(x), writer.ints([view.packed(axis) for axis in chosen])]
        return writer.node(node.op_type, inputs, {"keepdims": int(keep)})

    return Step((View(tuple(kept)),), write)


def _matmul(node: ir.Node, views: Views, names: Axes) -> Step | None:
    found = alone(node, views)
    matrix = node.inputs[1]
    if found is None or matrix is None or matrix.shape is None or len(matrix.shape) != 2:
        return None
    x, view = found
    inner = names.atoms(matrix.shape[0])
    width = matrix.shape[1]
    if not isinstance(width, int) or not view.plain(len(view.axes) - 1) or inner is None or len(view.axes) < 2:
        return None
    return Step((View((*view.axes[:-1], (width,))),), _like(node, x))


def _gemm(node: ir.Node, views: Views, names: Axes) -> Step | None:
    found = alone(node, views)
    matrix, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if found is None or node.attributes.get_int("transA", 0) or matrix is None or matrix.shape is None:
        return None
    x, view = found
    width = matrix.shape[0 if node.attributes.get_int("transB", 0) else 1]
    plain = len(view.axes) == 2 and not view.kept(0) and view.plain(1)
    if not isinstance(width, int) or not plain or (bias is not None and (bias.shape is None or len(bias.shape) > 1)):
        return None
    return Step((View((view.axes[0], (width,))),), _like(node, x))


def _gather(node: ir.Node, views: Views, names: Axes) -> Step | None:
    del names
    data, indices = node.inputs[:2]
    if data is None or indices is None or data.shape is None or indices.shape is None:
        return None
    axis = node.attributes.get_int("axis", 0) % len(data.shape)
    view, picks = views(data), views(indices)
    if view is None and picks is not None and axis == 0 and all(isinstance(size, int) for size in data.shape[1:]):
        after = View((*picks.axes, *((size,) for size in data.shape[1:] if isinstance(size, int))))
        return Step((after,), lambda writer: writer.node("Gather", [data, writer.tokens(indices)], {"axis": 0}))
    fixed_sizes = [size for size in indices.shape if isinstance(size, int)]
    if view is None or picks is not None or not view.plain(axis) or len(fixed_sizes) != len(indices.shape):
        return None
    after = View((*view.axes[:axis], *((size,) for size in fixed_sizes), *view.axes[axis + 1 :]))
    attributes = {"axis": view.packed(axis)}
    return Step((after,), lambda writer: writer.node("Gather", [writer.tokens(data), indices], attributes))


def _slice(node: ir.Node, views: Views, names: Axes) -> Step | None:
    found, shape = alone(node, views), node.outputs[0].shape
    axes = ints_of(node, 3) if len(node.inputs) > 3 else None
    if found is None or axes is None or shape is None:
        return None
    x, view = found
    chosen = [axis % len(view.axes) for axis in axes]
    after = [names.atoms(size) for size in shape]
    if not all(view.plain(axis) and isinstance(shape[axis], int) for axis in chosen) or None in after:
        return None
    kept = View(tuple(tuple(after[i] or ()) if i in chosen else axis for i, axis in enumerate(view.axes)))

    def write(writer: Writer) -> list[ir.Value]:
        places = writer.ints([view.packed(axis) for axis in chosen])
        return writer.node("Slice", [writer.tokens(x), *node.inputs[1:3], places, *node.inputs[4:]], {})

    return Step((kept,), write)


def _split(node: ir.Node, views: Views, names: Axes) -> Step | None:
    found = alone(node, views)
    if found is None:
        return None
    x, view = found
    axis = node.attributes.get_int("axis", 0) % len(view.axes)
    sizes = [names.atoms(value.shape[axis]) if value.shape is not None else None for value in node.outputs]
    if not view.plain(axis) or any(size is None or not isinstance(size[0], int) for size in sizes):
        return None
    parts = tuple(View((*view.axes[:axis], tuple(size or ()), *view.axes[axis + 1 :])) for size in sizes)
    return Step(parts, _like(node, x, {**attributes_of(node), "axis": view.packed(axis)}))


def _concat(node: ir.Node, views: Views, names: Axes) -> Step | None:
    del names
    found = [views(value) for value in node.inputs]
    first = found[0]
    if first is None or any(view is None for view in found):
        return None
    axis = node.attributes.get_int("axis", 0) % len(first.axes)

    def others(view: View) -> tuple[Any, ...]:
        return (*view.axes[:axis], *view.axes[axis + 1 :])

    if any(view is None or not view.plain(axis) or others(view) != others(first) for view in found):
        return None
    width = sum(view.size(axis) for view in found if view is not None)
    after = View((*first.axes[:axis], (width,), *first.axes[axis + 1 :]))
    attributes = {"axis": first.packed(axis)}

    def write(writer: Writer) -> list[ir.Value]:
        return writer.node("Concat", [writer.tokens(value) for value in node.inputs if value is not None], attributes)

    return Step((after,), write)


_RULES: Mapping[str, Rule] = {
    **moves.RULES,
    "RotaryEmbedding": rotary.rotary,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
}
