"""Writing a folder whole or not at all.

The folder is filled beside its destination under a hidden name, flushed to disk, then renamed into place. A failure,
an interrupt or SIGTERM removes the hidden folder; one that SIGKILL or a power cut left behind is removed (or, when
it is the old folder on its way out, put back) by the next write to the same destination.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import BundleError
from .manifest import MANIFEST_NAME
from .signals import sigterm_raises

__all__ = ["check_bundle_replaceable", "ensure_free", "flush_entry", "folder_problem", "replace_folder"]

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


Replaceable = Callable[[Path, str], None]
"""Refuses, with a BundleError, a folder (by the name that its user gave it) that must not be replaced."""


def check_bundle_replaceable(path: Path, shown: str) -> None:
    """Refuse to replace anything but an empty folder or a bundle that holds nothing else."""
    if path.is_symlink() or not path.is_dir():
        raise BundleError(f"{shown}: is {'a link' if path.is_symlink() else 'a file'}; --force only replaces bundles")
    entries = {entry.name for entry in path.iterdir()}
    if not entries:
        return
    if MANIFEST_NAME not in entries:
        raise BundleError(f"{shown}: is not a bundle (no {MANIFEST_NAME}); --force only replaces bundles")
    listed: set[str] = set()
    # Read leniently: a damaged or newer bundle may be replaced, but not somebody's other files beside it.
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
        listed = set(json.loads((path / MANIFEST_NAME).read_bytes())["files"])
    foreign = sorted(name for name in entries - listed - {MANIFEST_NAME})
    if foreign:
        raise BundleError(f"{shown}: holds {foreign[0]}, which is no part of the bundle; remove the folder yourself")


def ensure_free(
    destination: str | Path, force: bool = False, replaceable: Replaceable = check_bundle_replaceable
) -> Path:
    """Check, before any work is done, that a folder can be written to ``destination``.

    Args:
        destination: the folder to make; its parent must exist.
        force: what ``replaceable`` allows may be there and will be replaced.
        replaceable: what may be replaced; a bundle or an empty folder.

    Returns:
        The absolute destination.

    Raises:
        BundleError: it exists (without ``force``), must not be replaced, or its parent cannot be written.
    """
    path = Path(os.path.abspath(destination))  # noqa: PTH100 - absolute() keeps "..", resolve() follows links
    if not path.name:
        raise BundleError(f"{destination}: is no folder that can be made")
    problem = folder_problem(path.parent)
    if problem is not None:
        raise BundleError(f"{destination}: {problem}")
    if os.path.lexists(path):
        if not force:
            raise BundleError(f"{destination}: exists; use --force to replace it, or another --out")
        replaceable(path, str(destination))
    return path


def folder_problem(folder: Path) -> str | None:
    """Return why nothing can be made in a folder, None when it can."""
    if not folder.is_dir():
        return f"{folder} is not a folder" if os.path.lexists(folder) else f"the folder {folder} does not exist"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} is not writable"


def replace_folder(
    destination: str | Path,
    fill: Callable[[Path], None],
    *,
    force: bool = False,
    replaceable: Replaceable = check_bundle_replaceable,
    subfolders: bool = False,
) -> Path:
    """Fill a new folder and move it to ``destination``.

    Args:
        destination: the folder to make.
        fill: writes the files into the empty folder that it is given.
        force: replace what is there, if ``replaceable`` allows it.
        replaceable: what may be replaced; a bundle or an empty folder.
        subfolders: ``fill`` may make folders; they are refused otherwise.

    Returns:
        The absolute destination.

    Raises:
        BundleError: as ``ensure_free``, or the disk is full or fails. What ``fill`` raises passes through.
    """
    path = ensure_free(destination, force, replaceable)
    _sweep(path)
    ensure_free(destination, force, replaceable)  # an old folder may have been put back
    stem = f"{_prefix(path)}{os.getpid()}-{secrets.token_hex(4)}"
    fresh, aside = path.with_name(f"{stem}.new"), path.with_name(f"{stem}.old")
    with sigterm_raises():
        try:
            fresh.mkdir()
            fill(fresh)
            _flush(fresh, subfolders)
            ensure_free(destination, force, replaceable)  # somebody else may have written there meanwhile
            if os.path.lexists(path):
                path.rename(aside)
            try:
                fresh.rename(path)
            except BaseException:
                if aside.exists():
                    aside.rename(path)
                raise
            flush_entry(path.parent)
        except OSError as error:
            if not _is_write_error(error, fresh):
                raise  # `fill` could not read its own source
            raise BundleError(f"{destination}: cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            if path.exists():
                shutil.rmtree(aside, ignore_errors=True)
    return path


def _prefix(path: Path) -> str:
    """Return how hidden names beside ``path`` begin; the host is in it because process ids are per host."""
    host = re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32]
    return f".{path.name}.tfx-{host}-"


def _sweep(path: Path) -> None:
    """Remove what writers that no longer live left behind; put an old folder back when it was caught mid-swap."""
    if sys.platform == "win32":  # os.kill(pid, 0) would end the process there
        return
    pattern = re.compile(re.escape(_prefix(path)) + r"(\d+)-[0-9a-f]{8}\.(new|old)")
    for entry in list(path.parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match is None or _alive(int(match[1])):
            continue
        if match[2] == "old" and not os.path.lexists(path):
            entry.rename(path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_write_error(error: OSError, folder: Path) -> bool:
    """Tell a failure to write into ``folder`` from whatever else went wrong while it was filled."""
    short_write = error.errno is None and " written" in str(error)  # numpy's tofile on a full disk
    return error.errno in _DISK_ERRORS or short_write or str(folder) in str(error.filename)


def _flush(folder: Path, subfolders: bool) -> None:
    for entry in folder.iterdir():
        if subfolders and entry.is_dir() and not entry.is_symlink():
            _flush(entry, subfolders)
        elif entry.is_file() and not entry.is_symlink():
            flush_entry(entry)
        else:
            raise BundleError(f"{entry.name}: a bundle holds plain files only")
    flush_entry(folder)


def flush_entry(path: Path) -> None:
    """Make a file or a folder's list of names outlive a power cut."""
    if sys.platform == "win32":  # folders cannot be opened there, read-only files cannot be flushed
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without fsync
            raise
    finally:
        os.close(handle)
