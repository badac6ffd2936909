"""benchmarks/serve.py works, and takes neither a wrong vector nor an error for an answer."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tfx
from tfx.errors import CheckError
from tfx.runtime.session import Session

ROOT = Path(tfx.__file__).parent


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("serve")


@pytest.fixture
def clients_here(serve, monkeypatch):
    """Run the clients in this process: another test starts them as they are, and here it would be nine times."""
    load = importlib.import_module("serve_load")

    def run(command, *, input, **_):  # noqa: A002 - the name that it has
        found = asyncio.run(load.Clients(json.loads(input)).run())
        return subprocess.CompletedProcess(command, 0, json.dumps(found), "")

    monkeypatch.setattr(serve.subprocess, "run", run)


@pytest.mark.usefixtures("clients_here")
def test_everything_is_measured(serve, bundle, tmp_path):
    file = tmp_path / "found.json"
    result = CliRunner().invoke(serve.main, ["--bundle", str(bundle.path), "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    rows = {(row["clients"], row["server"]): row for row in found["race"]}
    assert set(rows) == {(clients, name) for clients in (1, 8) for name in (serve.SERVE, serve.ALONE, serve.NAIVE)}
    assert all(row["texts_per_s"] > 0 and row["checked"] > 0 and row["cpu_ms"] >= 0 for row in rows.values())
    assert all(row["p50_ms"] <= row["p99_ms"] for row in rows.values())
    assert rows[8, serve.NAIVE]["ratio"]["median"] == 1
    assert found["hold"]["statuses"] == {"200": found["hold"]["answers"]}
    assert found["hold"]["memory"]["runs"] >= 3


def test_lengths_are_mixed(serve):
    texts = serve.mixed(40)
    assert all("\n" not in text for text in texts[1::2])
    assert max(map(len, texts[::2])) > 2 * max(map(len, texts[1::2]))


def test_a_wrong_vector_and_an_error_end_it(serve, bundle, tmp_path):
    texts = ["the cat sat", "a dog ran"]
    np.save(tmp_path / "right.npy", np.asarray(Session(bundle).encode(texts)))
    np.save(tmp_path / "wrong.npy", np.asarray(Session(bundle).encode(texts[::-1])))
    command = [*serve.commands(bundle.path, 1)[serve.SERVE], "--max-texts", "1", "--max-body", "60"]
    with serve.servers({"tfx serve": command}) as running:
        url, _ = running["tfx serve"]
        asked = {"url": url, "clients": 2, "seconds": 0.3, "seed": 0, "max_abs": 1e-5}
        assert serve.under_load("it", {**asked, "texts": texts, "vectors": str(tmp_path / "right.npy")})["answers"]
        with pytest.raises(CheckError, match="it, 2 clients: a vector differs by"):
            serve.under_load("it", {**asked, "texts": texts, "vectors": str(tmp_path / "wrong.npy")})
        with pytest.raises(CheckError, match=r"it, 2 clients: found statuses \{'413': \d+\}, wanted 200 or 429"):
            serve.under_load("it", {**asked, "texts": ["a" * 100] * 2, "vectors": str(tmp_path / "right.npy")})
