"""What rotary embeddings are written with: halves and neighbours of a head, turned by a quarter, and their tables."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..fusion import NEEDED_ELSEWHERE
from ..guards import Refuse, axis_of, fixed, rank

__all__ = ["alone", "cut", "equal_halves", "factors", "source", "turned"]

_STEPS = 16
_ELEMENTWISE = frozenset({"Cos", "Sin", "Cast", "Identity", "Neg"})
_OUTER = frozenset({"Unsqueeze", "Squeeze", "Slice", "Gather", "Expand", "Transpose"})
"""Move or drop whole rows: fine as long as they leave the last axis alone."""


def alone(inner: list[ir.Value]) -> None:
    """Refuses values that are needed elsewhere."""
    for value in inner:
        if value.is_graph_output() or len({user for user, _ in value.uses()}) > 1:
            raise Refuse(NEEDED_ELSEWHERE, value)


def factors(value: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """Both orders of a product's factors; nothing for other values."""
    node = value.producer()
    if node is None or node.op_type != "Mul" or node.domain or node.inputs[0] is None or node.inputs[1] is None:
        return []
    a, b = node.inputs[0], node.inputs[1]
    return [(a, b), (b, a)]


def cut(value: ir.Value) -> tuple[ir.Value, int, int] | None:
    """(x, start, stop) of a contiguous part of the last axis, by Slice or Split."""
    found = _part(value)
    return None if found is None or found[3] != 1 else found[:3]


def source(value: ir.Value) -> tuple[ir.Value, str] | None:
    """(x, "first" | "second" | "even" | "odd") of half of the channels of x."""
    found = _part(value)
    if found is None:
        return _of_pairs(value)
    x, start, stop, step = found
    width = axis_of(x, -1)
    if not isinstance(width, int) or width % 2:
        return None
    names = {(0, width // 2, 1): "first", (width // 2, width, 1): "second", (0, width, 2): "even", (1, width, 2): "odd"}
    name = names.get((start, stop, step))
    return None if name is None else (x, name)


def turned(value: ir.Value) -> tuple[ir.Value, bool, list[ir.Value]] | None:
    """(x, interleaved, inner values) of ``[-x2, x1]``."""
    node = value.producer()
    if node is None or node.domain:
        return None
    inner = [value]
    interleaved = node.op_type == "Reshape"
    if interleaved:
        assert node.inputs[0] is not None
        inner.append(node.inputs[0])
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    if not _last(node.attributes.get_int("axis", 0), rank(node.outputs[0])):
        return None
    parts: list[ir.Value] = []
    for part in node.inputs:
        if part is not None and interleaved:
            inner.append(part)
            part = _unsqueezed(part)
        if part is None:
            return None
        parts.append(part)
    negated = [each.producer() for each in parts]
    kinds = ("even", "odd") if interleaved else ("first", "second")
    signs = [each is not None and each.op_type == "Neg" and not each.domain for each in negated]
    pieces = [
        source(n.inputs[0] if s and n and n.inputs[0] else p) for n, s, p in zip(negated, signs, parts, strict=True)
    ]
    if pieces[0] is None or pieces[1] is None or pieces[0][0] is not pieces[1][0]:
        return None
    found = (pieces[0][1], pieces[1][1])
    if found != (kinds[1], kinds[0]):
        return None
    if signs != [True, False]:
        raise Refuse("a head is turned, but the first part is not negated alone", value)
    x = pieces[0][0]
    if interleaved and rank(value) != rank(x):
        return None
    return x, interleaved, [*inner, parts[0]]


def equal_halves(table: ir.Value, interleaved: bool) -> bool:
    """Whether the graph shows that a table holds each number twice, in both halves or in neighbours."""
    value = table
    for _ in range(_STEPS):
        tensor = fixed(value)
        if tensor is not None:
            array = tensor.numpy()
            if array.ndim == 0 or array.shape[-1] % 2:
                return False
            half = array.shape[-1] // 2
            pair = (array[..., 0::2], array[..., 1::2]) if interleaved else (array[..., :half], array[..., half:])
            return bool(np.array_equal(*pair))
        node = value.producer()
        if node is None or node.domain or not node.inputs or node.inputs[0] is None:
            return False
        if node.op_type == "Concat" and not interleaved:
            same = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
            return same and _last(node.attributes.get_int("axis", 0), rank(value))
        if node.op_type == "Reshape" and interleaved:
            return _repeated(node.inputs[0])
        if node.op_type in ("Mul", "Div"):
            numbers = [i for i, each in enumerate(node.inputs) if _scalar(each)]
            if node.op_type == "Div":
                numbers = [i for i in numbers if i == 1]
            if not numbers:
                return False
            value = node.inputs[1 - numbers[0]] or value
        elif node.op_type in _ELEMENTWISE or (node.op_type in _OUTER and _last_axis_kept(node)):
            value = node.inputs[0]
        else:
            return False
    return False


def _repeated(value: ir.Value) -> bool:
    """Whether the last axis of (..., n, 2) holds one number twice: by Concat, Expand or Tile."""
    node = value.producer()
    if node is None or node.domain or axis_of(value, -1) != 2 or node.inputs[0] is None:
        return False
    if node.op_type == "Concat":
        parts = [_unsqueezed(each) for each in node.inputs if each is not None]
        return len(parts) == 2 and parts[0] is not None and parts[0] is parts[1]
    return node.op_type in ("Expand", "Tile") and axis_of(node.inputs[0], -1) == 1


def _last_axis_kept(node: ir.Node) -> bool:
    x, y = node.inputs[0], node.outputs[0]
    width = axis_of(x, -1) if x is not None else None
    if not isinstance(width, int) or width < 2 or axis_of(y, -1) != width:
        return False
    depth, operands = rank(x) or 0, [fixed(each) for each in node.inputs[1:]]
    if node.op_type == "Transpose":
        return _last(list(node.attributes.get_ints("perm", [0]))[-1], depth)
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) % depth != depth - 1
    if node.op_type == "Slice":
        axes = operands[2] if len(operands) > 2 else None
        return axes is not None and all(int(axis) % depth != depth - 1 for axis in axes.numpy().reshape(-1))
    return True  # Unsqueeze, Squeeze and Expand cannot move an axis that has kept its size of 2 or more at the end.


def _part(value: ir.Value) -> tuple[ir.Value, int, int, int] | None:
    """(x, start, stop, step) of a part of the last axis, by Slice or Split."""
    node = value.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return None
    x = node.inputs[0]
    width, depth = axis_of(x, -1), rank(x)
    if not isinstance(width, int) or depth is None:
        return None
    if node.op_type == "Split":
        if not _last(node.attributes.get_int("axis", 0), depth):
            return None
        sizes = [axis_of(each, -1) for each in node.outputs]
        if not all(isinstance(size, int) for size in sizes):
            return None
        index = list(node.outputs).index(value)
        start = sum(sizes[:index])
        return x, start, start + sizes[index], 1
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return None
    operands = [fixed(each) for each in node.inputs[1:]]
    if any(each is None or each.size != 1 for each in operands):
        return None
    start, stop, axis, *step = (int(each.numpy().reshape(())) for each in operands if each is not None)
    if not _last(axis, depth) or (step and step[0] < 1):
        return None
    return x, *slice(start, stop, step[0] if step else 1).indices(width)


def _of_pairs(value: ir.Value) -> tuple[ir.Value, str] | None:
    """Even or odd channels, taken from ``x.reshape(..., n, 2)`` by Gather, or by Squeeze of a Split or Slice."""
    node = value.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return None
    index: int | None = None
    pairs = node.inputs[0]
    if node.op_type == "Gather":
        number = fixed(node.inputs[1])
        if number is not None and number.size == 1 and _last(node.attributes.get_int("axis", 0), rank(pairs)):
            index = int(number.numpy().reshape(()))
    elif node.op_type == "Squeeze" and axis_of(pairs, -1) == 1:
        found = _part(pairs)
        if found is not None and found[2] == found[1] + 1:
            pairs, index = found[0], found[1]
    reshape = pairs.producer()
    if index not in (0, 1) or axis_of(pairs, -1) != 2 or reshape is None or reshape.op_type != "Reshape":
        return None
    x = reshape.inputs[0]
    if x is None or (rank(pairs) or 0) != (rank(x) or 0) + 1 or axis_of(x, -1) != 2 * (axis_of(pairs, -2) or 0):
        return None
    return x, ("even", "odd")[index]


def _unsqueezed(value: ir.Value) -> ir.Value | None:
    node = value.producer()
    if node is None or node.op_type != "Unsqueeze" or node.domain or axis_of(value, -1) != 1:
        return None
    return node.inputs[0]


def _last(axis: int, depth: int | None) -> bool:
    return axis == -1 or (depth is not None and axis == depth - 1)


def _scalar(value: ir.Value | None) -> bool:
    tensor = fixed(value)
    return tensor is not None and tensor.size == 1
