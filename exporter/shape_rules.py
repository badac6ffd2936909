"""Where ``onnx_shape_inference`` guesses: broadcasting stays honest.

Two axes of different names are taken for equal there, and an Expand of something unknown for its target. Either
would let a mask with a batch of its own pass for one of the scores' batch. Registered for the canonical opset
only, through the library's public registry.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import onnx_shape_inference as inference

__all__ = ["register"]

_OPSET = 23
_ELEMENTWISE = (
    "Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Where", "And", "Or", "Xor", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "BitwiseAnd", "BitwiseOr",
)  # fmt: skip

Size = int | ir.SymbolicDim


@functools.cache
def register() -> None:
    """Puts the checks in front of the library's own functions, once."""
    inference.registry.collect()
    for op_type in (*_ELEMENTWISE, "MatMul", "Expand"):
        own = inference.registry.get("", op_type, _OPSET)
        if own is not None:
            inference.registry.register("", op_type, since_version=_OPSET)(functools.partial(_checked, own))


def _checked(own: Any, context: inference.ShapeInferenceContext, node: ir.Node) -> None:
    """Infers a node, with a new name for every axis that its inputs do not agree on."""
    shapes = [value.shape for value in node.inputs if value is not None]
    if node.op_type == "Expand":
        target = context.get_symbolic_value(node.inputs[1]) if node.inputs[1] is not None else None
        if shapes[0] is None:
            return
        shapes = [shapes[0], None if target is None else ir.Shape(target)]
    known = [shape for shape in shapes if shape is not None]
    batch = slice(None, -2) if node.op_type == "MatMul" else slice(None)
    axes = [list(shape)[batch] for shape in known]
    if len(known) < len(shapes) or not any(len(_names(sizes)) > 1 for sizes in _aligned(axes)):
        own(context, node)
        return
    joined: list[Size] = [context.new_symbolic_dim() if _unclear(s) else _join(s) for s in _aligned(axes)]
    if node.op_type == "MatMul":
        joined += [known[0][-2], known[1][-1]]
    kind = ir.DataType.BOOL if _is_test(node.op_type) else node.inputs[-1 if node.op_type == "Where" else 0]
    dtype = kind if isinstance(kind, ir.DataType) else (kind.dtype if kind is not None else None)
    context.set_shape_and_dtype(node.outputs[0], ir.Shape(joined), dtype)


def _aligned(axes: Sequence[Sequence[Size]]) -> list[list[Size]]:
    """The sizes that meet on each axis, by numpy's rule."""
    depth = max((len(each) for each in axes), default=0)
    padded = [[1] * (depth - len(each)) + list(each) for each in axes]
    return [[sizes[axis] for sizes in padded] for axis in range(depth)]


def _join(sizes: Sequence[Size]) -> Size:
    """The size of an axis on which the inputs agree."""
    names = [size for size in sizes if size != 1]
    numbers = [size for size in names if isinstance(size, int)]
    if numbers or not names:
        return numbers[0] if numbers else 1
    return max(names, key=lambda size: not str(size).startswith("Min("))


def _unclear(sizes: Sequence[Size]) -> bool:
    """Whether names meet that need not be equal.

    A number wins over a name: only that number and 1 broadcast. ``sequence`` wins over ``Min(80, sequence)``, a
    table cut to the sequence: they meet only where both are equal or the latter is 1.
    """
    names = _names(sizes)
    if len(names) < 2 or any(isinstance(size, int) and size != 1 for size in sizes):
        return False
    whole = {name for name in names if not name.startswith("Min(")}
    return len(whole) != 1 or any(_cut_of(name) != next(iter(whole)) for name in names - whole)


def _names(sizes: Sequence[Size]) -> set[str]:
    return {str(size) for size in sizes if not isinstance(size, int)}


def _cut_of(name: str) -> str | None:
    """``sequence`` of ``Min(80, sequence)``."""
    parts = name.removeprefix("Min(").removesuffix(")").split(", ")
    if len(parts) != 2 or sum(part.isdigit() and int(part) > 1 for part in parts) != 1:
        return None
    return next(part for part in parts if not part.isdigit())


def _is_test(op_type: str) -> bool:
    return op_type in ("And", "Or", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
