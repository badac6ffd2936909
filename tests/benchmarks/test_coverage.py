"""benchmarks/coverage.py works, and takes no wrong count and no wrong number."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import tfx
from tfx.errors import CheckError

SCRIPT = Path(tfx.__file__).parent / "benchmarks" / "coverage.py"
ONE = ("--rows", "BERT eager", "--routes", "torchscript 17", "--no-peers")


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("coverage")


def script(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300, check=False)


def test_one_row(tmp_path):
    file = tmp_path / "coverage.json"
    done = script(*ONE, "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["summary"] == {"files": 1, "right": 1, "not_offered": 0}
    (result,) = found["results"]
    assert (result["row"], result["route"]) == ("BERT eager", "torchscript 17")
    assert result["found"] == result["wanted"]
    assert result["found"] == {"attention": 2, "layer_norm": 5, "rms_norm": 0, "gelu": 2, "rotary": 0}
    assert set(result["max_abs"]) == {"cpu", "cuda", "web", "portable"}
    assert all(0 < off < 2e-5 for off in result["max_abs"].values())
    assert "1 of 1 files right, 0 not offered" in done.stdout


def test_bad_input_is_one_line():
    done = script("--rows", "GPT")
    assert done.returncode == 2
    assert done.stderr.startswith('error: rows: found "GPT", wanted some of reference post; ')


def test_a_planted_wrong_count_fails(coverage, monkeypatch):
    row = next(row for row in coverage.ZOO if row.name == "BERT eager")
    planted = dataclasses.replace(row, counts={**row.counts, "gelu": 3})
    monkeypatch.setattr(coverage, "ZOO", (planted,))
    done = CliRunner().invoke(coverage.main, ONE)
    assert isinstance(done.exception, CheckError)
    assert done.exception.exit_code == 1
    assert "BERT eager | torchscript 17: gelu: found 2, wanted 3" in done.stdout


def test_a_planted_wrong_number_fails(coverage, monkeypatch):
    judging = importlib.import_module("judging")
    lower = judging.pipeline.lower_model

    def wrong(model: ir.Model, target, report):
        lower(model, target, report)
        if target.name == "portable":
            weight = next(each for each in model.graph.initializers.values() if each.shape == (32, 48))
            assert weight.const_value is not None
            weight.const_value = ir.tensor(weight.const_value.numpy() + np.float32(1e-3), name=weight.name)

    monkeypatch.setattr(judging.pipeline, "lower_model", wrong)
    done = CliRunner().invoke(coverage.main, ONE)
    assert isinstance(done.exception, CheckError)
    assert "BERT eager | torchscript 17: portable: batch " in done.stdout
    assert "torchscript 17: cpu" not in done.stdout


def test_a_file_of_one_length_is_told_by_running_it(coverage):
    judging = importlib.import_module("judging")
    none = np.zeros((1, 1))
    cases = [judging.Case(f"{length} {i}", length, {}, None, none) for length in judging.LENGTHS for i in range(2)]
    every = {case.name: none for case in cases}
    traced = {name: none for name in every if name.startswith(f"{judging.TRACED} ")}
    assert judging.kept_cases(cases, every) == cases
    assert judging.kept_cases(cases, {}) == cases
    assert judging.kept_cases(cases, {cases[-1].name: none}) == cases
    assert [case.length for case in judging.kept_cases(cases, traced)] == [judging.TRACED] * 2


def test_a_wrong_file_excuses_only_the_same_answer(coverage):
    judging = importlib.import_module("judging")
    case = judging.Case("one", 7, {}, np.array([[True, False]]), np.array([[[1.0], [5.0]]]))
    file = np.array([[[2.0], [0.0]]])
    assert judging.distance(case, np.array([[[1.0], [9.0]]]), None) == 0
    assert judging.distance(case, file, None) == 1
    assert judging.distance(case, file, file) == 0
    assert judging.distance(case, np.array([[[3.0], [0.0]]]), file) == 1
    assert judging.distance(case, np.array([[[math.nan], [0.0]]]), file) == math.inf
    assert judging.distance(case, np.zeros((1, 2, 2)), file) == math.inf
