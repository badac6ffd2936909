"""How far an engine's answers are from torch's in fp32, and how much a text's depend on what shares its batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["compare", "variance"]


def compare(found: np.ndarray, wanted: np.ndarray, mask: np.ndarray | None) -> dict[str, float]:
    """Compare answers.

    Args:
        found: (batch, sequence, d), or vectors (batch, d).
        wanted: likewise.
        mask: (batch, sequence), only attended positions count; None for vectors.

    Returns:
        ``max_abs``; ``min_cosine``, the worst of any vector (one per attended token, or per text); and
        ``min_text_cosine``, the worst of any text, which is the mean of its tokens where there are tokens.

    Raises:
        ValueError: the shapes differ, or a number is not finite.
    """
    if found.shape != wanted.shape:
        raise ValueError(f"outputs: found shape {found.shape}, wanted {wanted.shape}")
    if mask is None:
        tokens = texts = (found, wanted)
    else:
        on = mask.astype(bool)
        tokens = (found[on], wanted[on])
        texts = tuple((np.where(on[..., None], each, 0.0)).sum(1) for each in (found, wanted))
    if not np.isfinite(tokens[0]).all():
        raise ValueError("outputs: found NaN or infinity")
    return {
        "max_abs": float(np.abs(tokens[0].astype(np.float64) - tokens[1]).max()),
        "min_cosine": _min_cosine(*tokens),
        "min_text_cosine": _min_cosine(*texts),
    }


def variance(together: np.ndarray, alone: Mapping[int, np.ndarray]) -> dict[str, Any] | None:
    """Compare rows of a batch with the same rows run by themselves, without padding.

    Args:
        together: (batch, sequence, d) or (batch, d).
        alone: {row: (1, its own length, d) or (1, d)}.

    Returns:
        ``max_abs`` and ``min_cosine`` of the vectors, None where there are no rows to compare.
    """
    if not alone:
        return None
    pairs = [
        (each[0], together[row, : each.shape[1]] if each.ndim == 3 else together[row]) for row, each in alone.items()
    ]
    return {
        "max_abs": max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs),
        "min_cosine": min(_min_cosine(np.atleast_2d(a), np.atleast_2d(b)) for a, b in pairs),
    }


def _min_cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-300)).min())
