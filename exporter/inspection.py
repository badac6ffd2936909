"""``tfx inspect``: what a bundle or an ``.onnx`` file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..errors import SourceError, TfxError
from ..runtime.bundle import Bundle
from .foreign import load, operators, to_canonical_opset
from .metadata import count
from .pipeline import raise_model
from .save import weight_bytes

__all__ = ["inspect"]


def inspect(path: Path) -> dict[str, Any]:
    """Describes a bundle folder or a model file.

    A bundle's refusals are those of its export. Of a file they are found by raising a copy of it, which also
    tells what ``tfx optimize`` would recognise (``raisable``).

    Raises:
        InputError: There is neither a bundle nor a model.
    """
    if path.is_dir():
        bundle = Bundle.open(path, check_hashes=False)
        model = load(bundle.model_path)
        manifest = bundle.manifest
        found = _describe(model)
        found["refusals"] = [dict(refusal) for refusal in manifest.refusals]
        found["bundle"] = {
            key: value
            for key, value in manifest.to_json().items()
            if key in ("source", "target", "precision", "layout", "max_length", "pooling", "parity", "versions")
        }
        found["bytes"] = sum(int(entry["bytes"]) for entry in manifest.files.values())
        return found
    if not path.exists():
        raise SourceError(f"{path}: found nothing, wanted a bundle folder or an .onnx file")
    model = load(path)
    found = _describe(model)
    found["bytes"] = path.stat().st_size
    try:
        to_canonical_opset(model, path.name)
        report = raise_model(model)
    except TfxError as error:
        found["refusals"] = [{"rule": "all", "where": path.name, "reason": str(error)}]
        return found
    found["refusals"] = [r.to_json() for r in report.refusals]
    found["raisable"] = report.counts
    return found


def _describe(model: ir.Model) -> dict[str, Any]:
    ops = operators(model)
    return {
        "nodes": sum(ops.values()),
        "ops": ops,
        "domains": {domain or "ai.onnx": version for domain, version in sorted(model.opset_imports.items())},
        "opset": model.opset_imports.get("", 0),
        "ir_version": model.ir_version,
        "inputs": [_tensor(value) for value in model.graph.inputs],
        "outputs": [_tensor(value) for value in model.graph.outputs],
        "canonical": count(model),
        "weight_bytes": weight_bytes(model),
        "refusals": [],
    }


def _tensor(value: ir.Value) -> dict[str, Any]:
    shape = None if value.shape is None else [axis if isinstance(axis, int) else axis.value for axis in value.shape]
    return {"name": value.name, "dtype": None if value.dtype is None else str(value.dtype.numpy()), "shape": shape}
