"""Rotary embeddings on packed tokens."""

from __future__ import annotations

import onnx_ir as ir

from ..guards import attributes_of
from .steps import Step, Views, Writer, fits
from .tokens import TOKENS
from .views import POSITION, ROW, Axes, View

__all__ = ["rotary"]


def rotary(node: ir.Node, views: Views, names: Axes) -> Step | None:
    """Packed tokens are one long sequence whose tables have a row per token."""
    x, cos, sin = node.inputs[:3]
    places = node.inputs[3] if len(node.inputs) > 3 else None
    view = views(x)
    if x is None or view is None or cos is None or sin is None:
        return None
    many = len(view.axes) == 4
    wanted = [(ROW,), (POSITION,)]
    if [axis for axis in view.axes if axis[0] in (ROW, POSITION)] != wanted or view.axes[0] != (ROW,):
        return None
    if view.axes[2 if many else 1] != (POSITION,):
        return None
    heads = view.size(1) if many else node.attributes.get_int("num_heads", 0)
    width = view.rest[0] * view.rest[1] if many else view.rest[0]
    rows = View(((ROW,), (POSITION,), (1,)))
    if heads < 1 or (places is None and not all(views(t) or fits(t, rows, names) for t in (cos, sin))):
        return None
    if places is not None and views(places) is None and not fits(places, View(rows.axes[:2]), names):
        return None

    def write(writer: Writer) -> list[ir.Value]:
        one, long = writer.ints([0]), [1, TOKENS, width]
        wide = writer.node("Reshape", [writer.tokens(x), writer.ints([1, -1, width])], {}, long)[0]
        if places is None:
            tables = [writer.tokens(t) if views(t) else writer.beside(t, rows) for t in (cos, sin)]
        else:
            picks = writer.tokens(places) if views(places) else writer.beside(places, View(rows.axes[:2]))
            tables = [
                writer.node("Gather", [table, picks], {"axis": 0}, [TOKENS, _width(table)])[0] for table in (cos, sin)
            ]
        tables = [writer.node("Unsqueeze", [table, one], {}, [1, TOKENS, _width(table)])[0] for table in tables]
        attributes = {**attributes_of(node), "num_heads": heads}
        turned = writer.node(node.op_type, [wide, *tables], attributes, long)[0]
        return writer.node("Reshape", [turned, writer.ints([-1, *view.rest])], {}, [TOKENS, *view.rest])

    return Step((view,), write)


def _width(table: ir.Value) -> int | str:
    """Channel pairs of a table."""
    size = None if table.shape is None else table.shape[-1]
    return size if isinstance(size, int) else str(size)
