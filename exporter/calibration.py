"""What a precision is calibrated and judged on: real texts, the user's texts or arrays, or random ids.

Without anything given, texts are docstrings of Python's standard library: real prose and code, on every machine,
without a download.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import sys
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..runtime.tensors import TensorSpec, make_feeds
from ..runtime.text import TextEncoder

__all__ = ["DEFAULT_SAMPLES", "Calibration", "calibrate", "docstrings", "random_samples", "spread", "token_lengths"]

DEFAULT_SAMPLES = 48
"""Texts that are run when nothing is said."""

_LONGEST = 256
"""Longest calibration text in tokens, and longest random sequence."""

_SKIPPED = ("antigravity", "this", "idlelib", "test", "lib2to3", "turtledemo")
"""Modules that do something when they are imported, or that not every installation has."""


@functools.cache
def docstrings(count: int | None = None) -> tuple[str, ...]:
    """Docstrings of the standard library's public Python modules, their classes and functions, in a fixed order.

    Args:
        count: How many, spread evenly over all modules; ``None`` for all. Fewer where the library has fewer.
    """
    found: dict[str, None] = {}
    with warnings.catch_warnings():  # of deprecated modules
        warnings.simplefilter("ignore")
        for name in sorted(sys.stdlib_module_names):
            if name.startswith("_") or name in _SKIPPED:
                continue
            try:
                module = importlib.import_module(name)
            except Exception:  # noqa: BLE001 - made for another platform, or built without its library
                continue
            for text in _texts(module):
                found.setdefault(text)
    texts = tuple(found)
    return texts if count is None else tuple(spread(texts, count))


def _texts(module: Any) -> Iterator[str]:
    members = [each for _, each in sorted(vars(module).items()) if inspect.isclass(each) or inspect.isfunction(each)]
    own = [each for each in members if getattr(each, "__module__", None) == module.__name__]
    methods = [
        member
        for each in own
        if inspect.isclass(each)
        for _, member in sorted(vars(each).items())
        if inspect.isfunction(member)
    ]
    for each in (module, *own, *methods):
        text = inspect.cleandoc(each.__doc__) if isinstance(each.__doc__, str) else ""
        if text:
            yield text


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` of the items, evenly spread, in their order."""
    if count >= len(items):
        return list(items)
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, count)]


def token_lengths(texts: Sequence[str], encoder: TextEncoder) -> list[int]:
    """Tokens of each text, special ones included, cut to the encoder's limit."""
    return [len(encoding) for encoding in encoder.encode(texts)]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What is run.

    Attributes:
        feeds: By input name, one row each, without padding.
        source: Where they come from, for the manifest.
    """

    feeds: list[dict[str, np.ndarray]]
    source: str


def calibrate(
    inputs: Sequence[TensorSpec],
    path: str | Path | None = None,
    *,
    encoder: TextEncoder | None = None,
    max_length: int | None = None,
    count: int = DEFAULT_SAMPLES,
) -> Calibration:
    """Chooses samples, always the same.

    Args:
        inputs: The model's inputs.
        path: The user's own: a ``.txt`` with a text a line, a ``.jsonl`` with a string or ``{"text": ...}`` a line, or
            an ``.npz`` of arrays by input name whose first axis is the batch. Docstrings, and some random ids, when
            ``None``; only the latter without a tokenizer.
        encoder: The model's tokenizer, needed for texts.
        max_length: Longest sequence that the model takes.
        count: At most so many, evenly spread.

    Raises:
        InputError: The file cannot be read or used; says the line or the array.
    """
    if path is not None:
        return Calibration(_read(Path(path), inputs, encoder, max_length, count), Path(path).name)
    if encoder is None or any(spec.role == "features" for spec in inputs):
        return Calibration(random_samples(inputs, max_length, count), "random inputs")
    # Random ids are rows of the table that no docstring has: scales must hold for them too.
    some = random_samples(inputs, max_length, max(1, count // 6))
    return Calibration(
        _encoded(docstrings(count), encoder, max_length) + some, "docstrings of the standard library, random ids"
    )


def random_samples(inputs: Sequence[TensorSpec], max_length: int | None, count: int) -> list[dict[str, np.ndarray]]:
    """Random feeds with the lengths of short texts; the last one is as long as the longest golden case."""
    random = np.random.default_rng(0)
    longest = min(max_length or 2 * _LONGEST, 2 * _LONGEST)
    lengths = np.exp(random.normal(np.log(48), 0.6, count)).astype(int).clip(min(4, longest), min(longest, _LONGEST))
    lengths[-1] = longest
    return [make_feeds(inputs, batch=1, sequence=int(n), seed=1000 + i) for i, n in enumerate(lengths)]


def _encoded(texts: Sequence[str], encoder: TextEncoder, max_length: int | None) -> list[dict[str, np.ndarray]]:
    longest = min(max_length or _LONGEST, _LONGEST)
    return [
        {name: array[:, :longest] for name, array in encoder.feeds([encoding]).items()}
        for encoding in encoder.encode(texts)
    ]


def _read(
    path: Path, inputs: Sequence[TensorSpec], encoder: TextEncoder | None, max_length: int | None, count: int
) -> list[dict[str, np.ndarray]]:
    kinds = {".txt": _lines, ".jsonl": _records}
    if path.suffix != ".npz" and path.suffix not in kinds:
        raise InputError(f"calibration {path}: found {path.suffix or 'no suffix'}, wanted .txt, .jsonl or .npz")
    try:
        if path.suffix == ".npz":
            return _arrays(path, inputs, count)
        if encoder is None:
            raise InputError(f"calibration {path}: the source has no tokenizer, wanted an .npz of arrays")
        texts = kinds[path.suffix](path)
    except OSError as error:
        raise InputError(f"calibration {path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"calibration {path}: not UTF-8 at byte {error.start}") from error
    if not texts:
        raise InputError(f"calibration {path}: found no text, wanted at least one")
    return _encoded(spread(texts, count), encoder, max_length)


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _records(path: Path) -> list[str]:
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"calibration {path}: line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where}: not JSON: {error}") from error
        text = record.get("text") if isinstance(record, dict) else record
        if not isinstance(text, str):
            raise InputError(f'{where}: found {str(record)[:60]}, wanted a string or an object with "text"')
        texts.append(text)
    return texts


def _arrays(path: Path, inputs: Sequence[TensorSpec], count: int) -> list[dict[str, np.ndarray]]:
    try:
        with np.load(path, allow_pickle=False) as archive:  # noqa: TID251
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"calibration {path}: not an .npz of arrays: {error}") from error
    wanted = {spec.name: spec for spec in inputs}
    if set(arrays) != set(wanted):
        raise InputError(f"calibration {path}: found {', '.join(arrays) or 'nothing'}, wanted {', '.join(wanted)}")
    rows = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(rows) != 1 or rows == {0}:
        raise InputError(f"calibration {path}: found {sorted(rows)} rows, wanted the same number, at least 1")
    typed = {name: _typed(array, wanted[name], path) for name, array in arrays.items()}
    return [{name: array[i : i + 1] for name, array in typed.items()} for i in spread(range(rows.pop()), count)]


def _typed(array: np.ndarray, spec: TensorSpec, path: Path) -> np.ndarray:
    where = f"calibration {path}: {spec.name}"
    if array.ndim != len(spec.shape):
        raise InputError(f"{where}: found rank {array.ndim}, wanted {len(spec.shape)}")
    if not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise InputError(f"{where}: found {array.dtype}, wanted {spec.dtype}")
    if spec.limit is not None and array.size and not (array.min() >= 0 and array.max() < spec.limit):
        raise InputError(f"{where}: found values {array.min()} to {array.max()}, wanted 0 to {spec.limit - 1}")
    return array.astype(spec.dtype)
