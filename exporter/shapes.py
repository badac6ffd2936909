"""Symbolic shapes for graphs of others, by ``onnx_shape_inference`` (of onnx_ir's maintainer).

Guards compare axes by name. onnx's own inference invents a name per operator once a size is computed by the graph
itself, as TorchScript writes it (``Shape``, ``Gather``, ``Concat``, ``Reshape``); this one follows such sizes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnx_shape_inference as inference

from .guards import fixed
from .quiet import quiet
from .versions import nodes

__all__ = ["infer_shapes"]


def infer_shapes(model: ir.Model) -> None:
    """Infers the shapes that the file does not give by name, in place."""
    for node in nodes(model):
        _plain_expand(node)
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output() and not all(map(_known, value.shape)):
                value.shape = None
    with quiet(), contextlib.suppress(ValueError, inference.ShapeInferenceError):
        inference.infer_symbolic_shapes(model, warn_on_missing=False)
    for node in nodes(model):
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output():
                value.shape = ir.Shape(_number(size) for size in value.shape)
    _sizes_from_inputs(model)
    with quiet():
        # Knows more operators. Not strict: one wrong shape in a file would leave every other one unknown.
        passes.ShapeInferencePass(strict_mode=False, data_prop=True)(model)


def _known(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, int) or (size.value is not None and not str(size.value).startswith("unk__"))


def _number(size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    """A size that arithmetic on names has made a number."""
    text = str(size)
    return int(text) if text.isdigit() else size


def _sizes_from_inputs(model: ir.Model) -> None:
    """Takes sizes from the graph's inputs, so that no inner value is kept alive for its shape."""
    where = {
        str(size): (value, axis)
        for value in reversed(model.graph.inputs)
        for axis, size in enumerate(value.shape or ())
        if not isinstance(size, int) and size.value is not None
    }
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type == "Shape" and not node.domain else None
        if x is None or x.shape is None or x.is_graph_input() or node.outputs[0].is_graph_output():
            continue
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(x.shape))
        sizes = list(x.shape)[start:end]
        factors = [str(size).split("*") for size in sizes]
        if not sizes or not all(part.isdigit() or part in where for parts in factors for part in parts):
            continue

        def write(
            op_type: str, inputs: Sequence[ir.Value], size: int = 1, at: ir.Node = node, **attributes: Any
        ) -> ir.Value:
            made = ir.node(op_type, inputs, attributes)
            made.outputs[0].dtype, made.outputs[0].shape = ir.DataType.INT64, ir.Shape([size])
            model.graph.insert_before(at, made)
            return made.outputs[0]

        def read(part: str, write: Callable[..., ir.Value] = write) -> ir.Value:
            if part.isdigit():
                return write("Constant", [], value=ir.tensor(np.array([int(part)], np.int64)))
            value, axis = where[part]
            return write("Shape", [value], start=axis, end=axis + 1)

        whole = [functools.reduce(lambda a, b: write("Mul", [a, b]), map(read, parts)) for parts in factors]
        size = whole[0] if len(whole) == 1 else write("Concat", whole, len(whole), axis=0)
        node.outputs[0].replace_all_uses_with(size)
        model.graph.remove(node, safe=True)


def _plain_expand(node: ir.Node) -> None:
    """``Expand(x, Where(Equal(sizes, -1), 1, sizes))`` -> ``Expand(x, sizes with 1 for -1)``.

    TorchScript writes ``expand`` so; -1 keeps an axis, and sizes that are computed from shapes are never -1.
    """
    if node.op_type != "Expand" or node.domain or node.inputs[1] is None:
        return
    where = node.inputs[1].producer()
    if where is None or where.op_type != "Where" or where.domain:
        return
    equal = where.inputs[0].producer() if where.inputs[0] is not None else None
    sizes = where.inputs[2]
    if equal is None or equal.op_type != "Equal" or sizes is None or sizes not in equal.inputs:
        return
    other = equal.inputs[1] if equal.inputs[0] is sizes else equal.inputs[0]
    if not (_all(other, -1) and _all(where.inputs[1], 1)):
        return
    concat = sizes.producer()
    if concat is None or concat.op_type != "Concat" or concat.domain or node.graph is None:
        return
    parts: list[ir.Value | None] = []
    for part in concat.inputs:
        array = fixed(part)
        if array is not None and (array.numpy() == -1).any():
            one = ir.node("Constant", [], {"value": ir.tensor(np.where(array.numpy() == -1, 1, array.numpy()))})
            node.graph.insert_before(node, one)
            parts.append(one.outputs[0])
        elif array is not None or (part is not None and _is_size(part)):
            parts.append(part)
        else:
            return
    plain = ir.node("Concat", parts, {"axis": 0})
    plain.outputs[0].type = sizes.type
    node.graph.insert_before(node, plain)
    node.replace_input_with(1, plain.outputs[0])


def _all(value: ir.Value | None, number: int) -> bool:
    tensor = fixed(value)
    return tensor is not None and tensor.size > 0 and bool((tensor.numpy() == number).all())


def _is_size(value: ir.Value) -> bool:
    """Whether a value is taken from a shape."""
    node = value.producer()
    for _ in range(8):
        if node is None or node.domain:
            return False
        if node.op_type == "Shape":
            return True
        if node.op_type not in ("Gather", "Slice", "Unsqueeze", "Squeeze", "Cast", "Reshape", "Identity"):
            return False
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return False
