"""Weights in 8 bits: near the originals, and no pair of products leaves 16 bits (A19)."""

from __future__ import annotations

import numpy as np
import pytest

from tfx.exporter.precision.columns import quantize_columns, quantize_rows

SIGNS = {"both": lambda m: m, "positive": np.abs, "negative": lambda m: -np.abs(m)}


def saturating(left: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """u8 x s8 as CPUs without VNNI do it (vpmaddubsw): neighbouring products are added in 16 bits, with saturation."""
    products = left.astype(np.int64)[:, :, None] * weights.astype(np.int64)[None]  # (rows, K, N)
    if products.shape[1] % 2:
        products = np.concatenate([products, np.zeros_like(products[:, :1])], axis=1)
    pairs = products[:, 0::2] + products[:, 1::2]
    return pairs.clip(-(2**15), 2**15 - 1).sum(axis=1)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("inner", [1, 7, 64])
def test_no_activation_saturates_a_pair(sign: str, inner: int):
    random = np.random.default_rng(inner)
    matrix = SIGNS[sign](random.standard_normal((inner, 40)).astype(np.float32))
    matrix[:, 0] = 0.3  # every pair at its limit
    matrix[:, 1] = 0
    matrix[0, 2] = 50
    weights, scales = quantize_columns(matrix)
    left = random.integers(0, 256, (6, inner))
    left[0], left[1], left[2] = 255, 0, np.where(random.random(inner) < 0.5, 255, 0)
    np.testing.assert_array_equal(saturating(left, weights), left @ weights.astype(np.int64))
    assert weights.dtype == np.int8
    assert np.abs(weights.astype(int)).max() <= 127
    # Half a step, and another whole one where a pair had been rounded up on both sides.
    assert (np.abs(weights * scales - matrix) <= 1.5 * scales + 1e-6).all()


def test_plain_8_bit_weights_would_saturate():
    matrix = np.abs(np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
    plain = np.rint(matrix / np.abs(matrix).max(axis=0) * 127).astype(np.int8)
    left = np.full((1, 64), 255)
    assert (saturating(left, plain) != left @ plain.astype(np.int64)).any()


def test_the_pairs_cost_less_than_a_bit():
    matrix = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)
    weights, scales = quantize_columns(matrix)
    largest = np.abs(matrix).max(axis=0)

    def error(levels: int) -> float:
        steps = largest / levels
        return float(np.linalg.norm(np.rint(matrix / steps) * steps - matrix))

    assert error(127) <= np.linalg.norm(weights * scales - matrix) < 0.75 * error(64)


def test_rows_have_their_own_scales():
    table = np.random.default_rng(2).standard_normal((5, 32)).astype(np.float32)
    table[1] *= 1000
    table[2] = 0
    rows, scales = quantize_rows(table)
    assert rows.dtype == np.int8
    assert scales.shape == (5,)
    assert (np.abs(rows * scales[:, None] - table) <= 0.5 * scales[:, None] * 1.001).all()
    assert (scales > 0).all()
