"""Vectors as JSON lines and as Parquet, written a chunk of rows after the other; how many a file holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CHUNK", "WRITERS", "shape_of", "write_json", "write_parquet"]

CHUNK = 1024
"""Rows in a chunk."""

_ROW_GROUP = 8 * CHUNK


def write_json(path: Path, chunks: Iterable[np.ndarray]) -> None:
    """Write ``{"row": 0, "embedding": [...]}``, one line a row; null stands for NaN and infinity."""
    row = 0
    with path.open("w", encoding="ascii", newline="\n") as file:
        for values in chunks:
            # Nine digits give a float32 back exactly. JSON has no NaN and no infinity.
            numbers = ", ".join(["%.9g"] * values.shape[1])
            for vector in values.astype(np.float64):
                text = numbers % tuple(vector.tolist())
                if not np.isfinite(vector).all():
                    text = ", ".join(f"{value:.9g}" if np.isfinite(value) else "null" for value in vector)
                file.write(f'{{"row": {row}, "embedding": [{text}]}}\n')
                row += 1


def write_parquet(path: Path, chunks: Iterable[np.ndarray]) -> None:
    """Write one column ``embedding`` of lists of one length, in row groups."""
    import pyarrow
    import pyarrow.parquet as parquet

    writer: Any = None
    waiting: list[np.ndarray] = []

    def write() -> None:
        nonlocal writer
        values = np.concatenate(waiting)
        waiting.clear()
        vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.ravel()), values.shape[1])
        table = pyarrow.table({"embedding": vectors})
        if writer is None:
            # Vectors hardly compress and hardly repeat.
            writer = parquet.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
        writer.write_table(table, row_group_size=_ROW_GROUP)

    for values in chunks:
        waiting.append(values)
        if len(waiting) * CHUNK >= _ROW_GROUP:
            write()
    if waiting:
        write()
    writer.close()


WRITERS: Mapping[str, Callable[[Path, Iterable[np.ndarray]], None]] = {".jsonl": write_json, ".parquet": write_parquet}
"""Ending of a file and what writes it from chunks of rows (n, dimension)."""


def shape_of(path: Path) -> tuple[int, int] | None:
    """Return the rows and the dimension of a ``.npy``, ``.jsonl`` or ``.parquet`` of vectors, None where it is none.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        if path.suffix == ".npy":
            found = np.load(path, mmap_mode="r", allow_pickle=False)  # noqa: TID251 - no pickles
            return (found.shape[0], found.shape[1]) if found.ndim == 2 else None
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                first = file.readline()
                return 1 + sum(1 for _ in file), len(json.loads(first)["embedding"])
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(path) as file:
            return file.metadata.num_rows, file.schema_arrow.field("embedding").type.list_size
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # also what pyarrow raises
        return None
