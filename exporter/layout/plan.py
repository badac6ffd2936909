"""What of a padded graph works on packed tokens, decided before anything is changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from ..fusion import origin
from ..guards import Refuse
from ..raising.attention_form import plain
from .elements import Elements, Index, Interval
from .steps import Step, ints_of
from .tokenwise import step
from .views import POSITION, ROW, Axes, View

__all__ = ["MaskInput", "PackedAttention", "Plan"]

_MASKED = -1e4
"""What is added to a score at most where a position counts as masked: its weight is 0 in every float type."""


@dataclasses.dataclass(frozen=True)
class MaskInput:
    """The graph input that says which positions are attended.

    Attributes:
        name: Its name; the shape is (batch, sequence).
        ignored: Whether 1 (true) means ignored (``padding_mask``) instead of attended.
    """

    name: str
    ignored: bool = False


@dataclasses.dataclass(frozen=True)
class PackedAttention:
    """An attention that runs on packed tokens: its heads, and its mask where that holds more than padding."""

    heads: int
    bias: ir.Value | None
    view: View


class Plan:
    """What is going to be packed.

    Args:
        graph: A canonical graph; shapes inferred with named axes.
        masks: The inputs that say which positions are attended.

    Attributes:
        mask: The input that does.
        ignored: Whether it marks ignored positions.
        axes: The names of the token axes.
        views: Values that have tokens, as far as a node makes them token by token.
        steps: How token-wise nodes are written.
        attentions: The attentions that run sequence by sequence.
        region: The nodes that are written on packed tokens.
        behind: Those of them that follow an attention.
        first: Whether position 0 is kept although it may be ignored.
        fills: What ignored positions hold, for packed values that are wanted padded too.

    Raises:
        Refuse: The graph has to stay padded.
    """

    def __init__(self, graph: ir.Graph, masks: Sequence[MaskInput]) -> None:
        self.graph = graph
        self.mask, self.ignored = self._mask_input(masks)
        assert self.mask.shape is not None
        self.axes = Axes(*(str(size.value) for size in self.mask.shape if not isinstance(size, int)))
        self.views: dict[ir.Value, View] = {}
        self.steps: dict[ir.Node, Step] = {}
        self.attentions: dict[ir.Node, PackedAttention] = {}
        for node in self.graph:
            self._look(node)
        if not self.attentions:
            raise Refuse("no attention of the graph works on rows and positions of the mask")
        self.behind: set[ir.Node] = set(self.attentions)
        self.region = self._region()
        self.first = False
        self.fills = self._fills()
        if self.first:
            for node in self.attentions:
                self._check_first(node)
        self._check_places()

    def _mask_input(self, masks: Sequence[MaskInput]) -> tuple[ir.Value, bool]:
        if len(masks) != 1:
            found = ", ".join(mask.name for mask in masks) or "none"
            raise Refuse(f"found masks: {found}; wanted one input that says which positions are attended")
        value = next(value for value in self.graph.inputs if value.name == masks[0].name)
        shape = list(value.shape or ())
        if len(shape) != 2 or any(isinstance(size, int) or size.value is None for size in shape):
            raise Refuse(f"mask {value.name} has shape {value.shape}, wanted two named axes (batch, sequence)")
        return value, masks[0].ignored

    def view(self, value: ir.Value | None) -> View | None:
        """The view of a value that has tokens."""
        if value is None:
            return None
        return self.views.get(value) or (None if value.is_initializer() else self.axes.of(value))

    def _look(self, node: ir.Node) -> None:
        """Decides whether a node can work on packed tokens."""
        if node.op_type == "Attention" and not node.domain:
            found = self._attention(node)
            if found is not None:
                self.attentions[node] = found
                self.views[node.outputs[0]] = found.view
            return
        made = step(node, self.view, self.axes)
        if made is not None and len(made.views) == len(node.outputs):
            self.steps[node] = made
            self.views.update(zip(node.outputs, made.views, strict=True))

    def _attention(self, node: ir.Node) -> PackedAttention | None:
        views = [self.view(value) for value in node.inputs[:3]]
        if all(view is None for view in views):
            return None
        where = origin(node) or node.name
        try:
            plain(node.outputs[0])
        except Refuse as refusal:
            raise Refuse(f"{where}: {refusal.reason}") from None
        heads = [_heads(view, node, side) for view, side in zip(views, ("q", "kv", "kv"), strict=True)]
        if None in heads or len(set(heads)) != 1:
            raise Refuse(f"{where}: Q, K and V are {[str(v.shape) for v in node.inputs[:3] if v]}, wanted equal heads")
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is None:
            raise Refuse(f"{where}: attends positions whatever the mask says, so none can be left out")
        bias = self._bias(mask, str(where))
        many = len(views[0].axes) == 4 if views[0] is not None else False
        width = views[2].axes[-1] if views[2] is not None else (0,)
        rows, places = (ROW,), (POSITION,)
        out = View((rows, (int(heads[0] or 0),), places, width) if many else (rows, places, width))
        return PackedAttention(int(heads[0] or 0), bias, out)

    def _bias(self, mask: ir.Value, where: str) -> ir.Value | None:
        """What of a mask is more than padding; refuses one that leaves padding any weight."""
        if mask.shape is None or len(mask.shape) not in (2, 4):
            raise Refuse(f"{where}: the mask has shape {mask.shape}, wanted rank 2 or 4")
        hidden = self._element(mask, "k", k=False)
        boolean = mask.dtype == ir.DataType.BOOL
        if not (hidden.known == 0 if boolean else hidden.high <= _MASKED):
            raise Refuse(f"{where}: the mask {mask.name} is not seen to take all weight from ignored positions")
        # Where all keys of a query are hidden alike, finite fills make an average over the ignored ones too.
        if not boolean and not _outweighs(self._element(mask, "q"), hidden):
            raise Refuse(f"{where}: the mask {mask.name} may hide a query from itself, and so from every key")
        shown = self._element(mask, "k", k=True)
        if shown.known == (1 if boolean else 0):
            return None
        if len(mask.shape) != 4:
            raise Refuse(f"{where}: the mask holds more than padding and has shape {mask.shape}, wanted rank 4")
        return mask

    def _element(self, mask: ir.Value, key: str, *, q: bool = True, k: bool = True) -> Interval:
        """What a query adds to a key's score: ``key`` is ``"k"``, or ``"q"`` for the query's own position."""
        return self._elements(q=q, k=k).broadcast(mask, ("b", "h", "q", key))

    def _elements(self, **state: bool) -> Elements:
        return Elements(self.mask, (0.0, 1.0) if self.ignored else (1.0, 0.0), state)

    def _check_first(self, node: ir.Node) -> None:
        """Position 0 is a query even where it is ignored; then its row of the mask must be like any other."""
        mask = node.inputs[3]
        assert mask is not None
        hidden, shown = self._element(mask, "k", q=False, k=False), self._element(mask, "k", q=False)
        if mask.dtype == ir.DataType.BOOL:
            kept = self.attentions[node].bias is not None  # its row is gathered as it is
            fine = hidden.known == 0 and (kept or shown.known == 1)
        else:
            fine = hidden.high <= _MASKED and _outweighs(shown, hidden)
        if not fine:
            where = origin(node) or node.name
            raise Refuse(f"{where}: the model's output reads position 0, whose mask differs where it is ignored")

    def _check_places(self) -> None:
        """Refuses what could be neither packed nor unpacked: rows or positions merged with other axes."""
        for node in self.region:
            count = 3 if node in self.attentions else len(node.inputs)
            for x in node.inputs[:count]:
                view = self.view(x)
                if x is not None and view is not None and x.producer() not in self.region:
                    _check_apart(x, view)
        for value in self.fills:
            _check_apart(value, self.views[value])

    def _region(self) -> set[ir.Node]:
        """The nodes that work on packed tokens: what leads to an attention token by token, and what follows one."""
        backward: set[ir.Node] = set()
        ahead = [value for node in self.attentions for value in node.inputs[:3]]
        while ahead:
            value = ahead.pop()
            node = None if value is None else value.producer()
            if node is not None and node in self.steps and node not in backward:
                backward.add(node)
                ahead += [x for x in node.inputs if x is not None and self.view(x)]
        for node in self.graph:
            if node in self.steps and any(x is not None and x.producer() in self.behind for x in node.inputs):
                self.behind.add(node)
        return self.behind | backward

    def _fills(self) -> dict[ir.Value, float]:
        """What padded values hold at ignored positions, for each packed value that something outside reads.

        Only behind an attention: what comes before (token ids, positions) stays there in its padded form too, for
        those who want it.
        """
        fills: dict[ir.Value, float] = {}
        for node in self.graph:  # in its order: the same source gives the same file
            if node not in self.behind:
                continue
            for value in node.outputs:
                users = [user for user, at in value.uses() if self.outside(user, at)]
                if value.is_graph_output() or users:
                    fills[value] = self._fill(value, users)
        return fills

    def outside(self, user: ir.Node, at: int) -> bool:
        """Whether a node's input wants a padded value."""
        return user not in self.region or (user in self.attentions and at > 2)

    def _fill(self, value: ir.Value, users: Iterable[ir.Node]) -> float:
        view = self.views[value]
        index: list[Index] = [
            "b" if axis == (ROW,) else "s" if axis == (POSITION,) else f"i{i}" for i, axis in enumerate(view.axes)
        ]
        element = self._elements(s=False).at(value, index)
        if element.known is not None:
            return element.known
        if value.is_graph_output() and view.axes[:2] != ((ROW,), (POSITION,)):
            shape = f"[{', '.join(map(str, value.shape or ()))}]"
            raise Refuse(
                f"output {value.name} has axes {shape}, wanted [batch, sequence, ...]: its ignored positions count"
            )
        for user in users:
            if user.op_type == "Shape" and not user.domain:
                continue
            if self._takes_first(user, value, view):
                self.first = True
            elif not self._picks_by_mask(user, value):
                where = origin(user) or user.name
                raise Refuse(f"{user.op_type} {where} mixes positions, ignored ones among them", value)
        return 0.0

    def _takes_first(self, user: ir.Node, value: ir.Value, view: View) -> bool:
        """Whether a node reads nothing but position 0."""
        place = view.place(POSITION)
        if user.domain or place is None or user.inputs[0] is not value:
            return False
        if user.op_type == "Gather":
            picked = ints_of(user, 1)
            return user.attributes.get_int("axis", 0) % len(view.axes) == place and picked == [0]
        if user.op_type != "Slice" or len(user.inputs) < 4:
            return False
        starts, ends, axes = (ints_of(user, at) for at in (1, 2, 3))
        if starts is None or ends is None or axes is None:
            return False
        cuts = {axis % len(view.axes): (start, end) for axis, start, end in zip(axes, starts, ends, strict=True)}
        return cuts.get(place) == (0, 1)

    def _picks_by_mask(self, user: ir.Node, value: ir.Value) -> bool:
        """Whether a node picks positions that the mask has been asked for, as last-token pooling does."""
        if user.domain or user.op_type not in ("GatherElements", "GatherND") or user.inputs[0] is not value:
            return False
        index = user.inputs[1]
        while index is not None and (node := index.producer()) is not None and not node.domain:
            if node.op_type in ("Unsqueeze", "Squeeze", "Reshape", "Expand", "Cast", "Identity"):
                index = node.inputs[0]
            elif node.op_type in ("ReduceMax", "ArgMax"):
                return self._finds_attended(node)
            else:
                break
        return False

    def _finds_attended(self, node: ir.Node) -> bool:
        """Whether a reduction over positions ends at an attended one, as far as there is any.

        ``max(position * attended)`` does, and ``argmax(attended)``.
        """
        x = node.inputs[0]
        view = self.axes.of(x)
        if x is None or view is None or view.axes != ((ROW,), (POSITION,)):
            return False
        axes = [node.attributes.get_int("axis", 0)] if node.op_type == "ArgMax" else ints_of(node, 1)
        shown, hidden = (self._elements(s=state).at(x, ("b", "s")) for state in (True, False))
        if axes is None or [axis % 2 for axis in axes] != [1]:
            return False
        if node.op_type == "ArgMax":
            return shown.low > hidden.high
        return shown.index == ("s", 0) and hidden.known == 0


def _heads(view: View | None, node: ir.Node, side: str) -> int | None:
    """Heads of Q, K or V: (row, position, d) or (row, heads, position, d)."""
    if view is None:
        return None
    if len(view.axes) == 3 and view.axes[:2] == ((ROW,), (POSITION,)) and view.plain(2):
        return node.attributes.get_int(f"{side}_num_heads", 0) or None
    if len(view.axes) == 4 and view.axes[0] == (ROW,) and view.axes[2] == (POSITION,) and view.plain(1):
        return view.size(1)
    return None


def _outweighs(shown: Interval, hidden: Interval) -> bool:
    """Whether a key is shown beside hidden ones; of what a mask computes from scores nothing is known."""
    unknown = shown.low == -math.inf and shown.high == math.inf
    return unknown or shown.low >= hidden.high - _MASKED


def _check_apart(value: ir.Value, view: View) -> None:
    if view.place(ROW) is None or view.place(POSITION) is None:
        raise Refuse(f"{value.name} has rows or positions merged with other axes, wanted them apart", value)
