"""Texts out of files, one after the other: lines, JSON lines, CSV and Parquet.

A row is an index from 0, that of its vector; errors name it and, where there is one, the line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError

__all__ = ["SUFFIXES", "count_texts", "read_texts"]

_PARQUET_ROWS = 1024
_LONGEST_FIELD = (1 << 31) - 1  # characters; Python's csv allows 131072 until it is told otherwise


def read_texts(path: Path, column: str = "text", start: int = 0) -> Iterator[str]:
    """Yield the texts of a file.

    Args:
        path: ``.txt`` (a text per line), ``.jsonl`` or ``.ndjson`` (a string, or an object with the column, per line),
            ``.csv`` or ``.tsv`` (with a header), or ``.parquet``. Text files are UTF-8.
        column: where the text is, in files that have columns.
        start: rows to leave out at the beginning.

    Raises:
        InputError: the file is missing, damaged or of another kind, has no such column, or a row has no text.
        ImportError: a Parquet file, and pyarrow is not installed.
    """
    reader = _reader(path)
    with _readable(path):
        for row, (where, text) in enumerate(reader(path, column, start), start):
            if not isinstance(text, str):
                found = "nothing" if text is None else type(text).__name__
                raise InputError(f"{path} {where(row)}: found {found}, wanted a text")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"{path} {where(row)}: no valid Unicode (a lone surrogate)") from error
            yield text


def count_texts(path: Path, column: str = "text") -> int:
    """Read a whole file, so that a bad row is known before any work is done, and return how many texts it has.

    Raises:
        InputError: as ``read_texts``, or there is none.
    """
    count = sum(1 for _ in read_texts(path, column))
    if not count:
        raise InputError(f"{path}: holds no rows, wanted at least one text")
    return count


_Where = Callable[[int], str]
_Rows = Iterator[tuple[_Where, Any]]


def _row(row: int) -> str:
    return f"row {row}"


def _line(row: int) -> str:
    return f"row {row} (line {row + 1})"


def _lines(path: Path) -> Iterator[str]:
    """Yield decoded lines with their ends."""
    with path.open("rb") as file:
        for i, line in enumerate(file):
            try:
                yield line.decode("utf-8-sig" if i == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{path} line {i + 1}: not UTF-8: {error.reason}") from error


def _text_rows(path: Path, column: str, start: int) -> _Rows:
    del column
    for line in islice(_lines(path), start, None):
        yield _line, line.removesuffix("\n").removesuffix("\r")


def _json_rows(path: Path, column: str, start: int) -> _Rows:
    for row, line in enumerate(islice(_lines(path), start, None), start):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            found = "an empty line" if not line.strip() else f"no JSON ({error})"
            raise InputError(f"{path} {_line(row)}: found {found}, wanted a string or an object") from error
        if isinstance(value, dict):
            if column not in value:
                keys = ", ".join(list(value)[:8]) or "none"
                raise InputError(f'{path} {_line(row)}: has no "{column}"; it has {keys} (--column)')
            value = value[column]
        yield _line, value


def _csv_rows(path: Path, column: str, start: int) -> _Rows:
    reader = csv.reader(_lines(path), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)

    def where(row: int) -> str:
        return f"row {row} (line {reader.line_num})"

    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        header = next(reader, None)
        if header is None:
            return
        if column not in header:
            raise InputError(f'{path}: has no column "{column}"; it has {", ".join(header[:8])} (--column)')
        place = header.index(column)
        for row, values in enumerate(reader):
            if len(values) != len(header):
                raise InputError(f"{path} {where(row)}: found {len(values)} fields, wanted {len(header)}")
            if row >= start:
                yield where, values[place]
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: no CSV: {error}") from error
    finally:
        csv.field_size_limit(before)


def _parquet_rows(path: Path, column: str, start: int) -> _Rows:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise InputError(f'{path}: has no column "{column}"; it has {", ".join(names[:8])} (--column)')
            wanted = list(range(file.num_row_groups))
            while wanted and start >= (rows := file.metadata.row_group(wanted[0]).num_rows):
                start -= rows
                del wanted[0]
            for batch in file.iter_batches(_PARQUET_ROWS, row_groups=wanted, columns=[column]):
                for value in batch.column(0)[start:].to_pylist():
                    yield _row, value
                start = max(0, start - batch.num_rows)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: no Parquet: {' '.join(str(error).split())}") from error


_READERS: dict[str, Callable[[Path, str, int], _Rows]] = {
    ".txt": _text_rows,
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}

SUFFIXES = tuple(_READERS)
"""Endings of files that can be read."""


def _reader(path: Path) -> Callable[[Path, str, int], _Rows]:
    if path.suffix not in _READERS:
        raise InputError(f"{path}: found the ending {path.suffix or 'none'}, wanted one of {', '.join(SUFFIXES)}")
    return _READERS[path.suffix]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the file system says into an InputError."""
    if not path.is_file():
        raise InputError(f"{path}: found {'no file' if path.exists() else 'nothing'}, wanted a file of texts")
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
