"""What a token-wise step is, and what the rules for it share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from ..guards import fixed
from .views import Axes, View

__all__ = ["Rule", "Step", "Views", "Writer", "alone", "fits", "ints_of", "named"]


class Writer(Protocol):
    """What a step writes with."""

    def tokens(self, value: ir.Value) -> ir.Value:
        """The packed form of a value that has tokens: (tokens, rest...)."""
        ...

    def beside(self, value: ir.Value, view: View) -> ir.Value:
        """A value without tokens, or with rows or positions alone, as it broadcasts with packed tokens of a view."""
        ...

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any],
        shape: Sequence[int | str] | None = None,
    ) -> list[ir.Value]:
        """A new node, of the shape given, else that of the step's outputs; as many outputs."""
        ...

    def ints(self, values: Sequence[int]) -> ir.Value:
        """An int64 vector."""
        ...


@dataclasses.dataclass(frozen=True)
class Step:
    """A token-wise node.

    Attributes:
        views: The views of its outputs.
        write: Writes it on packed tokens, and returns its outputs.
    """

    views: tuple[View, ...]
    write: Callable[[Writer], list[ir.Value]]


Views = Callable[[ir.Value | None], View | None]
"""The view of a value that has tokens, ``None`` for others."""

Rule = Callable[[ir.Node, Views, Axes], Step | None]
"""How a node works on packed tokens; ``None`` for one that mixes tokens."""


def alone(node: ir.Node, views: Views) -> tuple[ir.Value, View] | None:
    """The first input and its view, where it has tokens and no other input has."""
    x = node.inputs[0] if node.inputs else None
    view = views(x)
    if x is None or view is None or any(views(value) for value in node.inputs[1:]):
        return None
    return x, view


def fits(value: ir.Value, whole: View, names: Axes) -> bool:
    """Whether a value without both token axes broadcasts with tokens, rows with rows and positions with positions."""
    if value.shape is None or len(value.shape) > len(whole.axes):
        return False
    offset = len(whole.axes) - len(value.shape)
    for axis, size in enumerate(value.shape, offset):
        atoms = names.atoms(size)
        if atoms is None:
            return False
        if whole.plain(axis):
            if not all(isinstance(atom, int) for atom in atoms):
                return False
        elif atoms != [1] and (len(whole.axes[axis]) > 1 or tuple(atoms) != whole.axes[axis]):
            return False
    return True


def ints_of(node: ir.Node, at: int) -> list[int] | None:
    """The numbers of a constant input; ``None`` where it is missing or computed."""
    tensor = fixed(node.inputs[at]) if len(node.inputs) > at else None
    return None if tensor is None else [int(i) for i in np.asarray(tensor.numpy()).reshape(-1)]


def named(shape: Iterable[Any]) -> list[int | str]:
    """Sizes as a new shape takes them: symbols by their names."""
    return [size if isinstance(size, int) else str(size) for size in shape]
