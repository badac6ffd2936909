"""What every engine is asked: batches of ids, and a corpus of texts. The same for all, and the same every time."""

from __future__ import annotations

import ast
import functools
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

__all__ = ["BATCHES", "CORPUS", "QUICK_BATCHES", "alone", "docstrings", "feeds", "mixed_lengths"]


def mixed_lengths(batch: int = 16, longest: int = 256, attended: float = 0.3, seed: int = 0) -> list[int]:
    """Return log-normal lengths.

    Args:
        batch: how many.
        longest: the longest one.
        attended: which share of (batch, longest) they cover; the width of the distribution follows from it.
        seed: of the draw.
    """
    draw = np.random.default_rng(seed).standard_normal(batch)
    low, high, lengths = 0.0, 8.0, np.zeros(batch)
    for _ in range(60):
        width = (low + high) / 2
        lengths = np.maximum(1, np.rint(longest * np.exp(width * (draw - draw.max()))))
        low, high = (width, high) if lengths.sum() > attended * batch * longest else (low, width)
    return [int(length) for length in lengths]


BATCHES: dict[str, list[int]] = {
    "1x16": [16],
    "1x128": [128],
    "8x128": [128] * 8,
    "mixed": mixed_lengths(),
}
"""The lengths of the rows of each batch, in the order they are timed: small to large."""

QUICK_BATCHES: dict[str, list[int]] = {"1x16": [16], "mixed": mixed_lengths(4, 32, 0.5)}

CORPUS = "corpus"

_PACKAGES = (
    "asyncio", "concurrent", "ctypes", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest",
    "urllib", "wsgiref", "xml",
)  # fmt: skip


def feeds(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return ``input_ids`` (0 where padded) and ``attention_mask``, int64 (batch, longest), padded on the right."""
    rng = np.random.default_rng(seed)
    mask = np.arange(max(lengths))[None, :] < np.asarray(lengths)[:, None]
    ids = rng.integers(1, vocab_size, mask.shape)
    return {"input_ids": np.where(mask, ids, 0).astype(np.int64), "attention_mask": mask.astype(np.int64)}


def alone(lengths: Sequence[int]) -> list[int]:
    """Return the rows that are also run by themselves, without padding: the shortest, the middle and the longest."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    return sorted({order[0], order[len(order) // 2], order[-1]})


def docstrings(count: int) -> list[str]:
    """Return docstrings of Python's standard library, each once, in the order of their SHA-256.

    They come from modules inside of packages, which tfx does not calibrate int8 with.

    Raises:
        ValueError: there are fewer.
    """
    found = _found()
    if len(found) < count:
        raise ValueError(f"the standard library at {sysconfig.get_path('stdlib')} holds {len(found)} docstrings")
    return sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())[:count]


@functools.cache
def _found() -> frozenset[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (file for package in _PACKAGES for file in (root / package).rglob("*.py") if file.stem != "__init__")
    return frozenset(text for file in files for text in _of(file))


def _of(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and text.strip():
                yield text.strip()
