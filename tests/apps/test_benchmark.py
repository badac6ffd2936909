"""benchmarks/apps.py measures every app beside Python, takes no wrong vector, and writes its table."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tfx
from tfx.errors import CheckError, InputError, MachineError

from .programs import Program

README = "before\n<!-- apps: begin -->\nold\n<!-- apps: end -->\nafter\n"


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, which nothing else sees afterwards."""
    monkeypatch.syspath_prepend(Path(tfx.__file__).parent / "benchmarks")
    before = sys.modules.pop("apps", None)
    yield importlib.import_module("apps")
    sys.modules.pop("apps", None)
    if before is not None:
        sys.modules["apps"] = before


@pytest.fixture
def ready(apps: ModuleType, monkeypatch: pytest.MonkeyPatch, built: Callable[..., Program]) -> ModuleType:
    """The script, with the apps that the tests have built."""
    monkeypatch.setattr(apps, "prepared", lambda lang: built(lang).folder)
    monkeypatch.setattr(apps, "command_of", lambda lang, _: built(lang).command)
    return apps


def run(apps: ModuleType, *arguments: object) -> Any:
    return CliRunner().invoke(apps.main, [*map(str, arguments), "--quick", "--threads", "1"], catch_exceptions=False)


@pytest.mark.thorough
def test_every_app_is_measured(ready: ModuleType, tiny: Callable[..., Path], tmp_path: Path, chromium: str):
    del chromium
    file, readme = tmp_path / "apps.json", tmp_path / "README.md"
    readme.write_text(README)
    done = run(ready, "--bundle", tiny(), "--json", file, "--into", readme)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert found["skipped"] == {}
    assert (found["threads"], found["precision"]) == (1, "fp32")
    assert list(found["engines"]) == list(ready.APPS)
    assert found["texts"]["short"] >= 16
    assert found["texts"]["long"] == 64  # what the bundle takes
    assert len(found["others"]) == 2  # a round of each text
    for each in found["engines"].values():
        assert each["max_abs"] <= 1e-5
        assert each["start_ms"][0] > 0
        assert {name: len(times) for name, times in each["latency_ms"].items()} == {"short": 1, "long": 1}
        assert each["peak_mb"] > 1
    text = readme.read_text()
    assert text.startswith("before\n<!-- apps: begin -->\n\n")
    assert text.endswith("\n\n<!-- apps: end -->\nafter\n")
    assert "old" not in text
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")] == [
        f"| {name}" for name in ("app", *ready.APPS)
    ]
    assert "1 threads each" in text


def test_what_cannot_be_built_is_left_out_and_said(apps: ModuleType, tiny: Callable[..., Path], monkeypatch):
    def prepared(lang: str) -> Path:
        raise MachineError(f"{lang}: no compiler")

    monkeypatch.setattr(apps, "prepared", prepared)
    done = run(apps, "--bundle", tiny(), "--apps", "c,node")
    assert done.exit_code == 0, done.output
    assert "c is left out: c: no compiler" in done.stderr
    assert "node is left out: node: no compiler" in done.stderr
    assert "python" in done.stdout


WRONG = """
import json, sys
for line in sys.stdin:
    print(json.dumps({vector}), flush=True)
"""


@pytest.mark.parametrize("vector", ["[0.1] * 64", "[0.1] * 3", "[float('nan')] * 64"])
def test_a_wrong_vector_ends_it(vector: str, apps: ModuleType, tiny: Callable[..., Path], tmp_path: Path, monkeypatch):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG.format(vector=vector))
    monkeypatch.setattr(apps, "prepared", lambda lang: tmp_path)
    monkeypatch.setattr(apps, "command_of", lambda *_: [sys.executable, str(script)])
    with pytest.raises(CheckError, match=r"^c: "):
        run(apps, "--bundle", tiny(), "--apps", "c")


def test_an_app_that_ends_is_named(apps: ModuleType, tiny: Callable[..., Path], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(apps, "prepared", lambda lang: tmp_path)
    monkeypatch.setattr(apps, "command_of", lambda *_: [sys.executable, "-c", "import sys; sys.exit('no model')"])
    with pytest.raises(MachineError, match="engine c: ended with status 1: no model"):
        run(apps, "--bundle", tiny(), "--apps", "c")


def test_more_cores_than_threads_are_not_compared(apps: ModuleType):
    apps._check_cores("c", 1.3, 1)
    apps._check_cores("c", None, 1)
    with pytest.raises(CheckError, match=r"c: used 2\.0 cores, wanted at most the 1 threads"):
        apps._check_cores("c", 2.0, 1)


def test_int8_is_held_to_a_cosine(apps: ModuleType):
    wanted = [np.array([1.0, 0.0], np.float32)]
    near, far = np.array([1.0, 0.1], np.float32), np.array([1.0, 0.2], np.float32)
    assert apps.check("c", [near], wanted, "int8")["min_cosine"] > 0.99
    with pytest.raises(CheckError):
        apps.check("c", [near], wanted, "fp32")
    with pytest.raises(CheckError):
        apps.check("c", [far], wanted, "int8")


def test_ratios_are_taken_round_by_round(apps: ModuleType):
    assert apps._cell([10.0, 30.0, 50.0], [10.0, 20.0, 100.0], "c") == "30.0 (1.00; 0.50 - 1.50)"
    assert apps._cell([5.0], [5.0], "python") == "5.00"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--apps", "perl"), "apps: found perl"), (("--bundle", "/nowhere"), "wanted a bundle folder")],
)
def test_wrong_options(arguments: tuple[str, ...], message: str, apps: ModuleType):
    with pytest.raises((InputError, tfx.TfxError), match=message):
        run(apps, *arguments)


def test_a_bundle_that_gives_no_vectors(apps: ModuleType, tiny: Callable[..., Path]):
    with pytest.raises(InputError, match="has no tokenizer or no pooling"):
        run(apps, "--bundle", tiny(pooling="none"), "--apps", "python")


@pytest.mark.parametrize("content", ["no marks", README + README])
def test_a_file_without_the_marks(content: str, apps: ModuleType, tmp_path: Path):
    (tmp_path / "README.md").write_text(content)
    with pytest.raises(InputError, match="once each"):
        apps.write_into(tmp_path / "README.md", ["x"])
