"""Drops what a graph writes without doing anything by it, so that patterns see the formula alone.

- A cast to the type that is there: torch.onnx writes one for ``softmax(..., dtype=float32)``. A cast to a type
  that holds every value of the first, on the way to a third.
- A reshape of a reshape: the last one alone says the shape.
- Reshapes and expansions that end in the shape they began with, and a reduced axis that is dropped only to be
  brought back: torch.onnx writes both for ``var(..., keepdim=True)``.
- A slice from the first to the last element: torch.onnx writes one for the ``:`` of ``x[:, 0]``.
- The last axis of a reduction counted from the front: written -1, equal reductions are seen to be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from .guards import fixed, same_axis

__all__ = ["drop_no_ops"]

_RESHAPES = frozenset({"Reshape", "Expand", "Squeeze", "Unsqueeze", "Flatten"})
_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax"})
_INTS = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64)
_WIDER: dict[ir.DataType, frozenset[ir.DataType]] = {
    ir.DataType.BOOL: frozenset(
        {ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.UINT8, *_INTS}
    ),
    ir.DataType.FLOAT16: frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE}),
    ir.DataType.BFLOAT16: frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE}),
    ir.DataType.FLOAT: frozenset({ir.DataType.DOUBLE}),
    ir.DataType.UINT8: frozenset({*_INTS[1:], ir.DataType.FLOAT, ir.DataType.DOUBLE}),
    ir.DataType.INT8: frozenset({*_INTS[1:], ir.DataType.FLOAT, ir.DataType.DOUBLE}),
    ir.DataType.INT32: frozenset({ir.DataType.INT64, ir.DataType.DOUBLE}),
}
"""Types that hold every value of a type."""


_ENDLESS = 2**31 - 1
"""Where slices end that have no end: longer axes than this do not occur."""


def drop_no_ops(model: ir.Model) -> None:
    """Removes them, in place."""
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain or not node.inputs or node.inputs[0] is None:
            continue
        if node.op_type == "Cast":
            _skip_wider_cast(node)
            kind = node.inputs[0].dtype
            if kind is not None and kind == node.attributes.get_int("to"):
                _identity(node, node.inputs[0])
        elif node.op_type == "Slice":
            if _takes_all(node):
                _identity(node, node.inputs[0])
        elif node.op_type in _REDUCTIONS:
            if _reduces_last(node):
                _set_axes(node, [-1])
        elif node.op_type in _RESHAPES:
            _skip_reshape(node)
            _undone(node)
    passes.IdentityEliminationPass()(model)


def _before(node: ir.Node, op_type: str) -> ir.Value | None:
    """The input of the node of this operator that comes before, if nothing else needs what it makes."""
    x = node.inputs[0]
    before = x.producer() if x is not None else None
    if x is None or before is None or before.domain or before.op_type != op_type:
        return None
    return before.inputs[0] if len(x.uses()) == 1 and not x.is_graph_output() else None


def _skip(node: ir.Node, x: ir.Value) -> None:
    before = node.inputs[0].producer() if node.inputs[0] is not None else None
    node.replace_input_with(0, x)
    if before is not None and before.graph is not None:
        before.graph.remove(before, safe=True)


def _skip_wider_cast(node: ir.Node) -> None:
    while (x := _before(node, "Cast")) is not None and x.dtype and (between := node.inputs[0]) is not None:
        if between.dtype not in _WIDER.get(x.dtype, ()):
            return
        _skip(node, x)


def _skip_reshape(node: ir.Node) -> None:
    """A 0 in the last shape stands for an axis of the shape before, so it needs that one."""
    shape = fixed(node.inputs[1]) if node.op_type == "Reshape" and len(node.inputs) > 1 else None
    if shape is not None and (shape.numpy() != 0).all():
        while (x := _before(node, "Reshape")) is not None:
            _skip(node, x)


def _undone(node: ir.Node) -> None:
    """Looks back along the reshapes for the shape that this one ends in.

    A chain of them keeps the order of the elements, and no other can undo an Expand that adds any.
    """
    wanted = node.outputs[0].shape
    x = node.inputs[0]
    while x is not None and x.shape is not None:
        if _same_shape(x.shape, wanted):
            _identity(node, x)
            return
        before = x.producer()
        if before is None or before.domain:
            return
        if before.op_type in _REDUCTIONS and before.attributes.get_int("keepdims", 1) == 0:
            if _reduces_last(before) and _same_shape((*x.shape, 1), wanted):
                kept = ir.node(before.op_type, before.inputs, {**before.attributes, "keepdims": 1})
                kept.metadata_props.update(before.metadata_props)
                kept.outputs[0].shape, kept.outputs[0].type = wanted, x.type
                _insert(node, kept)
                _identity(node, kept.outputs[0])
            return
        x = before.inputs[0] if before.op_type in _RESHAPES else None


def _takes_all(node: ir.Node) -> bool:
    """Whether a slice begins at 0, goes on without an end, and leaves nothing out."""
    found = [None if value is None else fixed(value) for value in (*node.inputs[1:3], *node.inputs[4:5])]
    if len(found) < 2 or any(tensor is None for tensor in found):
        return False
    starts, ends, *steps = (tensor.numpy() for tensor in found if tensor is not None)
    return bool((starts == 0).all() and (ends >= _ENDLESS).all() and all((step == 1).all() for step in steps))


def _identity(node: ir.Node, of: ir.Value) -> None:
    node.op_type = "Identity"
    node.attributes.clear()
    node.resize_inputs(1)
    node.replace_input_with(0, of)


def _insert(before: ir.Node, node: ir.Node) -> None:
    assert before.graph is not None
    before.graph.insert_before(before, node)


def _same_shape(a: Sequence[Any] | ir.Shape, b: ir.Shape | None) -> bool:
    return b is not None and len(a) == len(b) and all(same_axis(x, y) for x, y in zip(a, b, strict=True))


def _reduces_last(node: ir.Node) -> bool:
    """Whether a reduction since opset 18 reduces the last axis alone."""
    if len(node.inputs) < 2 or node.inputs[0] is None or node.inputs[1] is None:
        return False
    axes, shape = fixed(node.inputs[1]), node.inputs[0].shape
    if axes is None or axes.size != 1:
        return False
    last = int(axes.numpy().reshape(()))
    return last == -1 or (shape is not None and last == len(shape) - 1)


def _set_axes(node: ir.Node, axes: list[int]) -> None:
    constant = ir.node("Constant", [], {"value": ir.tensor(np.array(axes, np.int64))})
    constant.outputs[0].dtype, constant.outputs[0].shape = ir.DataType.INT64, ir.Shape([len(axes)])
    _insert(node, constant)
    node.replace_input_with(1, constant.outputs[0])
