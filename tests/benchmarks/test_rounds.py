"""Engines are checked, then timed in turns; ratios are taken within a round."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path

import pytest

import tfx
from tfx.errors import BundleError, MachineError


@pytest.fixture
def rounds(monkeypatch):
    monkeypatch.syspath_prepend(Path(tfx.__file__).parent / "benchmarks")
    yield importlib.import_module("rounds")
    sys.modules.pop("rounds")


def test_ratios_are_taken_round_by_round(rounds):
    # The machine slowed down threefold in the last rounds; the second engine always took twice as long.
    assert rounds.ratio([1, 1, 3], [2, 2, 6]) == {"median": 0.5, "min": 0.5, "max": 0.5}
    assert rounds.ratio([2, 9, 5], [1, 3, 2]) == {"median": 2.5, "min": 2, "max": 3}


def test_engines_take_turns_and_each_goes_first(rounds, monkeypatch):
    seen: list[tuple[str, object]] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def block(self, shape: tuple[int, int], calls: int) -> tuple[list[float], float]:
            seen.append((self.name, (shape, calls)))
            return [10.0 if self.name == "slow" else 1.0], 0.0

        def ask(self, question: str) -> dict[str, float]:
            return {"max_abs": 0.0}

    @contextlib.contextmanager
    def process(name: str, request: object):
        seen.append((name, "loaded"))
        yield Fake(name)

    monkeypatch.setattr(rounds, "_process", process)
    monkeypatch.setattr(rounds, "_busy_s", lambda: 0.0)
    found = rounds.timed_in_turns({"a": {}, "slow": {}, "c": {}}, [(1, 16)], rounds=3, seconds=0.05)
    names = [name for name, _ in seen]
    assert names == ["a", "slow", "c"] * 2 + ["a", "slow", "c", "slow", "c", "a", "c", "a", "slow"]
    assert [what for _, what in seen[:3]] == ["loaded"] * 3
    assert {what for _, what in seen[6:]} == {((1, 16), 5)}  # 0.05 s of the slowest, for all of them
    assert found.ms == {(1, 16): {"a": [1.0] * 3, "slow": [10.0] * 3, "c": [1.0] * 3}}


def test_processes_are_started_anew(rounds, monkeypatch):
    started = []
    monkeypatch.setattr(rounds, "_turn", lambda processes, turn, *args: (0.0, {"a": 10 * len(started) + turn}))

    @contextlib.contextmanager
    def process(name: str, request: object):
        started.append(name)
        yield type("Fake", (), {"block": lambda *args: ([1.0], 0.0), "ask": lambda *args: {}})()

    monkeypatch.setattr(rounds, "_process", process)
    found = rounds.timed_in_turns({"a": {}}, [(1, 1)], rounds=5, starts=2, seconds=0)
    assert found.ms == {(1, 1): {"a": [10, 11, 22, 23, 24]}}


@pytest.mark.parametrize(
    ("shares", "counted", "figures"),
    [
        # Twice it became quiet; then patience (3 tries a round) ran out, and the third round is left out.
        ([0.9, 0.02, 0.01, *[0.5] * 9], [0.02, 0.01], [11, 12]),
        # It never became quiet: the least disturbed try of each round.
        ([0.9, 0.6, 0.7, 0.8, 0.4, *[0.9] * 7], [0.4, 0.9, 0.9], [14, 20, 21]),
    ],
)
def test_a_round_that_others_disturb_is_tried_again(rounds, monkeypatch, shares, counted, figures):
    clock = iter(range(10, 100))
    shares = iter(shares)
    monkeypatch.setattr(rounds, "_turn", lambda *args: (next(shares), {"a": next(clock)}))
    monkeypatch.setattr(rounds, "_wait", lambda: None)
    fake = type("Fake", (), {"block": lambda *args: ([1.0], 0.0), "ask": lambda *args: {}})()
    monkeypatch.setattr(rounds, "_process", lambda *args: contextlib.nullcontext(fake))
    found = rounds.timed_in_turns({"a": {}}, [(1, 1)], rounds=3, seconds=0)
    assert found.others == {(1, 1): counted}
    assert found.ms == {(1, 1): {"a": figures}}


def test_what_others_take_is_what_the_cores_did_beyond_the_engines(rounds, monkeypatch):
    fake = type("Fake", (), {"block": lambda *args: ([3.0, 5.0, 4.0], 1.5)})()
    busy = iter([100.0, 103.8])  # of which the engine took 1.5
    monkeypatch.setattr(rounds, "_busy_s", lambda: next(busy))
    clock = iter([50.0, 52.0])
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(rounds.psutil, "cpu_count", lambda: 2)
    share, figures = rounds._turn({"a": fake}, 0, (1, 1), 3)
    assert share == pytest.approx(2.3 / 4)
    assert figures == {"a": 4.0}


def test_what_an_engine_met_is_raised_here(rounds, tmp_path):
    with pytest.raises(BundleError, match="found nothing, wanted a bundle folder"):
        rounds.timed_in_turns({"tfx": rounds.bundle_engine("tfx", tmp_path / "no", 1)}, [(1, 1)], rounds=1, seconds=0)


@pytest.mark.parametrize("program", ["false", "true"])
def test_an_engine_that_dies(rounds, tmp_path, monkeypatch, program):
    monkeypatch.setattr(rounds.sys, "executable", program)
    with pytest.raises(MachineError, match=r"engine tfx: its process ended with status [01]"):
        rounds.timed_in_turns({"tfx": rounds.bundle_engine("tfx", tmp_path, 1)}, [(1, 1)], rounds=1, seconds=0)


def test_a_process_comes_to_rest(rounds, monkeypatch):
    clock = iter([0.0, 0.01, 0.01, 0.02, 0.02, 0.0200001])  # two windows of work, then none
    monkeypatch.setattr(rounds.time, "process_time", lambda: next(clock))
    assert 0.02 <= rounds._rest() < 1
    assert list(clock) == []
