"""The near end of the engines: processes that stay alive, and turns in which each is timed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

__all__ = ["EngineError", "Process", "Turns", "started", "turns"]

_LONG_S = 0.5  # a call that takes this long needs no call before it that does not count
_MOST_CALLS = 200


class EngineError(Exception):
    """What an engine's process met."""


class Process:
    """An engine that answers the questions of ``worker.py``."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def ask(self, *question: Any) -> Any:
        """Ask, and wait for the answer.

        Raises:
            EngineError: the engine failed, or its process ended.
        """
        return self._say(list(question))

    def _say(self, content: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what it said before it went is still to be read
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            last = [each for each in self._log.read_text(errors="replace").splitlines() if each.strip()]
            raise EngineError(f"its process ended with status {self._process.wait()}: {(last or ['no word'])[-1]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["answer"]

    def load(self, request: Mapping[str, Any]) -> None:
        """Let it load its model.

        Raises:
            EngineError: as ``ask``.
        """
        self._say(dict(request))


@contextlib.contextmanager
def started(
    name: str, command: Sequence[str], threads: int, log: Path, variables: Mapping[str, str]
) -> Iterator[Process]:
    """Start an engine's process; it ends with the block.

    Args:
        name: of the engine.
        command: interpreter and script.
        threads: also of the pools that no option of an engine reaches (OpenMP, MKL, tokenizers).
        log: takes what it prints.
        variables: of its environment, on top of ours.
    """
    pools = {
        each: str(threads)
        for each in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    }
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **pools, **variables},
            text=True,
            encoding="utf-8",
        ) as process,
    ):
        try:
            yield Process(name, process, log)
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()


@dataclass
class Turns:
    """What came of the turns at one workload.

    Attributes:
        ms: {engine: one figure a round, the median of its calls}.
        calls: {engine: calls in a round}.
        others: share of all cores that other programs took, one figure a round.
        failed: {engine: why it has no figures}.
    """

    ms: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def turns(
    processes: Mapping[str, Process],
    feeds: str,
    *,
    rounds: int,
    seconds: float,
    limit_s: float,
    once: bool = False,
    step: Callable[[str], None] = lambda _: None,
) -> Turns:
    """Time the engines in turns, another one first in each round. An engine that fails drops out.

    Args:
        processes: by name; each is asked while all others rest.
        feeds: the file.
        rounds: at most; one at least is made.
        seconds: about how long an engine's turn takes; a call that takes longer is made once.
        once: one call a turn, without one that does not count; for what takes many seconds.
        limit_s: no round begins that would end later than this after the start, as far as the last one tells.
        step: told what is being done.
    """
    found = Turns()
    start = time.perf_counter()
    left = dict(processes)

    def block(name: str, warm: int, calls: int) -> tuple[list[float], float] | None:
        try:
            times, used = left[name].ask("block", feeds, warm, calls)
        except EngineError as error:
            found.failed[name] = str(error)
            found.ms.pop(name, None)
            del left[name]
            return None
        return times, used

    warm: dict[str, int] = {}
    for name in list(left):
        first = ([math.inf], 0.0) if once else block(name, 0, 1)
        if first is not None:
            one = first[0][0] / 1e3
            warm[name] = int(one < _LONG_S)
            found.calls[name] = max(1, min(_MOST_CALLS, int(seconds / one)))
            found.ms[name] = []
    for turn in range(rounds):
        begun = time.perf_counter()
        step(f"round {turn + 1} of {rounds}")
        names = list(left)
        at = turn % max(1, len(names))
        busy, own = _busy_s(), 0.0
        for name in names[at:] + names[:at]:
            made = block(name, warm[name], found.calls[name])
            if made is not None:
                found.ms[name].append(statistics.median(made[0]))
                own += made[1]
        now = time.perf_counter()
        elapsed = (now - begun) * (psutil.cpu_count() or 1)
        # The system counts in ticks of 10 ms: a short round may seem busier than it can be.
        found.others.append(min(1.0, max(0.0, (_busy_s() - busy - own) / elapsed)))
        if now - start + (now - begun) > limit_s:
            break
    return found


def _busy_s() -> float:
    """Return how long all cores together have been busy since the machine started, in s."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
