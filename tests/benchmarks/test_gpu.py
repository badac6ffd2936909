"""benchmarks/gpu.py works where there is no GPU, and times nothing that answers wrongly."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import tfx

FOLDER = Path(tfx.__file__).parent / "benchmarks"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_engines_take_turns_and_are_checked(tmp_path: Path):
    out = tmp_path / "gpu.json"
    engines = "tfx-fp16-graphs"
    command = [sys.executable, FOLDER / "gpu.py", "--device", "cpu", "--quick", "--rounds", "2", "--out", out]
    done = subprocess.run([*command, "--engines", engines], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {batch: sorted(rows) for batch, rows in found["results"].items()} == {
        batch: sorted(engines.split(",")) for batch in ("1x16", "mixed")
    }
    assert all(len(each["rounds_ms"]) == 2 for rows in found["results"].values() for each in rows.values())
    half = found["engines"]["tfx-fp16-graphs"]
    assert 0.9999 < half["outputs"]["mixed"]["min_cosine"] < 1
    assert half["about"]["cuda"]["tf32"] is False
    assert {(each["batch"], each["sequence"]) for each in half["about"]["buckets"]} == {(1, 16), (4, 32)}
    assert found["made"]["fp16"]["parity"]["passed"]
    assert done.stdout.splitlines()[0] == "| ms | 1x16 | mixed |"


def test_a_wrong_engine_is_left_out(tmp_path: Path):
    gpu = _script()
    wanted = np.random.default_rng(0).standard_normal((1, 3, 4)).astype(np.float32)
    np.savez(tmp_path / "b.npz", attention_mask=np.array([[1, 1, 0]]))
    answer = {"file": str(tmp_path / "a.npy")}
    np.save(tmp_path / "a.npy", np.where(np.array([1, 1, 0])[:, None], wanted, 9))
    assert gpu.judge("tfx-fp32", answer, wanted, tmp_path, "b")["max_abs"] == 0
    for wrong in (wanted + 0.1, np.full_like(wanted, np.nan)):
        np.save(tmp_path / "a.npy", wrong)
        with pytest.raises(gpu.EngineError, match="b: cosine"):
            gpu.judge("tfx-fp32", answer, wanted, tmp_path, "b")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_without_a_gpu_the_script_says_so(tmp_path: Path):
    done = subprocess.run(["bash", FOLDER / "gpu.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "gpu.sh: found no nvidia-smi, wanted a machine with an NVIDIA GPU\n"
