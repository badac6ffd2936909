"""What rotary embeddings are written with: halves and neighbours of a head, turned by a quarter, and their tables."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import NEEDED_ELSEWHERE
from ..guards import Refuse, axis_of, fixed, rank, same_axis

__all__ = [
    "alone", "cut", "equal_halves", "factors", "joins_last", "joins_pairs", "rows_for", "same_shape", "source",
    "turned",
]  # fmt: skip

_STEPS = 16
_AT_MOST = re.compile(r"Min\((\d+), ?(\w+)\)")
"""The rows of a table of fixed length that was cut to the sequence."""
_ELEMENTWISE = frozenset({"Cos", "Sin", "Cast", "Identity", "Neg", "Mul", "Div", "Add", "Sub", "Where"})
_OUTER = frozenset({"Unsqueeze", "Squeeze", "Slice", "Gather", "GatherND", "Expand", "Transpose", "Reshape"})
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


def joins_last(node: ir.Node) -> bool:
    """Whether a Concat joins along the last axis."""
    return _last(node.attributes.get_int("axis", 0), rank(node.outputs[0]))


def joins_pairs(node: ir.Node) -> bool:
    """Whether a Concat joins its operands along a last axis of their own: (..., n) and (..., n) to (..., n, 2)."""
    return joins_last(node) and all(each is not None and _unsqueezed(each) is not None for each in node.inputs)


def rows_for(table: Any, sequence: Any) -> bool:
    """Whether a table has a row for each position: one of two rows or more that is too short cannot be multiplied."""
    found = _AT_MOST.fullmatch(str(table))
    return same_axis(table, sequence) or (found is not None and int(found[1]) > 1 and found[2] == str(sequence))


def same_shape(x: ir.Value, y: ir.Value) -> bool:
    """Whether two values are provably of one shape."""
    depth = rank(x)
    return depth is not None and depth == rank(y) and all(same_axis(axis_of(x, i), axis_of(y, i)) for i in range(depth))


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
    if not joins_last(node):
        return None
    pieces: list[tuple[ir.Value, str] | None] = []
    signs: list[bool] = []
    for part in node.inputs:
        if part is None:
            return None
        inner.append(part)
        wide = interleaved
        if interleaved:
            flat = _unsqueezed(part)
            wide, part = flat is None, flat or part
        negated = part.producer()
        signs.append(negated is not None and negated.op_type == "Neg" and not negated.domain)
        if signs[-1] and negated is not None and negated.inputs[0] is not None:
            inner.append(part)
            part = negated.inputs[0]
        pieces.append(_of_pairs(part, wide=True) if wide else source(part))
    if pieces[0] is None or pieces[1] is None or pieces[0][0] is not pieces[1][0]:
        return None
    if (pieces[0][1], pieces[1][1]) != (("odd", "even") if interleaved else ("second", "first")):
        return None
    if signs != [True, False]:
        raise Refuse("a head is turned, but the first part is not negated alone", value)
    x = pieces[0][0]
    return (x, interleaved, inner[:-1]) if same_shape(x, value) else None


def equal_halves(table: ir.Value, interleaved: bool) -> bool:
    """Whether the graph shows that a table holds each number twice, in both halves or in neighbours."""
    return _twice(table, interleaved, _STEPS)


def _twice(value: ir.Value | None, interleaved: bool, steps: int) -> bool:
    if value is None or steps == 0:
        return False
    if rank(value) == 0 or axis_of(value, -1) == 1:
        return True  # Broadcast: one number for all channels.
    tensor = fixed(value)
    if tensor is not None:
        array = tensor.numpy()
        half, odd = divmod(array.shape[-1] if array.ndim else 0, 2)
        pair = (array[..., 0::2], array[..., 1::2]) if interleaved else (array[..., :half], array[..., half:])
        return not odd and bool(np.array_equal(*pair))
    node = value.producer()
    if node is None or node.domain or not node.inputs:
        return False
    if node.op_type in _ELEMENTWISE:
        return all(_twice(each, interleaved, steps - 1) for each in node.inputs)
    if node.op_type == "MatMul" and (rank(node.inputs[1]) or 0) > 1:
        return _twice(node.inputs[1], interleaved, steps - 1)
    if node.op_type == "Concat" and not interleaved and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]:
        return _last(node.attributes.get_int("axis", 0), rank(value))
    if node.op_type == "Tile" and not interleaved and len(node.inputs) == 2:
        times = fixed(node.inputs[1])
        return times is not None and times.size > 0 and int(times.numpy().reshape(-1)[-1]) % 2 == 0
    if node.op_type in ("Reshape", "Flatten") and interleaved and node.inputs[0] and _repeated(node.inputs[0]):
        return True
    return node.op_type in _OUTER and _last_axis_kept(node) and _twice(node.inputs[0], interleaved, steps - 1)


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
    if node.op_type == "GatherND":
        deep = axis_of(node.inputs[1], -1) if node.inputs[1] is not None else None
        return isinstance(deep, int) and deep + node.attributes.get_int("batch_dims", 0) < depth
    if node.op_type == "Slice":
        axes = operands[2] if len(operands) > 2 else None
        return axes is not None and all(int(axis) % depth != depth - 1 for axis in axes.numpy().reshape(-1))
    # Rows of the same width stay whole in a Reshape, and the others cannot move an axis that is still the last.
    return True


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


def _of_pairs(value: ir.Value, *, wide: bool = False) -> tuple[ir.Value, str] | None:
    """Even or odd channels, taken from ``x.reshape(..., n, 2)`` by Gather, or by Squeeze of a Split or Slice.

    Args:
        value: The channels, (..., n).
        wide: They are (..., n, 1): taken by a Split or Slice alone.
    """
    node = value.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return None
    index: int | None = None
    pairs = value if wide else node.inputs[0]
    if not wide and node.op_type == "Gather":
        number = fixed(node.inputs[1])
        if number is not None and not number.shape and _last(node.attributes.get_int("axis", 0), rank(pairs)):
            index = int(number.numpy())
    elif wide or node.op_type == "Squeeze":
        axes = None if wide else fixed(node.inputs[1]) if len(node.inputs) > 1 else None
        if not wide and (axes is None or axes.size != 1 or not _last(int(axes.numpy().reshape(())), rank(pairs))):
            return None
        found = _part(pairs)
        if found is not None and found[2] == found[1] + 1:
            pairs, index = found[0], found[1]
    reshape = pairs.producer()
    if index not in (0, 1) or axis_of(pairs, -1) != 2 or reshape is None or reshape.op_type != "Reshape":
        return None
    x = reshape.inputs[0]
    depth = rank(x)
    if x is None or depth is None or rank(pairs) != depth + 1 or axis_of(x, -1) != 2 * (axis_of(pairs, -2) or 0):
        return None
    # Other axes may not be mixed by the way.
    kept = all(same_axis(axis_of(x, i), axis_of(pairs, i)) for i in range(depth - 1))
    return (x, ("even", "odd")[index]) if kept else None


def _unsqueezed(value: ir.Value) -> ir.Value | None:
    """What (..., n, 1) is without its last axis."""
    node = value.producer()
    if node is None or node.op_type != "Unsqueeze" or node.domain:
        return None
    axes = fixed(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or axes.size != 1 or not _last(int(axes.numpy().reshape(())), rank(value)):
        return None
    return node.inputs[0]


def _last(axis: int, depth: int | None) -> bool:
    return axis == -1 or (depth is not None and axis == depth - 1)
