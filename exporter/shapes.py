"""Symbolic shapes for graphs of others, by ``onnx_shape_inference`` (of onnx_ir's maintainer).

Guards compare axes by name. onnx's own inference invents a name per operator once a size is computed by the graph
itself, as TorchScript writes it (``Shape``, ``Gather``, ``Concat``, ``Reshape``); this one follows such sizes.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnx_shape_inference as inference

from .guards import fixed
from .quiet import quiet
from .shape_rules import register
from .versions import nodes

__all__ = ["forget_invented", "infer_shapes", "sizes_from_inputs"]

_ROUNDS = 4
_INVENTED = re.compile(r"\bunk__|\b_d\d+\b")
"""Names that onnx and onnx_shape_inference give to axes they know nothing of."""


def infer_shapes(model: ir.Model) -> None:
    """Infers the shapes that the file does not give by name, in place."""
    for node in nodes(model):
        _plain_expand(node)
    _name_numbers(model)
    register()
    unknown = None
    for _ in range(_ROUNDS):
        _forget(model)
        with quiet(), contextlib.suppress(ValueError, inference.ShapeInferenceError):
            inference.infer_symbolic_shapes(model, warn_on_missing=False, adopt_declared_symbols=False)
        for node in nodes(model):
            for value in node.outputs:
                if value.shape is not None and not value.is_graph_output():
                    value.shape = ir.Shape(_plain(size) for size in value.shape)
        sizes_from_inputs(model)
        with quiet():
            # Knows more operators. Not strict: one wrong shape in a file would leave every other one unknown.
            passes.ShapeInferencePass(strict_mode=False, data_prop=True)(model)
        # What one of them finds, the other may follow further.
        before, unknown = unknown, len(_unknown(model))
        if not unknown or (before is not None and unknown >= before):
            break


def forget_invented(model: ir.Model) -> None:
    """Leaves open, in place, the sizes of inner values that inference has made names for.

    Those names count what inference has met on its way, so the same graph would not always give the same file.
    """
    for node in nodes(model):
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output() and not all(map(_known, value.shape)):
                value.shape = ir.Shape(size if _known(size) else None for size in value.shape)


def _name_numbers(model: ir.Model) -> None:
    """Axes whose names read as numbers ("2", as some converters count them) -> names ("axis_2"), in place.

    Inference would take them for sizes.
    """
    values = [value for graph in (model.graph, *model.graph.subgraphs()) for value in graph.inputs]
    values += [value for node in nodes(model) for value in node.outputs]
    names = {str(size.value) for value in values for size in value.shape or () if isinstance(size, ir.SymbolicDim)}
    wrong = sorted(name for name in names if name and not any(letter.isalpha() or letter == "_" for letter in name))
    named: dict[str, str] = {}
    for name in wrong:
        free = "axis_" + re.sub(r"\W", "_", name)
        while free in names:
            free += "_"
        names.add(free)
        named[name] = free
    for value in values if named else ():
        if value.shape is not None:
            value.shape = ir.Shape(
                size if isinstance(size, int) else ir.SymbolicDim(named.get(str(size.value), size.value))
                for size in value.shape
            )


def _unknown(model: ir.Model) -> list[ir.Value]:
    """Values of unknown rank, or with axes that have no name of the file's own."""
    values = [value for node in nodes(model) for value in node.outputs]
    return [value for value in values if value.shape is None or not all(map(_known, value.shape))]


def _forget(model: ir.Model) -> None:
    for value in _unknown(model):
        if not value.is_graph_output():
            value.shape = None


def _known(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, int) or (size.value is not None and not _INVENTED.search(str(size.value)))


def _plain(size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    """A size in its plainest form: arithmetic on names may come to a number, ``s ** 2 // s`` is ``s``."""
    if isinstance(size, int) or size.value is None or size.value.isidentifier():
        return size
    with contextlib.suppress(ValueError, TypeError, SyntaxError):
        size = size.simplify()
    text = str(size)
    return int(text) if text.isdigit() else size


class _Sizes:
    """Writes sizes as they can be read from the graph's inputs."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._where = {
            str(size): (value, axis)
            for value in reversed(graph.inputs)
            for axis, size in enumerate(value.shape or ())
            if not isinstance(size, int) and size.value is not None
        }

    def known(self, size: int | ir.SymbolicDim) -> bool:
        """Whether it is a number, the size of an input's axis, or a product of such."""
        return all(isinstance(part, int) or part in self._where for part in self._parts(size))

    def _parts(self, size: int | ir.SymbolicDim) -> list[int | str]:
        """The factors of a size. What stands alone in a symbol is a name, whatever it looks like."""
        if isinstance(size, int):
            return [size]
        name = str(size.value)
        parts = [name] if name in self._where else name.split("*")
        return [int(part) if len(parts) > 1 and part.isdigit() else part for part in parts]

    def write(self, sizes: Sequence[int | ir.SymbolicDim], before: ir.Node) -> ir.Value:
        """A vector of known sizes, int64."""
        if all(isinstance(size, int) for size in sizes):
            array = np.array(sizes, np.int64)
            return self._node("Constant", [], before, array.shape, value=ir.tensor(array))
        values = []
        for size in sizes:
            factors = [self._factor(part, before) for part in self._parts(size)]
            values.append(functools.reduce(lambda a, b: self._node("Mul", [a, b], before), factors))
        return values[0] if len(values) == 1 else self._node("Concat", values, before, (len(values),), axis=0)

    def scalar(self, size: int | ir.SymbolicDim, before: ir.Node) -> ir.Value:
        """One known size, 0-d."""
        if isinstance(size, int):
            return self._node("Constant", [], before, (), value=ir.tensor(np.array(size, np.int64)))
        zero = self._node("Constant", [], before, value=ir.tensor(np.array([0], np.int64)))
        return self._node("Squeeze", [self.write([size], before), zero], before, ())

    def _factor(self, part: int | str, before: ir.Node) -> ir.Value:
        if isinstance(part, int):
            return self._node("Constant", [], before, value=ir.tensor(np.array([part], np.int64)))
        value, axis = self._where[part]
        return self._node("Shape", [value], before, start=axis, end=axis + 1)

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value], before: ir.Node, shape: Sequence[int] = (1,), **attributes: Any
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.INT64, ir.Shape(shape)
        self._graph.insert_before(before, node)
        return node.outputs[0]


def sizes_from_inputs(model: ir.Model) -> None:
    """Takes sizes from the graph's inputs, so that no inner value is kept alive for its shape."""
    sizes = _Sizes(model.graph)
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type == "Shape" and not node.domain else None
        if x is None or x.shape is None or x.is_graph_input() or node.outputs[0].is_graph_output():
            continue
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(x.shape))
        found = list(x.shape)[start:end]
        for user, _ in node.outputs[0].uses():
            picked = _picked(user, found)
            if picked is None or user.graph is not model.graph or user.outputs[0].is_graph_output():
                continue
            if isinstance(picked, list):
                made = sizes.write(picked, user) if picked and all(map(sizes.known, picked)) else None
            else:
                made = sizes.scalar(picked, user) if sizes.known(picked) else None
            if made is not None:
                user.outputs[0].replace_all_uses_with(made)
                model.graph.remove(user, safe=True)
        if found and all(map(sizes.known, found)):
            node.outputs[0].replace_all_uses_with(sizes.write(found, node))
            model.graph.remove(node, safe=True)


def _picked(user: ir.Node, sizes: list[Any]) -> list[Any] | Any | None:
    """What a Gather (one size, or a list) or a Slice takes out of a shape; ``None`` where that is unclear."""
    operands = [fixed(value) for value in user.inputs[1:]]
    if user.domain or not operands or any(operand is None for operand in operands):
        return None
    arrays = [operand.numpy() for operand in operands if operand is not None]
    if user.op_type == "Gather" and user.attributes.get_int("axis", 0) == 0:
        if arrays[0].ndim > 1 or not all(-len(sizes) <= i < len(sizes) for i in arrays[0].reshape(-1)):
            return None
        return sizes[int(arrays[0])] if arrays[0].ndim == 0 else [sizes[int(i)] for i in arrays[0].reshape(-1)]
    if user.op_type == "Slice" and all(array.size == 1 for array in arrays):
        start, end, *rest = (int(array.reshape(())) for array in arrays)
        return sizes[start:end] if rest in ([], [0], [0, 1]) else None
    return None


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
