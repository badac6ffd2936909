"""Bundles of a graph or a golden that no export makes: tiny, written whole, as someone else could have written them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save

from .bundles import reseal

IDS = np.array([[1, 2, 3]], np.int64)
CASE = {"id": "a", "batch": 1, "sequence": 3, "pattern": "full"}
INPUT = {"name": "ids", "dtype": "int64", "shape": ["batch", "sequence"], "role": "token_ids"}
OUTPUT = {"name": "y", "dtype": "float32", "shape": ["batch", "sequence"]}
MANIFEST = {
    "format": 1,
    "source": {"kind": "none", "name": "none"},
    "inputs": [INPUT],
    "outputs": [OUTPUT],
    "max_length": None,
    "pad_id": 0,
    "pooling": None,
    "tokenizer": None,
    "target": "portable",
    "precision": "fp32",
    "layout": "padded",
    "model": {"file": "model.onnx", "opset": 17, "ir_version": 8, "domains": [""]},
    "counts": dict.fromkeys(("attention", "layer_norm", "rms_norm", "gelu", "rotary"), 0),
    "refusals": [],
    "tolerance": {"max_abs": None, "min_cosine": 0.9},
    "parity": None,
    "versions": {},
    "files": {},
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "truncation": None,
    "padding": None,
    "normalizer": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordPiece",
        "unk_token": "u",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 9,
        "vocab": {"u": 0, "a": 1, "b": 2, "c": 3},
    },
}


def cast(kind: int = TensorProto.FLOAT, name: str = "y") -> onnx.NodeProto:
    """The node that makes floats of the ids."""
    return helper.make_node("Cast", ["ids"], [name], to=kind)


def golden(tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> bytes:
    """Return a golden of one case; None for its tensors gives the right ones."""
    if tensors is None:
        tensors = {"a/inputs/ids": IDS, "a/outputs/y": IDS.astype(np.float32)}
    case = {key: value for key, value in {**CASE, **fields}.items() if value is not None}
    return save(tensors, {"cases": json.dumps([case])})


def raw_golden(header: dict[str, Any], data: bytes) -> bytes:
    """Return a golden whose header says what it wants of its bytes."""
    text = json.dumps({"__metadata__": {"cases": json.dumps([CASE])}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(
    folder: Path,
    nodes: Sequence[onnx.NodeProto] = (),
    *,
    recorded: bytes | None = None,
    constants: dict[str, np.ndarray] | None = None,
    kind: int = TensorProto.FLOAT,
    opset: int = 17,
    change: Callable[[dict[str, Any]], Any] = lambda _: None,
    **files: bytes,
) -> Path:
    """Write a bundle; without more it is a sound one.

    Args:
        folder: to be made.
        nodes: of the graph; None take ``cast()``.
        recorded: the golden; None takes ``golden()``, and nothing (``b""``) leaves it out.
        constants: of the graph.
        kind: type of the output.
        opset: of the model.
        change: is given the manifest.
        files: more of them, by name, with ``_`` for the dot.

    Returns:
        ``folder``.
    """
    folder.mkdir()
    graph = helper.make_graph(
        list(nodes) or [cast()],
        "graph",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(values, name) for name, values in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    if recorded != b"":
        (folder / "golden.safetensors").write_bytes(golden() if recorded is None else recorded)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    manifest = json.loads(json.dumps(MANIFEST))
    manifest["model"]["opset"] = opset
    (folder / "tfx.json").write_text(json.dumps(manifest), encoding="utf-8")
    reseal(folder)
    manifest = json.loads((folder / "tfx.json").read_bytes())
    change(manifest)
    (folder / "tfx.json").write_text(json.dumps(manifest, ensure_ascii=False), encoding="utf-8")
    return folder
