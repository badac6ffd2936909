"""The fewest, most harmful parts are kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tfx.exporter.precision.running import Agreement
from tfx.exporter.precision.sensitivity import choose_kept

AIM = Agreement(texts=0.99, vectors=0.9)


class Parts:
    """Parts whose harms add up, and how often they were measured."""

    def __init__(self, *harms: float):
        self.harms = harms
        self.measured: list[tuple[int, ...]] = []

    def joint(self, parts: Sequence[int]) -> Agreement:
        self.measured.append(tuple(parts))
        total = sum(self.harms[part] for part in parts)
        return Agreement(1 - total, 1 - total)

    def kept(self) -> list[int]:
        kept, found = choose_kept(range(len(self.harms)), self.joint, lambda part: self.joint([part]), AIM)
        assert kept == {part: pytest.approx(self.harms[part]) for part in kept}
        assert found == self.joint([part for part in range(len(self.harms)) if part not in kept])
        return list(kept)


def test_nothing_is_kept_nor_measured_alone_when_all_together_are_good():
    parts = Parts(0.001, 0.002, 0.003)
    assert parts.kept() == []
    assert parts.measured[:1] == [(0, 1, 2)]
    assert len(parts.measured) == 2  # the second one is the test's own


@pytest.mark.parametrize(
    ("harms", "kept"),
    [
        ((0.001, 0.5, 0.002), [1]),
        ((0.004, 0.004, 0.004, 0.004), [0, 1]),  # equal harms: the first in the graph
        ((0.02, 0.03, 0.04, 0.05), [3, 2, 1, 0]),
        ((0.02, 0.001, 0.03, 0.001, 0.04, 0.001, 0.05), [6, 4, 2, 0]),
        ((0.03, 0.001, 0.02, 0.04), [3, 0, 2]),
    ],
)
def test_as_few_as_reach_the_aim_the_worst_first(harms: tuple[float, ...], kept: list[int]):
    assert Parts(*harms).kept() == kept


def test_both_cosines_count():
    def joint(parts: Sequence[str]) -> Agreement:
        return Agreement(1.0, 0.5 if "b" in parts else 1.0)

    assert list(choose_kept("abc", joint, joint, AIM)[0]) == ["b"]
