"""What lowering must not mix up between layers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tfx.exporter import fusion, pipeline, targets
from tfx.exporter.capture import capture
from tfx.exporter.fusion import Arg
from tfx.exporter.lowering.attention import AttentionPrimitives
from tfx.exporter.raising.attention import AttentionPieces
from tfx.exporter.raising.attention_form import AttentionScale
from tfx.exporter.sources import reference
from tfx.models.config import EncoderConfig

from . import laws

CONFIG = EncoderConfig(d_model=16, heads=2, layers=3, d_ff=32, vocab_size=50, max_len=20)


def _packed(model: ir.Model) -> list[ir.Node]:
    return [n for n in model.graph if n.op_type == "Attention" and n.domain]


def test_layers_with_equal_biases_keep_their_own_weights():
    source = reference(CONFIG)
    with torch.no_grad():
        for name, parameter in source.module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    model = capture(source)
    pipeline.optimize(model, targets.get("cpu"))
    assert len({n.inputs[1] for n in _packed(model)}) == 3
    assert len({n.inputs[2] for n in _packed(model)}) == 1, "equal biases are stored once"
    feeds = {"input_ids": np.arange(12).reshape(2, 6), "attention_mask": np.ones((2, 6), np.int64)}
    with torch.no_grad():
        wanted = source.call({name: torch.from_numpy(array) for name, array in feeds.items()})
    np.testing.assert_allclose(laws.runner(model)(feeds)[0], wanted["last_hidden_state"].numpy(), rtol=0, atol=2e-6)


def test_numbers_may_have_as_many_axes_as_what_they_scale():
    """Some exporters write a scale of 0.5 as [[[[0.5]]]]; with one axis more it would add an axis to the result."""
    factor, value = np.full((1, 1, 1, 1), 8**0.5, np.float32), np.full((1, 1, 1, 1), -1e9, np.float32)
    model = laws.build(AttentionPieces(), replace={"factor": factor, "value": value})
    report = pipeline.raise_model(model)
    assert (report.counts["attention"], report.refusals) == (1, [])
    model = laws.build(AttentionScale(), replace={"factor": factor})
    assert (pipeline.raise_model(model).fired, [n.op_type for n in model.graph]) == (
        {"attention_scale": 1},
        ["Attention"],
    )
    model = laws.build(AttentionPieces(), replace={"factor": factor[None]})
    assert pipeline.raise_model(model).counts["attention"] == 0


@pytest.mark.parametrize("many", [False, True], ids=["merged heads", "separate heads"])
def test_dead_rows_are_zeroed_in_the_type_of_the_queries(many: bool):
    shape = ("B", 2, "S", 8) if many else ("B", "S", 16)
    unfused, lowered = (
        laws.build(AttentionPrimitives(many=many), replace={name: Arg(shape, "float64") for name in "qkv"})
        for _ in range(2)
    )
    assert fusion.apply(AttentionPrimitives, lowered, []) == 1
    laws.check(lowered)
    feeds = laws.feeds(unfused, 3, 7, seed=1)
    np.testing.assert_allclose(laws.runner(lowered)(feeds)[0], laws.runner(unfused)(feeds)[0], rtol=0, atol=1e-12)


def test_a_layer_that_is_applied_again_shares_its_packed_weights():
    source = reference(CONFIG)
    layers = source.module.layers
    assert isinstance(layers, torch.nn.ModuleList)
    layers[1] = layers[2] = layers[0]
    model = capture(source)
    pipeline.optimize(model, targets.get("cpu"))
    assert len(_packed(model)) == 3
    assert len({n.inputs[1] for n in _packed(model)}) == 1
    unused = [v.name for v in model.graph.initializers.values() if not v.uses() and not v.is_graph_output()]
    assert unused == []
