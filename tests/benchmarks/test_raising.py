"""benchmarks/raising.py works, and gives no figure for a graph that was not raised whole."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tfx
from tfx.errors import CountError

SCRIPT = Path(tfx.__file__).parent / "benchmarks" / "raising.py"


@pytest.fixture
def raising(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("raising")


def test_quick(tmp_path):
    file = tmp_path / "raising.json"
    command = [sys.executable, SCRIPT, "--quick", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [(row["graph"], row["layers"]) for row in found["results"]] == [
        (graph, layers) for graph in ("capture", "torchscript 17") for layers in (4, 8, 16)
    ]
    assert all(0 < row["raise"] < 30 and 0 < row["lower"] < 30 for row in found["results"])
    # Twice the layers in four times the time would give 4 here; what does not grow gives less than 1.
    assert all(0.1 < ratio < 1.5 for ratio in found["growth"].values())
    assert "time(16) / time(4) / 4" in done.stdout


def test_a_graph_that_is_not_raised_whole_is_not_timed(raising, monkeypatch):
    def lost(model):
        report = raise_model(model)
        report.counts["gelu"] -= 1
        return report

    raise_model = raising.raise_model
    monkeypatch.setattr(raising, "raise_model", lost)
    with pytest.raises(CountError, match="gelu: found 0, wanted 1"):
        raising.measure(raising._row(1, raising.TINY), "capture", 1)
