"""How the axes of a padded value hold its tokens, and what stays of them once only attended tokens are kept.

A padded value has a row axis (batch) and a position axis (sequence) somewhere among its axes, perhaps merged with
others: ``nn.MultiheadAttention`` works on (S, B * H, d). Packed, the same numbers are (tokens, rest...): one leading
axis for the attended tokens, row by row, then the other axes in their order. Where rows and positions stand does not
matter to the packed form, so transposing them or merging them with their neighbours costs nothing there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

__all__ = ["POSITION", "ROW", "Atom", "Axes", "View"]

ROW, POSITION = "row", "position"

Atom = int | str
"""A size, or which of the two token axes it is."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of the two token axes in a graph's shapes.

    Attributes:
        batch: Symbol of the rows.
        sequence: Symbol of the positions.
    """

    batch: str
    sequence: str

    def atoms(self, size: Any) -> list[Atom] | None:
        """The factors of an axis' size, rows and positions by their own name; ``None`` for what is neither."""
        if isinstance(size, int):
            return [size]
        names = {self.batch: ROW, self.sequence: POSITION}
        if str(size.value) in names:
            return [names[str(size.value)]]
        parts = [part.strip() for part in str(size.value).split("*")]
        found: list[Atom] = []
        for part in parts:
            if part in names:
                found.append(names[part])
            elif part.isdigit() and len(parts) > 1:  # alone in a symbol it is a name that looks like a number
                found.append(int(part))
            else:
                return None
        return found

    def of(self, value: ir.Value | None) -> View | None:
        """The view of a value that has both token axes, each by itself; ``None`` otherwise."""
        if value is None or value.shape is None:
            return None
        axes = [self.atoms(size) for size in value.shape]
        if any(axis is None or len(axis) != 1 for axis in axes):
            return None
        view = View(tuple(tuple(axis) for axis in axes if axis is not None))
        return view if view.whole else None

    def mentions(self, value: ir.Value) -> tuple[bool, bool] | None:
        """Whether a value's shape has rows and positions in it; ``None`` where the shape is not known."""
        if value.shape is None:
            return None
        atoms = [self.atoms(size) for size in value.shape]
        if any(axis is None for axis in atoms):
            return None
        flat = [atom for axis in atoms if axis is not None for atom in axis]
        return ROW in flat, POSITION in flat


@dataclasses.dataclass(frozen=True)
class View:
    """The axes of a padded value, each as the atoms it is made of, in order of memory."""

    axes: tuple[tuple[Atom, ...], ...]

    @property
    def whole(self) -> bool:
        """Whether rows and positions both occur, once."""
        flat = self.atoms
        return flat.count(ROW) == 1 and flat.count(POSITION) == 1

    @property
    def atoms(self) -> list[Atom]:
        """All atoms, in order."""
        return [atom for axis in self.axes for atom in axis]

    @property
    def rest(self) -> list[int]:
        """The sizes of the packed value behind its token axis."""
        return [self.size(axis) for axis in range(len(self.axes)) if self.kept(axis)]

    def size(self, axis: int) -> int:
        """What is left of an axis once its tokens are taken out."""
        return math.prod(atom for atom in self.axes[axis] if isinstance(atom, int))

    def kept(self, axis: int) -> bool:
        """Whether an axis holds anything but tokens."""
        return any(isinstance(atom, int) for atom in self.axes[axis])

    def plain(self, axis: int) -> bool:
        """Whether an axis holds no tokens at all."""
        return all(isinstance(atom, int) for atom in self.axes[axis])

    def place(self, atom: Atom) -> int | None:
        """The axis that is this token axis and nothing else."""
        return self.axes.index((atom,)) if (atom,) in self.axes else None

    def packed(self, axis: int) -> int:
        """Where an axis is in the packed value."""
        return 1 + sum(self.kept(before) for before in range(axis))

    def transposed(self, perm: Sequence[int]) -> View:
        """The view after a Transpose."""
        return View(tuple(self.axes[axis] for axis in perm))

    def reshaped(self, shape: Sequence[Any], names: Axes) -> View | None:
        """The view after a Reshape; ``None`` where the new axes do not follow the old atoms."""
        left = [atom for atom in self.atoms if atom != 1]
        axes: list[tuple[Atom, ...]] = []
        for size in shape:
            wanted = names.atoms(size)
            if wanted is None:
                return None
            number = math.prod(atom for atom in wanted if isinstance(atom, int))
            marks = [atom for atom in wanted if not isinstance(atom, int)]
            taken: list[Atom] = []
            while marks or number > 1:
                if not left:
                    return None
                atom = left.pop(0)
                if not isinstance(atom, int):
                    if atom not in marks:
                        return None
                    marks.remove(atom)
                    taken.append(atom)
                elif number % atom == 0:
                    number //= atom
                    taken.append(atom)
                elif number > 1 and atom % number == 0:
                    taken.append(number)
                    left.insert(0, atom // number)
                    number = 1
                else:
                    return None
            axes.append(tuple(taken) or (1,))
        return View(tuple(axes)) if not left else None
