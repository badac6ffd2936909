"""benchmarks/peers: the same inputs for all, answers judged, turns in order, tables that follow from the figures."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tfx
from tfx.errors import InputError, MachineError

FOLDER = Path(tfx.__file__).parent / "benchmarks" / "peers"
OWN = ("engines", "environments", "judge", "processes", "run", "table", "worker", "workloads")

# Answers like worker.py; call after call one ms more. An engine named "bad" fails at its second block.
FAKE = """
import json, sys
request = json.loads(sys.stdin.readline())
print(json.dumps({"answer": "ready"}), flush=True)
ms = request["ms"]
for count, line in enumerate(sys.stdin):
    what, _, warm, calls = json.loads(line)
    with open(request["order"], "a") as order:
        order.write(request["name"] + str(calls) + " ")
    if request["name"] == "bad" and count == 1:
        print(json.dumps({"error": "ValueError: no more"}), flush=True)
        continue
    if request["name"] == "dead" and count == 1:
        sys.exit("out of luck")
    print(json.dumps({"answer": [[ms] * calls, 0.0]}), flush=True)
    ms += 1
"""


@pytest.fixture
def peers(monkeypatch):
    """Import a module of the folder, which nothing else sees afterwards."""
    before = {name: sys.modules.pop(name, None) for name in OWN}
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def script(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / "run.py", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.thorough
def test_quick(tmp_path):
    """Without environments: the engines that need none."""
    out = tmp_path / "peers.json"
    engines = "floor-fp32,tfx-padded-fp32"
    done = script(
        *("--quick", "--engines", engines, "--workloads", "mixed,1x16", "--rounds", "2", "--seconds", "0.01"),
        *("--threads", "1", "--envs", str(tmp_path), "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["threads"] == 1
    assert found["skipped"] == {"encoder": {}}
    assert list(found["workloads"]) == ["1x16", "mixed"]
    mixed = found["workloads"]["mixed"]["engines"]
    assert set(mixed) == set(engines.split(","))
    bundle = mixed["tfx-padded-fp32"]
    assert 0 < bundle["max_abs"] < 1e-5
    assert bundle["min_cosine"] > 0.99999
    assert bundle["variance"]["max_abs"] < 1e-5
    assert all(len(each["rounds_ms"]) == 2 and min(each["rounds_ms"]) > 0 for each in mixed.values())
    assert all(each["peak_mb"] > 10 for each in mixed.values())
    assert found["engines"]["encoder"]["tfx-padded-fp32"]["versions"]["tfx-onnx"] == tfx.__version__


def test_bad_input_is_one_line(tmp_path):
    done = script("--engines", "tensorflow", "--envs", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith('error: engines: found "tensorflow", wanted some of floor-fp32, ')
    assert done.stderr.count("\n") == 1


def test_workloads(peers):
    workloads = peers("workloads")
    lengths = workloads.BATCHES["mixed"]
    assert (len(lengths), max(lengths)) == (16, 256)
    assert sum(lengths) / (16 * 256) == pytest.approx(0.3, abs=0.005)
    assert len(set(lengths)) > 8
    feeds = workloads.feeds([2, 4], 50)
    assert feeds["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert ((feeds["input_ids"] > 0) == (feeds["attention_mask"] > 0)).all()
    assert workloads.alone([5, 9, 1, 7]) == [1, 2, 3]
    texts = workloads.docstrings(200)
    assert texts == workloads.docstrings(300)[:200]
    assert len(set(texts)) == 200
    with pytest.raises(ValueError, match=r"holds \d+ docstrings"):
        workloads.docstrings(10**6)


def test_judging(peers):
    judge = peers("judge")
    wanted = np.array([[[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]])
    mask = np.array([[1, 1, 0]])
    padded = wanted + np.array([[[0.0], [0.0], [9.0]]])
    assert judge.compare(padded, wanted, mask) == pytest.approx({"max_abs": 0, "min_cosine": 1, "min_text_cosine": 1})
    turned = wanted.copy()
    turned[0, 0] = [0.0, 1.0]  # (1, 0) before: the token's cosine is 0, that of (0, 3) and (1, 2) is 2 / sqrt(5)
    found = judge.compare(turned, wanted, mask)
    assert found["max_abs"] == 1
    assert found["min_cosine"] == 0
    assert found["min_text_cosine"] == pytest.approx(2 / 5**0.5)
    with pytest.raises(ValueError, match="NaN"):
        judge.compare(wanted * np.nan, wanted, mask)
    with pytest.raises(ValueError, match="shape"):
        judge.compare(wanted[:, :2], wanted, mask)
    assert judge.variance(wanted, {}) is None
    assert judge.variance(wanted, {0: wanted[:, :2]})["max_abs"] == 0
    assert judge.variance(wanted, {0: wanted[:, :2] + 0.5})["max_abs"] == 0.5
    assert judge.variance(np.array([[1.0, 0.0], [0.0, 1.0]]), {1: np.array([[1.0, 0.0]])})["min_cosine"] == 0


@pytest.fixture
def race(peers, tmp_path):
    processes = peers("processes")
    order = tmp_path / "order"

    def run(engines: dict[str, float], **options: Any) -> Any:
        with contextlib.ExitStack() as stack:
            started = {}
            for name, ms in engines.items():
                command = [sys.executable, "-c", FAKE]
                process = stack.enter_context(processes.started(name, command, 1, tmp_path / name, {}))
                process.load({"name": name, "ms": ms, "order": str(order)})
                started[name] = process
            return processes.turns(started, "feeds.npz", **options), order.read_text().split()

    return run


def test_each_goes_first_and_calls_follow_from_the_time(race):
    found, order = race({"a": 10.0, "b": 600.0}, rounds=3, seconds=0.1, limit_s=60)
    assert found.calls == {"a": 10, "b": 1}
    assert order == ["a1", "b1", *("a10", "b1"), *("b1", "a10"), *("a10", "b1")]
    assert found.ms == {"a": [11.0, 12.0, 13.0], "b": [601.0, 602.0, 603.0]}
    assert len(found.others) == 3
    assert all(0 <= share <= 1 for share in found.others)


def test_no_round_begins_after_the_limit(race):
    found, order = race({"a": 1.0}, rounds=9, seconds=0, limit_s=0, once=True)
    assert order == ["a1"]
    assert len(found.ms["a"]) == 1


def test_an_engine_that_fails_drops_out(race):
    found, _ = race({"a": 10.0, "bad": 10.0, "dead": 10.0}, rounds=2, seconds=0, limit_s=60)
    assert set(found.ms) == {"a"}
    assert len(found.ms["a"]) == 2
    assert found.failed["bad"] == "ValueError: no more"
    assert found.failed["dead"] == "its process ended with status 1: out of luck"


def test_environments(peers, tmp_path, monkeypatch):
    environments = peers("environments")
    assert environments.NAMES == ("onnxruntime", "openvino", "torch")
    with pytest.raises(InputError, match='found "jax", wanted one of onnxruntime, '):
        environments.ensure("jax", tmp_path)
    called: list[list[str]] = []

    def call(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        called.append(command)
        if command[1:3] == ["-m", "venv"]:
            Path(command[3]).mkdir(exist_ok=True)
            return subprocess.CompletedProcess(command, 0, "", "")
        error = "ERROR: no such package\nWARNING: a newer pip\n"
        return subprocess.CompletedProcess(command, int(len(called) < 3), "", error)

    monkeypatch.setattr(environments.subprocess, "run", call)
    with pytest.raises(MachineError, match=r"environment torch: cannot be made: ERROR: no such package$"):
        environments.ensure("torch", tmp_path)
    python = environments.ensure("torch", tmp_path, pip_flags=["--pre"])
    assert called[3] == [
        str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--pre", "-r", str(FOLDER / "requirements" / "torch.txt"),
    ]  # fmt: skip
    assert environments.ensure("torch", tmp_path) == python
    assert len(called) == 4
    (tmp_path / "torch" / ".installed").write_text("torch==1.0\n")
    environments.ensure("torch", tmp_path)
    assert len(called) == 6


def engine(ms: list[float], precision: str = "fp32", **more: Any) -> dict[str, Any]:
    figures = {"ms": sorted(ms)[len(ms) // 2], "rounds_ms": ms, "calls": 1, "peak_mb": 100.0, "max_abs": 1e-6}
    return {"precision": precision, "min_cosine": 1.0, "variance": {"max_abs": 0.0}, **figures, **more}


@pytest.fixture
def result(tmp_path):
    """Write a result as run.py does. tfx is four times as fast in each round, though the machine slowed down."""

    def write(**changed: dict[str, Any]) -> Path:
        engines = {
            "floor-fp32": engine([20.0, 20.0, 60.0]),
            "tfx-ragged-fp32": engine([25.0, 25.0, 75.0], peak_mb=60.0),
            "tfx-ragged-int8": engine([10.0, 10.0, 30.0], "int8"),
            "onnxruntime": engine([100.0, 100.0, 300.0]),
            "openvino": engine([80.0, 80.0, 240.0]),
            "openvino-int8": engine([15.0, 15.0, 45.0], "int8"),
        }
        for name, each in changed.items():
            engines[name.replace("_", "-")].update(each)
        facts = {name: {"precision": each.pop("precision")} for name, each in engines.items()}
        file = tmp_path / "result.json"
        content = {
            "environment": {"cpu": "a CPU", "cpu_features": ["avx2"]},
            "threads": 2,
            "engines": {"encoder": facts},
            "workloads": {"mixed": {"engines": engines, "others": [0.0] * 3}},
        }
        file.write_text(json.dumps(content))
        return file

    return write


def test_goals_follow_from_the_figures(peers, result):
    table = peers("table")
    lines = table.goals(table.merged([result()]))
    assert "| mixed | ragged-fp32 | onnxruntime (onnxruntime) | time >= 3.8 | 4.00 (4.00 - 4.00) | yes |" in lines
    assert "| mixed | ragged-fp32 | best fp32 peer (openvino) | time >= 2.9 | 3.20 (3.20 - 3.20) | yes |" in lines
    assert "| mixed | ragged-fp32 | matrix floor (floor-fp32) | time <= 1.2 | 1.25 (1.25 - 1.25) | no |" in lines
    assert "| mixed | ragged-int8 | best int8 peer (openvino-int8) | time >= 2 | 1.50 (1.50 - 1.50) | no |" in lines
    assert "| mixed | ragged-fp32 | onnxruntime (onnxruntime) | memory <= 0.7 | 0.60 | yes |" in lines
    assert "| mixed | int8 | onnxruntime int8 | memory <= 0.5 | not measured | ? |" in lines


@pytest.mark.parametrize("off", [{"min_cosine": 0.99}, {"variance": {"max_abs": 1e-7}}])
def test_wrong_answers_reach_no_goal(peers, result, off):
    table = peers("table")
    lines = table.goals(table.merged([result(tfx_ragged_int8=off)]))
    wanted = "| mixed | ragged-int8 | onnxruntime fp32 (onnxruntime) | time >= 8.5 | 10.00 (10.00 - 10.00)"
    assert f"{wanted} but its answers are off | no |" in lines


def test_table_goes_between_its_marks(peers, result, tmp_path):
    table = peers("table")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    done = CliRunner().invoke(table.main, [str(result()), "--into", str(readme)], catch_exceptions=False)
    assert done.exit_code == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n\n2 threads each, a CPU (avx2).\n")
    assert text.endswith(f"\n{table.END}\nafter\n")
    assert "old" not in text
    assert "| tfx-ragged-fp32 | fp32 | 25.0 (4.00) |" in text
    readme.write_text("no marks")
    with pytest.raises(InputError, match="once each"):
        CliRunner().invoke(table.main, [str(result()), "--into", str(readme)], catch_exceptions=False)


def test_one_machine_and_each_workload_once(peers, result, tmp_path):
    table = peers("table")
    file = result()
    with pytest.raises(InputError, match="holds mixed, which another file holds too"):
        table.merged([file, file])
    other = tmp_path / "other.json"
    other.write_text(file.read_text().replace('"mixed"', '"8x128"').replace("a CPU", "another"))
    with pytest.raises(InputError, match="wanted one machine"):
        table.merged([file, other])
    other.write_text("{}")
    with pytest.raises(InputError, match=r"other\.json: not written by run\.py"):
        table.merged([other])
