"""Does memory come to rest? One engine over many calls of ever other shapes, as a service sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .bench_race import Race

__all__ = ["GROWTH", "RUNS", "measure_memory", "plateau", "varying"]

RUNS = 300
"""Calls that memory is watched over."""

GROWTH = 0.02
"""What the last third may add to the most that was held before it, as a share, for memory to be at rest."""

_MOST_ROWS, _SHORTEST, _LONGEST = 16, 8, 256
_CHUNK = 10


def varying(runs: int, max_length: int | None, lengths: Sequence[int] | None = None, seed: int = 0) -> list[list[int]]:
    """Return the lengths of the rows of each call.

    Args:
        runs: number of calls.
        max_length: longest sequence the model takes.
        lengths: a histogram to draw from; without one 1 to 16 rows of one length from 8 to 256.
        seed: the same seed gives the same shapes.
    """
    random = np.random.default_rng(seed)
    longest = min(_LONGEST, max_length or _LONGEST)
    shapes = []
    for _ in range(runs):
        rows = int(random.integers(1, _MOST_ROWS + 1))
        if lengths is None:
            shapes.append([int(random.integers(min(_SHORTEST, longest), longest + 1))] * rows)
        else:
            shapes.append([int(length) for length in random.choice(np.asarray(lengths), rows)])
    return shapes


def plateau(resident_mb: Sequence[float]) -> dict[str, Any]:
    """Judge resident memory after each call.

    Returns:
        ``runs``; ``first_mb``, ``steady_mb`` (median of the last third) and ``most_mb``; ``growth``, what the last
        third added to the most that was held before, as a share; ``plateau``, whether that is below 2 %.
    """
    values = np.asarray(resident_mb, float)
    last = len(values) - len(values) // 3
    growth = max(0.0, float(values[last:].max() / values[:last].max() - 1))
    return {
        "runs": len(values),
        "first_mb": float(values[0]),
        "steady_mb": float(np.median(values[last:])),
        "most_mb": float(values.max()),
        "growth": growth,
        "plateau": growth < GROWTH,
    }


def measure_memory(
    request: Mapping[str, Any], max_length: int | None, lengths: Sequence[int] | None = None, runs: int = RUNS
) -> dict[str, Any]:
    """Run an engine in a fresh process over varying shapes.

    Args:
        request: as ``bench_worker`` describes.
        max_length: longest sequence the model takes.
        lengths: a histogram to draw from, as in ``varying``.
        runs: number of calls, at least 3.

    Returns:
        As ``plateau``, and ``peak_mb``, the most that the process ever held.
    """
    shapes = varying(runs, max_length, lengths)
    resident: list[float] = []
    with Race() as race:
        race.add("tfx", dict(request))
        for i in range(0, runs, _CHUNK):
            resident += race.ask("tfx", {"do": "shapes", "batches": shapes[i : i + _CHUNK]})
        peak = race.ask("tfx", {"do": "memory"})
    return {**plateau(resident), "peak_mb": peak}
