"""What the guards of rules share: each returns what a rule needs, or refuses with what was found and wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter._basics import MatchFailureError

Refuse = MatchFailureError
"""Raised by a guard: ``Refuse("epsilon is 2, wanted less than 1", value)``.

With an empty reason it says that there is nothing to do here, which is not worth a report.
"""


def absorbing(kind: np.dtype[Any]) -> np.ndarray:
    """A finite additive mask value that absorbs any score, in the given float type.

    Not the lowest float: onnxruntime's ai.onnx Attention takes that one for -inf and zeros rows which
    hold nothing else, where a sum of finite numbers gives an average.
    """
    return np.array(max(-1e30, float(np.finfo(kind).min) / 2), kind)


def fixed(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a constant; ``None`` for what is computed, and for initializers that a caller may override."""
    if value is None or value.is_graph_input():
        return None
    return ir.convenience.get_const_tensor(value)


def producer(value: ir.Value) -> ir.Node:
    """The node that computes a value which a pattern has matched as computed."""
    node = value.producer()
    assert node is not None
    return node


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """A node's attributes as the builder takes them."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def scalar(value: ir.Value | None, what: str, beside: ir.Value | None = None) -> float:
    """The number in a constant of one element (0-d, 1-d, half, ...).

    Args:
        value: The constant.
        what: Its name in a refusal.
        beside: What it meets in the graph: a number of higher rank than that would add axes to the result.
    """
    array = constant(value, what)
    if array.size != 1 or array.ndim > max(rank(beside) or 1, 1):
        raise Refuse(f"{what} has shape {list(array.shape)}, wanted one number", *_source(value))
    return float(array.reshape(()))


def expect(value: ir.Value | None, wanted: float, what: str, beside: ir.Value | None = None) -> None:
    """Refuses unless a constant equals ``wanted``, as far as its type and six decimals can say."""
    found = scalar(value, what, beside)
    slack = 1e-3 if constant(value, what).dtype.itemsize == 2 else 1e-5
    if not abs(found - wanted) <= slack * abs(wanted):
        raise Refuse(f"{what} is {found:.6g}, wanted {wanted:.6g}", *_source(value))


def positive(value: ir.Value | None, what: str, beside: ir.Value | None = None) -> float:
    """A positive, finite number."""
    found = scalar(value, what, beside)
    if not (math.isfinite(found) and found > 0):
        raise Refuse(f"{what} is {found:g}, wanted a positive number", *_source(value))
    return found


def constant(value: ir.Value | None, what: str) -> np.ndarray:
    """The array of a constant."""
    tensor = fixed(value)
    if tensor is None:
        raise Refuse(f"{what} is not a constant", *_source(value))
    return tensor.numpy()


def of_type(value: ir.Value | None, what: str, *allowed: ir.DataType) -> None:
    """Refuses a value of another element type than the kernels or the arithmetic of a rule are made for."""
    found = None if value is None else value.dtype
    if found not in allowed:
        names = " or ".join(kind.name for kind in allowed)
        raise Refuse(f"{what} is {found.name if found else 'of unknown type'}, wanted {names}", *_source(value))


def rank(value: ir.Value | None) -> int | None:
    """The rank of a value, ``None`` when unknown."""
    return len(value.shape) if value is not None and value.shape is not None else None


def static(value: ir.Value, axis: int, what: str) -> int:
    """The size of an axis that must be known."""
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise Refuse(f"{what} has axis {axis} of unknown size, wanted a fixed one", value)
    return size


def axis_of(value: ir.Value, axis: int) -> Any:
    """The size or symbol of an axis, ``None`` when the shape is unknown."""
    return value.shape[axis] if value.shape is not None else None


def same_axis(a: Any, b: Any) -> bool:
    """Whether two axes are provably of equal size: equal ints, or the same named symbol."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    return a is not None and b is not None and a.value is not None and a.value == b.value


def transpose(op: Any, x: ir.Value, perm: Sequence[int]) -> ir.Value:
    """A Transpose whose type and shape are known to the rules that come after."""
    y = op.Transpose(x, perm=list(perm))
    y.dtype = x.dtype
    if x.shape is not None:
        y.shape = ir.Shape([x.shape[axis] for axis in perm])
    return y


def ints(op: Any, *values: int) -> ir.Value:
    """An int64 vector as a constant: a shape, axes, a place to cut."""
    return op.Constant(value=ir.tensor(np.array(values, np.int64)))


def weight(op: Any, beside: ir.Value, name: str, content: str, make: Callable[[], ir.TensorProtocol]) -> ir.Value:
    """An initializer of our own making: the one that is there already for the same content, else a new one.

    Args:
        op: The rewriter's builder.
        beside: A value of the graph that it goes into.
        name: What to call it; another initializer of that name gets a number behind it.
        content: Says all that it is made of.
        make: Makes the tensor.
    """
    graph = beside.graph
    there = graph.initializers if isinstance(graph, ir.Graph) else {}
    free, number = name, 1
    while free in there:
        if there[free].meta.get(_CONTENT) == content:
            return there[free]
        free, number = f"{name}_{number}", number + 1
    made = op.initializer(make(), name=free)
    made.meta[_CONTENT] = content
    return made


_CONTENT = "tfx.content"


def last_axis_only(node: ir.Node, of: ir.Value, what: str) -> None:
    """Refuses unless a ReduceMean or ReduceSum reduces the last axis alone and keeps it."""
    axes = node.attributes.get_ints("axes") if "axes" in node.attributes else None
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = constant(node.inputs[1], f"{what} axes").tolist()
    size = rank(of)
    last = [-1] if size is None else [-1, size - 1]
    if axes is None or len(axes) != 1 or axes[0] not in last:
        raise Refuse(f"{what} reduces axes {axes}, wanted the last alone", *_source(of))
    if node.attributes.get_int("keepdims", 1) != 1:
        raise Refuse(f"{what} drops the axis, wanted keepdims=1", *_source(of))


def _source(value: ir.Value | None) -> tuple[ir.Value, ...]:
    return () if value is None else (value,)
