"""The ragged layout against torch: every mask pattern, rows without a token, and what has to be refused."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import tfx
from tfx.errors import InputError
from tfx.exporter import targets
from tfx.exporter.capture import capture
from tfx.exporter.guards import Refuse
from tfx.exporter.layout import MaskInput, to_ragged
from tfx.exporter.pipeline import Report, lower_model, raise_model
from tfx.exporter.sources import Source, module
from tfx.models.config import EncoderConfig
from tfx.models.encoder import Encoder
from tfx.models.pooling import Pooled

sys.path.insert(0, str(Path(tfx.__file__).parent / "benchmarks"))
try:
    zoo = importlib.import_module("zoo")
    routes = importlib.import_module("routes")
finally:
    sys.path.pop(0)

ROWS = {row.name: row for row in zoo.ZOO}
RAGGED = (
    "reference pre",  # the textbook
    pytest.param(
        "TransformerEncoder post", marks=pytest.mark.thorough
    ),  # sequence first inside, rows merged with heads
    pytest.param("own reshape", marks=pytest.mark.thorough),  # heads in an axis of their own
    "own flat",  # projections of (batch * sequence, d)
    "RoBERTa sdpa",  # positions counted from the ids
    pytest.param("MPNet", marks=pytest.mark.thorough),  # a learned bias on top of the mask
    "ModernBERT sdpa",  # rotary embeddings and local windows
)
IDS = ("input_ids:int64:batch,sequence", "attention_mask:int64:batch,sequence")


def raised(source) -> ir.Model:
    model = capture(source)
    raise_model(model)
    return model


@functools.cache
def row_raised(name: str) -> tuple[Source, ir.Model]:
    """A row of the zoo and its raised graph, to be cloned: torch.export takes seconds."""
    source = routes.source(ROWS[name])
    return source, raised(source)


def ragged(source, target: str = "cpu") -> ir.Model:
    return packed(raised(source), target)


def packed(model: ir.Model, target: str = "cpu") -> ir.Model:
    to_ragged(model, [MaskInput("attention_mask")])
    lower_model(model, targets.get(target), Report())
    return model


class Running:
    """A session whose outputs are arrays."""

    def __init__(self, ort: onnxruntime.InferenceSession):
        self._ort = ort

    def run(self, names: list[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(value) for value in self._ort.run(names, feeds)]


def session(model: ir.Model, *, optimize: bool = False) -> Running:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(model).SerializeToString()
    return Running(onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]))


def cases():
    """Ids and masks: full, right, left, holes, and a batch in which one row attends nothing."""
    rng = np.random.default_rng(0)
    for batch, length in ((1, 1), (1, 7), (3, 7)):
        ids = rng.integers(3, 99, (batch, length))
        whole = np.ones((batch, length), np.int64)
        yield ids, whole
        if length > 1:
            holes = whole.copy()
            holes[:, 1::2] = 0
            right, left = whole.copy(), whole.copy()
            for row in range(batch):
                right[row, length - 1 - row :] = 0
                left[row, : 1 + row] = 0
            yield from ((ids, mask) for mask in (right, left, holes))
            # All of one length, but not at the same places.
            shifted = np.stack([np.roll(right[0], row) for row in range(batch)])
            yield ids, shifted
    dead = whole.copy()
    dead[1] = 0
    yield ids, dead


def wanted(source, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    with torch.no_grad():
        found = source.call({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)})
    return {name: tensor.numpy() for name, tensor in found.items()}


@pytest.mark.parametrize("name", RAGGED)
def test_equals_torch_on_attended_positions_and_is_zero_elsewhere(name):
    source = routes.source(ROWS[name])
    model = ragged(source)
    runs = session(model), session(model, optimize=True)
    for ids, mask in cases():
        expected = wanted(source, ids, mask)["last_hidden_state"]
        for run in runs:
            (found,) = run.run(None, {"input_ids": ids, "attention_mask": mask})
            assert np.abs(found - expected)[mask != 0].max(initial=0) < 5e-6, mask
            assert not found[mask == 0].any()


def test_every_target_takes_the_same_graph():
    source, model = row_raised("NomicBERT sdpa")
    for target in ("cuda", "portable"):
        run = session(packed(model.clone(), target))
        for ids, mask in list(cases())[-3:]:
            (found,) = run.run(None, {"input_ids": ids, "attention_mask": mask})
            assert np.abs(found - wanted(source, ids, mask)["last_hidden_state"])[mask != 0].max() < 5e-6


def test_nothing_is_computed_on_padding():
    model = ragged(routes.source(ROWS["BERT sdpa"]))
    heavy = [node for node in model.graph if node.op_type in ("MatMul", "Gemm", "LayerNormalization", "BiasGelu")]
    assert len(heavy) == 2 * 6 + 5 + 2
    for node in heavy:
        shape = node.outputs[0].shape
        assert shape is not None and str(shape[0]) == "tfx_tokens", node


def test_a_batch_without_any_token():
    run = session(packed(row_raised("reference post")[1].clone()), optimize=True)
    nothing = np.zeros((2, 5), np.int64)
    (found,) = run.run(None, {"input_ids": nothing, "attention_mask": nothing})
    assert found.shape == (2, 5, 32) and not found.any()


def test_onnxruntime_fuses_no_slower_norm_by_itself(tmp_path):
    """SkipLayerNormalization costs a CPU more than what it replaces; onnxruntime makes it of padded graphs."""
    counts = {}
    for layout in ("padded", "ragged"):
        model = row_raised("reference post")[1].clone()
        if layout == "ragged":
            to_ragged(model, [MaskInput("attention_mask")])
        lower_model(model, targets.get("cpu"), Report())
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{layout}.onnx")
        options.log_severity_level = 4
        onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        counts[layout] = [node.op_type for node in ir.load(tmp_path / f"{layout}.onnx").graph].count(
            "SkipLayerNormalization"
        )
    assert counts == {"padded": 4, "ragged": 0}


def one_layer() -> nn.Module:
    """The textbook encoder; one layer is what a tail needs."""
    torch.manual_seed(0)
    return Encoder(EncoderConfig(d_model=32, heads=4, layers=1, d_ff=48, vocab_size=99, max_len=80)).eval()


class Hidden(nn.Module):
    """The textbook encoder with a tail."""

    def __init__(self, tail):
        super().__init__()
        self.model = one_layer()
        self.tail = tail

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)["last_hidden_state"]
        return {"y": self.tail(hidden, attention_mask)}


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "last"])
def test_pooling_behind_it(mode):
    source = module(Pooled(one_layer(), mode, normalize=True), IDS)
    run = session(ragged(source), optimize=True)
    for ids, mask in cases():
        expected = wanted(source, ids, mask)["sentence_embedding"]
        (found,) = run.run(["sentence_embedding"], {"input_ids": ids, "attention_mask": mask})
        assert np.abs(found - expected).max() < 5e-6, (mode, mask)


@pytest.mark.parametrize(("tail", "reason"), [
    (lambda x, mask: x.mean(1), "ReduceMean .* mixes positions"),
    (lambda x, mask: x[:, -1], "mixes positions"),
    (lambda x, mask: nn.functional.avg_pool1d(x.transpose(1, 2), 3, padding=1), "mixes positions"),
    (lambda x, mask: x.cumsum(1), "CumSum .* mixes positions"),
    (lambda x, mask: x[torch.arange(x.shape[0]), mask.sum(1) - 1], "mixes positions"),
    (lambda x, mask: x.gather(1, (mask.sum(1) - 1)[:, None, None].expand(-1, 1, 32)), "mixes positions"),
    (lambda x, mask: torch.stack([x, 2 * x]), "output y has axes .* wanted .batch, sequence"),
    (lambda x, mask: x.transpose(1, 2) * 2, "output y has axes"),
    (lambda x, mask: x.reshape(-1, 32) * 2, "merged with other axes|has axes"),
    (lambda x, mask: (x.reshape(-1, 32) * mask.reshape(-1, 1)).reshape(x.shape), "merged with other axes"),
], ids=[
    "mean of all", "last position", "convolution", "cumulative sum", "last by count", "gathered by count", "stacked",
    "channels first", "flat output", "flat mask",
])  # fmt: skip
def test_what_mixes_positions_is_refused(tail, reason):
    model = raised(module(Hidden(tail), IDS))
    before = [node.name for node in model.graph if node.op_type != "Constant"]
    with pytest.raises(Refuse, match=reason):
        to_ragged(model, [MaskInput("attention_mask")])
    assert [node.name for node in model.graph if node.op_type != "Constant"] == before


class OneLayer(nn.Module):
    """Attention alone, with a mask of the test's own."""

    def __init__(self, mask, causal=False):
        super().__init__()
        self.embedding = nn.Embedding(99, 16)
        self.project = nn.Linear(16, 16)
        self.mask, self.causal = mask, causal

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor):
        x = self.embedding(input_ids)
        q = self.project(x)[:, None]
        mask = self.mask(attention_mask, q)
        y = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=self.causal)
        return {"y": y[:, 0] + attention_mask[:, :, None]}


def _grid(mask):
    places = torch.arange(mask.shape[1])
    return places[:, None] - places[None, :]


@pytest.mark.parametrize(("mask", "causal", "reason"), [
    (lambda m, q: None, False, "whatever the mask says"),
    (lambda m, q: (1.0 - m[:, None, None, :].float()) * -5.0, False, "not seen to take all weight"),
    (lambda m, q: (m[:, None, None, :] == 0), False, "not seen to take all weight"),
    (lambda m, q: (m[:, None, :, None] == 1), False, "not seen to take all weight"),
    (lambda m, q: None, True, "is_causal"),
    (lambda m, q: torch.softmax(q @ q.transpose(-1, -2), -1).masked_fill(m[:, None, None, :] == 0, -1e9), False, None),
    (lambda m, q: 3.0 * m[:, None, None, :].float() - 1e4, False, "may hide a query from itself"),
    (lambda m, q: torch.zeros(1).masked_fill((m[:, None, None, :] == 0) | (_grid(m) <= 0), -1e9), False, "from itself"),
    (lambda m, q: torch.where(m[:, None, None, :] != 0, 0.0, -torch.inf) + torch.arange(m.shape[1]), False, None),
], ids=[
    "none", "weak", "inverted", "queries", "causal", "scores of its own", "all of one weight", "later keys only",
    "minus infinity and positions",
])  # fmt: skip
def test_masks_that_do_not_hide_padding_are_refused(mask, causal, reason):
    source = module(OneLayer(mask, causal), IDS)
    model = raised(source)
    if reason is None:  # what the mask holds besides is handed on
        to_ragged(model, [MaskInput("attention_mask")])
        lower_model(model, targets.get("cpu"), Report())
        for ids, given in cases():
            (found,) = session(model).run(None, {"input_ids": ids, "attention_mask": given})
            assert np.abs(found - wanted(source, ids, given)["y"])[given != 0].max() < 5e-6
        return
    with pytest.raises(Refuse, match=reason):
        to_ragged(model, [MaskInput("attention_mask")])


@pytest.mark.parametrize("mask", [
    lambda m, q: (m[:, None, None, :] != 0) & (_grid(m).abs() <= 2),
    lambda m, q: (m[:, None, None, :] != 0) & (_grid(m) >= 0),
    lambda m, q: (1.0 - m[:, None, None, :].float()) * -1e9 - 0.1 * _grid(m).abs().float(),
    lambda m, q: torch.zeros(q.shape[0], 1, q.shape[2], q.shape[2]).masked_fill(m[:, None, None, :] == 0, -torch.inf),
], ids=["window", "causal as a mask", "alibi", "minus infinity"])  # fmt: skip
def test_masks_with_more_than_padding(mask):
    source = module(OneLayer(mask), IDS)
    run = session(ragged(source), optimize=True)
    for ids, given in cases():
        (found,) = run.run(None, {"input_ids": ids, "attention_mask": given})
        expected = wanted(source, ids, given)["y"]
        seen = (given != 0) & np.isfinite(expected).all(-1)
        assert np.abs(found - expected)[seen].max() < 5e-6, given


def test_position_0_is_read_where_the_mask_hides_it_as_a_query():
    class Pairs(OneLayer):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor):
            return {"y": super().forward(input_ids, attention_mask)["y"][:, 0]}

    pairs = Pairs(lambda m, q: torch.zeros(1).masked_fill((m[:, None, None, :] * m[:, None, :, None]) == 0, -1e9))
    with pytest.raises(Refuse, match="reads position 0, whose mask differs"):
        to_ragged(raised(module(pairs, IDS)), [MaskInput("attention_mask")])
    source = module(Pairs(lambda m, q: (m[:, None, None, :] != 0) & (_grid(m).abs() <= 2)), IDS)
    run = session(ragged(source), optimize=True)
    for ids, mask in cases():
        alive = mask.any(1)
        (found,) = run.run(None, {"input_ids": ids, "attention_mask": mask})
        assert np.abs(found - wanted(source, ids, mask)["y"])[alive].max() < 5e-6, mask


@pytest.mark.parametrize("axes", ["batch,tokens", "tokens,length", "padded,keys"])
def test_axes_named_like_ours(axes):
    """onnxruntime takes axes of one name for equal."""
    source = module(Hidden(lambda x, mask: x), (f"input_ids:int64:{axes}", f"attention_mask:int64:{axes}"))
    run = session(ragged(source), optimize=True)
    for ids, mask in cases():
        (found,) = run.run(None, {"input_ids": ids, "attention_mask": mask})
        assert np.abs(found - wanted(source, ids, mask)["y"])[mask != 0].max() < 5e-6


def test_which_inputs_are_masks():
    model = row_raised("reference post")[1].clone()
    with pytest.raises(Refuse, match="found masks: none"):
        to_ragged(model, [])
    with pytest.raises(Refuse, match="found masks: input_ids, attention_mask"):
        to_ragged(model, [MaskInput("input_ids"), MaskInput("attention_mask")])


def test_a_mask_that_says_what_is_ignored():
    class Ignoring(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = one_layer()

        def forward(self, input_ids: torch.Tensor, padding_mask: torch.Tensor):
            return {"y": self.model(input_ids=input_ids, attention_mask=(~padding_mask).long())["last_hidden_state"]}

    source = module(Ignoring(), ("input_ids:int64:batch,sequence", "padding_mask:bool:batch,sequence"))
    model = raised(source)
    to_ragged(model, [MaskInput("padding_mask", ignored=True)])
    lower_model(model, targets.get("cpu"), Report())
    run = session(model)
    for ids, mask in cases():
        with torch.no_grad():
            expected = source.call({"input_ids": torch.tensor(ids), "padding_mask": torch.tensor(mask == 0)})["y"]
        (found,) = run.run(None, {"input_ids": ids, "padding_mask": mask == 0})
        assert np.abs(found - expected.numpy())[mask != 0].max() < 5e-6


def test_a_packed_file_is_not_padded_again(tmp_path):
    model = packed(row_raised("reference post")[1].clone())
    ir.save(model, tmp_path / "ragged.onnx")
    with pytest.raises(InputError, match="packed token by token already"):
        tfx.optimize(tmp_path / "ragged.onnx", tmp_path / "out.onnx", layout="padded")
    assert not (tmp_path / "out.onnx").exists()
