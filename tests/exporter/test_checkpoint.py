from __future__ import annotations

import importlib
import json
import logging
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from onnx.reference import ReferenceEvaluator
from onnx_ir import to_proto
from safetensors.torch import load_file, save_file
from torch import nn

from tfx.errors import SourceError
from tfx.exporter import golden
from tfx.exporter.capture import capture
from tfx.exporter.checkpoint import checkpoint
from tfx.exporter.probe import inference
from tfx.runtime.tensors import MASK_PATTERNS, Case

from .checkpoints import SIZES, given, save, save_tokenizer, sentence_modules, write


def embed(source, feeds: dict[str, torch.Tensor]) -> np.ndarray:
    with inference(source.module):
        return source.call(feeds)["sentence_embedding"].numpy()


# --- a plain folder


def test_a_bert_folder_says_all_there_is_to_know(bert):
    source = checkpoint(bert)
    assert [(spec.name, spec.role, spec.limit) for spec in source.inputs] == [
        ("input_ids", "token_ids", 60),
        ("attention_mask", "attention_mask", 2),
        ("token_type_ids", "token_type_ids", 2),
    ]
    assert source.expected == {"attention": 2, "gelu": 2, "layer_norm": 5}
    assert (source.kind, source.name, source.max_length, source.pad_id) == ("checkpoint", "tiny-bert", 24, 0)
    assert source.pooling is None
    assert source.output_names == ("last_hidden_state",)
    assert source.notes["attn_implementation"] == "sdpa"
    assert len(source.sha256) == 64
    assert not source.module.training
    model = transformers.BertModel.from_pretrained(bert, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted, found = model(**given())["last_hidden_state"], source.call(given())["last_hidden_state"]
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(("kind", "pad", "length"), [("Roberta", 1, 16), ("Roberta", 3, 14), ("Bert", 3, 18)])
def test_a24_the_true_limit_is_what_the_position_table_holds(tmp_path, kind, pad, length):
    source = checkpoint(save(tmp_path / "model", kind, max_position_embeddings=18, pad_token_id=pad))
    assert (source.max_length, source.pad_id) == (length, pad)
    ids = torch.full((1, length + 1), 5)
    with inference(source.module):
        source.module(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]))
        with pytest.raises((IndexError, RuntimeError)):
            source.module(input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize(
    ("options", "gelu"),
    [({"hidden_act": "gelu_new"}, 2), ({"hidden_act": "gelu_pytorch_tanh"}, 2), ({"hidden_act": "relu"}, 0)],
)
def test_expected_counts_follow_the_activation(tmp_path, options, gelu):
    source = checkpoint(save(tmp_path / "model", **options))
    assert source.expected == {"attention": 2, "gelu": gelu, "layer_norm": 5}


def test_counts_of_attention_that_is_written_by_hand_are_not_guessed(tmp_path):
    source = checkpoint(save(tmp_path / "model", "MPNet", max_position_embeddings=18))
    assert source.expected is None
    assert (source.notes["attn_implementation"], source.max_length) == ("eager", 16)


def test_one_segment_type_makes_no_input(tmp_path):
    source = checkpoint(save(tmp_path / "model", "Roberta", type_vocab_size=1))
    assert [spec.name for spec in source.inputs] == ["input_ids", "attention_mask"]


def test_half_precision_weights_are_read_in_float32(tmp_path):
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES)).half().save_pretrained(tmp_path)
    source = checkpoint(tmp_path)
    assert {parameter.dtype for parameter in source.module.parameters()} == {torch.float32}


def test_the_hash_is_that_of_the_weights(copy, bert):
    assert checkpoint(copy).sha256 == checkpoint(bert).sha256
    weights = load_file(copy / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][5, 5] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint(copy).sha256 != checkpoint(bert).sha256


def test_sharded_weights_are_read(bert, tmp_path):
    torch.manual_seed(0)
    model = transformers.BertModel.from_pretrained(bert)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    with torch.no_grad():
        one, two = (checkpoint(path).call(given())["last_hidden_state"] for path in (bert, tmp_path))
    assert torch.equal(one, two)
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(SourceError, match=r"missing, but model\.safetensors\.index\.json lists it"):
        checkpoint(tmp_path)


def test_nothing_is_downloaded_printed_or_left_changed(bert, monkeypatch, capfd):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    logger = logging.getLogger("transformers")
    before = logger.level, torch.get_rng_state()
    checkpoint(bert)
    assert logger.level == before[0]
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


# --- capture: what the graph answers


@pytest.mark.parametrize(("kind", "options"), [("Bert", {}), ("Roberta", {"pad_token_id": 1})])
def test_the_graph_equals_the_model_on_every_mask_also_a_fully_masked_row(tmp_path, kind, options):
    source = checkpoint(save(tmp_path / "model", kind, max_position_embeddings=24, **options), pooling="mean")
    model = capture(source)
    assert sum(node.op_type == "Attention" for node in model.graph) == 2
    assert "embeddings.LayerNorm.weight" in model.graph.initializers
    assert not any("pooler" in name for name in model.graph.initializers)
    evaluator = ReferenceEvaluator(to_proto(model))
    shapes = [(1, 1), (3, 9), (2, min(20, source.max_length or 20))]
    cases = golden.record(source, [Case(f"{b}-{s}-{p}", b, s, p) for b, s in shapes for p in MASK_PATTERNS])
    for case in cases:
        found = evaluator.run(None, dict(case.inputs))
        for name, array in zip(evaluator.output_names, found, strict=True):
            assert np.abs(array - case.outputs[str(name)]).max() <= 1e-5
    feeds = {name: np.array(array) for name, array in cases[-1].inputs.items()}
    feeds["attention_mask"][0] = 0
    with inference(source.module):
        wanted = source.call({name: torch.tensor(array) for name, array in feeds.items()})
    for array, tensor in zip(evaluator.run(None, feeds), wanted.values(), strict=True):
        assert np.isfinite(array).all()
        assert np.abs(array - tensor.numpy()).max() <= 1e-5


@pytest.mark.parametrize("mode", ["cls", "mean", "last", "max"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a30_a_padded_batch_equals_the_singles(bert, mode, normalize):
    source = checkpoint(bert, pooling=mode, normalize=normalize)
    assert source.pooling == {"mode": mode, "normalize": normalize, "output": "sentence_embedding"}
    rows = given(3, 9)
    lengths = (3, 9, 0)
    for row, length in enumerate(lengths):
        rows["attention_mask"][row, length:] = 0
    batch = embed(source, rows)
    for row, length in enumerate(lengths[:2]):
        single = embed(source, {name: tensor[row : row + 1, :length] for name, tensor in rows.items()})
        assert np.abs(batch[row] - single[0]).max() <= 1e-5
        assert abs(np.linalg.norm(batch[row]) - 1) <= 1e-5 or not normalize
    assert not batch[2].any()


# --- sentence-transformers folders


def test_pooling_and_normalization_are_read_from_the_folder(copy):
    source = checkpoint(sentence_modules(copy, "Pooling", "Normalize"))
    assert source.pooling == {"mode": "mean", "normalize": True, "output": "sentence_embedding"}
    assert source.output_names == ("last_hidden_state", "sentence_embedding")
    hidden = checkpoint(copy, pooling="none").call(given())["last_hidden_state"]
    wanted = nn.functional.normalize(hidden.mean(dim=1), dim=1).detach().numpy()
    assert np.abs(embed(source, given()) - wanted).max() <= 1e-6


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "cls", "embedding_dimension": 32}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_old_and_new_pooling_settings(copy, config, mode):
    source = checkpoint(sentence_modules(copy, "Pooling", pooling=config))
    assert source.pooling == {"mode": mode, "normalize": False, "output": "sentence_embedding"}


def test_the_caller_overrides_the_folder(copy):
    sentence_modules(copy, "Pooling", "Normalize")
    assert checkpoint(copy, pooling="none").pooling is None
    for pooling, normalize, wanted in (("cls", None, ("cls", True)), (None, False, ("mean", False))):
        found = checkpoint(copy, pooling, normalize).pooling
        assert found is not None
        assert (found["mode"], found["normalize"]) == wanted
    with pytest.raises(SourceError, match="pooling: found 'sum', wanted one of none, cls"):
        checkpoint(copy, pooling="sum")
    with pytest.raises(SourceError, match="no sentence vector to normalize"):
        checkpoint(copy, pooling="none", normalize=True)


def test_a_dense_module_is_applied(copy):
    source = checkpoint(sentence_modules(copy, "Pooling", "Dense", "Normalize"))
    weights = load_file(copy / "2_Dense" / "model.safetensors")
    mean = checkpoint(copy, pooling="none").call(given())["last_hidden_state"].mean(dim=1)
    dense = torch.tanh(mean @ weights["linear.weight"].T + weights["linear.bias"])
    wanted = (dense / dense.norm(dim=1, keepdim=True)).detach().numpy()
    found = embed(source, given())
    assert found.shape == (2, 8)
    assert np.abs(found - wanted).max() <= 1e-6
    graph = ReferenceEvaluator(to_proto(capture(source)))
    (vectors,) = graph.run(["sentence_embedding"], {name: tensor.numpy() for name, tensor in given().items()})
    assert np.abs(np.asarray(vectors) - wanted).max() <= 1e-5
    assert source.sha256 != checkpoint(copy, pooling="none").sha256


def test_what_sentence_transformers_saves_is_read_and_gives_its_vectors(bert, tmp_path):
    from sentence_transformers import SentenceTransformer

    parts: Any = importlib.import_module("sentence_transformers.models")
    write(Path(bert) / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"})
    head = [parts.Pooling(32, pooling_mode="mean"), parts.Dense(32, 8), parts.Normalize()]
    model = SentenceTransformer(modules=[parts.Transformer(str(bert), max_seq_length=7), *head], device="cpu")
    model.save(str(tmp_path / "saved"))
    source = checkpoint(tmp_path / "saved")
    assert source.tokenizer == {"file": "tokenizer.json", "max_length": 7}
    texts = ["a b c", "d"]
    encoded = model.tokenize(texts)
    feeds = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    feeds["token_type_ids"] = encoded.get("token_type_ids", torch.zeros_like(feeds["input_ids"]))
    assert np.abs(embed(source, feeds) - model.encode(texts)).max() <= 1e-5


@pytest.mark.parametrize(
    ("kinds", "pooling", "reason"),
    [
        (("Pooling", "LayerNorm"), None, "module LayerNorm at this place is not supported"),
        (("Normalize",), None, "module Normalize at this place is not supported"),
        (("Pooling",), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "found pooling cls + mean"),
        (("Pooling",), {"pooling_mode_weightedmean_tokens": True}, "found pooling weightedmean, wanted one of cls"),
        (("Pooling",), {"pooling_mode_mean_tokens": False}, "found pooling none"),
        (("Pooling",), [1], "found list, wanted a JSON object"),
    ],
)
def test_a_head_that_cannot_be_built_is_named(copy, kinds, pooling, reason):
    with pytest.raises(SourceError) as caught:
        checkpoint(sentence_modules(copy, *kinds, pooling=pooling))
    assert reason in str(caught.value)


def test_a_damaged_dense_module_is_named(copy):
    sentence_modules(copy, "Pooling", "Dense")
    settings = json.loads((copy / "2_Dense" / "config.json").read_text())
    for change, reason in (
        ({"activation_function": "torch.nn.Softmax"}, "Dense with Softmax on sentence_embedding is not supported"),
        ({"module_input_name": "token_embeddings"}, "on token_embeddings is not supported"),
        ({"out_features": 9}, "does not fit its config.json"),
    ):
        write(copy / "2_Dense" / "config.json", settings | change)
        with pytest.raises(SourceError, match=reason):
            checkpoint(copy)
    (copy / "2_Dense" / "model.safetensors").unlink()
    write(copy / "2_Dense" / "config.json", settings)
    with pytest.raises(SourceError, match=r"no model\.safetensors for the Dense module"):
        checkpoint(copy)


# --- tokenizers


def test_tokenizer_files_are_copied_with_the_smallest_limit(copy):
    assert checkpoint(copy).tokenizer == {"file": "tokenizer.json", "max_length": 24}
    write(copy / "tokenizer_config.json", {"model_max_length": 1000000000000000019884624838656})
    assert checkpoint(copy).tokenizer == {"file": "tokenizer.json", "max_length": 24}
    write(copy / "tokenizer_config.json", {"model_max_length": 20})
    assert checkpoint(copy).tokenizer == {"file": "tokenizer.json", "max_length": 20}
    write(copy / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": True})
    write(copy / "special_tokens_map.json", {})
    source = checkpoint(copy)
    assert source.tokenizer == {"file": "tokenizer.json", "max_length": 12}
    assert source.max_length == 24
    assert [file.name for file in source.files] == [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ]


def test_a_tokenizer_that_cannot_be_used_is_an_error(copy):
    save_tokenizer(copy, lower=False)
    write(copy / "sentence_bert_config.json", {"do_lower_case": True})
    with pytest.raises(SourceError, match=r"do_lower_case is set, but tokenizer\.json keeps upper case"):
        checkpoint(copy)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match=r"tokenizer\.json: not a tokenizer"):
        checkpoint(copy)
    (copy / "tokenizer.json").unlink()
    assert checkpoint(copy).tokenizer is None
