"""Weights in 8 bits, one scale a column, that no CPU's integer product saturates on.

CPUs without VNNI (AVX2, and AVX-512 before Cascade Lake) multiply unsigned by signed bytes with ``vpmaddubsw``: the sum
of two neighbouring products must fit 16 bits, or it saturates in silence. With activations up to 255 it fits if two
neighbouring weights of one sign add up to 128 at most. The usual answers are weights of 7 bits, or unsigned weights,
whose product is far slower on CPUs with VNNI. Here the scale of a column is chosen so that its worst pair
just fits, which costs about a third of a bit.
"""

from __future__ import annotations

import numpy as np

__all__ = ["quantize_columns", "quantize_rows"]

_LARGEST = 127
_PAIR = 32767 // 255
"""What two neighbouring weights of one sign may add up to: 128."""


def quantize_columns(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a matrix to 8 bits a weight and one scale a column.

    Args:
        matrix: (K, N) float32.

    Returns:
        int8 (K, N) in [-127, 127], in which rows 2i and 2i + 1 of one sign add up to 128 at most in every column, and
        float32 scales (N,), positive: ``matrix`` is about ``quantized * scales``.
    """
    inner, outer = matrix.shape
    even = np.zeros((inner + inner % 2, outer), np.float32)
    even[:inner] = matrix
    first, second = even[0::2], even[1::2]
    # Of two signs only the larger one counts: the other takes away from it.
    pairs = np.where((first < 0) == (second < 0), np.abs(first) + np.abs(second), 0)
    scales = np.maximum(np.abs(even).max(axis=0) / _LARGEST, pairs.max(axis=0, initial=0) / _PAIR)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    scaled = even / scales
    rounded = np.rint(scaled)
    # Both halves of a pair may have been rounded up; then the one that was rounded further goes back.
    first, second = rounded[0::2], rounded[1::2]
    over = np.abs(first + second) > _PAIR
    back = np.abs(first) - np.abs(scaled[0::2]) >= np.abs(second) - np.abs(scaled[1::2])
    first[over & back] -= np.sign(first[over & back])
    second[over & ~back] -= np.sign(second[over & ~back])
    return rounded[:inner].clip(-_LARGEST, _LARGEST).astype(np.int8), scales


def quantize_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a table to 8 bits a number and one scale a row.

    Args:
        table: (rows, d) float32.

    Returns:
        int8 (rows, d) and float32 scales (rows,), positive.
    """
    scales = np.abs(table).max(axis=1) / _LARGEST
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    return np.rint(table / scales[:, None]).clip(-_LARGEST, _LARGEST).astype(np.int8), scales
