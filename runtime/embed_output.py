"""Vectors into a file that appears whole, by a run that may be killed at any moment and continued.

Beside ``OUT`` two files stand while a run is unfinished:

``OUT.partial``
    a ``.npy`` of its final size, into which rows are written in place;
``OUT.journal``
    JSON lines: what the run is made of (so that it is not continued with another input, model or schedule), then one
    line per written block: ``{"rows": how many rows are done, "crc32": of the block's bytes}``.

A process that is killed loses at most the blocks after the last line. A power cut may lose what the journal says was
written: blocks are read back and checked before a run goes on, and computed again from the first that differs.

At the end the ``.npy`` moves to ``OUT``, or is turned into JSON lines or Parquet under a hidden name that moves there.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import InputError
from .embed_formats import CHUNK, WRITERS, shape_of
from .swap import flush_entry, folder_problem

__all__ = ["SUFFIXES", "Spool", "check_out", "is_complete", "journal_of"]

SUFFIXES = (".npy", *WRITERS)
"""Endings of files that can be written."""


def check_out(out: Path, *, resume: bool, force: bool) -> None:
    """Check, before any work is done, that vectors can be written.

    Args:
        out: the file.
        resume: continue an unfinished run, or begin one where there is none.
        force: replace an existing file, and begin anew where a run is unfinished (unless ``resume``).

    Raises:
        InputError: another ending, a folder that is missing or read-only, a file or an unfinished run that is there. A
            file without an unfinished run is left to ``is_complete`` where a run is to be continued.
        ImportError: a Parquet file is wanted and pyarrow is not installed.
    """
    if out.suffix not in SUFFIXES:
        raise InputError(f"{out}: found the ending {out.suffix or 'none'}, wanted one of {', '.join(SUFFIXES)}")
    if out.suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401
    problem = folder_problem(out.absolute().parent)
    if problem is not None:
        raise InputError(f"{out}: {problem}")
    if out.exists() and not out.is_file():
        raise InputError(f"{out}: is no file")
    unfinished = journal_of(out).exists()
    if unfinished and not (resume or force):
        raise InputError(f"{out}: an unfinished run is there; --resume continues it, --force begins anew")
    if out.exists() and not force and not resume:
        raise InputError(f"{out}: exists; use --force to replace it")


def is_complete(out: Path, identity: Mapping[str, Any], *, resume: bool, force: bool) -> bool:
    """Return whether a run that is to be continued has nothing left to do: its file is there, and no journal.

    Raises:
        InputError: the file does not hold as many vectors of that size.
    """
    if not resume or force or journal_of(out).exists() or not out.exists():
        return False
    wanted = (identity["rows"], identity["dimension"])
    with _writing(out):
        found = shape_of(out)
    if found != wanted:
        said = "something else" if found is None else f"{found[0]} vectors of {found[1]}"
        raise InputError(f"{out}: exists with {said}, wanted {wanted[0]} of {wanted[1]}; use --force to replace it")
    return True


class Spool:
    """The unfinished file; made by ``begin`` and ``resume``, and to be closed.

    Attributes:
        identity: what the run is made of.
        done: rows that are written.
        rows: rows in all.
    """

    def __init__(
        self, out: Path, identity: Mapping[str, Any], done: int, partial: IO[bytes], journal: IO[bytes]
    ) -> None:
        self.identity = identity
        self.done = done
        self.rows = int(identity["rows"])
        self._out = out
        self._partial = partial
        self._journal = journal

    @classmethod
    def begin(cls, out: Path, identity: Mapping[str, Any], *, force: bool) -> Spool:
        """Make the files of a new run; those of an unfinished one are replaced.

        Args:
            out: the file that is wanted.
            identity: JSON values that describe the run; ``rows``, ``dimension`` and ``dtype`` say what is written.
            force: ``out`` may be replaced at the end.

        Raises:
            InputError: the disk is full, or another process writes there.
        """
        with _writing(out):
            partial = _locked(out)
            try:
                journal_of(out).unlink(missing_ok=True)
                header = _header(identity)
                partial.truncate(0)
                partial.write(header)
                rows = int(identity["rows"])
                size = len(header) + _row_bytes(identity) * rows
                partial.flush()
                free = shutil.disk_usage(out.absolute().parent).free
                if size > free:  # known now, and not after hours
                    raise InputError(f"{out}: {rows} rows need {size} bytes, and {free} are free there")
                partial.truncate(size)
                # The journal appears whole: a run without it has not begun.
                fresh = _hidden(out)
                fresh.write_bytes(_line({"tfx_embed": 1, "force": force, "identity": dict(identity)}))
                flush_entry(fresh)
                fresh.replace(journal_of(out))
                return cls(out, identity, 0, partial, journal_of(out).open("ab"))
            except BaseException:
                partial.close()
                _partial(out).unlink(missing_ok=True)
                raise

    @classmethod
    def resume(cls, out: Path, identity: Mapping[str, Any], *, force: bool) -> Spool | None:
        """Continue the unfinished run of a file, None where there is none.

        Args:
            out: the file that is wanted.
            identity: what the run must be made of; keys that it leaves out are taken as they are.
            force: ``out`` may be replaced at the end.

        Raises:
            InputError: the run is made of something else, or another process writes there.
        """
        path = journal_of(out)
        if not path.exists():
            return None
        with _writing(out):
            found, blocks, moving, ends = _read_journal(path)
            finished = moving and out.exists() and not _partial(out).exists()  # killed between its last two steps
            partial = out.open("rb") if finished else _locked(out)
            try:
                for key, wanted in identity.items():
                    if found["identity"].get(key) != wanted:
                        raise InputError(
                            f"{out}: the unfinished run has {key} {found['identity'].get(key)!r}, this one {wanted!r}; "
                            "--force without --resume begins anew"
                        )
                if out.exists() and not (moving or force or found["force"]):
                    raise InputError(f"{out}: exists beside an unfinished run; use --resume --force to replace it")
                if finished:
                    done = int(found["identity"]["rows"])
                else:
                    done, lines = _checked(out, partial, found["identity"], blocks)
                    with path.open("r+b") as file:
                        file.truncate(ends[lines])
                return cls(out, found["identity"], done, partial, path.open("ab"))
            except BaseException:
                partial.close()
                raise

    def write(self, vectors: np.ndarray) -> None:
        """Write the next rows (n, dimension).

        Raises:
            InputError: the disk is full or fails.
        """
        values = np.ascontiguousarray(vectors, self.identity["dtype"]).tobytes()
        with _writing(self._out):
            self._partial.seek(len(_header(self.identity)) + self.done * _row_bytes(self.identity))
            self._partial.write(values)
            self._partial.flush()
            self.done += len(vectors)
            self._journal.write(_line({"rows": self.done, "crc32": zlib.crc32(values)}))
            self._journal.flush()

    def finish(self) -> None:
        """Move the result to where it is wanted, whole, and remove the run's files.

        Raises:
            InputError: the disk is full or fails; the run can be continued.
        """
        out, partial = self._out, _partial(self._out)
        with _writing(out):
            if partial.exists():
                self._partial.flush()
                os.fsync(self._partial.fileno())
                self._journal.write(_line({"moving": True}))
                self._journal.flush()
                if out.suffix == ".npy":
                    self._partial.close()  # Windows moves no open file
                    partial.replace(out)
                else:
                    fresh = _hidden(out)
                    try:
                        WRITERS[out.suffix](fresh, self._chunks())
                        flush_entry(fresh)
                        fresh.replace(out)
                    finally:
                        fresh.unlink(missing_ok=True)
                flush_entry(out.absolute().parent)
            self.close()
            partial.unlink(missing_ok=True)
            journal_of(out).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; what was written stays for a later run."""
        self._journal.close()
        self._partial.close()

    def _chunks(self) -> Iterator[np.ndarray]:
        start, width = len(_header(self.identity)), int(self.identity["dimension"])
        self._partial.seek(start)
        for row in range(0, self.rows, CHUNK):
            count = min(CHUNK, self.rows - row) * width
            values = np.frombuffer(self._partial.read(count * _itemsize(self.identity)), self.identity["dtype"])
            yield values.reshape(-1, width)


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def journal_of(out: Path) -> Path:
    """Return the file that says what of an unfinished run is done; it is there as long as the run is unfinished."""
    return out.with_name(f"{out.name}.journal")


def _hidden(out: Path) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"


def _itemsize(identity: Mapping[str, Any]) -> int:
    return np.dtype(identity["dtype"]).itemsize


def _row_bytes(identity: Mapping[str, Any]) -> int:
    return int(identity["dimension"]) * _itemsize(identity)


def _header(identity: Mapping[str, Any]) -> bytes:
    """Return the first bytes of a ``.npy`` of the run's shape."""
    file = io.BytesIO()
    shape = (int(identity["rows"]), int(identity["dimension"]))
    descr = np.lib.format.dtype_to_descr(np.dtype(identity["dtype"]))
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _locked(out: Path) -> IO[bytes]:
    """Open the partial file for this process alone; a process that ends, however it does, lets go of it."""
    handle = os.fdopen(os.open(_partial(out), os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    try:
        import fcntl
    except ImportError:  # Windows
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise InputError(f"{out}: another tfx embed is writing it") from None
    return handle


def _read_journal(path: Path) -> tuple[dict[str, Any], list[tuple[int, int]], bool, list[int]]:
    """Read a journal up to the line that a kill cut short.

    Returns:
        The first line; rows done and checksum of each block; whether the end was reached; and where the first line and
        each block's line end in the file.
    """
    found: dict[str, Any] | None = None
    blocks: list[tuple[int, int]] = []
    ends: list[int] = []
    moving = False
    place = 0
    for line in path.read_bytes().splitlines(keepends=True):
        place += len(line)
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            break
        if found is None:
            if value.get("tfx_embed") != 1 or not {"rows", "dimension", "dtype"} <= set(value.get("identity", ())):
                break
            found = value
            ends.append(place)
        elif "moving" in value:
            moving = True
        else:
            blocks.append((value["rows"], value["crc32"]))
            ends.append(place)
    if found is None:
        raise InputError(f"{path}: is no journal of tfx embed; --force without --resume begins anew")
    return found, blocks, moving, ends


def _checked(
    out: Path, partial: IO[bytes], identity: Mapping[str, Any], blocks: list[tuple[int, int]]
) -> tuple[int, int]:
    """Return how many rows, and blocks, are in the file as the journal says."""
    header = _header(identity)
    partial.seek(0)
    if partial.read(len(header)) != header:
        raise InputError(f"{_partial(out)}: damaged; --force without --resume begins anew")
    done = 0
    for number, (rows, checksum) in enumerate(blocks):
        values = partial.read((rows - done) * _row_bytes(identity))
        if zlib.crc32(values) != checksum:
            return done, number
        done = rows
    return done, len(blocks)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn what the file system says into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}") from error
