from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tfx.errors import BundleError
from tfx.runtime.golden import GoldenCase, load_golden, save_golden

ONE_CASE = json.dumps([{"id": "c", "batch": 1, "sequence": 1, "pattern": "full"}])


def case(id_="b1-s2-full", **changes):
    values = {
        "batch": 1,
        "sequence": 2,
        "pattern": "full",
        "inputs": {"x": np.arange(6, dtype=np.int64).reshape(2, 3).T},
        "outputs": {"layer/0": np.array(3.5, np.float32), "flag": np.array([True, False])},
    }
    return GoldenCase(id_, **{**values, **changes})


def test_round_trip_keeps_order_names_dtypes_and_strided_values(tmp_path):
    path = tmp_path / "golden.safetensors"
    save_golden(path, [case("z"), case("a")])
    loaded = load_golden(path)
    assert [found.id for found in loaded] == ["z", "a"]
    np.testing.assert_array_equal(loaded[0].inputs["x"], [[0, 3], [1, 4], [2, 5]])
    assert loaded[0].outputs["layer/0"].shape == ()
    assert loaded[0].outputs["layer/0"] == np.float32(3.5)
    np.testing.assert_array_equal(loaded[0].outputs["flag"], [True, False])


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ([], "found 0 cases"),
        ([case("a/b")], "has a slash"),
        ([case("a"), case("a")], "repeat"),
        ([case(outputs={})], "no inputs or no outputs"),
    ],
)
def test_wrong_cases_are_not_written(tmp_path, cases, message):
    with pytest.raises(BundleError, match=message):
        save_golden(tmp_path / "golden.safetensors", cases)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"c/inputs/x": np.zeros(1)}, None, "no case list"),
        ({"c/inputs/x": np.zeros(1)}, {"cases": "["}, "not JSON"),
        ({"c/inputs/x": np.zeros(1)}, {"cases": "{}"}, "wanted an array"),
        ({"c/inputs/x": np.zeros(1)}, {"cases": '[{"id": "c"}]'}, r"cases\[0\]\.batch: missing"),
        ({"c/inputs/x": np.zeros(1)}, {"cases": ONE_CASE}, "no outputs"),
        ({"d/inputs/x": np.zeros(1)}, {"cases": ONE_CASE}, "belongs to no case"),
    ],
)  # fmt: skip
def test_a_file_with_a_wrong_case_list(tmp_path, tensors, metadata, message):
    path = tmp_path / "golden.safetensors"
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(BundleError, match=message):
        load_golden(path)


@pytest.mark.parametrize(("dtype", "size"), [("BF16", 2), ("F8_E4M3", 1), ("C64", 8)])
def test_types_that_no_bundle_has(tmp_path, dtype, size):
    places = {name: [i * size, i * size + size] for i, name in enumerate(("c/inputs/x", "c/outputs/y"))}
    header = {name: {"dtype": dtype, "shape": [1], "data_offsets": place} for name, place in places.items()}
    text = json.dumps({"__metadata__": {"cases": ONE_CASE}, **header}).encode()
    path = tmp_path / "golden.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(2 * size))
    with pytest.raises(BundleError, match=f"golden.safetensors: tensor c/inputs/x is {dtype}, wanted one of BOOL"):
        load_golden(path)


def test_truncated_and_missing_files(tmp_path):
    path = tmp_path / "golden.safetensors"
    with pytest.raises(BundleError, match="cannot be read"):
        load_golden(path)
    save_golden(path, [case()])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BundleError, match="not a safetensors file"):
        load_golden(path)


TEXTS = ("", "\U00020000 \u0130\n", "\u05d0\u0301 [CLS]")


def test_texts_travel_with_their_case(tmp_path):
    path = tmp_path / "golden.safetensors"
    save_golden(path, [case("random"), case("texts", batch=3, texts=TEXTS)])
    assert [found.texts for found in load_golden(path)] == [(), TEXTS]
    with safe_open(path, framework="numpy") as file:
        entries = json.loads(file.metadata()["cases"])
    assert "texts" not in entries[0] and entries[1]["texts"] == list(TEXTS)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", "b"], r"texts: found 2, wanted 1, one per row"),
        ("a", r"texts: found \"a\", wanted an array"),
        ([1], r"texts\[0\]: found 1, wanted a string"),
        (["\0"], r"texts\[0\]: found .*, wanted a string without NUL"),
        (["\ud800"], r"texts\[0\]: found .*, wanted valid Unicode"),
    ],
)
def test_wrong_texts_are_neither_written_nor_read(tmp_path, texts, message):
    path = tmp_path / "golden.safetensors"
    with pytest.raises(BundleError, match=message):
        save_golden(path, [case(texts=texts)])
    assert not path.exists()
    listing = json.dumps([{**json.loads(ONE_CASE)[0], "texts": texts}])
    save_file({"c/inputs/x": np.zeros(1), "c/outputs/y": np.zeros(1)}, path, metadata={"cases": listing})
    with pytest.raises(BundleError, match=message):
        load_golden(path)
