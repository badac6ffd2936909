"""Arrays in and out of files: ``.npz`` in, ``.npz`` or ``.json`` out."""

from __future__ import annotations

import contextlib
import json
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import InputError, MachineError
from .swap import folder_problem

__all__ = ["check_target", "excerpt", "nested", "read_npz", "write"]

_SUFFIXES = (".npz", ".json")
_SHOWN_ROWS, _SHOWN_VALUES = 8, 4096


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read every array of an ``.npz`` file; nothing in it is unpickled.

    Raises:
        InputError: the file is missing, damaged, of another kind, or holds Python objects.
        MachineError: memory ran out.
    """
    try:
        file = np.load(path, allow_pickle=False)  # noqa: TID251 - without unpickling
        if isinstance(file, np.ndarray):
            raise InputError(f"{path}: found a single array, wanted an .npz with one array per input name")
        with file:
            arrays = {name: file[name] for name in file.files}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise MachineError(f"{path}: its arrays do not fit into memory: {error}") from error
    except Exception as error:
        # zipfile, zlib, lzma and the parser of .npy headers each raise kinds of their own for damaged bytes.
        said = " ".join(str(error).split())
        if "pickled" in said:  # what numpy says of any file that it does not know
            raise InputError(f"{path}: not an .npz of plain arrays") from error
        raise InputError(f"{path}: not an .npz of plain arrays: {said}") from error
    for name, values in arrays.items():
        if not isinstance(values, np.ndarray):  # numpy hands other members out as bytes
            raise InputError(f"{path}: not an .npz of plain arrays: {name} is no array")
    return arrays


def check_target(path: Path, force: bool) -> None:
    """Check, before any work is done, that results can be written to ``path``.

    Raises:
        InputError: neither .npz nor .json, there already (without ``force``), or its folder is missing or read-only.
    """
    if path.suffix not in _SUFFIXES:
        raise InputError(f"{path}: found the ending {path.suffix or 'none'}, wanted one of {', '.join(_SUFFIXES)}")
    if path.exists() and (not force or not path.is_file()):
        raise InputError(f"{path}: exists; use --force to replace it" if path.is_file() else f"{path}: is no file")
    problem = folder_problem(path.absolute().parent)
    if problem is not None:
        raise InputError(f"{path}: {problem}")


def write(path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    """Write outputs, whole or not at all, in the form that the ending says.

    Raises:
        InputError: the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with fresh.open("wb") as file:
            if path.suffix == ".npz":
                _write_npz(file, outputs)
            else:
                value = {"outputs": {name: nested(values) for name, values in outputs.items()}}
                file.write((json.dumps(value, allow_nan=False) + "\n").encode())
        fresh.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def _write_npz(file: IO[bytes], outputs: Mapping[str, np.ndarray]) -> None:
    """Write what np.savez writes; that takes no array of the name ``file``."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, values in outputs.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, values, allow_pickle=False)


def nested(values: np.ndarray) -> Any:
    """Return nested lists; NaN and infinity, which JSON does not have, become None."""
    if values.dtype.kind != "f":
        return values.tolist()
    # The shortest decimals that give the same number back: 9 digits for a float32, not the 17 of its float64.
    flat = np.empty(values.size, dtype=object)
    flat[:] = [float(str(value)) if np.isfinite(value) else None for value in values.ravel()]
    return flat.reshape(values.shape).tolist()


def excerpt(values: np.ndarray) -> list[str]:
    """Return lines for people: one row a line, whole while the array is small."""
    if values.size > _SHOWN_VALUES:
        return [np.array2string(values, precision=6, threshold=16, edgeitems=2).replace("\n", " ")]
    rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    lines = ["[" + ", ".join(f"{value:.6g}" for value in row.tolist()) + "]" for row in rows[:_SHOWN_ROWS]]
    return lines + ([f"... {len(rows) - _SHOWN_ROWS} more rows"] if len(rows) > _SHOWN_ROWS else [])
