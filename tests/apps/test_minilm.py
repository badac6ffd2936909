"""The real all-MiniLM-L6-v2 in every language: the golden's ids, and its vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfx.runtime.bundle import Bundle
from tfx.runtime.golden import GoldenCase

from .faults import check_by
from .programs import Program

COMMANDS = ("c", "cpp", "node")
PRECISIONS = ("fp32", "int8")
CLOSE = 1e-5
"""Largest difference from torch's vectors in fp32; the manifest's own tolerance is ten times that."""


@pytest.fixture(scope="module", params=PRECISIONS)
def bundle(request: pytest.FixtureRequest, minilm: Callable[..., Path]) -> Bundle:
    return Bundle.open(minilm(request.param))


@pytest.fixture(scope="module", params=COMMANDS)
def program(request: pytest.FixtureRequest, built: Callable[..., Program]) -> Program:
    return built(request.param)


def recorded(bundle: Bundle) -> list[tuple[str, GoldenCase, int]]:
    """(text, case, row) of every recorded text."""
    return [(text, case, row) for case in bundle.golden() for row, text in enumerate(case.texts)]


def wanted_tokens(bundle: Bundle, case: GoldenCase, row: int) -> dict[str, list[int]]:
    roles = {spec.role: spec.name for spec in bundle.manifest.inputs}
    attended = case.inputs[roles["attention_mask"]][row] == 1
    return {
        "ids": case.inputs[roles["token_ids"]][row][attended].tolist(),
        "types": case.inputs[roles["token_type_ids"]][row][attended].tolist(),
    }


def test_ids_are_those_of_the_golden(program: Program, bundle: Bundle):
    texts = recorded(bundle)
    assert len(texts) >= 15
    found = program.answers([text for text, *_ in texts], "--tokens", bundle=bundle.path)
    for (text, case, row), answer in zip(texts, found, strict=True):
        assert answer == wanted_tokens(bundle, case, row), text


def test_vectors_are_those_of_the_golden(program: Program, bundle: Bundle):
    texts, manifest = recorded(bundle), bundle.manifest
    assert manifest.pooling is not None
    wanted = np.array([case.outputs[manifest.pooling["output"]][row] for _, case, row in texts])
    found = np.array(program.answers([text for text, *_ in texts], bundle=bundle.path), np.float32)
    assert found.shape == wanted.shape
    if manifest.precision == "fp32":
        assert np.abs(found - wanted).max() <= CLOSE
    cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosines.min() >= (manifest.tolerance["min_cosine"] or 0)


@pytest.mark.parametrize("lang", ["python", *COMMANDS, "web"])
def test_the_self_check_passes(lang: str, bundle: Bundle, request: pytest.FixtureRequest):
    code, report = check_by(lang, request)(bundle.path)
    assert (code, report["passed"], report["problem"]) == (0, True, None)
    assert report["app"] == lang
    manifest = bundle.manifest
    assert (report["precision"], report["target"], report["layout"]) == (
        *(manifest.precision, manifest.target, manifest.layout),
    )
    stages: dict[str, Any] = {stage["stage"]: stage for stage in report["stages"]}
    assert list(stages) == ["files", "runtime", "tokens", "outputs", "vectors"]
    texts = len(recorded(bundle))
    assert (stages["files"]["checked"], stages["tokens"]["checked"]) == (len(manifest.files), texts)
    assert stages["vectors"]["checked"] == texts
    assert stages["outputs"]["checked"] == sum(len(case.outputs) for case in bundle.golden())
    limit = CLOSE if manifest.precision == "fp32" else manifest.tolerance["max_abs"]
    if limit is not None:
        assert report["max_abs"] <= limit
    # The report's own smallest one may be of a single position, which have a limit of their own.
    assert stages["vectors"]["min_cosine"] >= (manifest.tolerance["min_cosine"] or 0)
    assert report["min_cosine"] >= (manifest.tolerance.get("min_token_cosine") or manifest.tolerance["min_cosine"] or 0)
    if manifest.quantization is not None:
        promised = manifest.quantization["batch_variance"]
        assert report["promised_batch_variance"] == promised == 0
        # Browsers and other releases of onnxruntime have kernels of their own.
        assert report["batch_variance"] <= (1e-3 if lang == "web" else 1e-6)
