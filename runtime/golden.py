"""The golden: feeds and the source's outputs, recorded at export, kept in ``golden.safetensors``.

Tensors are named ``<case id>/inputs/<name>`` and ``<case id>/outputs/<name>``; the list of cases is JSON under
the key ``cases`` of the file's metadata. An entry with ``texts`` has one text per row, whose tokens, right padded, are
the case's inputs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleError
from . import fields
from .tensors import TensorSpec

__all__ = ["GOLDEN_NAME", "GoldenCase", "load_golden", "save_golden"]

GOLDEN_NAME = "golden.safetensors"

# A golden is a few shapes; a file beyond these bounds is damaged or made to exhaust memory.
_MAX_BYTES = 2 << 30
_MAX_CASES = 10_000
_DTYPES = ("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "F16", "F32", "F64")


@dataclass(frozen=True)
class GoldenCase:
    """One recorded call.

    Attributes:
        id: unique, without ``/``.
        batch: rows.
        sequence: positions per row, padding included.
        pattern: mask pattern that made the feeds.
        inputs: feeds by input name.
        outputs: the source's outputs by output name.
        texts: what the rows of ``inputs`` were tokenized from, one per row; none where the feeds are random.
    """

    id: str
    batch: int
    sequence: int
    pattern: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    texts: tuple[str, ...] = ()


def save_golden(path: Path, cases: Sequence[GoldenCase]) -> None:
    """Write the cases to a safetensors file.

    Raises:
        BundleError: no cases, a case without inputs or outputs, a repeated id or an id with ``/``, or wrong texts.
    """
    from safetensors.numpy import save_file

    _check_ids([case.id for case in cases], path.name)
    tensors: dict[str, np.ndarray] = {}
    for case in cases:
        if not case.inputs or not case.outputs:
            raise BundleError(f"{path.name}: case {case.id} has no inputs or no outputs")
        for kind, arrays in (("inputs", case.inputs), ("outputs", case.outputs)):
            for name, values in arrays.items():
                # safetensors writes the buffer as it lies: a transposed view would be stored scrambled.
                tensors[f"{case.id}/{kind}/{name}"] = np.asarray(values, order="C")
    entries: list[dict[str, Any]] = []
    for case in cases:
        entry = {"id": case.id, "batch": case.batch, "sequence": case.sequence, "pattern": case.pattern}
        texts = _texts(case.texts, case.batch, f"{path.name}: case {case.id}: texts")
        entries.append({**entry, "texts": texts} if texts else entry)
    save_file(tensors, path, metadata={"cases": json.dumps(entries)})
    # safetensors makes its file for its owner alone; a bundle is often read by another user than made it.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def load_golden(
    path: Path, inputs: Sequence[TensorSpec] | None = None, outputs: Sequence[TensorSpec] | None = None
) -> list[GoldenCase]:
    """Read what ``save_golden`` wrote, in its order.

    Args:
        path: the file.
        inputs: of the bundle; each case must record all of them, in their shapes. None asks for nothing.
        outputs: of the bundle; a case records no others. None takes any.

    Raises:
        BundleError: the file is missing, too large, no safetensors file, its case list is wrong, a tensor is of a
            type that no bundle has, or a case is not one of such inputs and outputs.
    """
    from safetensors import SafetensorError, safe_open

    name = path.name
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise BundleError(f"{name}: found {size} bytes, wanted at most {_MAX_BYTES}")
        with safe_open(path, framework="numpy") as file:
            entries = _entries((file.metadata() or {}).get("cases"), name)
            found: dict[str, dict[str, dict[str, np.ndarray]]] = {
                str(entry["id"]): {"inputs": {}, "outputs": {}} for entry in entries
            }
            for key in file.keys():  # noqa: SIM118 - the file is no mapping
                case, _, rest = key.partition("/")
                kind, _, tensor = rest.partition("/")
                if case not in found or kind not in found[case] or not tensor:
                    raise BundleError(f"{name}: tensor {key} belongs to no case")
                dtype = file.get_slice(key).get_dtype()
                if dtype not in _DTYPES:
                    raise BundleError(f"{name}: tensor {key} is {dtype}, wanted one of {', '.join(_DTYPES)}")
                found[case][kind][tensor] = file.get_tensor(key)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise BundleError(f"{path}: not a safetensors file: {error}") from error
    cases = [
        GoldenCase(**entry, inputs=found[entry["id"]]["inputs"], outputs=found[entry["id"]]["outputs"])
        for entry in entries
    ]
    for case in cases:
        if not case.inputs or not case.outputs:
            raise BundleError(f"{name}: case {case.id} has no inputs or no outputs")
        if inputs is not None:
            _check_inputs(case, inputs, name)
        unknown = [] if outputs is None else sorted(set(case.outputs) - {spec.name for spec in outputs})
        if unknown:
            raise BundleError(f"{name}: case {case.id} records {unknown[0]}, which is no output of the bundle")
    return cases


def _check_inputs(case: GoldenCase, inputs: Sequence[TensorSpec], name: str) -> None:
    """Refuse a case whose inputs are not the bundle's, or not of so many rows as it says."""
    where = f"{name}: case {case.id}"
    unknown = sorted(set(case.inputs) - {spec.name for spec in inputs})
    if unknown:
        raise BundleError(f"{where} records {unknown[0]}, which is no input of the bundle")
    sizes: dict[str | int, int] = {"batch": case.batch}
    for spec in inputs:
        if spec.name not in case.inputs:
            raise BundleError(f"{where} does not record {spec.name}")
        found = case.inputs[spec.name].shape
        wanted = tuple(axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in spec.shape)
        if len(found) != len(wanted) or any(
            isinstance(axis, int) and axis != size for axis, size in zip(wanted, found, strict=True)
        ):
            shapes = [f"({', '.join(map(str, shape))})" for shape in (found, wanted)]
            raise BundleError(f"{where}: {spec.name}: found shape {shapes[0]}, wanted {shapes[1]}")
        sizes |= {axis: size for axis, size in zip(spec.shape, found, strict=True) if isinstance(axis, str)}


def _entries(listing: str | None, name: str) -> list[dict[str, Any]]:
    """Return the checked case list."""
    if listing is None:
        raise BundleError(f"{name}: no case list in the metadata")
    try:
        parsed = json.loads(listing)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{name}: the case list is not JSON: {error}") from error
    entries = []
    for i, value in enumerate(fields.array(parsed, f"{name}: cases")):
        where = f"{name}: cases[{i}]"
        entry = fields.mapping(value, where)
        batch = fields.integer(fields.required(entry, "batch", where), f"{where}.batch", minimum=1)
        entries.append(
            {
                "id": fields.text(fields.required(entry, "id", where), f"{where}.id"),
                "batch": batch,
                "sequence": fields.integer(fields.required(entry, "sequence", where), f"{where}.sequence", minimum=1),
                "pattern": fields.text(fields.required(entry, "pattern", where), f"{where}.pattern"),
                "texts": _texts(entry.get("texts", ()), batch, f"{where}.texts"),
            }
        )
    _check_ids([entry["id"] for entry in entries], name)
    return entries


def _texts(value: object, batch: int, where: str) -> tuple[str, ...]:
    """Return checked texts: none, or one per row, without NUL, which ends a string in C."""
    texts = tuple(fields.text(text, f"{where}[{i}]", empty=True) for i, text in enumerate(fields.array(value, where)))
    if texts and len(texts) != batch:
        raise BundleError(f"{where}: found {len(texts)}, wanted {batch}, one per row")
    for i, text in enumerate(texts):
        if "\0" in text:
            raise fields.wrong(f"{where}[{i}]", text, "a string without NUL")
    return texts


def _check_ids(ids: list[str], name: str) -> None:
    if not ids or len(ids) > _MAX_CASES:
        raise BundleError(f"{name}: found {len(ids)} cases, wanted 1 to {_MAX_CASES}")
    for id_ in ids:
        if not id_ or "/" in id_:
            raise BundleError(f'{name}: case id "{id_}" is empty or has a slash')
    if len(set(ids)) != len(ids):
        raise BundleError(f"{name}: case ids repeat")
