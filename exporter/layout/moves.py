"""Reshape, Transpose and their kind on packed tokens: mostly nothing at all."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from .steps import Rule, Step, Views, Writer, alone
from .views import Axes, View

__all__ = ["RULES"]


def _view_only(view: View, after: View, x: ir.Value) -> Step:
    """Axes are cut or joined: nothing but a new shape, and nothing at all where only tokens' axes change."""

    def write(writer: Writer) -> list[ir.Value]:
        packed = writer.tokens(x)
        if view.rest == after.rest:
            return [packed]
        return writer.node("Reshape", [packed, writer.ints([0, *after.rest])], {})

    return Step((after,), write)


def _reshape(node: ir.Node, views: Views, names: Axes) -> Step | None:
    found = alone(node, views)
    shape = node.outputs[0].shape
    if found is None or shape is None:
        return None
    x, view = found
    after = view.reshaped(list(shape), names)
    return None if after is None or not after.whole else _view_only(view, after, x)


def _expand(node: ir.Node, views: Views, names: Axes) -> Step | None:
    found = alone(node, views)
    shape = node.outputs[0].shape
    if found is None or shape is None or len(shape) != len(found[1].axes):
        return None
    x, view = found
    axes = []
    for atoms, size in zip(view.axes, shape, strict=True):
        wanted = names.atoms(size)
        if wanted is None or (tuple(wanted) != atoms and not (atoms == (1,) and isinstance(size, int))):
            return None
        axes.append(tuple(wanted))
    after = View(tuple(axes))

    def write(writer: Writer) -> list[ir.Value]:
        packed = writer.tokens(x)
        return [packed] if after == view else writer.node("Expand", [packed, writer.ints([1, *after.rest])], {})

    return Step((after,), write)


def _transpose(node: ir.Node, views: Views, names: Axes) -> Step | None:
    del names
    found = alone(node, views)
    if found is None:
        return None
    x, view = found
    rank = len(view.axes)
    perm = list(node.attributes.get_ints("perm") or range(rank - 1, -1, -1))
    inner = [0, *(view.packed(axis) for axis in perm if view.kept(axis))]

    def write(writer: Writer) -> list[ir.Value]:
        packed = writer.tokens(x)
        return [packed] if inner == sorted(inner) else writer.node("Transpose", [packed], {"perm": inner})

    return Step((view.transposed(perm),), write)


RULES: Mapping[str, Rule] = {
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Flatten": _reshape,
    "Expand": _expand,
    "Transpose": _transpose,
}
