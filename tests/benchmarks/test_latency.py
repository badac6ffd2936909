"""benchmarks/latency.py works, and gives no figure for a wrong answer."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tfx
from tfx.errors import ParityError
from tfx.exporter.export import export
from tfx.exporter.sources import reference
from tfx.models.config import EncoderConfig
from tfx.runtime.bundle import Bundle, write_bundle

SCRIPT = Path(tfx.__file__).parent / "benchmarks" / "latency.py"
ENGINES = {"tfx", "onnxruntime", "torch"}


def script(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.thorough
def test_quick(tmp_path):
    file = tmp_path / "latency.json"
    done = script("--quick", "--threads", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["threads"] == 1
    assert found["environment"]["cpu"]
    assert set(found["load"]) == {"before", "after"}
    assert set(found["models"]) == {"tiny"}
    tiny = found["models"]["tiny"]
    assert set(tiny["engines"]) == ENGINES
    assert all(engine["max_abs"] < 1e-5 and engine["peak_rss_mb"] > 0 for engine in tiny["engines"].values())
    assert [(row["batch"], row["sequence"]) for row in tiny["results"]] == [(1, 16), (1, 128), (8, 128)]
    for row in tiny["results"]:
        assert set(row["ms"]) == ENGINES
        assert all(len(times) in (1, 2) and min(times) > 0 for times in row["rounds_ms"].values())
        for other in ("onnxruntime", "torch"):
            pairs = zip(row["rounds_ms"]["tfx"], row["rounds_ms"][other], strict=True)
            each = [a / b for a, b in pairs]
            spread = row["ratio"][f"tfx/{other}"]
            assert (spread["min"], spread["max"]) == (min(each), max(each))
            assert spread["min"] <= spread["median"] <= spread["max"]
    table = [line for line in done.stdout.splitlines() if "tiny" in line]
    assert len(table) == 3
    assert "1 threads each" in done.stdout


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    config = EncoderConfig(d_model=16, heads=2, layers=1, d_ff=32, vocab_size=40, max_len=128)
    return export(lambda: reference(config), tmp_path_factory.mktemp("latency") / "right")


def test_a_planted_wrong_output_is_refused(bundle, tmp_path, monkeypatch):
    """A bundle whose weights are not those that its golden was recorded with."""
    other = EncoderConfig(d_model=16, heads=2, layers=1, d_ff=32, vocab_size=40, max_len=128)
    wrong = export(lambda: reference(other, seed=1), tmp_path / "wrong")

    def fill(folder: Path):
        for file in bundle.path.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "model.onnx").write_bytes(wrong.model_path.read_bytes())
        (folder / "tfx.json").unlink()
        return bundle.manifest

    planted = write_bundle(tmp_path / "planted", fill)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    latency = importlib.import_module("latency")
    told: list[str] = []
    with pytest.raises(ParityError, match=r"parity failed on \d+ of 16 outputs"):
        latency.measure(planted.path, None, threads=1, rounds=1, seconds=0, progress=told.append)
    assert told == ["loading tfx"]


def test_bad_input_is_one_line(tmp_path):
    done = script("--models", "reference,gpt")
    assert done.returncode == 2
    assert done.stderr == 'error: models: found "gpt", wanted some of reference, minilm, tiny\n'
