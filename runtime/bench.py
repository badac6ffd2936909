"""Measurement: every engine in a process of its own, with the same threads, on the same feeds.

Two engines in one process fight over cores with two spinning thread pools, and the second one inherits the first
one's memory; so each gets a worker (``bench_worker``), one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import CheckError, InputError, MachineError, TfxError
from .bench_worker import ENGINES
from .bundle import DEFAULT_BUNDLE, Bundle
from .doctor import default_threads, environment
from .signals import sigterm_raises

__all__ = ["BenchPlan", "bench", "error_from_json"]

_MAX_TOKENS = 2**24
"""Most tokens of one call: more is a typing mistake that would fill memory before it fails."""


@dataclass(frozen=True)
class BenchPlan:
    """What to time.

    Attributes:
        batches: rows per call.
        sequences: tokens per row; None takes 16 and 128, as far as the model goes.
        provider: ``cpu`` or ``cuda``.
        threads: threads of each engine, None for the physical cores of this machine.
        warmup: calls before the clock starts, per shape.
        rounds: timed calls per shape, None to go by ``seconds``.
        seconds: time per shape.
        engines: what to time beside the bundle; names out of ``bench_worker.ENGINES``.
        source: what the bundle was made of, for these engines: a checkpoint's folder or pkg.mod:factory; None for a
            reference encoder.
    """

    batches: Sequence[int] = (1, 8)
    sequences: Sequence[int] | None = None
    provider: str = "cpu"
    threads: int | None = None
    warmup: int = 3
    rounds: int | None = None
    seconds: float = 2.0
    engines: Sequence[str] = ()
    source: str | None = None

    def shapes(self, max_length: int | None) -> list[tuple[int, int]]:
        """Return (batch, sequence) pairs, each once.

        Raises:
            InputError: a size below 1, a sequence that is longer than the model takes, or more than 2^24 tokens in
                one call.
        """
        longest = max_length or sys.maxsize
        sequences = self.sequences or sorted({min(length, longest) for length in (16, 128)})
        for name, sizes in (("batch", self.batches), ("sequence", sequences)):
            for size in sizes:
                if size < 1:
                    raise InputError(f"{name}: found {size}, wanted at least 1")
        for length in sequences:
            if length > longest:
                raise InputError(f"sequence: found {length}, wanted at most {longest}, the longest this model takes")
        shapes = list(dict.fromkeys((batch, length) for batch in self.batches for length in sequences))
        for batch, length in shapes:
            if batch * length > _MAX_TOKENS:
                raise InputError(
                    f"batch x sequence: found {batch} x {length}, wanted at most {_MAX_TOKENS} tokens in one call"
                )
        return shapes


def bench(
    bundle: Bundle | str | Path = DEFAULT_BUNDLE,
    plan: BenchPlan | None = None,
    progress: Callable[[str, tuple[int, int], int, int], None] = lambda engine, shape, done, total: None,
) -> dict[str, Any]:
    """Time a bundle, and other engines beside it.

    Args:
        bundle: the bundle or its folder.
        plan: what to time.
        progress: called before each shape with the engine, (batch, sequence), how many are done and how many there are.

    Returns:
        The keys of ``tfx bench --json``: ``provider``, ``threads``, ``environment``, ``engines`` (provider, placement
        and parity of each) and ``results``.

    Raises:
        ParityError: an engine's outputs differ from the golden; there are no figures then.
        ProviderError: the provider does not run here.
        CheckError: engines ran with different numbers of threads or on different providers.
        InputError: the plan or the bundle is wrong.
        MachineError: a worker died.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    plan = plan or BenchPlan()
    shapes = plan.shapes(opened.manifest.max_length)
    threads = default_threads() if plan.threads is None else plan.threads
    names = list(dict.fromkeys(("tfx", *plan.engines)))
    for name in names:
        if name not in ENGINES:
            raise InputError(f'engine: found "{name}", wanted one of {", ".join(ENGINES)}')
    if plan.source is not None and len(names) == 1:
        raise InputError(f"source: found {plan.source}, but no engine to compare with that needs it")
    total = len(names) * len(shapes)
    done = 0
    engines: list[dict[str, Any]] = []
    for name in names:
        request = {
            "engine": name,
            "bundle": str(opened.path),
            "source": plan.source,
            "provider": plan.provider,
            "threads": threads,
            "shapes": shapes,
            "warmup": plan.warmup,
            "rounds": plan.rounds,
            "seconds": plan.seconds,
        }

        def tell(shape: tuple[int, int], name: str = name) -> None:
            nonlocal done
            progress(name, shape, done, total)
            done += 1

        engines.append(_run_worker(request, tell))
    for key in ("threads", "provider"):
        if len({engine[key] for engine in engines}) > 1:
            found = ", ".join(f"{engine['engine']} {engine[key]}" for engine in engines)
            raise CheckError(f"bench: engines differ in {key} ({found}), so their times cannot be compared")
    return {
        "bundle": str(opened.path),
        "target": opened.manifest.target,
        "precision": opened.manifest.precision,
        "provider": engines[0]["provider"],
        "threads": threads,
        "environment": environment(),
        "engines": {
            engine["engine"]: {key: engine[key] for key in ("provider", "placement", "max_abs", "min_cosine")}
            for engine in engines
        },
        "results": [row for engine in engines for row in engine["results"]],
    }


def _run_worker(request: dict[str, Any], progress: Callable[[tuple[int, int]], None]) -> dict[str, Any]:
    """Run one engine in a fresh process and return its result, or raise its error here."""
    # Thread pools that no session option reaches (OpenMP, MKL) get the same size; the caller's folder must not
    # shadow modules of the worker.
    variables = {**os.environ, "OMP_NUM_THREADS": str(request["threads"]), "PYTHONSAFEPATH": "1"}
    answer: dict[str, Any] = {}
    with sigterm_raises(), tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as noise:
        with subprocess.Popen(
            [sys.executable, "-m", "tfx.runtime.bench_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            env=variables,
            text=True,
            encoding="utf-8",
        ) as worker:
            try:
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.write(json.dumps(request))
                worker.stdin.close()
                for line in worker.stdout:
                    answer = json.loads(line)
                    if "progress" in answer:
                        progress((answer["progress"][0], answer["progress"][1]))
            except BaseException:
                worker.kill()
                raise
        noise.seek(0)
        last = (noise.read().strip().splitlines() or ["no message"])[-1]
    if "result" in answer:
        return answer["result"]
    if "error" in answer:
        raise error_from_json(request["engine"], answer["error"])
    raise MachineError(f"engine {request['engine']}: its process ended with status {worker.returncode}: {last}")


def error_from_json(engine: str, error: Mapping[str, str]) -> TfxError:
    """Return the error that a worker met; ``bench_worker.error_to_json`` wrote it."""
    if error["kind"] == MemoryError.__name__:
        return MachineError(f"engine {engine}: out of memory")
    kind = getattr(errors, error["kind"], None)
    return (kind if isinstance(kind, type) and issubclass(kind, TfxError) else TfxError)(error["message"])
