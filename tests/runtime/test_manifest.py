from __future__ import annotations

import copy
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfx.errors import BundleError
from tfx.runtime.manifest import Manifest, bare_name


def put(value, path, new):
    """Return a copy of nested JSON with one place changed."""
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


def test_round_trip(tiny_manifest):
    manifest = tiny_manifest(parity={"passed": True, "max_abs": 1e-6, "min_cosine": 1.0, "provider": "cpu", "cases": 4})
    assert Manifest.parse(json.dumps(manifest.to_json())) == manifest


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["inputs", 0, "dtype"], "int65", 'tfx.json: inputs[0].dtype: found "int65", wanted one of bool, int8'),
        (["inputs", 1, "shape", 0], -1, "tfx.json: inputs[1].shape[0]: found -1, wanted an integer of at least 1"),
        (["inputs", 0, "limit"], "many", "tfx.json: inputs[0].limit"),
        (["inputs", 0, "role"], "output", "tfx.json: inputs[0].role"),
        (["inputs"], [], "tfx.json: inputs: found none"),
        (["outputs", 0, "surplus"], 1, 'tfx.json: outputs[0]: found "surplus"'),
        (["max_length"], 0, "tfx.json: max_length: found 0"),
        (["max_length"], True, "tfx.json: max_length: found True"),
        (["pad_id"], None, "tfx.json: pad_id: found None"),
        (["pooling", "mode"], "median", "tfx.json: pooling.mode"),
        (["pooling", "normalize"], 1, "tfx.json: pooling.normalize"),
        (["pooling", "output"], "nothing", 'tfx.json: pooling.output: found "nothing", wanted one of last'),
        (["layout"], "loose", "tfx.json: layout"),
        (["model", "file"], "../model.onnx", 'tfx.json: model.file: found "../model.onnx", wanted a bare file name'),
        (["model", "opset"], 0, "tfx.json: model.opset"),
        (["tokenizer", "file"], "/etc/passwd", "tfx.json: tokenizer.file"),
        (["counts", "attention"], -1, "tfx.json: counts.attention"),
        (["counts", "attentions"], 1, 'tfx.json: counts: found "attentions"'),
        (["tolerance", "max_abs"], "small", "tfx.json: tolerance.max_abs"),
        (["tolerance", "max_abs"], 10**400, "tfx.json: tolerance.max_abs: found 1000"),
        (["tolerance", "max_abs"], float("inf"), "tfx.json: tolerance.max_abs: found inf, wanted a finite number"),
        (["tolerance", "max_abs"], -1e-9, "tfx.json: tolerance.max_abs: found -1e-09, wanted a finite number of at"),
        (["tolerance", "min_cosine"], float("nan"), "tfx.json: tolerance.min_cosine: found nan, wanted a finite"),
        (["tolerance", "min_cosine"], 1.5, "found 1.5, wanted a finite number of at least -1 and of at most 1"),
        (["max_length"], 10**400, "tfx.json: max_length: found 1000"),
        (["source", "notes"], {"eps": float("nan")}, "tfx.json: cannot be written as JSON"),
        (["source", "name"], "\ud800", "tfx.json: source.name: found \"\\ud800\", wanted valid Unicode"),
        (["model", "file"], "\ud800", "tfx.json: model.file: found \"\\ud800\", wanted valid Unicode"),
        (["files"], {"\ud800": {"bytes": 1, "sha256": "0" * 64}}, "tfx.json: files: found \"\\ud800\""),
        (["versions"], {"\ud800": 1}, "tfx.json: versions.\\ud800: found 1"),
        (["versions"], {"\ud800": "1"}, "tfx.json: cannot be written as JSON"),
        (["refusals"], [{"rule": "r"}], "tfx.json: refusals[0].where: missing"),
        (["files"], {"a/b": {"bytes": 1, "sha256": "0" * 64}}, 'tfx.json: files: found "a/b"'),
        (["files"], {"a": {"bytes": 1, "sha256": "0"}}, 'tfx.json: files["a"].sha256'),
        (["files"], {"tfx.json": {"bytes": 1, "sha256": "0" * 64}}, "lists tfx.json itself"),
        (["format"], 2, "tfx.json: format: found 2, this tfx reads format 1"),
        (["format"], "1", 'tfx.json: format: found "1"'),
        (["poolign"], None, 'tfx.json: found "poolign", wanted only the keys'),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(tiny_manifest, path, value, message):
    with pytest.raises(BundleError, match=re.escape(message)):
        Manifest.from_json(put(tiny_manifest().to_json(), path, value))


def test_a_missing_field_is_named(tiny_manifest):
    for key in tiny_manifest().to_json():
        value = tiny_manifest().to_json()
        del value[key]
        with pytest.raises(BundleError, match=rf"tfx\.json\.{key}: missing"):
            Manifest.from_json(value)


def test_a_newer_format_is_named_before_its_unknown_fields(tiny_manifest):
    with pytest.raises(BundleError, match="found 7, this tfx reads format 1; install a newer tfx-onnx"):
        Manifest.from_json({"format": 7, "shards": []})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, b"\xff\xfe\x00"])
def test_text_that_is_no_manifest(text):
    with pytest.raises(BundleError, match=r"^tfx\.json"):
        Manifest.parse(text)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "\\a", "a\\b", "C:a", "a\0", "x" * 256, "../a", "nul\n", 3, None]
)
def test_names_that_could_leave_the_folder(name):
    with pytest.raises(BundleError, match=r"^here"):
        bare_name(name, "here")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_any_json_in_any_field_is_read_or_refused(data):
    from tfx.runtime.tensors import TensorSpec

    value = {
        "format": 1,
        "source": {"kind": "module", "name": "x", "sha256": None},
        "inputs": [TensorSpec("a", "int64", ("batch",), "features").to_json()],
        "outputs": [{"name": "b", "dtype": "float32", "shape": [1]}],
        "max_length": None,
        "pad_id": 0,
        "pooling": None,
        "tokenizer": None,
        "target": "cpu",
        "precision": "fp32",
        "layout": "padded",
        "model": {"file": "m", "opset": 1, "ir_version": 1, "domains": []},
        "counts": dict.fromkeys(("attention", "layer_norm", "rms_norm", "gelu", "rotary"), 0),
        "refusals": [],
        "tolerance": {"max_abs": None, "min_cosine": None},
        "parity": None,
        "files": {},
        "versions": {},
    }
    Manifest.from_json(value)
    value[data.draw(st.sampled_from(sorted(value)))] = data.draw(json_values)
    try:
        Manifest.from_json(value)
    except BundleError as error:
        assert "\n" not in str(error)
