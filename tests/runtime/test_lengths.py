from __future__ import annotations

import numpy as np
import pytest

from tfx.errors import InputError
from tfx.runtime.lengths import histogram, holds_texts, make_ragged_feeds, parse_lengths, waste
from tfx.runtime.tensors import TensorSpec, attended_positions
from tfx.runtime.text import text_encoder

IDS = TensorSpec("ids", "int64", ("batch", "sequence"), "token_ids", 9)
MASK = TensorSpec("mask", "int64", ("batch", "sequence"), "attention_mask", 2)
IGNORED = TensorSpec("ignored", "bool", ("batch", "sequence"), "padding_mask")
WIDE = TensorSpec("wide", "float32", ("batch", 1, 1, "sequence"), "attention_mask")
TYPES = TensorSpec("types", "int32", ("batch", "sequence"), "token_type_ids", 2)
PLACES = TensorSpec("places", "int64", ("batch", "sequence"), "position_ids", 64)
PIXELS = TensorSpec("pixels", "float32", ("batch", 3, 8), "features")


def test_written_out():
    assert parse_lengths("7,2,30", count=5) == [7, 2, 30, 7, 2]
    assert parse_lengths("7", count=2, max_length=7) == [7, 7]


def test_lognormal_has_the_median_and_the_longest():
    found = np.array(parse_lengths("lognormal:60,256", count=20_000, seed=3))
    assert abs(np.median(found) - 60) < 2
    assert found.max() == 256
    # The longest is the 99th percentile of the distribution that is cut there.
    assert 0.005 < (found == 256).mean() < 0.015
    assert abs(np.log(found).std() - np.log(256 / 60) / 2.326) < 0.02
    assert found.min() >= 1
    assert list(found) == parse_lengths("lognormal:60,256", count=20_000, seed=3)
    assert list(found) != parse_lengths("lognormal:60,256", count=20_000, seed=4)
    assert max(parse_lengths("lognormal:60,256", count=1000, max_length=100)) == 100
    assert parse_lengths("lognormal:5,5", count=3) == [5, 5, 5]


def test_uniform_holds_both_ends():
    found = parse_lengths("uniform:3,6", count=400)
    assert set(found) == {3, 4, 5, 6}
    assert max(np.bincount(found)[3:]) < 140


def test_a_file_of_numbers(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("4\n9\n\n 2 \n")
    assert not holds_texts(str(path))
    assert parse_lengths(str(path), count=3) == [4, 9, 2]
    assert parse_lengths(str(path), count=4) == [4, 9, 2, 4]
    path.write_text("\n".join(str(i) for i in range(1, 101)))
    drawn = parse_lengths(str(path), count=10, seed=1)
    assert len(set(drawn)) == 10
    assert drawn == sorted(drawn) != list(range(1, 11))


def test_texts_are_counted_by_the_bundles_tokenizer(tmp_path, shared_bundle):
    path = tmp_path / "texts.txt"
    path.write_text("the cat sat\n12\n\nthe cat sat on a mat the dog ran\n")
    tokenizer = text_encoder(shared_bundle)
    # With [CLS] and [SEP]; the tokenizer of this bundle cuts at 8.
    assert parse_lengths(str(path), count=3, tokenizer=tokenizer) == [5, 3, 8]
    assert holds_texts(str(path))
    assert not holds_texts("lognormal:60,256")
    with pytest.raises(InputError, match=r"texts.txt: holds texts, but the bundle has no tokenizer"):
        parse_lengths(str(path), count=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.txt", 'found "nowhere.txt", which is no file; wanted N,N,N, lognormal:MEDIAN,MAX'),
        ("normal:1,2", 'found "normal:1,2", which is no file'),
        ("0,4", "lengths: found 0, wanted at least 1"),
        ("-4", "lengths: found -4"),
        ("4,99", "lengths: found 99, wanted at most 64, the longest this model takes"),
        ("uniform:6,3", 'found "uniform:6,3", wanted two whole numbers'),
        ("uniform:0,3", "wanted two whole numbers, 1 or more"),
        ("lognormal:60", "wanted two whole numbers"),
        ("", 'found "", which is no file'),
    ],
)
def test_what_is_no_histogram(text, message):
    with pytest.raises(InputError, match=message):
        parse_lengths(text, count=2, max_length=64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"found no lines"),
        (b"4\n99\n", r"lengths.txt:2: found 99, wanted at most 64"),
        (b"4\n\n0\n", r"lengths.txt:3: found 0, wanted at least 1"),
        (b"\xff\xfe", r"cannot be read"),
    ],
)
def test_a_wrong_file(tmp_path, content, message):
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        parse_lengths(str(path), count=2, max_length=64)


def test_a_count_that_fills_memory():
    with pytest.raises(InputError, match="found a count of 100000000"):
        parse_lengths("4", count=10**8)


def test_histogram():
    found = histogram([1, 2, 2, 9], bins=3)
    assert found["bins"] == [
        {"from": 1, "to": 3, "count": 3},
        {"from": 4, "to": 6, "count": 0},
        {"from": 7, "to": 9, "count": 1},
    ]
    assert (found["count"], found["min"], found["median"], found["mean"], found["max"]) == (4, 1, 2, 3.5, 9)
    assert histogram([5, 5])["bins"] == [{"from": 5, "to": 5, "count": 2}]
    assert sum(each["count"] for each in histogram(list(range(1, 256)))["bins"]) == 255


def test_waste():
    assert waste([[4, 4]]) == 0
    assert waste([[1, 3], [8]]) == pytest.approx(1 - 12 / 14)


def test_ragged_feeds():
    specs = [IDS, MASK, IGNORED, WIDE, TYPES, PLACES, PIXELS]
    feeds = make_ragged_feeds(specs, [2, 5, 1], 6, pad_id=3)
    attended = np.array([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(feeds["mask"], attended)
    np.testing.assert_array_equal(feeds["ignored"], attended == 0)
    np.testing.assert_array_equal(feeds["wide"], attended[:, None, None, :])
    assert [feeds[spec.name].dtype for spec in specs] == [np.dtype(spec.dtype) for spec in specs]
    assert (feeds["ids"][attended == 0] == 3).all()
    assert (feeds["ids"][attended == 1] != 3).all()
    assert (feeds["types"][attended == 0] == 0).all()
    np.testing.assert_array_equal(feeds["places"][0], range(6))
    assert feeds["pixels"].shape == (3, 3, 8)
    np.testing.assert_array_equal(attended_positions(specs, feeds), attended == 1)
    assert make_ragged_feeds([IDS], [2, 5])["ids"].shape == (2, 5)
    assert not np.array_equal(make_ragged_feeds([IDS], [9], seed=1)["ids"], make_ragged_feeds([IDS], [9])["ids"])


@pytest.mark.parametrize(("lengths", "pad_to"), [([], None), ([0, 2], None), ([4], 3)])
def test_wrong_ragged_feeds(lengths, pad_to):
    with pytest.raises(InputError, match="lengths: found"):
        make_ragged_feeds([IDS], lengths, pad_to)
