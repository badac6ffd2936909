from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors

from tfx.exporter import golden
from tfx.exporter.checkpoint import checkpoint
from tfx.exporter.golden_texts import LONG, TEXTS, text_feeds
from tfx.exporter.sources import parse_input
from tfx.runtime.tensors import Case
from tfx.runtime.text import TextEncoder

from .checkpoints import WORDS, save, save_tokenizer

IDS, MASK, TYPES = map(
    parse_input,
    ("input_ids:int64:batch,sequence", "attention_mask:int64:batch,sequence", "token_type_ids:int64:batch,sequence"),
)
INPUTS = (dataclasses.replace(IDS, limit=60), MASK, TYPES)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A tokenizer that adds special tokens and finds them in texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def made(path, inputs=INPUTS, max_length=None):
    found = text_feeds(TextEncoder(path, inputs, 0, max_length), inputs, max_length)
    return {case.id: (case, feeds, texts) for case, feeds, texts in found}


def test_rows_are_the_tokens_of_their_text_right_padded(path):
    tokenizer = Tokenizer.from_file(str(path))
    found = made(path)
    assert list(found) == ["texts", "text-long"]
    for case, feeds, texts in found.values():
        assert list(feeds) == ["input_ids", "attention_mask", "token_type_ids"]
        assert feeds["input_ids"].shape == (case.batch, case.sequence) and len(texts) == case.batch
        for text, ids, mask in zip(texts, feeds["input_ids"], feeds["attention_mask"], strict=True):
            wanted = tokenizer.encode(text).ids
            assert ids[mask == 1].tolist() == wanted and (ids[mask == 0] == 0).all()
            assert mask.tolist() == [1] * len(wanted) + [0] * (case.sequence - len(wanted))
    case, _, texts = found["texts"]
    assert case.pattern == "right" and texts[: len(TEXTS)] == TEXTS
    assert "[UNK] [CLS] [SEP]" in texts and "x[UNK]y[CLS]y[SEP]z" in texts
    assert found["text-long"][0].sequence > 512 and found["text-long"][2] == (LONG,)


def test_texts_are_cut_to_what_the_model_takes(path):
    found = made(path, max_length=9)
    assert {case.sequence for case, _, _ in found.values()} == {9}
    assert found["texts"][0].pattern == "right" and found["text-long"][0].pattern == "full"


def test_texts_without_tokens_and_ids_that_the_model_does_not_have_are_left_out(path, tmp_path):
    save_tokenizer(tmp_path)  # adds no special tokens, so an empty text has none
    texts = made(tmp_path / "tokenizer.json")["texts"][2]
    assert "" not in texts and "   " not in texts and "a" in texts
    texts = made(path, (dataclasses.replace(IDS, limit=5), MASK))["texts"][2]  # "a" is the last one it has
    assert "a" in texts and not any("{y}" in text for text in texts)
    assert made(path, (dataclasses.replace(IDS, limit=1), MASK)) == {}


def test_inputs_without_a_mask_have_no_batch_and_features_no_text(path):
    assert list(made(path, (IDS,))) == ["text-long"]
    assert made(path, (IDS, MASK, parse_input("image:float32:batch,4"))) == {}


def test_the_module_answers_the_texts_after_the_other_cases(tmp_path):
    save_tokenizer(save(tmp_path, max_position_embeddings=24))
    source = checkpoint(tmp_path)
    encoder = TextEncoder(tmp_path / "tokenizer.json", source.inputs, source.pad_id, 24)
    one, texts, long = golden.record(source, [Case("one", 1, 3, "full")], encoder=encoder)
    assert (one.id, one.texts) == ("one", ())
    assert (texts.id, long.id, long.texts) == ("texts", "text-long", (LONG,))
    assert texts.batch == len(texts.texts) and texts.sequence == long.sequence == 24
    for case in (texts, long):
        with torch.no_grad():
            hidden = source.module(**{name: torch.tensor(array) for name, array in case.inputs.items()})
        assert np.array_equal(case.outputs["last_hidden_state"], hidden["last_hidden_state"].numpy())
