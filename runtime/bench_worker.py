"""One engine in one process: checked against the golden, warmed up, timed.

Started by ``bench`` as ``python -m tfx.runtime.bench_worker``. Reads one JSON object from stdin::

    {"engine": "tfx", "bundle": "/path", "source": null, "provider": "cpu", "threads": 2, "shapes": [[1, 16]],
     "warmup": 3, "rounds": null, "seconds": 2.0}

and writes one JSON object per line to stdout: ``{"progress": [1, 16]}`` before each shape, at the end either
``{"result": {...}}`` or ``{"error": {"kind": "ParityError", "message": "..."}}``. Whatever libraries print goes to
stderr.

An engine is a function ``make_runner(bundle, provider, threads, source) -> Runner`` in the module that ``ENGINES``
names, imported only when it is asked for. ``source`` is where the torch module comes from that the bundle was made of,
for engines that need it: a checkpoint's folder or pkg.mod:factory, None when the bundle's manifest says enough.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

import numpy as np

from ..errors import CheckError, DependencyError, InputError, TfxError
from .bundle import Bundle
from .doctor import peak_rss_mb
from .parity import ParityReport, Tolerance, verify
from .session import Session
from .tensors import TensorSpec, make_feeds

__all__ = ["ENGINES", "Runner", "checked_engine", "error_to_json", "main", "make_runner", "measure"]

ENGINES: Mapping[str, str] = {
    "tfx": "tfx.runtime.bench_worker",
    "torch": "tfx.exporter.bench_torch",
    "onnxruntime": "tfx.exporter.bench_onnxruntime",
}
"""Engine -> the module that holds its ``make_runner``. Only ``tfx`` needs nothing but the runtime."""

_MIN_ROUNDS, _MAX_ROUNDS = 5, 10_000


class Runner(Protocol):
    """What an engine gives."""

    provider: str
    """Where it runs, by tfx's name of the provider."""
    threads: int
    """Threads that it was really given."""
    placement: Mapping[str, int] | None
    """Number of nodes per onnxruntime provider; None where there is no such thing."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Compute the bundle's outputs from the bundle's inputs, by name."""
        ...


class _BundleRunner:
    """The bundle itself in a strict session."""

    def __init__(self, bundle: Bundle, provider: str, threads: int) -> None:
        self._session = Session(bundle, provider=provider, threads=threads)
        self.provider = self._session.provider
        self.placement: Mapping[str, int] | None = self._session.placement
        self.threads = threads

    def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return self._session.run(feeds)


def make_runner(bundle: Bundle, provider: str, threads: int, source: str | None = None) -> Runner:
    """Make the engine ``tfx``, which needs no source."""
    del source
    return _BundleRunner(bundle, provider, threads)


def measure(request: Mapping[str, Any], progress: Callable[[tuple[int, int]], None] = lambda shape: None) -> dict:
    """Check and time one engine in this process.

    Args:
        request: as the module describes.
        progress: called with (batch, sequence) before each shape is timed.

    Returns:
        The engine's ``provider``, ``threads``, ``placement``, parity (``max_abs``, ``min_cosine``) and ``results``,
        one entry per shape. Times are per call in ms; ``tokens_per_s`` is attended tokens by the median time;
        ``peak_rss_mb`` (1e6 bytes) is the most that the process has held so far, loading included.

    Raises:
        ParityError: outputs differ from the golden; nothing is timed.
        TfxError: the bundle, the provider or the engine cannot be used.
    """
    runner, inputs, report = checked_engine(request)
    results = []
    for batch, sequence in request["shapes"]:
        progress((batch, sequence))
        feeds = make_feeds(inputs, batch=batch, sequence=sequence)
        times = _time(lambda feeds=feeds: runner.run(feeds), request)
        p50, p90, p99 = (float(value) for value in np.percentile(times, (50, 90, 99)))
        results.append(
            {
                "engine": request["engine"],
                "batch": batch,
                "sequence": sequence,
                "tokens": batch * sequence,
                "p50_ms": p50,
                "p90_ms": p90,
                "p99_ms": p99,
                "tokens_per_s": batch * sequence / p50 * 1e3,
                "peak_rss_mb": peak_rss_mb(),
                "rounds": len(times),
            }
        )
    return {
        "engine": request["engine"],
        "provider": runner.provider,
        "threads": runner.threads,
        "placement": None if runner.placement is None else dict(runner.placement),
        "max_abs": report.max_abs,
        "min_cosine": report.min_cosine,
        "results": results,
    }


def checked_engine(request: Mapping[str, Any]) -> tuple[Runner, tuple[TensorSpec, ...], ParityReport]:
    """Make a request's engine and compare its outputs with the golden.

    Returns:
        The engine, its inputs and the report.

    Raises:
        ParityError: outputs differ from the golden.
        TfxError: the bundle, the provider or the engine cannot be used.
    """
    bundle = Bundle.open(request["bundle"])
    manifest = bundle.manifest
    runner = _engine(request["engine"])(bundle, request["provider"], request["threads"], request.get("source"))
    tolerance = Tolerance(manifest.tolerance["max_abs"], manifest.tolerance["min_cosine"])
    report = verify(runner.run, bundle.golden(), tolerance, inputs=manifest.inputs, outputs=manifest.outputs)
    report.check()
    return runner, manifest.inputs, report


def _engine(name: str) -> Callable[[Bundle, str, int, str | None], Runner]:
    try:
        module = importlib.import_module(ENGINES[name])
    except ModuleNotFoundError as error:
        if error.name == ENGINES[name]:
            raise InputError(f'engine: "{name}" is not part of this tfx') from error
        raise
    return module.make_runner


def _time(call: Callable[[], object], request: Mapping[str, Any]) -> list[float]:
    """Return milliseconds per call: ``rounds`` of them, or as many as ``seconds`` allow."""
    for _ in range(request["warmup"]):
        call()
    rounds, seconds = request["rounds"], request["seconds"]
    times: list[float] = []
    start = time.perf_counter()
    while True:
        before = time.perf_counter()
        call()
        after = time.perf_counter()
        times.append((after - before) * 1e3)
        if rounds is not None:
            if len(times) >= rounds:
                return times
        elif (after - start >= seconds and len(times) >= _MIN_ROUNDS) or len(times) >= _MAX_ROUNDS:
            return times


def error_to_json(error: Exception) -> dict[str, str]:
    """Return ``kind`` and ``message``, out of which ``bench.error_from_json`` makes the error again."""
    if isinstance(error, ImportError):
        error = DependencyError.from_import(error) or error
    known = isinstance(error, TfxError)
    message = str(error) if known else f"unexpected {type(error).__name__}: {error}"
    kind = type(error).__name__ if known or isinstance(error, MemoryError) else CheckError.__name__
    return {"kind": kind, "message": message}


def main() -> None:
    """Serve one request from stdin."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout belongs to the protocol

    try:
        request = json.load(sys.stdin)
        result = measure(request, lambda shape: _send(out, {"progress": shape}))
    except Exception as error:  # noqa: BLE001 - the parent says it
        _send(out, {"error": error_to_json(error)})
    else:
        _send(out, {"result": result})


def _send(out: TextIO, message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
