"""Does a text's vector depend on what shares its call? The same sample alone, beside others, and padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...errors import ParityError
from ...runtime.tensors import MASK_ROLES, TensorSpec, attended_positions

__all__ = ["Variance", "gate", "measure"]

Feeds = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Variance:
    """Largest absolute change of any output of a sample at its attended positions; ``None`` where not measurable.

    Attributes:
        batch: Beside others of its own length, among them an outlier.
        padding: Padded to twice its length, on the right.
    """

    batch: float | None
    padding: float | None


def measure(
    run: Callable[[Feeds], Mapping[str, np.ndarray]],
    samples: Sequence[Feeds],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    pad_id: int = 0,
    max_length: int | None = None,
) -> Variance:
    """Runs samples in different company.

    Args:
        run: The model: feeds by input name to outputs by output name.
        samples: One row each, none padded.
        inputs: Specs of the inputs.
        outputs: Specs of the outputs.
        pad_id: Token that pads.
        max_length: Longest sequence.

    Returns:
        How far outputs moved.
    """
    if not samples or any(spec.shape[:1] != ("batch",) for spec in inputs):
        return Variance(None, None)
    batch, padding = [], []
    masked = any(spec.role in MASK_ROLES for spec in inputs)
    for sample in samples:
        alone = run(sample)
        beside = _beside(sample, inputs)
        batch.append(_change(run(beside), alone, sample, inputs, outputs))
        longer = _padded(sample, inputs, pad_id, max_length) if masked else None
        if longer is not None:
            padding.append(_change(run(longer), alone, sample, inputs, outputs))
    return Variance(max(batch), max(padding, default=None))


def _beside(sample: Feeds, inputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """The sample first, then one of random content, one of a single token repeated, and itself."""
    random = np.random.default_rng(len(next(iter(sample.values())).ravel()))
    feeds = {}
    for spec in inputs:
        mine = sample[spec.name]
        if spec.role == "token_ids":
            other = random.integers(0, spec.limit or 16, mine.shape).astype(mine.dtype)
            same = np.full_like(mine, random.integers(0, spec.limit or 16))
        elif spec.role == "features":
            other = (mine * random.standard_normal(mine.shape) * 20).astype(mine.dtype)
            same = (mine * 100).astype(mine.dtype) if mine.dtype.kind == "f" else mine
        else:
            other, same = mine, mine
        feeds[spec.name] = np.concatenate([mine, other, same, mine])
    return feeds


def _padded(
    sample: Feeds, inputs: Sequence[TensorSpec], pad_id: int, max_length: int | None
) -> dict[str, np.ndarray] | None:
    """The sample with padding behind it; ``None`` where it does not fit or an input cannot be padded."""
    feeds = {}
    for spec in inputs:
        mine = sample[spec.name]
        if "sequence" not in spec.shape or spec.shape.count("sequence") > 1:
            return None
        axis = spec.shape.index("sequence")
        length = mine.shape[axis]
        more = min(length, (max_length or 2 * length) - length)
        if more < 1:
            return None
        fill = {"token_ids": pad_id, "padding_mask": 1}.get(spec.role, 0)
        if spec.role == "position_ids":
            tail = np.broadcast_to(np.arange(length, length + more), (*mine.shape[:-1], more)).astype(mine.dtype)
        else:
            shape = [*mine.shape[:axis], more, *mine.shape[axis + 1 :]]
            tail = np.full(shape, fill, mine.dtype)
        feeds[spec.name] = np.concatenate([mine, tail], axis=axis)
    return feeds


def _change(
    found: Mapping[str, np.ndarray],
    alone: Mapping[str, np.ndarray],
    sample: Feeds,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> float:
    """The largest change of the first row, where it attends."""
    attended = attended_positions(inputs, sample)
    largest = 0.0
    for spec in outputs:
        wanted = alone[spec.name]
        if wanted.dtype.kind != "f" or spec.shape[:1] != ("batch",):
            continue
        mine = found[spec.name][:1]
        if spec.shape[1:2] == ("sequence",):
            mine = mine[:, : wanted.shape[1]]
            if attended is not None and attended.shape == wanted.shape[:2]:
                mine, wanted = mine[attended], wanted[attended]
        if mine.size:
            largest = max(largest, float(np.abs(mine.astype(np.float64) - wanted).max()))
    return largest


_FREE = ("int8-dynamic",)
"""Precisions that do not promise anything: what they give is in the manifest."""

_NOISE = 1e-3
"""A sum of float32 may be taken in another order in other company; a scale that follows the company moves a vector by
more than this (by 0.5 in all-MiniLM-L6-v2)."""


def gate(found: Variance, precision: str) -> None:
    """Refuses a model whose outputs move with their company although its precision promises that they do not.

    Raises:
        ParityError: They do; says by how much.
    """
    if precision in _FREE:
        return
    for where, change in (("beside others", found.batch), ("padded", found.padding)):
        if change is not None and not change <= _NOISE:
            raise ParityError(
                f"precision {precision}: an output moves by {change:.3g} {where}, wanted {_NOISE} at most"
            )
