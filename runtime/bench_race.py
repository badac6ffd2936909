"""Engines that stay loaded, each in a process of its own, and are timed in turns.

A shared machine drifts by tens of percent within minutes. So engines are not timed one after the other but in turns
(A B C, B C A, C A B, ...), and a ratio is taken within a turn, where both sides met the same machine.

Only one engine computes at a time: the thread pools of onnxruntime and torch spin on for a while after a call, which
would take cores from the engine that comes next, so a worker answers when its CPU clock has come to rest. How many
cores it really used is measured too: an engine with threads that no option reaches is not compared.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from .. import errors
from ..errors import CheckError, MachineError, TfxError

__all__ = ["Race", "Turn", "Work", "error_from_json", "total_calls"]

_MOST_TURNS = 10
_MIN_CALLS, _MAX_CALLS = 5, 10_000
_SPARE_CORES = 0.35
"""What an engine may use above its threads: Python, the kernel's share of page faults, rounding of clocks."""
_MEANINGFUL_S = 0.5  # CPU time below which the cores that were used are noise

Request = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is timed.

    Attributes:
        batches: lengths of the rows of each batch, in tokens; calls go through them over and over.
        whole: True times all batches at once as one call, in any order and grouping that the engine likes.
        batch: rows of a batch.
        sequence: the longest row.
    """

    batches: tuple[tuple[int, ...], ...]
    whole: bool = False

    @property
    def batch(self) -> int:
        """Most rows of a batch."""
        return max(map(len, self.batches))

    @property
    def sequence(self) -> int:
        """The longest row."""
        return max(map(max, self.batches))

    def tokens(self, first: int, calls: int) -> int:
        """Return the attended tokens of ``calls`` calls, the first of which takes batch number ``first``."""
        sizes = [sum(batch) for batch in self.batches]
        if self.whole:
            return sum(sizes) * calls
        return sum(sizes[(first + i) % len(sizes)] for i in range(calls))

    def to_json(self) -> dict[str, Any]:
        """Return what a worker is told."""
        return {"batches": self.batches, "whole": self.whole}


@dataclass(frozen=True)
class Turn:
    """One block of calls of every engine, one after the other.

    Attributes:
        first: number of the batch that the first call took.
        ms: {engine: ms of each call}.
        cores: {engine: cores that were busy in its block, None when the block was too short to tell}.
        others: share of all cores that other programs took meanwhile.
    """

    first: int
    ms: Mapping[str, Sequence[float]]
    cores: Mapping[str, float | None] = field(default_factory=dict)
    others: float = 0.0


def total_calls(rounds: int | None, seconds: float, slowest_ms: float) -> int:
    """Return how many calls of each engine are timed: ``rounds``, or what ``seconds`` allow the slowest, at least 5."""
    if rounds is not None:
        return rounds
    return max(_MIN_CALLS, min(_MAX_CALLS, int(seconds * 1e3 / max(slowest_ms, 1e-3))))


class Race:
    """Workers of several engines; a context manager that ends them.

    Attributes:
        facts: {engine: what its worker said when it was ready}: provider, threads, placement, parity, cold start.
    """

    def __init__(self) -> None:
        self.facts: dict[str, dict[str, Any]] = {}
        self._workers: dict[str, _Worker] = {}
        self._turns = 0

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._workers):
            self.remove(name)

    def add(self, name: str, request: Request) -> dict[str, Any]:
        """Start an engine, have its outputs checked, and return its facts.

        Args:
            name: by which it is known here.
            request: as ``bench_worker`` describes.

        Raises:
            ParityError: its outputs differ from the golden.
            MachineError: its process died.
            TfxError: it cannot be used.
        """
        worker = self._workers[name] = _Worker(name, request)
        try:
            self.facts[name] = worker.ask(request)
        except BaseException:
            self.remove(name)
            raise
        return self.facts[name]

    def remove(self, name: str) -> None:
        """End an engine's process."""
        self._workers.pop(name).close()
        self.facts.pop(name, None)

    def check_equal(self) -> None:
        """Refuse engines that were given different numbers of threads or run on different providers.

        Raises:
            CheckError: they differ.
        """
        for key in ("threads", "provider"):
            if len({facts[key] for facts in self.facts.values()}) > 1:
                found = ", ".join(f"{name} {facts[key]}" for name, facts in self.facts.items())
                raise CheckError(f"bench: engines differ in {key} ({found}), so their times cannot be compared")

    def prepare(self, work: Work, warmup: int) -> dict[str, float]:
        """Give every engine its feeds, let it run them ``warmup`` times (once at least), return ms per call."""
        return {
            name: worker.ask({"do": "prepare", "work": work.to_json(), "warmup": warmup})
            for name, worker in self._workers.items()
        }

    def turns(
        self, calls: int, names: Sequence[str] | None = None, progress: Callable[[str], None] = lambda _: None
    ) -> list[Turn]:
        """Time the prepared work in at most 10 turns of about equally many calls, ``calls`` of each engine in all.

        Args:
            calls: of each engine.
            names: engines to time, None for all.
            progress: told the engine before each block.

        Raises:
            CheckError: an engine used more cores than it was given threads.
        """
        names = list(self._workers if names is None else names)
        count = min(calls, _MOST_TURNS)
        bounds = [calls * i // count for i in range(count + 1)]
        found = []
        for first, end in itertools.pairwise(bounds):
            found.append(self._turn(names, first, end - first, progress))
        return found

    def _turn(self, names: list[str], first: int, calls: int, progress: Callable[[str], None]) -> Turn:
        # Another one goes first in each turn.
        start = self._turns % len(names)
        self._turns += 1
        clock, busy, own = time.perf_counter(), _busy_s(), 0.0
        ms: dict[str, list[float]] = {}
        cores: dict[str, float | None] = {}
        for name in names[start:] + names[:start]:
            progress(name)
            alone = len(self._workers) == 1
            answer = self._workers[name].ask({"do": "time", "first": first, "calls": calls, "rest": not alone})
            ms[name], used, elapsed = answer["ms"], answer["cpu_s"], answer["elapsed_s"]
            own += answer["all_cpu_s"]
            cores[name] = used / elapsed if used > _MEANINGFUL_S else None
            self._check_cores(name, cores[name])
        elapsed = (time.perf_counter() - clock) * (os.cpu_count() or 1)
        return Turn(first, ms, cores, max(0.0, (_busy_s() - busy - own) / elapsed))

    def _check_cores(self, name: str, cores: float | None) -> None:
        facts = self.facts[name]
        if facts["provider"] == "cpu" and cores is not None and cores > facts["threads"] + _SPARE_CORES:
            raise CheckError(
                f"engine {name}: used {cores:.1f} cores, wanted at most the {facts['threads']} threads that every "
                "engine gets, so its times cannot be compared"
            )

    def ask(self, name: str, question: Mapping[str, Any]) -> Any:
        """Ask one engine's worker something else that ``bench_worker`` answers."""
        return self._workers[name].ask(question)


def _busy_s() -> float:
    """Return how long all cores together have been busy since the machine started, in s."""
    import psutil

    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


class _Worker:
    """The near end of a worker process."""

    def __init__(self, name: str, request: Request) -> None:
        self._name = name
        self._noise: TextIO = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        # Thread pools that no session option reaches (OpenMP, MKL, BLAS) get the same size; the caller's folder must
        # not shadow modules of the worker.
        threads = str(request["threads"])
        pools = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tfx.runtime.bench_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            env={**os.environ, **pools, "PYTHONSAFEPATH": "1"},
            text=True,
            encoding="utf-8",
        )

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Send one line of JSON and return what the answer holds; raise the error that it holds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what it said before it went is still to be read
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._noise.seek(0)
            last = (self._noise.read().strip().splitlines() or ["no message"])[-1]
            raise MachineError(f"engine {self._name}: its process ended with status {status}: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise error_from_json(self._name, answer["error"])
        return answer["answer"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._noise):
            with contextlib.suppress(BrokenPipeError):  # of a question that the process did not live to read
                if stream is not None:
                    stream.close()


def error_from_json(engine: str, error: Mapping[str, str]) -> TfxError:
    """Return the error that a worker met; ``bench_worker.error_to_json`` wrote it."""
    if error["kind"] == MemoryError.__name__:
        return MachineError(f"engine {engine}: out of memory")
    kind = getattr(errors, error["kind"], None)
    return (kind if isinstance(kind, type) and issubclass(kind, TfxError) else TfxError)(error["message"])
