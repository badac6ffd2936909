"""What is measured is whether a text's outputs depend on its company."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from tfx.errors import ParityError
from tfx.exporter.precision.variance import Variance, gate, measure
from tfx.runtime.tensors import TensorSpec, make_feeds

AXES = ("batch", "sequence")
INPUTS = (
    TensorSpec("ids", "int64", AXES, "token_ids", 50),
    TensorSpec("mask", "int64", AXES, "attention_mask", 2),
)
OUTPUTS = (
    TensorSpec("states", "float32", (*AXES, 1), "output"),
    TensorSpec("vector", "float32", ("batch", 1), "output"),
)
Feeds = Mapping[str, np.ndarray]
Run = Callable[[Feeds], Mapping[str, np.ndarray]]


def runner(scale: Callable[[np.ndarray, np.ndarray], np.ndarray | float]) -> Run:
    """Ids times a scale, and their sum over attended positions."""

    def run(feeds: Feeds) -> dict[str, np.ndarray]:
        mask = feeds["mask"][..., None]
        states = feeds["ids"][..., None] * np.asarray(scale(feeds["ids"], feeds["mask"]), np.float32)
        return {"states": states, "vector": (states * mask).sum(axis=1)}

    return run


def found(run: Run, **options: int) -> Variance:
    samples = [make_feeds(INPUTS, batch=1, sequence=length, seed=length) for length in (3, 9)]
    return measure(run, samples, INPUTS, OUTPUTS, pad_id=7, **options)


def test_a_model_that_looks_at_one_row_does_not_vary():
    assert found(runner(lambda ids, mask: 0.5)) == Variance(0.0, 0.0)


def test_a_scale_over_the_call_is_seen():
    batch = found(runner(lambda ids, mask: ids.mean()))
    assert batch.batch is not None and batch.batch > 0


def test_a_scale_that_counts_padding_is_seen():
    padding = found(runner(lambda ids, mask: ids.shape[1]))
    assert padding.batch == 0
    assert padding.padding is not None and padding.padding > 0


def test_only_attended_positions_count():
    assert found(runner(lambda ids, mask: np.where(mask[..., None] == 0, 99, 1))) == Variance(0.0, 0.0)


def test_a_sample_as_long_as_the_model_takes_is_not_padded():
    lengths = []

    def run(feeds: Feeds) -> Mapping[str, np.ndarray]:
        lengths.append(feeds["ids"].shape[1])
        return runner(lambda ids, mask: 1.0)(feeds)

    assert found(run, max_length=9).padding == 0
    assert max(lengths) == 9


def test_a_variance_that_int8_promises_not_to_have_is_an_error():
    gate(Variance(0.0, 1e-6), "int8")
    gate(Variance(0.5, 0.5), "int8-dynamic")
    gate(Variance(None, None), "int8")
    with pytest.raises(ParityError, match=r"precision int8: an output moves by 0\.02 padded, wanted 0\.001"):
        gate(Variance(0.0, 0.02), "int8")
