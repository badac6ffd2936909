"""Padded layout -> ragged layout: only attended tokens are computed.

A padded batch is mostly padding when lengths vary. The pass keeps the attended tokens of all rows behind each other,
``(tokens, d)`` instead of ``(batch, sequence, d)``, from the token ids to the outputs:

1. every node that works token by token (:mod:`.tokenwise`) between the inputs, the attentions and the outputs is
   written on packed tokens;
2. attention runs sequence by sequence (:mod:`.sequences`), without the mask, which :mod:`.elements` has read: it must
   take the weight from every position that is not attended;
3. outputs, and what mixes tokens behind the last attention (pooling), are given padded values again, with zeros at
   positions that are not attended.

Anything else that mixes tokens is refused with a reason: on positions that are not attended it would read other
numbers than the padded graph has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ..shapes import infer_shapes
from .plan import MaskInput, PackedAttention, Plan
from .sequences import attend
from .steps import ints_of, named
from .tokens import PADDED, TOKENS, Builder, Tokens
from .views import POSITION, ROW, Atom, View

__all__ = ["to_ragged"]


def to_ragged(model: ir.Model, masks: Sequence[MaskInput]) -> int:
    """Rewrites a canonical graph for attended tokens alone, in place.

    Args:
        model: Raised; shapes inferred with named axes.
        masks: The inputs that say which positions are attended.

    Returns:
        How many attentions run sequence by sequence.

    Raises:
        Refuse: The graph has to stay padded; the reason says why. Nothing has been changed.
    """
    infer_shapes(model)  # Raising leaves nodes whose shapes nobody has looked at.
    plan = Plan(model.graph, masks)
    _write(plan)
    passes.RemoveUnusedNodesPass()(model)
    return len(plan.attentions)


def _write(plan: Plan) -> None:
    tokens = Tokens(plan.graph, plan.mask, ignored=plan.ignored, first=plan.first)
    writer = _Writer(plan, tokens)
    for node in list(plan.graph):
        if node not in plan.region:
            continue
        writer.begin(node)
        found = plan.attentions.get(node)
        outputs = [writer.attention(node, found)] if found else plan.steps[node].write(writer)
        for old, new in zip(node.outputs, outputs, strict=True):
            writer.packed[old] = new
    for value, fill in plan.fills.items():
        _unpack(plan, value, writer.packed[value], fill, tokens)


def _unpack(plan: Plan, value: ir.Value, packed: ir.Value, fill: float, tokens: Tokens) -> None:
    """Gives a packed value its padded form again, for those outside who read it."""
    node = value.producer()
    assert node is not None and value.dtype is not None
    view, op = plan.views[value], Builder(plan.graph, node, str(value.name))
    rest = view.rest
    rows = op("Unsqueeze", tokens.padded_size, op.ints(0), shape=[1])
    size = op("Concat", rows, *([op.ints(*rest)] if rest else []), shape=[1 + len(rest)], axis=0)
    blank = op("ConstantOfShape", size, dtype=value.dtype, value=ir.tensor(np.array([fill], value.dtype.numpy())))
    flat = op("ScatterND", blank, tokens.scatter, packed, shape=[PADDED, *rest])
    parts = [tokens.sizes[plan.axes.batch], tokens.sizes[plan.axes.sequence]]
    shape = op("Concat", *parts, *([op.ints(*rest)] if rest else []), shape=[2 + len(rest)], axis=0)
    padded = op("Reshape", flat, shape, shape=[plan.axes.batch, plan.axes.sequence, *rest])
    padded = _placed(op, padded, view)
    padded.dtype, padded.shape = value.dtype, value.shape
    for user, at in [(user, at) for user, at in value.uses() if plan.outside(user, at)]:
        user.replace_input_with(at, padded)
    if value.is_graph_output():
        value.name, padded.name = f"{value.name}.padded", value.name
        padded.metadata_props.update(value.metadata_props)
        for at, output in enumerate(plan.graph.outputs):
            if output is value:
                plan.graph.outputs[at] = padded


def _placed(op: Builder, padded: ir.Value, view: View) -> ir.Value:
    """(batch, sequence, rest...) -> the axes of the padded value; the plan has seen that none are merged."""
    fronts: dict[tuple[Atom, ...], int] = {(ROW,): 0, (POSITION,): 1}
    order = [fronts.get(axis, 1 + view.packed(i)) for i, axis in enumerate(view.axes)]
    return padded if order == sorted(order) else op("Transpose", padded, perm=order)


class _Writer:
    """Writes steps in front of the nodes they replace."""

    def __init__(self, plan: Plan, tokens: Tokens) -> None:
        self._plan = plan
        self._tokens = tokens
        self._beside: dict[tuple[ir.Value, View], ir.Value] = {}
        self.packed: dict[ir.Value, ir.Value] = {}
        self._node: ir.Node
        self._op: Builder

    def begin(self, node: ir.Node) -> None:
        """The node that is written next."""
        self._node = node
        self._op = Builder(self._plan.graph, node, node.name or node.op_type)

    def ints(self, values: Sequence[int]) -> ir.Value:
        return self._op.ints(*values)

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        shape: Sequence[int | str] | None = None,
    ) -> list[ir.Value]:
        old = self._node
        same = op_type == old.op_type
        made = ir.node(op_type, inputs, attributes, num_outputs=len(old.outputs) if same else 1)
        made.metadata_props.update(old.metadata_props)
        step = self._plan.steps.get(old)
        for i, out in enumerate(made.outputs):
            first = next((value for value in made.inputs if value is not None), None)
            out.type = old.outputs[i].type if same else first.type if first is not None else None
            if shape is not None:
                out.shape = ir.Shape(shape)
            elif same and step is not None:
                out.shape = ir.Shape([TOKENS, *step.views[i].rest])
            elif op_type == "Reshape":
                out.shape = _reshaped(made)
        self._op.add(made)
        return list(made.outputs)

    def tokens(self, value: ir.Value) -> ir.Value:
        if value not in self.packed:
            self.packed[value] = self._pack(value)
        return self.packed[value]

    def _pack(self, value: ir.Value) -> ir.Value:
        """Picks the attended positions of a padded value."""
        view = self._plan.view(value)
        assert view is not None
        op, rest = self._op, view.rest
        row, place = view.place(ROW), view.place(POSITION)
        assert row is not None and place is not None  # the plan has seen to it
        order = [row, place, *(axis for axis in range(len(view.axes)) if view.plain(axis))]
        if order != sorted(order):
            value = op("Transpose", value, perm=order)
        flat = op("Reshape", value, op.ints(-1, *rest), shape=[PADDED, *rest])
        return op("Gather", flat, self._tokens.index, shape=[TOKENS, *rest], axis=0)

    def beside(self, value: ir.Value, view: View) -> ir.Value:
        key = (value, view)
        if key not in self._beside:
            self._beside[key] = self._aligned(value, view)
        return self._beside[key]

    def _aligned(self, value: ir.Value, view: View) -> ir.Value:
        assert value.shape is not None
        op, offset = self._op, len(view.axes) - len(value.shape)
        sizes = list(value.shape)
        held = [i for i in range(len(sizes)) if not view.plain(i + offset)]
        taken = [i for i in held if sizes[i] != 1]
        # Merged axes keep a place in the packed value: there, one number stands for all of them.
        gone = [i for i in held if i not in taken and not view.kept(i + offset)]
        index = None
        if taken:
            index = self._tokens.row if view.axes[taken[0] + offset] == (ROW,) else self._tokens.position
            order = [*taken, *(i for i in range(len(sizes)) if i not in taken)]
            if order != sorted(order):
                value = op("Transpose", value, shape=named([sizes[i] for i in order]), perm=order)
                gone = [order.index(i) for i in gone]
                sizes = [sizes[i] for i in order]
        if gone:
            kept = named([size for i, size in enumerate(sizes) if i not in gone])
            value = op("Squeeze", value, op.ints(*gone), shape=kept)
        if index is None:
            return value
        assert value.shape is not None
        rest = named(list(value.shape)[1:])
        picked = op("Gather", value, index, shape=[TOKENS, *rest], axis=0)
        wide = len(view.rest) - len(rest)
        if wide:
            picked = op("Reshape", picked, op.ints(0, *[1] * wide, *(int(size) for size in rest)))
        return picked

    def attention(self, node: ir.Node, found: PackedAttention) -> ir.Value:
        sides = []
        for value in node.inputs[:3]:
            assert value is not None
            packed, view = self.tokens(value), self._plan.view(value)
            assert view is not None
            if len(view.axes) == 4:
                width = view.rest[0] * view.rest[1]
                packed = self._op("Reshape", packed, self._op.ints(0, width), shape=[TOKENS, width])
            sides.append(packed)
        q, k, v = sides
        out = attend(node, q, k, v, found.heads, found.bias, self._tokens)
        if len(found.view.axes) == 4:
            out = self._op("Reshape", out, self._op.ints(0, *found.view.rest), shape=[TOKENS, *found.view.rest])
        return out


def _reshaped(node: ir.Node) -> ir.Shape | None:
    sizes = ints_of(node, 1)
    return None if sizes is None else ir.Shape([TOKENS if size < 1 else size for size in sizes])
