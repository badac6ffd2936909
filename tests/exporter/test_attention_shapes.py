"""Attention in pieces whose axes stand where no kernel wants them, or are stretched on the way."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tfx.exporter.shapes import infer_shapes

from .running import lowered, run

TARGETS = [("cpu", None), ("cuda", None), ("web", None), ("portable", 17), ("portable", 23)]
MERGED = """
    eight = Constant<value_ints = [8]>()
    rest = Constant<value_ints = [-1]>()
    to3 = Concat<axis = 0>(rest, length, eight)
    q3 = Reshape(qh, to3)
    k3 = Reshape(kh, to3)
    v3 = Reshape(vh, to3)
    kt = Transpose<perm = [0, 2, 1]>(k3)
    product = MatMul(q3, kt)
"""
HEADS_BEFORE_BATCH = f"""(float[S, B, 16] q, float[S, B, 16] k, float[S, B, 16] v) => (float[N, S, 8] y) {{
    length = Shape<start = 0, end = 1>(q)
    split = Constant<value_ints = [0, 0, 2, 8]>()
    q4 = Reshape(q, split)
    k4 = Reshape(k, split)
    v4 = Reshape(v, split)
    qh = Transpose<perm = [2, 1, 0, 3]>(q4)
    kh = Transpose<perm = [2, 1, 0, 3]>(k4)
    vh = Transpose<perm = [2, 1, 0, 3]>(v4)
{MERGED}
    weights = Softmax(product)
    y = MatMul(weights, v3)
}}"""
HEADS_THAT_VARY = """(float[H, B, S, 8] q, float[H, B, S, 8] k, float[H, B, S, 8] v) => (float[H, B, S, 8] y) {
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    product = MatMul(q, kt)
    weights = Softmax(product)
    y = MatMul(weights, v)
}"""
A_BATCH_BEFORE_THE_MERGED = f"""
(float[B, 2, S, 8] qh, float[B, 2, S, 8] kh, float[B, 2, S, 8] vh, float[B, 1, 1, S] m) => (float[B, N, S, 8] y) {{
    length = Shape<start = 2, end = 3>(qh)
{MERGED}
    scores = Add(product, m)
    weights = Softmax(scores)
    y = MatMul(weights, v3)
}}"""


def shaped(text: str) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """A graph as a file of others, and feeds for 3 rows of 5 positions with 2 heads."""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> g {text}'))
    infer_shapes(model)
    rng, sizes = np.random.default_rng(0), {"B": 3, "S": 5, "H": 2}
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        shape = [size if isinstance(size, int) else sizes[str(size.value)] for size in value.shape or ()]
        feeds[str(value.name)] = rng.standard_normal(shape).astype(np.float32)
    return model, feeds


@pytest.mark.parametrize(("target", "opset"), TARGETS)
def test_heads_merged_before_the_batch_are_attention_of_one_head(target: str, opset: int | None) -> None:
    source, feeds = shaped(HEADS_BEFORE_BATCH)
    model, report = lowered(source, target, opset)
    assert report.counts["attention"] == 1
    assert report.refusals == []
    np.testing.assert_allclose(run(model)(feeds)["y"], run(source)(feeds)["y"], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (HEADS_THAT_VARY, "Q has B heads, wanted a fixed number"),
        (A_BATCH_BEFORE_THE_MERGED, "Add makes rank 4 of scores of rank 3, wanted it kept"),
    ],
)
@pytest.mark.parametrize(("target", "opset"), TARGETS)
def test_what_no_kernel_takes_stays_in_pieces(text: str, reason: str, target: str, opset: int | None) -> None:
    source, feeds = shaped(text)
    model, report = lowered(source, target, opset)
    assert report.counts["attention"] == 0
    assert [refusal.reason for refusal in report.refusals] == [reason]
    np.testing.assert_array_equal(run(model)(feeds)["y"], run(source)(feeds)["y"])
