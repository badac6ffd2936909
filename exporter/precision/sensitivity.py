"""Chooses what stays in float32: the fewest of the most harmful, so that the rest reaches its aim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .running import Agreement

__all__ = ["choose_kept"]

T = TypeVar("T")


def choose_kept(
    parts: Sequence[T], joint: Callable[[Sequence[T]], Agreement], alone: Callable[[T], Agreement], aim: Agreement
) -> tuple[dict[T, float], Agreement]:
    """Chooses parts to leave as they are.

    The parts are ordered by what each one alone does to the smallest cosine, and the first ones are kept: as few as
    reach the aim, found by doubling and halving. Nothing is measured alone if all together reach it.

    Args:
        parts: What can be changed, each hashable by identity.
        joint: The agreement with these parts changed.
        alone: The agreement with one part changed.
        aim: Smallest cosines to reach.

    Returns:
        The parts to keep, with the cosine that each costs alone, and the agreement with all others changed.
    """
    found = joint(parts)
    if reaches(found, aim):
        return {}, found
    harms = {part: 1 - min(each.texts, each.vectors) for part in parts for each in (alone(part),)}
    order = sorted(parts, key=lambda part: -harms[part])  # stable: equal harms keep the order of the graph
    measured = {0: found}

    def enough(count: int) -> bool:
        if count not in measured:
            kept = order[:count]
            measured[count] = joint([part for part in parts if part not in kept])
        return reaches(measured[count], aim)

    high = 1
    while high < len(order) and not enough(high):
        high *= 2
    high, low = min(high, len(order)), high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    enough(high)
    return {part: harms[part] for part in order[:high]}, measured[high]


def reaches(found: Agreement, aim: Agreement) -> bool:
    """Whether both cosines are reached."""
    return found.texts >= aim.texts and found.vectors >= aim.vectors
