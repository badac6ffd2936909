"""Smoothing goes into a norm's own result alone."""

from __future__ import annotations

import numpy as np
import pytest

from tfx.exporter.precision.products import find_products
from tfx.exporter.precision.smooth import fold, normed_by
from tfx.exporter.precision.writing import Writer

from ..running import parse, run

TEXT = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
g (float[B, S, 64] x, float[B, S, 64] skip) => (float[B, S, 80] y, float[B, S, 64] z) {{
  n, m, v, t = com.microsoft.SkipLayerNormalization(x, skip, gain, shift)
  y = MatMul({read}, w)
  z = Neg({other})
}}"""


@pytest.mark.parametrize("read", ["n", "t"])
def test_the_sum_beside_a_norm_is_not_its_result(read: str):
    random = np.random.default_rng(0)
    shapes = {"gain": (64,), "shift": (64,), "w": (64, 80)}
    constants = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model = parse(TEXT.format(read=read, other="t" if read == "n" else "n"), constants)
    feeds = {name: random.standard_normal((1, 5, 64)).astype(np.float32) for name in ("x", "skip")}
    before = run(model)(feeds)
    (product,) = find_products(model)
    smooth = random.uniform(0.5, 2, 64).astype(np.float32)
    folded = fold(Writer(model), product.x, [product], smooth)
    assert folded == (read == "n") == (normed_by(product.x) is not None)
    after = run(model)(feeds)
    np.testing.assert_allclose(after["z"], before["z"], atol=1e-5)
    if not folded:
        np.testing.assert_allclose(after["y"], before["y"], atol=1e-5)
