"""Captured graphs against torch, in the ONNX reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from tfx.exporter import golden
from tfx.exporter.probe import inference
from tfx.exporter.sources import Source, parse_input
from tfx.models.config import EncoderConfig
from tfx.runtime.tensors import MASK_PATTERNS, Case

CONFIG = EncoderConfig(d_model=16, heads=2, layers=2, d_ff=32, vocab_size=50, max_len=40, pooling="mean")
SHAPES = [(1, 1), (3, 5), (4, 1), (5, 19)]
CASES = [Case(f"{b}-{s}-{pattern}", b, s, pattern) for b, s in SHAPES for pattern in MASK_PATTERNS]
IDS, MASK, TYPES = (f"{name}:int64:batch,sequence" for name in ("ids", "mask", "types"))


def source_of(module: nn.Module, *inputs: str, **fields) -> Source:
    return Source(module.eval(), tuple(map(parse_input, inputs)), "module", "mine", "", **fields)


def answers(model: ir.Model, feeds) -> dict[str, np.ndarray]:
    """Run a graph in the ONNX reference evaluator, which shares no code with torch or onnxruntime."""
    evaluator = ReferenceEvaluator(ir.to_proto(model))
    arrays: Any = evaluator.run(None, dict(feeds))
    return dict(zip(map(str, evaluator.output_names), arrays, strict=True))


def check_equal(source: Source, model: ir.Model, cases=CASES, tolerance: float = 3e-6) -> None:
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for case in golden.record(source, cases):
        found = answers(model, case.inputs)
        assert list(found) == list(case.outputs)
        for name, wanted in case.outputs.items():
            assert found[name].shape == wanted.shape, (case.id, name)
            assert np.abs(found[name] - wanted).max() <= tolerance, (case.id, name)


def check_fully_masked(source: Source, model: ir.Model, mask: str, hidden: int) -> None:
    """One row attends nothing (case A08): no NaN, and what torch answers."""
    (case,) = golden.record(source, [Case("x", 3, 5, "right")])
    feeds = {name: np.array(array) for name, array in case.inputs.items()}
    feeds[mask][1] = hidden
    with inference(source.module):
        wanted = source.call({name: torch.tensor(array) for name, array in feeds.items()})
    for name, found in answers(model, feeds).items():
        assert np.isfinite(found).all()
        assert np.abs(found - wanted[name].numpy()).max() <= 3e-6


def stored_bytes(model: ir.Model) -> int:
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
