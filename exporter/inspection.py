"""``tfx inspect``: what a bundle or an ``.onnx`` file holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..errors import CountError, SourceError, TfxError
from ..runtime.bundle import Bundle
from ..runtime.external import check_external_data
from .foreign import load, operators, to_canonical_opset
from .metadata import count
from .pipeline import check_counts, raise_model
from .save import weight_bytes

__all__ = ["check_expected", "inspect"]

_SHOWN = 3


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
    found["bytes"] = path.stat().st_size + sum(
        (path.parent / name).stat().st_size for name in check_external_data(path)
    )
    try:
        to_canonical_opset(model, path.name)
        report = raise_model(model)
    except TfxError as error:
        found["refusals"] = [{"rule": "all", "where": path.name, "reason": str(error)}]
        return found
    found["refusals"] = [r.to_json() for r in report.refusals]
    found["raisable"] = report.counts
    return found


def check_expected(found: Mapping[str, Any], expected: Mapping[str, int]) -> None:
    """Compares the counts of a description, as the file is, with expected ones.

    Args:
        found: ``canonical``, ``refusals`` and, of a file, ``raisable``.
        expected: Canonical counts.

    Raises:
        CountError: They differ; says what could be raised and what was refused.
    """
    try:
        check_counts(found["canonical"], expected)
    except CountError as error:
        helps = [str(error)]
        more = found.get("raisable", {})
        raised = [f"{name} {more[name]}" for name in expected if more.get(name, 0) > found["canonical"].get(name, 0)]
        if raised:
            helps.append(f"tfx optimize would raise {', '.join(raised)}")
        helps += refused(found["refusals"])
        raise CountError("; ".join(helps)) from error


def refused(refusals: Sequence[Mapping[str, str]]) -> list[str]:
    """The first refusals in words, and how many more there are."""
    shown = [f"refused {each['rule']} at {each['where']}: {each['reason']}" for each in refusals[:_SHOWN]]
    more = len(refusals) - len(shown)
    return shown + ([f"and {more} more refusals (tfx inspect)"] if more else [])


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
    return {"name": value.name, "dtype": None if value.dtype is None else _dtype(value.dtype), "shape": shape}


def _dtype(kind: ir.DataType) -> str:
    try:
        return str(kind.numpy())
    except TypeError:
        return kind.name.lower()
