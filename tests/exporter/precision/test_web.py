"""Precisions of target ``web``: those that onnxruntime-web was seen to compute."""

from __future__ import annotations

import numpy as np
import pytest

from tfx.errors import InputError
from tfx.exporter.calibration import random_samples
from tfx.exporter.precision import PRECISIONS, apply_precision, check
from tfx.exporter.targets import get

from ..running import encoder, lowered, run


def test_those_that_were_seen_to_run() -> None:
    assert [name for name, each in PRECISIONS.items() if "web" in each.targets] == [
        "fp32", "fp16", "int8", "int8-dynamic", "int8-block"
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"precision int4: found target web, wanted one of cpu$"):
        check("int4", "web")


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic"])
def test_a_graph_for_the_web_is_written_in_them(precision: str) -> None:
    source, captured = encoder(pooling="mean", d_model=64, heads=4, d_ff=96)
    model, _ = lowered(captured, "web", None)
    samples = random_samples(source.inputs, source.max_length, 4)
    wanted = run(model)(samples[0])["sentence_embedding"]
    report = apply_precision(model, precision, samples, target=get("web"))
    found = run(model)(samples[0])["sentence_embedding"]
    assert report.changed > 0 and not np.array_equal(found, wanted)
    assert (found * wanted).sum() / np.linalg.norm(found) / np.linalg.norm(wanted) > 0.99
