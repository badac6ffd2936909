"""Engines that stay loaded, each in a process of its own, and are timed in turns.

A shared machine drifts by tens of percent within minutes. So engines are not timed one after the other but in rounds
(A B C, B C A, C A B, ...), and a ratio is taken within a round, where both sides met the same machine.

Only one engine computes at a time. The thread pools of onnxruntime and torch spin on for a while after a call, which
would take cores from the engine that comes next: a process answers when its CPU clock has come to rest.

What other programs took of the cores meanwhile is measured too. A round that they disturbed is tried again, and left
out in the end if it stayed so.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from tfx.errors import InputError, MachineError, TfxError
from tfx.runtime.bench import error_from_json
from tfx.runtime.bench_worker import checked_engine, error_to_json
from tfx.runtime.doctor import environment, peak_rss_mb
from tfx.runtime.golden import load_golden
from tfx.runtime.parity import TOLERANCES, ParityReport, verify
from tfx.runtime.providers import create_session
from tfx.runtime.tensors import TensorSpec, make_feeds

__all__ = [
    "Times",
    "bundle_engine",
    "file_engine",
    "load",
    "ratio",
    "run",
    "surroundings",
    "timed_in_turns",
    "write_json",
]

Shape = tuple[int, int]
Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
Request = dict[str, Any]
_Turn = tuple[float, dict[str, float]]  # the share of all cores that others took, and each engine's median in ms

_FACTS = "facts"

_REST_S = 0.01  # a window in which a process at rest has used (almost) no CPU time
_REST_SHARE = 0.05
_LONGEST_REST_S = 5.0

_QUIET = 0.05  # share of all cores that other programs may take in a round
_LONGEST_WAIT_S = 20


def bundle_engine(engine: str, bundle: Path, threads: int, source: str | None = None) -> Request:
    """Describe an engine of ``tfx bench``, to be checked against the bundle's golden."""
    return {"engine": engine, "bundle": str(bundle), "source": source, "provider": "cpu", "threads": threads}


def file_engine(
    model: Path,
    golden: Path,
    inputs: Sequence[TensorSpec],
    threads: int,
    disabled_optimizers: Sequence[str] | None = None,
) -> Request:
    """Describe an ``.onnx`` file in onnxruntime, to be checked against a golden file.

    Args:
        model: the file.
        golden: written by ``save_golden``.
        inputs: of the model.
        threads: inside an operator.
        disabled_optimizers: as ``create_session`` takes it.
    """
    return {
        "model": str(model),
        "golden": str(golden),
        "inputs": [spec.to_json() for spec in inputs],
        "threads": threads,
        "disabled_optimizers": disabled_optimizers,
    }


def _open(request: Request) -> tuple[Run, Sequence[TensorSpec], ParityReport]:
    """Load an engine and check its outputs; an error says why there will be no figure."""
    if "engine" in request:
        runner, inputs, report = checked_engine(request)
        if runner.threads != request["threads"]:
            raise MachineError(f"found {runner.threads} threads, wanted {request['threads']}")
        return runner.run, inputs, report
    inputs = [TensorSpec.from_json(spec, "inputs") for spec in request["inputs"]]
    session = create_session(
        request["model"], threads=request["threads"], disabled_optimizers=request["disabled_optimizers"]
    )
    report = verify(session.run, load_golden(Path(request["golden"])), TOLERANCES["fp32"], inputs=inputs)
    report.check()
    return session.run, inputs, report


@dataclass(frozen=True)
class Times:
    """What came out of a race.

    Attributes:
        ms: {shape: {engine: one figure a round that counts}}: the median of a block of calls, in ms.
        others: {shape: one figure a round}: share of all cores that other programs took.
        engines: {engine: what it is}: max_abs and min_cosine against the golden, peak_rss_mb, rest_ms (the longest
            that its threads spun after a block).
    """

    ms: Mapping[Shape, Mapping[str, list[float]]]
    others: Mapping[Shape, list[float]]
    engines: Mapping[str, dict[str, float | None]]


def timed_in_turns(
    engines: Mapping[str, Request],
    shapes: Sequence[Shape],
    *,
    rounds: int,
    seconds: float,
    starts: int = 1,
    patience: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> Times:
    """Load every engine, check its outputs, then time them in turns.

    Args:
        engines: by name, what ``bundle_engine`` or ``file_engine`` describes.
        shapes: (batch, sequence) of the feeds; every position is attended.
        rounds: figures for each engine and shape.
        seconds: about how long a block of calls of the slowest engine takes; all engines make as many calls.
        starts: how often all processes are started anew: where memory lies shifts the times of a process by a few
            percent, for as long as it lives.
        patience: how often a disturbed round is tried again, on average.
        progress: told what is being done.

    Raises:
        ParityError: outputs of an engine differ from what was recorded; nothing is timed then.
        MachineError: a process died.
    """
    turns: dict[Shape, list[_Turn]] = {shape: [] for shape in shapes}
    facts: dict[str, dict[str, float | None]] = {}
    patience *= rounds * len(shapes)
    done = 0
    for start in range(starts):
        until = rounds * (start + 1) // starts
        with contextlib.ExitStack() as stack:
            processes = {}
            for name, engine in engines.items():
                progress(f"loading {name}")
                processes[name] = stack.enter_context(_process(name, engine))
            calls = {shape: _calls(processes, shape, seconds) for shape in shapes}
            for turn in range(done, until):
                for shape in shapes:
                    progress(f"round {turn + 1} of {rounds} {shape}")
                    tries = [_turn(processes, turn, shape, calls[shape])]
                    while tries[-1][0] > _QUIET and patience > 0:
                        progress(f"waiting, for other programs took {tries[-1][0]:.0%}")
                        patience -= 1
                        _wait()
                        tries.append(_turn(processes, turn, shape, calls[shape]))
                    turns[shape].append(min(tries, key=lambda each: each[0]))
            facts = {name: process.ask(_FACTS) for name, process in processes.items()}
        done = until
    # A round that stayed disturbed counts only where there is no other.
    kept = {shape: [turn for turn in each if turn[0] <= _QUIET] or each for shape, each in turns.items()}
    return Times(
        ms={shape: {name: [figures[name] for _, figures in each] for name in engines} for shape, each in kept.items()},
        others={shape: [share for share, _ in each] for shape, each in kept.items()},
        engines=facts,
    )


def _calls(processes: Mapping[str, _Process], shape: Shape, seconds: float) -> int:
    slowest = max(statistics.median(process.block(shape, 2)[0]) for process in processes.values())
    return max(2, min(1000, int(seconds * 1e3 / slowest)))


def _turn(processes: Mapping[str, _Process], turn: int, shape: Shape, calls: int) -> _Turn:
    """Time a block of each engine, another one first in each turn."""
    names = list(processes)
    first = turn % len(names)
    figures = {}
    start, busy, own = time.perf_counter(), _busy_s(), 0.0
    for name in names[first:] + names[:first]:
        times, used = processes[name].block(shape, calls)
        figures[name] = statistics.median(times)
        own += used
    elapsed = (time.perf_counter() - start) * (psutil.cpu_count() or 1)
    return max(0.0, (_busy_s() - busy - own) / elapsed), figures


def _wait() -> None:
    """Wait until the cores are idle, for a while."""
    for _ in range(_LONGEST_WAIT_S):
        busy = _busy_s()
        time.sleep(1)
        if _busy_s() - busy < _QUIET * (psutil.cpu_count() or 1):
            return


def _busy_s() -> float:
    """Return how long all cores together have been busy since the machine started, in s."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Divide round by round.

    Returns:
        ``median``, ``min`` and ``max`` of the rounds' ratios.
    """
    each = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


class _Process:
    """The near end of an engine's process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name = name
        self._process = process

    def ask(self, question: Any) -> Any:
        """Send one line and return what the answer holds.

        Raises:
            TfxError: what the process met.
            MachineError: it died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said before it went is still to be read
        line = self._process.stdout.readline()
        if not line:
            raise MachineError(f"engine {self._name}: its process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise error_from_json(self._name, answer["error"])
        return answer["answer"]

    def block(self, shape: Shape, calls: int) -> tuple[list[float], float]:
        """Return the ms of each of ``calls`` calls that follow each other, and the CPU time that they took, in s."""
        times, used = self.ask([shape, calls])
        return times, used


@contextlib.contextmanager
def _process(name: str, request: Request) -> Iterator[_Process]:
    # Thread pools that no option of an engine reaches (OpenMP, MKL) get the same size.
    variables = {**os.environ, "OMP_NUM_THREADS": str(request["threads"])}
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True, encoding="utf-8"
    ) as process:
        try:
            remote = _Process(name, process)
            remote.ask(request)
            yield remote
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # of a question that the process did not live to read
                assert process.stdin is not None
                process.stdin.close()


def _serve() -> None:
    """Be an engine's process: a line of JSON in, a line of JSON out."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout belongs to the protocol; what libraries print goes to stderr

    def answer(content: Mapping[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")
        out.flush()

    try:
        call, inputs, report = _open(json.loads(sys.stdin.readline()))
        rest = _rest()
        answer({"answer": "ready"})
        for line in sys.stdin:
            question = json.loads(line)
            if question == _FACTS:
                facts = {"max_abs": report.max_abs, "min_cosine": report.min_cosine}
                answer({"answer": {**facts, "peak_rss_mb": peak_rss_mb(), "rest_ms": rest * 1e3}})
                continue
            (batch, sequence), calls = question
            feeds = make_feeds(inputs, batch=batch, sequence=sequence)
            before = time.process_time()
            times = _block(lambda feeds=feeds: call(feeds), calls)
            rest = max(rest, _rest())
            answer({"answer": [times, time.process_time() - before]})
    except Exception as error:  # noqa: BLE001 - raised at the near end
        answer({"error": error_to_json(error)})


def _block(call: Callable[[], object], calls: int) -> list[float]:
    call()  # brings weights back into the caches and wakes the threads
    times = []
    for _ in range(calls):
        before = time.perf_counter()
        call()
        times.append((time.perf_counter() - before) * 1e3)
    return times


def _rest() -> float:
    """Wait until this process uses no CPU any more; return how long that took, in s."""
    start = time.perf_counter()
    while time.perf_counter() - start < _LONGEST_REST_S:
        before = time.process_time()
        time.sleep(_REST_S)
        if time.process_time() - before < _REST_S * _REST_SHARE:
            break
    return time.perf_counter() - start - _REST_S


def surroundings(threads: int, load_before: tuple[float, float, float] | None) -> dict[str, Any]:
    """Return what figures depend on: the machine, the threads, and its load (1 min) before and after."""
    loads = [None if each is None else each[0] for each in (load_before, load())]
    return {"environment": environment(), "threads": threads, "load": {"before": loads[0], "after": loads[1]}}


def load() -> tuple[float, float, float] | None:
    """Return the system's load averages, None where there are none."""
    return os.getloadavg() if hasattr(os, "getloadavg") else None


def write_json(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write one JSON object, if a file is wanted.

    Raises:
        InputError: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def run(command: click.Command) -> None:
    """Run a benchmark's command; an error of tfx becomes one line and an exit code."""
    try:
        command()
    except TfxError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    _serve()
