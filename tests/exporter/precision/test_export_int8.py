"""``tfx export --precision int8``: the bundle says what was measured, and wrong options are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tfx import cli
from tfx.runtime.bundle import Bundle
from tfx.runtime.parity import TOLERANCES, Tolerance
from tfx.runtime.session import Session

from ..running import said

SMALL = ["--d-model", "64", "--heads", "4", "--layers", "1", "--d-ff", "96", "--vocab-size", "80", "--max-len", "24"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("int8") / "bundle"
    arguments = ["export", *SMALL, "--pooling", "mean", "--precision", "int8", "--out", str(out), "--json"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout)


def test_the_manifest_says_what_was_measured(exported: tuple[Path, dict]):
    out, told = exported
    manifest = Bundle.open(out).manifest
    found = manifest.quantization
    assert found is not None and found == told["quantization"]
    assert manifest.precision == told["precision"] == "int8"
    assert found["changed"] == 6 + 1 and found["kept"] == []
    assert found["calibration"]["source"] == "random inputs"
    assert found["worst_cosine"] >= 0.995
    assert found["batch_variance"] <= 1e-6 and found["padding_variance"] <= 1e-6
    assert Tolerance(**manifest.tolerance) == TOLERANCES["int8"]
    assert manifest.parity is not None and manifest.parity["passed"]


def test_the_bundle_runs_and_verifies(exported: tuple[Path, dict]):
    out, _ = exported
    result = CliRunner().invoke(cli.main, ["verify", str(out), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tolerance"] == TOLERANCES["int8"].to_json()
    vectors = Session(out).run({"input_ids": [[3, 4, 5]], "attention_mask": [[1, 1, 1]]})["sentence_embedding"]
    assert np.isfinite(vectors).all()


WRONG = {
    "target": (["--precision", "int8", "--target", "cuda"], "precision int8: found target cuda, wanted one of cpu"),
    "calibration": (["--calibration", "x.txt"], "calibration: precision fp32 takes none"),
    "texts": (
        ["--precision", "int8", "--calibration", "x.txt"],
        "calibration x.txt: the source has no tokenizer, wanted an .npz of arrays",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named_and_nothing_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    options, reason = WRONG[name]
    result = CliRunner().invoke(cli.main, ["export", *SMALL, *options, "--out", "bundle"])
    assert said(result).startswith(reason)
    assert list(tmp_path.iterdir()) == []
