"""Samples: the same everywhere, or the user's own, read with errors that name the line or the array."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tfx.errors import InputError
from tfx.exporter.calibration import calibrate, docstrings, spread, token_lengths
from tfx.runtime.tensors import TensorSpec
from tfx.runtime.text import TextEncoder

AXES = ("batch", "sequence")
INPUTS = (
    TensorSpec("ids", "int64", AXES, "token_ids", 4),
    TensorSpec("mask", "int64", AXES, "attention_mask", 2),
)


@pytest.fixture
def encoder(tmp_path: Path) -> TextEncoder:
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2, "the": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextEncoder(tmp_path / "tokenizer.json", INPUTS, 0, 30)


def test_docstrings_are_many_distinct_and_in_a_fixed_order():
    texts = docstrings()
    assert len(texts) > 2000
    assert len(set(texts)) == len(texts)
    assert docstrings(10) == tuple(spread(texts, 10))
    assert len(docstrings(10)) == 10


def test_texts_are_single_rows_without_padding(encoder: TextEncoder):
    found = calibrate(INPUTS, encoder=encoder, max_length=20, count=12)
    assert found.source == "docstrings of the standard library, random ids"
    assert len(found.feeds) == 12 + 2
    for feeds in found.feeds:
        assert set(feeds) == {"ids", "mask"}
        assert feeds["ids"].shape[0] == 1 and feeds["ids"].shape[1] <= 20
        assert feeds["mask"].all()
    again = calibrate(INPUTS, encoder=encoder, max_length=20, count=12)
    assert all((a["ids"] == b["ids"]).all() for a, b in zip(found.feeds, again.feeds, strict=True))
    assert token_lengths(["a b", "the"], encoder) == [2, 1]


def test_without_a_tokenizer_inputs_are_random_and_as_long_as_the_longest_golden():
    found = calibrate(INPUTS, max_length=33, count=5)
    assert found.source == "random inputs"
    lengths = [feeds["ids"].shape[1] for feeds in found.feeds]
    assert len(lengths) == 5 and lengths[-1] == 33 and all(1 <= length <= 33 for length in lengths)


@pytest.mark.parametrize("name", ["own.txt", "own.jsonl"])
def test_own_texts(name: str, tmp_path: Path, encoder: TextEncoder):
    lines = ["a b", "", "the a"]
    if name.endswith("jsonl"):
        lines = [json.dumps("a b"), "", json.dumps({"text": "the a", "more": 1})]
    (tmp_path / name).write_text("\n".join(lines))
    found = calibrate(INPUTS, tmp_path / name, encoder=encoder)
    assert found.source == name
    assert [feeds["ids"].tolist() for feeds in found.feeds] == [[[1, 2]], [[3, 1]]]


def test_own_arrays(tmp_path: Path):
    np.savez(tmp_path / "own.npz", ids=np.array([[1, 2], [3, 0]], np.int32), mask=np.ones((2, 2), np.int64))
    found = calibrate(INPUTS, tmp_path / "own.npz")
    assert [feeds["ids"].tolist() for feeds in found.feeds] == [[[1, 2]], [[3, 0]]]
    assert found.feeds[0]["ids"].dtype == np.int64


WRONG = {
    "none.txt": (None, "cannot be read: No such file"),
    "own.csv": (b"", r"found \.csv, wanted \.txt, \.jsonl or \.npz"),
    "empty.txt": (b"\n \n", "found no text"),
    "latin.txt": (b"caf\xe9", "not UTF-8 at byte 3"),
    "bad.jsonl": (b'"a"\n{', "line 2: not JSON"),
    "number.jsonl": (b"3", 'line 1: found 3, wanted a string or an object with "text"'),
    "bad.npz": (b"PK\x03\x04", "not an .npz of arrays"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_named(name: str, tmp_path: Path, encoder: TextEncoder):
    content, reason = WRONG[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"calibration .*{name}: .*{reason}"):
        calibrate(INPUTS, tmp_path / name, encoder=encoder)


ARRAYS = {
    "a missing one": ({"ids": np.ones((1, 2), int)}, "found ids, wanted ids, mask"),
    "rows": ({"ids": np.ones((1, 2), int), "mask": np.ones((2, 2), int)}, r"found \[1, 2\] rows"),
    "rank": ({"ids": np.ones((1, 2, 1), int), "mask": np.ones((1, 2), int)}, "ids: found rank 3, wanted 2"),
    "floats": ({"ids": np.ones((1, 2)), "mask": np.ones((1, 2), int)}, "ids: found float64, wanted int64"),
    "range": ({"ids": np.full((1, 2), 4), "mask": np.ones((1, 2), int)}, "ids: found values 4 to 4, wanted 0 to 3"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_wrong_arrays_are_named(name: str, tmp_path: Path):
    arrays, reason = ARRAYS[name]
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(InputError, match=reason):
        calibrate(INPUTS, tmp_path / "own.npz")


def test_texts_need_a_tokenizer(tmp_path: Path):
    (tmp_path / "own.txt").write_text("a")
    with pytest.raises(InputError, match="the source has no tokenizer"):
        calibrate(INPUTS, tmp_path / "own.txt")
