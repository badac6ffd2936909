"""A tiny bundle: an embedding model in eight ONNX nodes, and the same model in numpy."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tfx.runtime.bundle import Bundle, write_bundle
from tfx.runtime.golden import GOLDEN_NAME, GoldenCase, save_golden
from tfx.runtime.manifest import Manifest
from tfx.runtime.tensors import TensorSpec, default_cases, make_feeds
from tfx.runtime.text import TextEncoder

VOCAB, D, MAX_LENGTH, PAD = 12, 5, 24, 0
IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"), "token_ids", VOCAB)
MASK = TensorSpec("attention_mask", "int64", ("batch", "sequence"), "attention_mask", 2)
TYPES = TensorSpec("token_type_ids", "int64", ("batch", "sequence"), "token_type_ids", 2)
HIDDEN = TensorSpec("last_hidden_state", "float32", ("batch", "sequence", D), "output")
POOLED = TensorSpec("sentence_embedding", "float32", ("batch", D), "output")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran")


def tables() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    return {
        "words": random.standard_normal((VOCAB, D)).astype(np.float32),
        "segments": random.standard_normal((2, D)).astype(np.float32),
    }


def reference(feeds) -> dict[str, np.ndarray]:
    """hidden = (word + segment), masked; vector = mean of the attended ones."""
    weights = tables()
    hidden = weights["words"][feeds["input_ids"]]
    if "token_type_ids" in feeds:
        hidden = hidden + weights["segments"][feeds["token_type_ids"]]
    mask = feeds["attention_mask"][..., None].astype(np.float32)
    hidden = hidden * mask
    return {
        "last_hidden_state": hidden,
        "sentence_embedding": hidden.sum(1) / np.maximum(mask.sum(1), 1),
    }


def graph(segments: bool = True, swapped: bool = False) -> onnx.ModelProto:
    weights = tables()
    nodes = [helper.make_node("Gather", ["words", "input_ids"], ["h0"])]
    if segments:
        nodes += [
            helper.make_node("Gather", ["segments", "token_type_ids"], ["s"]),
            helper.make_node("Add", ["h0", "s"], ["h"]),
        ]
    nodes += [
        helper.make_node("Cast", ["attention_mask"], ["m2"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["m2", "last"], ["m"]),
        helper.make_node("Mul", ["h" if segments else "h0", "m"], ["last_hidden_state"]),
        helper.make_node("ReduceSum", ["last_hidden_state", "one"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["m", "one"], ["count"], keepdims=0),
        helper.make_node("Max", ["count", "unit"], ["floor"]),
        helper.make_node("Div", ["sum", "floor"], ["sentence_embedding"]),
    ]
    if swapped:
        nodes[-1].op_type = "Mul"
    inputs = [IDS, MASK, TYPES] if segments else [IDS, MASK]
    constants = {
        "words": weights["words"],
        **({"segments": weights["segments"]} if segments else {}),
        "last": np.array([-1], np.int64),
        "one": np.array([1], np.int64),
        "unit": np.array([1], np.float32),
    }
    return helper.make_model(
        helper.make_graph(
            nodes,
            "tiny",
            [helper.make_tensor_value_info(s.name, TensorProto.INT64, list(s.shape)) for s in inputs],
            [helper.make_tensor_value_info(s.name, TensorProto.FLOAT, list(s.shape)) for s in (HIDDEN, POOLED)],
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # Left over from training, as in the files of real checkpoints; must not leak into inference.
    tokenizer.enable_padding(length=20)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(path))


def manifest(segments: bool = True, tokenizer: bool = True, pooling: bool = True, **changes) -> Manifest:
    values = {
        "source": {"kind": "module", "name": "tiny", "sha256": None},
        "inputs": (IDS, MASK, TYPES) if segments else (IDS, MASK),
        "outputs": (HIDDEN, POOLED),
        "max_length": MAX_LENGTH,
        "pad_id": PAD,
        "target": "cpu",
        "precision": "fp32",
        "layout": "padded",
        "model": {"file": "model.onnx", "opset": 17, "ir_version": 8, "domains": [""]},
        "counts": dict.fromkeys(("attention", "layer_norm", "rms_norm", "gelu", "rotary"), 0),
        "tolerance": {"max_abs": 1e-4, "min_cosine": 0.99999},
        "pooling": {"mode": "mean", "normalize": False, "output": "sentence_embedding"} if pooling else None,
        "tokenizer": {"file": "tokenizer.json", "max_length": 8} if tokenizer else None,
        "versions": {"onnx": onnx.__version__},
    }
    return Manifest(**{**values, **changes})


@pytest.fixture
def tiny_reference():
    return reference


@pytest.fixture
def tiny_manifest():
    return manifest


def make(
    parent: Path,
    name: str = "tfx-model",
    *,
    segments: bool = True,
    external: bool = False,
    model: onnx.ModelProto | None = None,
    expected=reference,
    texts: tuple[str, ...] = (),
    force: bool = False,
    **changes,
) -> Bundle:
    """Write a tiny bundle; ``expected`` makes the recorded outputs, ``changes`` go to the manifest.

    With ``texts`` their tokens are a golden case too.
    """

    def fill(folder: Path) -> Manifest:
        made = manifest(segments, **changes)
        onnx.save(
            model or graph(segments),
            folder / "model.onnx",
            save_as_external_data=external,
            location="model.onnx.data",
            size_threshold=100,
        )
        cases = []
        for seed, case in enumerate(default_cases(made.inputs, made.max_length)):
            feeds = make_feeds(made.inputs, batch=case.batch, sequence=case.sequence, pattern=case.pattern, seed=seed)
            cases.append(GoldenCase(case.id, case.batch, case.sequence, case.pattern, feeds, expected(feeds)))
        if made.tokenizer:
            write_tokenizer(folder / "tokenizer.json")
        if texts:
            encoder = TextEncoder(folder / "tokenizer.json", made.inputs, made.pad_id, 8)
            feeds = encoder.feeds(encoder.encode(texts))
            batch, sequence = feeds["input_ids"].shape
            cases.append(GoldenCase("texts", batch, sequence, "right", feeds, expected(feeds), texts))
        save_golden(folder / GOLDEN_NAME, cases)
        return made

    return write_bundle(parent / name, fill, force=force)


@pytest.fixture
def make_bundle(tmp_path):
    """Return a function that writes a tiny bundle into the test's folder and opens it."""
    return functools.partial(make, tmp_path)


@pytest.fixture(scope="module")
def shared_bundle(tmp_path_factory) -> Bundle:
    """A bundle that tests only read."""
    return make(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def bundle(make_bundle) -> Bundle:
    return make_bundle()


@pytest.fixture
def tiny_graph():
    return graph


def write_file_of_texts(path: Path, texts: list) -> Path:
    """Write texts in the form that the ending says, with a column of ids beside them."""
    if path.suffix == ".txt":
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    elif path.suffix in (".jsonl", ".ndjson"):
        rows = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([("id", "text"), *enumerate(texts)])
    else:
        import pyarrow
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=3)
    return path


@pytest.fixture
def write_texts():
    return write_file_of_texts
