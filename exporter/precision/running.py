"""Runs of a graph on samples: what enters its products, and how far its outputs are from others."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...errors import MachineError
from ...runtime.providers import StrictSession, create_session
from ..save import save

__all__ = ["Activations", "Agreement", "Answers", "Samples", "agreement", "answers", "observe", "tokens"]

Samples = Sequence[Mapping[str, np.ndarray]]
Answers = list[dict[str, np.ndarray]]

_ROWS = 512
"""Rows of each input that are kept to judge schemes on."""


@dataclasses.dataclass
class Activations:
    """What entered a product.

    Attributes:
        channels: Largest magnitude of each channel over all samples, (K,).
        rows: Rows spread evenly over the samples, (rows, K).
        peaks: The row of largest magnitude of each sample, (samples, K): outliers sit in few tokens.
    """

    channels: np.ndarray
    rows: np.ndarray
    peaks: np.ndarray


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Smallest cosines between two sets of answers.

    Attributes:
        texts: Of vectors that stand for a whole sample: outputs of one vector a sample, else means over its positions.
        vectors: Of every vector along the last axis.
    """

    texts: float
    vectors: float


@contextlib.contextmanager
def session_of(model: ir.Model) -> Iterator[StrictSession]:
    """A session on the CPU; the model goes through a file, so that size does not matter."""
    with tempfile.TemporaryDirectory(prefix="tfx-") as folder:
        path = Path(folder) / "model.onnx"
        try:
            save(model, path)
        except OSError as error:
            raise MachineError(f"calibration: {folder} cannot hold the model: {error.strerror}") from error
        yield create_session(path)


def answers(model: ir.Model, samples: Samples) -> Answers:
    """What a model answers to each sample, by output name."""
    with session_of(model) as session:
        return [session.run(sample) for sample in samples]


def observe(model: ir.Model, values: Sequence[ir.Value], samples: Samples) -> tuple[dict[str, Activations], Answers]:
    """Runs a model and looks at values inside of it.

    Args:
        model: Left as it is.
        values: Named values of its main graph, inputs among them.
        samples: Feeds, at least one.

    Returns:
        What was seen, by the values' names, and what the model answered.
    """
    watched = model.clone()
    inner = {value.name: value for node in watched.graph for value in node.outputs}
    fed = {value.name for value in watched.graph.inputs}
    own = [value.name or "" for value in watched.graph.outputs]
    names = [value.name or "" for value in values if value.name in inner or value.name in fed]
    for value in (inner[name] for name in names if name in inner):
        value.dtype = ir.DataType.FLOAT
        if not value.is_graph_output():
            watched.graph.outputs.append(value)
    quota = max(1, _ROWS // len(samples))
    found_of: dict[str, list[list[np.ndarray]]] = {name: [[], [], []] for name in names}
    answered: Answers = []
    with session_of(watched) as session:
        for sample in samples:
            found = session.run(sample)
            answered.append({name: found[name] for name in own})
            for name, (largest, rows, peaks) in found_of.items():
                array = np.asarray(sample[name]) if name in fed else found[name]
                seen = array.reshape(-1, array.shape[-1])
                if not len(seen):
                    continue
                sizes = np.abs(seen)
                largest[:] = [np.max([*largest, sizes.max(axis=0)], axis=0)]
                rows.append(seen[np.linspace(0, len(seen) - 1, min(quota, len(seen))).astype(int)])
                peaks.append(seen[[int(sizes.max(axis=1).argmax())]])
    return {
        name: Activations(largest[0], np.concatenate(rows), np.concatenate(peaks))
        for name, (largest, rows, peaks) in found_of.items()
    }, answered


def agreement(found: Answers, wanted: Answers) -> Agreement:
    """How near two sets of answers are; outputs that are no floats are not looked at."""
    texts, tokens = [1.0], [1.0]
    for one, other in zip(found, wanted, strict=True):
        floats = {name: array for name, array in other.items() if array.dtype.kind == "f" and array.ndim >= 2}
        pooled = any(array.ndim == 2 for array in floats.values())
        for name, array in floats.items():
            tokens.append(_cosine(one[name], array))
            if array.ndim == 2:
                texts.append(tokens[-1])
            elif not pooled:
                axes = tuple(range(1, array.ndim - 1))
                texts.append(_cosine(one[name].mean(axis=axes), array.mean(axis=axes)))
    return Agreement(min(texts), min(tokens))


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The smallest cosine along the last axis; -1 for what is not finite."""
    if a.shape != b.shape or not np.isfinite(a).all():
        return -1.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosines = np.where((a == b).all(axis=-1), 1.0, (a * b).sum(axis=-1) / np.where(norms == 0, 1, norms))
    return float(cosines.min(initial=1.0))


def tokens(samples: Samples) -> int:
    """How many positions samples have, by their first input of two axes."""
    sizes = ([array.shape[:2] for array in sample.values() if array.ndim >= 2] for sample in samples)
    return sum(int(np.prod(shapes[0])) for shapes in sizes if shapes)
