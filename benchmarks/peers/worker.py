"""The far end of an engine: a line of JSON in, a line of JSON out. Needs numpy alone, for it runs in any environment.

A script of an engine calls ``serve(load)``. The first line is the request that ``load`` turns into a function of feeds;
then come questions:

- ``["answers", FEEDS, OUT]``: run once, write what came out to OUT (``.npy``); answers ``seconds`` and ``peak_mb``, the
  highest resident memory during that call;
- ``["block", FEEDS, WARM, CALLS]``: answers the ms of each call after WARM calls that do not count, and the CPU time of
  all, in s;
- ``["facts"]``: answers ``peak_mb`` (of the whole life), ``load_s`` and ``versions``.

FEEDS is a file: ``.npz`` of arrays by input name, or ``.json`` of texts.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Run", "feeds_of", "serve"]

Run = Callable[[Any], np.ndarray]

_REST_S = 0.01  # a window in which a process at rest has used (almost) no CPU time
_REST_SHARE = 0.05
_LONGEST_REST_S = 5.0


def serve(load: Callable[[dict[str, Any]], Run], packages: Sequence[str]) -> None:
    """Answer questions until stdin ends.

    Args:
        load: makes the engine of a request.
        packages: whose versions are told.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout belongs to the protocol; what libraries print goes to stderr

    def answer(content: dict[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")
        out.flush()

    try:
        start = time.perf_counter()
        call = load(json.loads(sys.stdin.readline()))
        load_s = time.perf_counter() - start
        _rest()
        answer({"answer": "ready"})
        feeds: dict[str, Any] = {}
        highest = 0.0  # of the times before memory's high-water mark was set back
        for line in sys.stdin:
            what, *rest = json.loads(line)
            if what == "facts":
                peak = max(highest, _peak_mb())
                answer({"answer": {"load_s": load_s, "peak_mb": peak, "versions": _versions(packages)}})
                continue
            file = rest[0]
            if file not in feeds:
                feeds[file] = _read(Path(file))
            if what == "answers":
                highest = max(highest, _peak_mb())
                _forget_peak()
                start = time.perf_counter()
                values = call(feeds[file])
                seconds = time.perf_counter() - start
                peak = _peak_mb()
                np.save(rest[1], np.ascontiguousarray(values, dtype=np.float32))
                _rest()
                answer({"answer": {"seconds": seconds, "peak_mb": peak}})
            else:
                answer({"answer": _block(lambda file=file: call(feeds[file]), *rest[1:])})
    except Exception as error:  # noqa: BLE001 - engines raise what they like; it is raised again at the near end
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"[:500]})


def feeds_of(names: Sequence[str], feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the feeds that a model of these input names takes; segment ids that nobody gave are zeros."""
    zeros = np.zeros_like(feeds["input_ids"])
    return {name: feeds.get(name, zeros) for name in names}


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    with np.load(path, allow_pickle=False) as arrays:  # noqa: TID251 - of our own
        return {name: arrays[name] for name in arrays.files}


def _block(call: Callable[[], object], warm: int, calls: int) -> tuple[list[float], float]:
    before = time.process_time()
    for _ in range(warm):  # brings weights back into the caches and wakes the threads
        call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    _rest()
    return times, time.process_time() - before


def _rest() -> None:
    """Wait until this process uses no CPU any more: thread pools spin on for a while after a call."""
    start = time.perf_counter()
    while time.perf_counter() - start < _LONGEST_REST_S:
        before = time.process_time()
        time.sleep(_REST_S)
        if time.process_time() - before < _REST_S * _REST_SHARE:
            break


def _peak_mb() -> float:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    import resource  # not on Windows, where no figure is better than a wrong one

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _forget_peak() -> None:
    """Set the high-water mark back, where that is possible (Linux); else peaks are those of the whole life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
