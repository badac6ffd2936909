"""One engine in one process: checked against the golden, then timed whenever it is told to.

Started by ``bench_race`` as ``python -m tfx.runtime.bench_worker``. Reads JSON objects from stdin, one a line, and
answers each with one line on stdout: ``{"answer": ...}`` or ``{"error": {"kind": "ParityError", "message": "..."}}``,
after which it ends. Whatever libraries print goes to stderr. The first object says what to load::

    {"engine": "tfx", "bundle": "/path", "source": null, "provider": "cpu", "threads": 2, "options": {}}

The answer are the engine's facts: ``provider``, ``threads``, ``placement``, ``max_abs``, ``min_cosine``, ``load_s``
(until it could take a call) and ``first_ms`` (its first call, one row of up to 16 tokens). Then::

    {"do": "prepare", "work": {"batches": [[16], [16]], "whole": false}, "warmup": 3}   ->  ms per call
    {"do": "time", "first": 0, "calls": 5, "rest": true}   ->  {"ms": [...], "cpu_s", "elapsed_s", "all_cpu_s"}
    {"do": "shapes", "batches": [[8, 8], [16]]}            ->  resident MB after each
    {"do": "memory"}                                       ->  peak MB

An engine is a function ``make_runner(bundle, provider, threads, source, **options) -> Runner`` in the module that
``ENGINES`` names, imported only when it is asked for. ``source`` is where the torch module comes from that the bundle
was made of, for engines that need it: a checkpoint's folder or pkg.mod:factory, None when the bundle's manifest says
enough.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TextIO

import numpy as np

from ..errors import CheckError, DependencyError, InputError, TfxError
from .bundle import Bundle
from .doctor import peak_rss_mb
from .lengths import make_ragged_feeds
from .parity import ParityReport, Tolerance, verify
from .schedule import Schedule, tuned
from .session import Session
from .tensors import TensorSpec, attended_positions
from .text import Encoding

__all__ = ["ENGINES", "Engine", "Runner", "checked_engine", "error_to_json", "main", "make_runner"]

ENGINES: Mapping[str, str] = {
    "tfx": "tfx.runtime.bench_worker",
    "torch": "tfx.exporter.bench_torch",
    "onnxruntime": "tfx.exporter.bench_onnxruntime",
    "openvino": "tfx.exporter.bench_openvino",
    "sentence-transformers": "tfx.exporter.bench_sentence_transformers",
    "floor": "tfx.exporter.bench_floor",
}
"""Engine -> the module that holds its ``make_runner``. Only ``tfx`` needs nothing but the runtime."""

_TEXT_ROLES = {"token_ids", "attention_mask", "padding_mask", "token_type_ids", "position_ids"}

_SHORT_MS = 50.0  # calls below this are preceded by one that brings weights back into the caches
_REST_S = 0.01  # a window in which a process at rest has used (almost) no CPU time
_REST_SHARE = 0.05
_LONGEST_REST_S = 5.0


class Runner(Protocol):
    """What an engine gives.

    One that has ``run_all`` takes rows without padding, any number of them at once: ``run_all(encodings)``, a list of
    :class:`.text.Encoding`. Others are given batches, sorted by length.
    """

    provider: str
    """Where it runs, by tfx's name of the provider."""
    threads: int
    """Threads that it was really given."""
    placement: Mapping[str, int] | None
    """Number of nodes per onnxruntime provider; None where there is no such thing."""
    load_s: float
    """Seconds until a process that has everything at hand can take its first call."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Compute the bundle's outputs from the bundle's inputs, by name."""
        ...


class _BundleRunner:
    """The bundle itself in a strict session."""

    def __init__(
        self,
        bundle: Bundle,
        provider: str,
        threads: int,
        schedule: Mapping[str, int] | None,
        options: Mapping[str, Any],
    ) -> None:
        start = time.perf_counter()
        self._session = Session(bundle, provider=provider, threads=threads, **options)
        self.load_s = time.perf_counter() - start
        self.provider = self._session.provider
        self.placement: Mapping[str, int] | None = self._session.placement
        self.threads = threads
        own = tuned(bundle.manifest.tuning, threads)
        self._schedule = own if schedule is None else Schedule.from_json(schedule)
        if {spec.role for spec in bundle.manifest.inputs} <= _TEXT_ROLES:
            self.run_all = self._run_all

    def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return self._session.run(feeds)

    def _run_all(self, encodings: Sequence[Encoding]) -> None:
        """Run rows as ``Session.run_many`` does, under the schedule that is fastest for the first that come."""
        if self._schedule is None:
            self._schedule, _ = self._session.choose_schedule(encodings, self.threads)
        deque(self._session.run_many(encodings, schedule=self._schedule), maxlen=0)


def make_runner(
    bundle: Bundle,
    provider: str,
    threads: int,
    source: str | None = None,
    *,
    schedule: Mapping[str, int] | None = None,
    **options: Any,
) -> Runner:
    """Make the engine ``tfx``.

    Args:
        bundle: what to run.
        provider: ``cpu`` or ``cuda``.
        threads: inside an operator; all that a schedule may use.
        source: not needed.
        schedule: of ``Session.run_many``; None for the bundle's own, else the fastest.
        options: more for ``Session``.
    """
    del source
    return _BundleRunner(bundle, provider, threads, schedule, options)


class Engine:
    """An engine that is loaded and checked, and the work it was given.

    Args:
        request: what to load, as the module describes.

    Attributes:
        facts: what it answers when it is ready.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._runner, bundle, self._first_ms = _loaded(request)
        self._inputs = bundle.manifest.inputs
        self._pad_id = bundle.manifest.pad_id
        report = _checked(self._runner, bundle) if request["engine"] != "floor" else None
        self._calls: list[Callable[[], object]] = []
        self._expected_ms = 0.0
        runner = self._runner
        self.facts = {
            "engine": request["engine"],
            "provider": runner.provider,
            "threads": runner.threads,
            "placement": None if runner.placement is None else dict(runner.placement),
            "max_abs": None if report is None else report.max_abs,
            "min_cosine": None if report is None else report.min_cosine,
            "load_s": runner.load_s,
            "first_ms": self._first_ms,
        }

    def answer(self, question: Mapping[str, Any]) -> Any:
        """Answer one of the questions that the module describes."""
        if question["do"] == "prepare":
            return self._prepare(question["work"], question["warmup"])
        if question["do"] == "time":
            return self._time(question["first"], question["calls"], rest=question["rest"])
        if question["do"] == "shapes":
            return list(self._shapes(question["batches"]))
        if question["do"] == "memory":
            return peak_rss_mb()
        raise InputError(f"bench worker: found {question['do']!r}")

    def _feeds(self, lengths: Sequence[int], seed: int = 0) -> dict[str, np.ndarray]:
        return make_ragged_feeds(self._inputs, lengths, pad_id=self._pad_id, seed=seed)

    def _prepare(self, work: Mapping[str, Any], warmup: int) -> float:
        """Make the work's feeds, run it, and return ms per call; 0 warm-up calls still make the one that is timed."""
        if work["whole"]:
            # Neighbours in length share a batch, so little of it is padding.
            lengths = sorted((length for batch in work["batches"] for length in batch), reverse=True)
            size = max(map(len, work["batches"]))
            batches = [self._feeds(lengths[i : i + size], i) for i in range(0, len(lengths), size)]
            run_all = getattr(self._runner, "run_all", None)
            if run_all is None:
                self._calls = [lambda: self._one_by_one(batches)]
            else:
                encodings = [each for feeds in batches for each in self._rows(feeds)]
                np.random.default_rng(0).shuffle(encodings)  # as they come, not sorted
                self._calls = [lambda: run_all(encodings)]
        else:
            each = [self._feeds(lengths, i) for i, lengths in enumerate(work["batches"])]
            self._calls = [lambda feeds=feeds: self._runner.run(feeds) for feeds in each]
        times = _block(self._calls, 0, max(1, warmup))
        self._expected_ms = statistics.median(times)
        _rest()
        return self._expected_ms

    def _rows(self, feeds: Mapping[str, np.ndarray]) -> list[Encoding]:
        """Rows of feeds without their padding."""
        by_role = {spec.role: feeds[spec.name] for spec in self._inputs}
        ids = by_role["token_ids"]
        types = by_role.get("token_type_ids", np.zeros_like(ids))
        attended = attended_positions(self._inputs, feeds)
        lengths = [ids.shape[1]] * len(ids) if attended is None else attended.sum(axis=1).tolist()
        return [
            Encoding(row[:length].tolist(), kind[:length].tolist())
            for row, kind, length in zip(ids, types, lengths, strict=True)
        ]

    def _one_by_one(self, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        for feeds in batches:
            self._runner.run(feeds)

    def _time(self, first: int, calls: int, *, rest: bool) -> dict[str, Any]:
        whole = time.process_time()
        if rest and self._expected_ms < _SHORT_MS:
            _block(self._calls, first, 1)
        used, clock = time.process_time(), time.perf_counter()
        times = _block(self._calls, first, calls)
        elapsed = time.perf_counter() - clock
        used = time.process_time() - used
        if rest:
            _rest()
        return {"ms": times, "cpu_s": used, "elapsed_s": elapsed, "all_cpu_s": time.process_time() - whole}

    def _shapes(self, batches: Sequence[Sequence[int]]) -> Iterator[float]:
        import psutil

        process = psutil.Process()
        for i, lengths in enumerate(batches):
            self._runner.run(self._feeds(lengths, i))
            yield process.memory_info().rss / 1e6


def checked_engine(request: Mapping[str, Any]) -> tuple[Runner, tuple[TensorSpec, ...], ParityReport]:
    """Make a request's engine and compare its outputs with the golden.

    Returns:
        The engine, its inputs and the report.

    Raises:
        ParityError: outputs differ from the golden.
        TfxError: the bundle, the provider or the engine cannot be used.
    """
    runner, bundle, _ = _loaded(request)
    return runner, bundle.manifest.inputs, _checked(runner, bundle)


def _loaded(request: Mapping[str, Any]) -> tuple[Runner, Bundle, float]:
    """Return the engine, the bundle and the ms of the first call."""
    bundle = Bundle.open(request["bundle"])
    make = _engine(request["engine"])
    runner = make(bundle, request["provider"], request["threads"], request.get("source"), **request.get("options", {}))
    length = min(16, bundle.manifest.max_length or 16)
    feeds = make_ragged_feeds(bundle.manifest.inputs, [length], pad_id=bundle.manifest.pad_id)
    start = time.perf_counter()
    runner.run(feeds)
    return runner, bundle, (time.perf_counter() - start) * 1e3


def _checked(runner: Runner, bundle: Bundle) -> ParityReport:
    manifest = bundle.manifest
    tolerance = Tolerance(**manifest.tolerance)
    report = verify(runner.run, bundle.golden(), tolerance, inputs=manifest.inputs, outputs=manifest.outputs)
    report.check()
    return report


def _engine(name: str) -> Callable[..., Runner]:
    try:
        module = importlib.import_module(ENGINES[name])
    except ModuleNotFoundError as error:
        if error.name == ENGINES[name]:
            raise InputError(f'engine: "{name}" is not part of this tfx') from error
        raise
    return module.make_runner


def _block(calls: Sequence[Callable[[], object]], first: int, count: int) -> list[float]:
    """Return the ms of each of ``count`` calls that follow each other, beginning with number ``first``."""
    times = []
    for i in range(first, first + count):
        call = calls[i % len(calls)]
        before = time.perf_counter()
        call()
        times.append((time.perf_counter() - before) * 1e3)
    return times


def _rest() -> None:
    """Wait until this process uses no CPU any more.

    Raises:
        CheckError: its threads never stop, and would take cores from the engine that comes next.
    """
    start = time.perf_counter()
    while time.perf_counter() - start < _LONGEST_REST_S:
        before = time.process_time()
        time.sleep(_REST_S)
        if time.process_time() - before < _REST_S * _REST_SHARE:
            return
    raise CheckError(
        f"engine: its threads were still busy {_LONGEST_REST_S:g} s after a call, so nothing can be timed beside it"
    )


def error_to_json(error: Exception) -> dict[str, str]:
    """Return ``kind`` and ``message``, out of which ``bench_race.error_from_json`` makes the error again."""
    if isinstance(error, ImportError):
        error = DependencyError.from_import(error) or error
    known = isinstance(error, TfxError)
    message = str(error) if known else f"unexpected {type(error).__name__}: {error}"
    kind = type(error).__name__ if known or isinstance(error, MemoryError) else CheckError.__name__
    return {"kind": kind, "message": message}


def main() -> None:
    """Answer stdin until it ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout belongs to the protocol
    try:
        engine = Engine(json.loads(sys.stdin.readline()))
        _rest()
        _send(out, {"answer": engine.facts})
        for line in sys.stdin:
            _send(out, {"answer": engine.answer(json.loads(line))})
    except Exception as error:  # noqa: BLE001 - the parent says it
        _send(out, {"error": error_to_json(error)})


def _send(out: TextIO, message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
