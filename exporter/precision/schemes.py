"""How the activations that enter a product are scaled, chosen by the error that each way leaves on calibration rows.

None of the ways looks beyond one token, so a vector does not depend on what shares its batch.

- ``static``: one scale for all tokens, found by calibration. For what comes out of a norm, whose size is bounded. The
  channels are evened out first (SmoothQuant, arXiv 2211.10438): divided by a vector that goes into the weights.
- ``token``: a scale per token, its largest magnitude over 127.
- ``shifted``: for what comes out of a GELU or a ReLU, which is hardly ever negative. All 255 steps go to the positive
  side: with ``z = floor(255 c / (max + c))``, 255 at most, and ``s = c / z`` the shift ``s z`` is the same ``c`` for
  all tokens, so that what it adds to the product, ``c`` times the sums of the columns, is a constant and goes into the
  bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .columns import quantize_columns

__all__ = ["FLOORS", "SHIFTS", "Scheme", "choose", "drift"]

FLOORS = {"Gelu": 0.171, "BiasGelu": 0.171, "FastGelu": 0.171, "QuickGelu": 0.28, "Relu": 0.0}
"""Operators whose results are never below minus this (QuickGelu: that of SiLU, the lowest)."""

SHIFTS = (0.3, 0.5, 1.0, 2.0)
"""What ``shifted`` may move the values by. Magnitudes up to 254 times this fit."""

HEADROOM = 1.2
"""What a static scale leaves above the largest magnitude that calibration saw."""

_STRENGTHS = (0.5, 0.65, 0.8, 0.9)
"""How much of a channel's size goes into the weights: SmoothQuant's alpha."""

_WORSE = 1.6
"""A static scale is taken up to this many times the error of one scale per token: it costs several passes less."""

_COLUMNS = 256
"""About so many columns of a matrix are enough to tell the ways apart."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One way.

    Attributes:
        kind: ``static``, ``token`` or ``shifted``.
        error: Root mean square of the product's error, relative to the product, over calibration rows.
        smooth: What the channels are divided by, (K,), ``None`` for nothing.
        shift: The ``c`` of ``shifted``.
    """

    kind: str
    error: float
    smooth: np.ndarray | None = None
    shift: float = 0.0


def smoothing(channels: np.ndarray, matrix: np.ndarray, strength: float) -> np.ndarray:
    """SmoothQuant's vector: ``max|x_k| ** a / max|W_k| ** (1 - a)``, scaled to a geometric mean of 1.

    Args:
        channels: Largest magnitude of each input channel, (K,).
        matrix: All weights that meet it, (K, N).
        strength: How much of a channel's size goes into the weights, 0 to 1.
    """
    rows = np.abs(matrix).max(axis=1)
    least = 1e-3 * max(float(channels.max()), 1e-20), 1e-3 * max(float(rows.max()), 1e-20)
    vector = np.maximum(channels, least[0]) ** strength / np.maximum(rows, least[1]) ** (1 - strength)
    return (vector / np.exp(np.log(vector).mean())).astype(np.float32)


def static_scale(channels: np.ndarray, smooth: np.ndarray | None) -> float:
    """The scale that leaves headroom above what calibration saw."""
    largest = float((channels if smooth is None else channels / smooth).max())
    return max(largest, 1e-20) * HEADROOM / 127


def token_scales(rows: np.ndarray) -> np.ndarray:
    """(rows, 1) scales of ``token``."""
    return np.maximum(np.abs(rows).max(axis=-1, keepdims=True), 1e-20) / 127


def shifted_scales(rows: np.ndarray, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """(rows, 1) scales and zero points of ``shifted``."""
    zero = np.clip(np.floor(255 * shift / (rows.max(axis=-1, keepdims=True) + shift)), 1, 255)
    return shift / zero, zero


def rounded(rows: np.ndarray, scheme: Scheme, channels: np.ndarray) -> np.ndarray:
    """What the product sees in place of ``rows``, but for the smoothing."""
    if scheme.smooth is not None:
        rows = rows / scheme.smooth
    if scheme.kind == "shifted":
        scales, zero = shifted_scales(rows, scheme.shift)
        return (np.clip(np.rint(rows / scales) + zero, 0, 255) - zero) * scales
    scales = static_scale(channels, scheme.smooth) if scheme.kind == "static" else token_scales(rows)
    return np.clip(np.rint(rows / scales), -128, 127) * scales


def _measured(scheme: Scheme, samples: Sequence[tuple[np.ndarray, np.ndarray]], matrix: np.ndarray) -> Scheme:
    smooth = scheme.smooth
    weights, scales = quantize_columns(matrix if smooth is None else matrix * smooth[:, None])
    kept = weights.astype(np.float32) * scales
    errors = []
    for rows, channels in samples:
        exact = rows @ matrix
        wrong = rounded(rows, scheme, channels) @ kept - exact
        errors.append((wrong**2).sum(axis=1) / np.maximum((exact**2).sum(axis=1), 1e-30))
    return dataclasses.replace(scheme, error=float(np.sqrt(np.concatenate(errors).mean())))


def choose(
    samples: Sequence[tuple[np.ndarray, np.ndarray]], matrix: np.ndarray, *, normed: bool, floor: float | None
) -> Scheme:
    """The cheapest way whose error is near that of the best.

    Args:
        samples: For every input of the unit: rows (rows, K) and the largest magnitude of each channel (K,).
        matrix: All weights that meet these inputs, (K, N).
        normed: Whether every input comes out of a norm.
        floor: The inputs are never below minus this; ``None`` when nothing is known.
    """
    whole, matrix = matrix, matrix[:, :: max(1, matrix.shape[1] // _COLUMNS)]
    plain = _measured(Scheme("token", 0.0), samples, matrix)
    if floor is not None:
        largest = max(float(channels.max()) for _, channels in samples)
        # Four times what was seen must fit: beyond the largest magnitude values would be cut.
        shifts = [shift for shift in SHIFTS if shift > floor and 254 * shift > 4 * largest]
        ways = [_measured(Scheme("shifted", 0.0, shift=shift), samples, matrix) for shift in shifts]
        return min((plain, *ways), key=lambda each: each.error)
    if not normed:
        return plain
    channels = np.max([channels for _, channels in samples], axis=0)
    smooths = [smoothing(channels, whole, strength) for strength in _STRENGTHS]
    static = min(
        (_measured(Scheme("static", 0.0, smooth), samples, matrix) for smooth in (None, *smooths)),
        key=lambda each: each.error,
    )
    token = min(
        (plain, *(_measured(Scheme("token", 0.0, smooth), samples, matrix) for smooth in smooths)),
        key=lambda each: each.error,
    )
    return static if static.error <= _WORSE * token.error else token


def drift(scheme: Scheme, rows: np.ndarray, channels: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """What the 8 bit product lacks on average, (N,): rounded weights meet channels whose mean is not zero."""
    smooth = scheme.smooth
    weights, scales = quantize_columns(matrix if smooth is None else matrix * smooth[:, None])
    found = rounded(rows, scheme, channels) @ (weights.astype(np.float32) * scales)
    return (rows @ matrix - found).mean(axis=0)
