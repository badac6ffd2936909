"""How long texts are: length histograms from a few words, and padded feeds of such lengths.

======================  ================================================================================
``--lengths``           meaning
======================  ================================================================================
``12,64,256``           these lengths, over and over
``lognormal:60,256``    median 60, cut at 256, which is the 99th percentile: what mixed texts look like
``uniform:8,128``       every length from 8 to 128 alike
``lengths.txt``         a file with one whole number a line
``texts.txt``           a file with one text a line, through the bundle's tokenizer
======================  ================================================================================
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from .tensors import TensorSpec, make_feeds

__all__ = ["FORMS", "Tokens", "histogram", "holds_texts", "make_ragged_feeds", "parse_lengths", "waste"]

FORMS = "N,N,N, lognormal:MEDIAN,MAX, uniform:A,B, or a file of numbers or texts"
"""What ``parse_lengths`` reads, for messages and help."""

_MAX_COUNT = 10**7
_P99 = 2.3263478740408408  # standard deviations from the median to the 99th percentile


class Tokens(Protocol):
    """What turns texts into tokens: ``TextEncoder`` does."""

    def encode(self, texts: Sequence[str]) -> Sequence[Any]:
        """Return one sized object per text; its ``len`` is the number of tokens."""
        ...


def parse_lengths(
    text: str, *, count: int, seed: int = 0, tokenizer: Tokens | None = None, max_length: int | None = None
) -> list[int]:
    """Read a length histogram and draw from it.

    Args:
        text: one of the module's forms.
        count: how many lengths to return. Those that are written out repeat in their order until there are enough; of
            a file with more lines, ``count`` are drawn without replacement.
        seed: the same seed draws the same lengths.
        tokenizer: counts the tokens of texts, cut to what the model takes.
        max_length: longest sequence the model takes; distributions are cut to it, numbers beyond it are an error.

    Raises:
        InputError: not one of the forms, a length below 1 or beyond ``max_length``, an empty file, or texts for a
            model without a tokenizer.
    """
    if not 1 <= count <= _MAX_COUNT:
        raise InputError(f"lengths: found a count of {count}, wanted 1 to {_MAX_COUNT}")
    random = np.random.default_rng(seed)
    longest = max_length or 2**31
    name, colon, numbers = text.partition(":")
    if colon and name in ("lognormal", "uniform"):
        low, high = _pair(text, numbers)
        if name == "uniform":
            found = random.integers(low, high + 1, count)
        else:
            spread = math.log(high / low) / _P99
            found = np.minimum(np.rint(np.exp(random.normal(math.log(low), spread, count))), high)
        return [int(length) for length in np.clip(found, 1, longest)]
    if re.fullmatch(r"-?\d+(,-?\d+)*", text):
        written = _checked([int(part) for part in text.split(",")], "lengths", max_length)
        return _repeated(written, count)
    path = Path(text)
    if not path.is_file():
        raise InputError(f'lengths: found "{text}", which is no file; wanted {FORMS}')
    written = _from_file(path, tokenizer, max_length)
    if len(written) <= count:
        return _repeated(written, count)
    return [written[i] for i in sorted(random.choice(len(written), count, replace=False))]


def holds_texts(text: str) -> bool:
    """Return whether what ``parse_lengths`` reads is a ``.txt`` file of texts and not of numbers.

    Raises:
        InputError: the file cannot be read.
    """
    path = Path(text)
    return path.suffix == ".txt" and path.is_file() and not _numbers(_lines(path))


def histogram(lengths: Sequence[int], bins: int = 8) -> dict[str, Any]:
    """Describe lengths.

    Returns:
        ``count``, ``min``, ``median``, ``mean``, ``p90``, ``max`` in tokens, and ``bins``: [{from, to, count}], both
        ends included.
    """
    values = np.asarray(lengths)
    low, high = int(values.min()), int(values.max())
    step = max(1, math.ceil((high - low + 1) / bins))
    edges = list(range(low, high + 1, step))
    return {
        "count": len(values),
        "min": low,
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "p90": float(np.percentile(values, 90)),
        "max": high,
        "bins": [
            {
                "from": start,
                "to": min(start + step - 1, high),
                "count": int(((values >= start) & (values < start + step)).sum()),
            }
            for start in edges
        ],
    }


def waste(batches: Sequence[Sequence[int]]) -> float:
    """Return the share of positions that are padding when each batch is padded to its longest row."""
    padded = sum(len(batch) * max(batch) for batch in batches)
    return 1 - sum(map(sum, batches)) / padded


def make_ragged_feeds(
    inputs: Sequence[TensorSpec],
    lengths: Sequence[int],
    pad_to: int | None = None,
    *,
    pad_id: int = 0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Make feeds of rows of different lengths, padded on the right.

    Args:
        inputs: the model's inputs.
        lengths: tokens of each row, at least 1.
        pad_to: length of the batch, None for the longest row.
        pad_id: id at padded positions; attended ones have other ids, as far as the vocabulary has any.
        seed: the same seed gives the same feeds.

    Returns:
        Arrays (batch, sequence, ...) by input name; a model without a mask gets the padding all the same.

    Raises:
        InputError: no rows, a length below 1, or a row longer than ``pad_to``.
    """
    if not lengths or min(lengths) < 1:
        raise InputError(f"lengths: found {list(lengths)[:8]}, wanted at least one, each at least 1")
    sequence = max(lengths) if pad_to is None else pad_to
    if max(lengths) > sequence:
        raise InputError(f"lengths: found {max(lengths)}, wanted at most {sequence}, the length of the batch")
    feeds = make_feeds(inputs, batch=len(lengths), sequence=sequence, seed=seed)
    attended = np.arange(sequence)[None, :] < np.asarray(lengths)[:, None]  # (batch, sequence)
    for spec in inputs:
        values = feeds[spec.name]
        if values.shape[:1] != (len(lengths),) or values.shape[-1] != sequence:
            continue
        # Axes between the first and the last repeat the same row.
        rows = attended.reshape(len(lengths), *(1,) * (values.ndim - 2), sequence)
        if spec.role in ("attention_mask", "padding_mask"):
            ones = rows if spec.role == "attention_mask" else ~rows
            feeds[spec.name] = np.broadcast_to(ones, values.shape).astype(values.dtype)
        elif spec.role == "token_ids":
            other = (pad_id + 1) % (spec.limit or pad_id + 2)
            feeds[spec.name] = np.where(rows, np.where(values == pad_id, other, values), pad_id).astype(values.dtype)
        elif spec.role == "token_type_ids":
            feeds[spec.name] = np.where(rows, values, 0).astype(values.dtype)
    return feeds


@dataclasses.dataclass(frozen=True)
class _Line:
    number: int
    text: str


def _from_file(path: Path, tokenizer: Tokens | None, max_length: int | None) -> list[int]:
    lines = _lines(path)
    if _numbers(lines):
        return [length for line in lines for length in _checked([int(line.text)], f"{path}:{line.number}", max_length)]
    if tokenizer is None:
        raise InputError(f"{path}: holds texts, but the bundle has no tokenizer; wanted one whole number a line")
    return [len(encoding) for encoding in tokenizer.encode([line.text for line in lines])]


def _lines(path: Path) -> list[_Line]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    lines = [_Line(i, line.strip()) for i, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError(f"{path}: found no lines, wanted one length or text a line")
    return lines


def _numbers(lines: Sequence[_Line]) -> bool:
    return all(re.fullmatch(r"-?\d{1,18}", line.text) for line in lines)


def _pair(text: str, numbers: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", numbers)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= low <= high:
        raise InputError(f'lengths: found "{text}", wanted two whole numbers, 1 or more, the smaller first')
    return low, high


def _checked(lengths: list[int], where: str, max_length: int | None) -> list[int]:
    for length in lengths:
        if length < 1:
            raise InputError(f"{where}: found {length}, wanted at least 1")
        if max_length is not None and length > max_length:
            raise InputError(f"{where}: found {length}, wanted at most {max_length}, the longest this model takes")
    return lengths


def _repeated(lengths: list[int], count: int) -> list[int]:
    return [lengths[i % len(lengths)] for i in range(count)]
