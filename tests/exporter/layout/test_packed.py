"""Packed attention for CUDA: no CPU has the operator, so its documentation is written out in numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from tfx.exporter import pipeline, targets
from tfx.exporter.layout import MaskInput, to_ragged
from tfx.exporter.layout.packed import to_packed
from tfx.exporter.metadata import count
from tfx.exporter.precision import fp16
from tfx.exporter.precision.ranges import Observed

from ..running import encoder, masks, nodes_of, torch_answers


class PackedMultiHeadAttention(OpRun):
    """By way of the padded form that the two vectors describe, with padding on the right."""

    op_domain = "com.microsoft"

    def _run(self, q: Any, k: Any, v: Any, bias: Any, offset: Any, bounds: Any, num_heads: int = 0, scale: float = 0.0):
        del bias
        assert offset.dtype == bounds.dtype == np.int32
        sequences, longest = offset.shape
        assert sorted(offset.reshape(-1)) == list(range(sequences * longest))
        assert bounds.shape == (sequences + 1,) and bounds[0] == 0 and bounds[-1] == len(q)
        padded = []
        for x in (q, k, v):
            whole = np.full((sequences * longest, x.shape[1]), np.nan, np.float64)
            whole[offset.reshape(-1)[: len(x)]] = x
            padded.append(whole.reshape(sequences, longest, num_heads, -1))
        out = np.full((sequences * longest, v.shape[1]), np.nan)
        for row, (start, end) in enumerate(itertools.pairwise(bounds)):
            rq, rk, rv = (each[row, : end - start].transpose(1, 0, 2) for each in padded)
            scores = rq @ rk.swapaxes(-1, -2) * (scale or rq.shape[-1] ** -0.5)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            answer = (weights / weights.sum(-1, keepdims=True)) @ rv
            out[row * longest : row * longest + end - start] = answer.transpose(1, 0, 2).reshape(end - start, -1)
        return (out[offset.reshape(-1)[: len(q)]].astype(q.dtype),)


def _packed(**options: Any) -> tuple[Any, ir.Model]:
    source, captured = encoder(**options)
    model = captured.clone()
    report = pipeline.raise_model(model)
    assert to_ragged(model, [MaskInput("attention_mask", False)]) == 2
    assert to_packed(model) == 2
    assert count(model)["attention"] == 2
    pipeline.lower_model(model, targets.get("cuda"), report)
    return source, model


def _plain(model: ir.Model) -> ReferenceEvaluator:
    """With contrib kernels by their documentation."""
    return ReferenceEvaluator(ir.to_proto(model), new_ops=[PackedMultiHeadAttention, *CONTRIB])


class SkipLayerNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, skip: Any, gamma: Any, beta: Any, epsilon: float = 1e-5):
        total = (x + skip).astype(np.float64)
        centred = total - total.mean(-1, keepdims=True)
        return ((centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * gamma + beta).astype(x.dtype),)


class BiasGelu(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, bias: Any):
        from torch import from_numpy
        from torch.nn.functional import gelu

        return (gelu(from_numpy((x + bias).astype(np.float64))).numpy().astype(x.dtype),)


CONTRIB = [SkipLayerNormalization, BiasGelu]


@pytest.mark.parametrize("rows", [("11111",), ("1111111", "1110000"), ("0001111", "1010110", "0000000", "0100000")])
def test_any_mask_gives_the_vectors_of_the_source(rows: tuple[str, ...]):
    source, model = _packed(d_model=64, d_ff=128, heads=4)
    assert {n.op_type for n in ir.traversal.RecursiveGraphIterator(model.graph)} & {"If", "Loop"} == set()
    assert len(nodes_of(model, "PackedMultiHeadAttention", "com.microsoft")) == 2
    mask = masks(*rows)
    feeds = {"input_ids": np.random.default_rng(0).integers(1, 50, mask.shape), "attention_mask": mask}
    found, *_ = _plain(model).run(None, dict(feeds))
    found = np.asarray(found)
    wanted = torch_answers(source, feeds)["last_hidden_state"]
    seen = mask != 0
    np.testing.assert_allclose(found[seen], wanted[seen], rtol=0, atol=1e-5)
    assert (found[~seen] == 0).all()


def test_halves_go_through_it():
    source, model = _packed(d_model=64, d_ff=128, heads=4)
    with pytest.MonkeyPatch.context() as patch:  # What calibration runs is the padded form's to test.
        patch.setattr(fp16, "observe", lambda *_: Observed())
        patch.setattr(fp16, "_worst_cosine", lambda *_: 1.0)
        fp16.apply(model, [], target=targets.get("cuda"))
    for node in nodes_of(model, "PackedMultiHeadAttention", "com.microsoft"):
        kinds = [value.dtype for value in node.inputs if value is not None]
        assert kinds == [*[ir.DataType.FLOAT16] * 3, *[ir.DataType.INT32] * 2]
    mask = masks("1111111", "0010110")
    feeds = {"input_ids": np.random.default_rng(0).integers(1, 50, mask.shape), "attention_mask": mask}
    found, *_ = _plain(model).run(None, dict(feeds))
    found = np.asarray(found)
    assert found.dtype == np.float32
    np.testing.assert_allclose(
        found[mask != 0], torch_answers(source, feeds)["last_hidden_state"][mask != 0], rtol=0, atol=0.03
    )
