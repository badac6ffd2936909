"""An ``.onnx`` file and the file of its weights, replaced so that a working pair is there at every moment.

The model names its weights, so the weights move in first and the model, by one rename, after them. Where weights of
that name are already there, the new ones get another: until the rename the old model still finds its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from pathlib import Path

import onnx_ir as ir

from ..errors import BundleError, InputError
from ..runtime.external import check_external_data, external_data
from ..runtime.swap import folder_problem
from .targets import DATA_SUFFIX

__all__ = ["check_destination", "data_name", "move_in"]


def check_destination(source: Path, out: Path, force: bool) -> None:
    """Refuses, before any work, a destination that cannot be written or that the source needs.

    Raises:
        InputError: It is a folder, the source or its weights, there already without ``force``, or cannot be made.
    """
    if out.is_dir():
        raise InputError(f"{out}: found a folder, wanted a file name for the optimized model")
    problem = folder_problem(out.parent)
    if problem is not None:
        raise InputError(f"{out}: {problem}")
    if out.exists() and source.exists() and out.samefile(source):
        raise InputError(f"{out}: is the input itself, wanted another file")
    data = out.with_name(out.name + DATA_SUFFIX)
    if source.is_file():
        for name in check_external_data(source):
            for path in (out, data):
                if path.exists() and path.samefile(source.parent / name):
                    raise InputError(
                        f"{out}: its weights would replace {path.name}, which {source.name} reads; rename it"
                    )
    for path in (out, data):
        if path.exists() and not force:
            raise InputError(f"{path}: exists; --force replaces it")


def data_name(model: ir.Model, out: Path) -> str:
    """The name of the weights' file: that of the model and ``.data``, or with the weights' hash where that is taken."""
    if not out.with_name(out.name + DATA_SUFFIX).exists():
        return out.name + DATA_SUFFIX
    digest = hashlib.sha256()
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            digest.update(f"{name} {value.const_value.dtype} {value.const_value.shape}".encode())
            digest.update(value.const_value.tobytes())
    return f"{out.name}.{digest.hexdigest()[:16]}{DATA_SUFFIX}"


def move_in(written: Path, data: str, out: Path) -> None:
    """Moves a model, and its weights where it has them outside, to their place; then removes what it replaced.

    Args:
        written: The model, in a folder on the same file system.
        data: Name of the weights' file, beside it or not there.
        out: Where it goes.
    """
    old = _own_weights(out)
    weights = written.with_name(data)
    kept = set()
    if weights.exists():
        _flush(weights)
        weights.replace(out.with_name(data))
        kept.add(data)
    _flush(written)
    written.replace(out)
    _flush(out.parent)
    for name in old - kept:
        out.with_name(name).unlink(missing_ok=True)


def _own_weights(out: Path) -> set[str]:
    """Files with weights of the model that is replaced, and those that a killed run left: by our names only."""
    named = re.compile(re.escape(out.name) + r"(\.[0-9a-f]{16})?" + re.escape(DATA_SUFFIX))
    found = {path.name for path in out.parent.iterdir() if named.fullmatch(path.name)}
    plain = out.name + DATA_SUFFIX
    if plain in found:
        read: set[str] = set()
        with contextlib.suppress(BundleError, UnicodeDecodeError):
            read = {entry.location for entry in external_data(out)} if out.exists() else set()
        if plain not in read:
            found.discard(plain)  # anybody may have a file of that name
    return found


def _flush(path: Path) -> None:
    """Make a file, or a folder's names, outlive a power cut, where the file system can."""
    if sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
