"""int8: near the module, and the same numbers in any company (A18); one copy of what is shared."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from tfx.errors import ParityError
from tfx.exporter import pipeline
from tfx.exporter.capture import capture
from tfx.exporter.precision import PrecisionReport, apply_precision, int8, products
from tfx.exporter.precision.running import Agreement, agreement
from tfx.exporter.sources import Source, reference
from tfx.exporter.targets import get
from tfx.models.config import EncoderConfig
from tfx.runtime.tensors import make_feeds

from ..running import Arrays, nodes_of, run, source_of, torch_answers, weights

SMALL: dict[str, Any] = {
    "d_model": 64, "heads": 4, "layers": 2, "d_ff": 128, "vocab_size": 100, "max_len": 40, "pooling": "mean",
    "normalize": True,
}  # fmt: skip
WAYS = pytest.mark.parametrize("options", [{}, {"norm": "pre", "activation": "relu"}], ids=["post", "pre-relu"])
MS = "com.microsoft"


def samples_of(source: Source, count: int = 12) -> list[Arrays]:
    return [make_feeds(source.inputs, batch=1, sequence=4 + 3 * i, seed=i) for i in range(count)]


@functools.cache
def lowered(**options: Any) -> tuple[Source, ir.Model]:
    source = reference(EncoderConfig(**{**SMALL, **options}))
    model = capture(source)
    pipeline.lower_model(model, get("cpu"), pipeline.raise_model(model), packed=False)
    return source, model


def quantized(precision: str, **options: Any) -> tuple[Source, ir.Model, PrecisionReport]:
    source, model = lowered(**options)
    copy = model.clone()
    report = apply_precision(copy, precision, samples_of(source), target=get("cpu"))
    onnx.checker.check_model(ir.to_proto(copy), full_check=True)
    return source, copy, report


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic"])
@WAYS
def test_near_the_module(precision: str, options: dict[str, Any]):
    source, model, report = quantized(precision, **options)
    runner = run(model)
    feeds = [
        make_feeds(source.inputs, batch=3, sequence=length, pattern=pattern, seed=90 + length)
        for length, pattern in ((1, "full"), (17, "holes"), (40, "right"))
    ]
    found = [{"v": runner(each)["sentence_embedding"]} for each in feeds]
    wanted = [{"v": torch_answers(source, each)["sentence_embedding"]} for each in feeds]
    assert agreement(found, wanted).texts >= 0.998
    assert report.changed == 2 * 6 + 1
    assert report.kept == []
    assert report.worst_cosine is not None and 0.998 <= report.worst_cosine < 1
    assert len(nodes_of(model, "MatMul")) == (precision == "int8")  # the sum over tokens
    assert len(nodes_of(model, "MatMulIntegerToFloat", MS)) == 12
    assert "float32" not in {str(array.dtype) for array in weights(model).values() if array.size >= 4096}


@WAYS
def test_a_row_is_the_same_in_any_company(options: dict[str, Any]):
    source, model, _ = quantized("int8", **options)
    runner = run(model)
    alone = make_feeds(source.inputs, batch=1, sequence=9, seed=5)
    mine = runner(alone)["last_hidden_state"]
    other = make_feeds(source.inputs, batch=3, sequence=9, seed=6)
    together = {name: np.concatenate([other[name], array]) for name, array in alone.items()}
    padded = {name: np.pad(array, ((0, 0), (0, 20))) for name, array in alone.items()}
    np.testing.assert_array_equal(runner(together)["last_hidden_state"][3:], mine)
    np.testing.assert_array_equal(runner(padded)["last_hidden_state"][:, :9], mine)
    vector = runner(alone)["sentence_embedding"]
    np.testing.assert_array_equal(runner(together)["sentence_embedding"][3:], vector)
    np.testing.assert_array_equal(runner(padded)["sentence_embedding"], vector)


def test_the_dynamic_scheme_is_not_the_same_in_any_company():
    source, model, _ = quantized("int8-dynamic")
    runner = run(model)
    alone = make_feeds(source.inputs, batch=1, sequence=9, seed=5)
    other = make_feeds(source.inputs, batch=3, sequence=9, seed=6)
    together = {name: np.concatenate([other[name], array]) for name, array in alone.items()}
    assert (runner(together)["last_hidden_state"][3:] != runner(alone)["last_hidden_state"]).any()


def test_one_input_is_quantised_once():
    _, model, _ = quantized("int8")
    assert len(nodes_of(model, "QuantizeLinear")) == 2 * 4  # q, k and v share theirs
    _, model, _ = quantized("int8-dynamic")
    assert len(nodes_of(model, "DynamicQuantizeLinear")) == 2 * 4


class Repeated(nn.Module):
    """One layer, applied three times; its second matrix is the embedding too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, 64)
        self.first = nn.Linear(64, 96)
        self.norm = nn.LayerNorm(64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for _ in range(3):
            x = self.norm(x + torch.relu(self.first(x)) @ self.table.weight)
        return x


def test_a_shared_matrix_is_quantised_once_and_everywhere():
    torch.manual_seed(0)
    source = source_of(Repeated(), "input_ids:int64:batch,sequence")
    model = capture(source)
    pipeline.lower_model(model, get("cpu"), pipeline.raise_model(model), packed=False)
    report = apply_precision(model, "int8", samples_of(source), target=get("cpu"))
    assert report.changed == 3 * 2 + 1
    matrices = [array for array in weights(model).values() if array.ndim == 2 and array.size >= 4096]
    # The first matrix, and the table by its columns as a matrix and by its rows as a table.
    assert sorted(str(array.dtype) for array in matrices) == ["int8"] * 3
    feeds = make_feeds(source.inputs, batch=2, sequence=7, seed=3)
    found, wanted = run(model)(feeds), torch_answers(source, feeds)
    assert agreement([found], [wanted]).vectors > 0.998


def test_what_harms_is_kept_with_all_that_shares_it(monkeypatch: pytest.MonkeyPatch):
    source, model = lowered()
    harmful = products.units(products.find_products(model))[0]
    assert len(harmful.products) == 3

    def joint(found: list[Arrays], wanted: list[Arrays]) -> Agreement:
        measured = agreement(found, wanted)
        near = measured.texts > 0.9999999
        return measured if near or not planted else Agreement(0.5, 0.5)

    planted: list[int8.Plan] = []
    true_write = int8.write

    def write(model: ir.Model, plans: Any, *arguments: Any, **options: Any) -> int:
        plans = list(plans)
        planted[:] = [each for each in plans if harmful.products[0].node.name in each.names]
        return true_write(model, plans, *arguments, **options)

    monkeypatch.setattr(int8, "write", write)
    monkeypatch.setattr(int8, "agreement", joint)
    copy = model.clone()
    report = apply_precision(copy, "int8", samples_of(source, 4), target=get("cpu"))
    assert len(nodes_of(copy, "MatMul")) == 3 + 1  # and the sum over tokens
    assert [each["where"] for each in report.kept] == [harmful.products[0].node.name]
    assert report.kept[0]["reason"] == "costs 0.5 of cosine"


def test_below_what_is_promised_nothing_is_changed(monkeypatch: pytest.MonkeyPatch):
    """As where the tables alone, which no choice of layers leaves out, cost too much."""
    source, model = lowered()
    monkeypatch.setattr(int8, "agreement", lambda found, wanted: Agreement(0.981, 0.95))
    copy = model.clone()
    with pytest.raises(ParityError, match=r"smallest cosine .* is 0\.981, .* 0\.95, wanted 0\.995 and 0\.97; 8 of 8 "):
        apply_precision(copy, "int8", samples_of(source, 4), target=get("cpu"))
    assert list(weights(copy)) == list(weights(model))
