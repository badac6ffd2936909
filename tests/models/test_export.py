"""The encoder goes through torch.onnx.export with dynamic axes, whatever its options."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

from tfx.models.config import EncoderConfig
from tfx.models.encoder import Encoder

pytestmark = pytest.mark.usefixtures("seeded")

# Every value of every option at least once, and every pair of positions and combine.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm": "pre", "activation": "gelu_tanh", "positions": "learned"},
    {"activation": "relu", "combine": "concat", "pooling": "mean"},
    {"norm": "pre", "positions": "learned", "combine": "concat", "pooling": "cls", "normalize": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())) or "default")
def test_the_exported_graph_runs_at_any_shape(options: dict[str, Any]):
    config = EncoderConfig(d_model=33, heads=3, layers=1, d_ff=64, vocab_size=50, max_len=40, **options)
    module = Encoder(config).eval()
    names = ("input_ids", "attention_mask")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        program = torch.onnx.export(
            module,
            (),
            kwargs={name: torch.ones(2, 7, dtype=torch.int64) for name in names},
            dynamic_shapes={name: {0: "batch", 1: "sequence"} for name in names},
            input_names=names,
            dynamo=True,
            opset_version=23,
            verbose=False,
        )
    assert program is not None
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = program.model_proto.SerializeToString()
    session = ort.InferenceSession(proto, settings, providers=["CPUExecutionProvider"])
    for batch, sequence in ((1, 1), (3, 5), (2, 40)):
        ids = torch.randint(0, 50, (batch, sequence))
        mask = torch.randint(0, 2, (batch, sequence))
        mask[-1] = 0  # a fully masked row must not become NaN
        with torch.no_grad():
            wanted = module(ids, mask)
        got = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        assert len(got) == len(wanted)
        for value, reference in zip(got, wanted.values(), strict=True):
            np.testing.assert_allclose(np.asarray(value), reference.numpy(), rtol=0, atol=5e-6)
