"""benchmarks/schedule.py works, and takes no wrong vector."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import tfx
from tfx.errors import CheckError

ROOT = Path(tfx.__file__).parent


@pytest.fixture
def schedule(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("schedule")


def test_everything_is_measured(schedule, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "_MOST_KILLS", 2)
    file = tmp_path / "found.json"
    result = CliRunner().invoke(schedule.main, ["--bundle", str(bundle.path), "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    ways = {row["way"]: row for row in found["schedules"]}
    assert len(ways) == 8
    assert ways["encode, batches of 32"]["faster"] == 1
    assert all(row["tokens_per_s"] > row["texts_per_s"] > 0 for row in ways.values())
    assert [row["memory"] for row in found["memory"]] == ["steady", "lean", "onnxruntime"]
    assert all(row["runs"] == 30 and row["peak_mb"] > 0 for row in found["memory"])
    assert found["kill"]["same"]
    assert found["kill"]["rows"] == 2000


def test_a_wrong_vector_ends_it(schedule, bundle, monkeypatch):
    run_many = schedule.Session.run_many

    def wrong(self, items, **options):
        return reversed(list(run_many(self, items, **options)))

    monkeypatch.setattr(schedule.Session, "run_many", wrong)
    with pytest.raises(CheckError, match="differs by"):
        schedule.schedules(bundle, 30, 2, 1)
