"""Measurement: every engine in a process of its own, with the same threads, on the same feeds, in turns.

:mod:`.bench_race` says how engines take turns; here is what they are timed on, and what is made of the times.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .bench_memory import RUNS, measure_memory
from .bench_race import Race, Turn, Work, error_from_json, total_calls
from .bench_worker import ENGINES
from .bundle import DEFAULT_BUNDLE, Bundle
from .doctor import default_threads, environment
from .lengths import histogram, parse_lengths, waste
from .signals import sigterm_raises
from .text import text_encoder

__all__ = ["COMPARED", "MODES", "BenchPlan", "bench", "error_from_json", "ratio"]

COMPARED = tuple(name for name in ENGINES if name not in ("tfx", "floor"))
"""Engines that can be timed beside a bundle."""

MODES = ("latency", "throughput")

_MAX_TOKENS = 2**24
"""Most tokens of one call: more is a typing mistake that would fill memory before it fails."""


@dataclass(frozen=True)
class BenchPlan:
    """What to time.

    Attributes:
        batches: rows per call.
        sequences: tokens per row; None takes 16 and 128, as far as the model goes.
        provider: ``cpu`` or ``cuda``.
        threads: threads of each engine, None for the physical cores of this machine, or, for a bundle alone, for what
            it was tuned to.
        warmup: calls before the clock starts, per shape.
        rounds: timed calls per shape, None to go by ``seconds``.
        seconds: time per shape and engine.
        engines: what to time beside the bundle; names out of ``COMPARED``.
        source: what the bundle was made of, for these engines: a checkpoint's folder or pkg.mod:factory; None for a
            reference encoder.
        lengths: a length histogram in place of ``sequences``, as :mod:`.lengths` reads it.
        count: rows drawn from it.
        seed: of what is drawn.
        mode: ``latency`` times batch by batch, in the order in which rows come; ``throughput`` all rows at once, which
            an engine may sort and group as it likes.
        floor: also time the model's matrix products alone.
        memory: also watch memory over ``RUNS`` varying shapes.
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
    lengths: str | None = None
    count: int = 64
    seed: int = 0
    mode: str = "latency"
    floor: bool = False
    memory: bool = False

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

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            InputError: an unknown engine or mode, or options that exclude each other.
        """
        for name in self.engines:
            if name not in COMPARED:
                raise InputError(f'engine: found "{name}", wanted one of {", ".join(COMPARED)}')
        if self.mode not in MODES:
            raise InputError(f'mode: found "{self.mode}", wanted one of {", ".join(MODES)}')
        if self.source is not None and not self.engines:
            raise InputError(f"source: found {self.source}, but no engine to compare with that needs it")
        if self.lengths is not None and self.sequences is not None:
            raise InputError("lengths and sequences: found both, wanted one of them")

    def rows(self, bundle: Bundle) -> list[int] | None:
        """Draw the lengths of all rows, None without a histogram; errors as ``parse_lengths``."""
        if self.lengths is None:
            return None
        manifest = bundle.manifest
        return parse_lengths(
            self.lengths,
            count=max(self.count, *self.batches),
            seed=self.seed,
            tokenizer=None if manifest.tokenizer is None else text_encoder(bundle),
            max_length=manifest.max_length,
        )

    def works(self, bundle: Bundle, rows: Sequence[int] | None) -> list[Work]:
        """Return what is timed, one per shape or batch size; errors as ``shapes``."""
        whole = self.mode == "throughput"
        if rows is None:
            shapes = self.shapes(bundle.manifest.max_length)
            return [
                Work(((length,) * batch,) * (max(1, self.count // batch) if whole else 1), whole)
                for batch, length in shapes
            ]
        dataclasses.replace(self, sequences=(1,)).shapes(None)  # checks the batches
        works = []
        for batch in dict.fromkeys(self.batches):
            if batch * max(rows) > _MAX_TOKENS:
                raise InputError(f"batch: found {batch} rows of {max(rows)}, wanted at most {_MAX_TOKENS} tokens")
            groups = [tuple(rows[i : i + batch]) for i in range(0, len(rows), batch)]
            # A last batch of fewer rows would be another latency.
            works.append(Work(tuple(groups if whole else [each for each in groups if len(each) == batch]), whole))
        return works


def bench(
    bundle: Bundle | str | Path = DEFAULT_BUNDLE,
    plan: BenchPlan | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Time a bundle, and other engines beside it.

    Args:
        bundle: the bundle or its folder.
        plan: what to time.
        progress: called with what is being done, how much is done and how much there is.

    Returns:
        The keys of ``tfx bench --json``: ``provider``, ``threads``, ``mode``, ``environment``, ``engines`` (provider,
        placement, parity, cold start and memory of each), ``lengths`` (the histogram or null), ``results``, one row
        per engine and work, and ``ratios``: how many times as long an engine takes as the bundle, turn by turn.

    Raises:
        ParityError: an engine's outputs differ from the golden; there are no figures then.
        ProviderError: the provider does not run here.
        CheckError: engines ran with different numbers of threads or on different providers.
        InputError: the plan or the bundle is wrong.
        MachineError: a worker died.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    plan = plan or BenchPlan()
    plan.check()
    rows = plan.rows(opened)
    works = plan.works(opened, rows)
    threads = _threads(opened, plan)
    names = list(dict.fromkeys(("tfx", *plan.engines, *(("floor",) if plan.floor else ()))))
    results: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    steps = len(works) + (len(names) if plan.memory else 0)
    with sigterm_raises():
        with Race() as race:
            for name in names:
                progress(f"loading {name}", 0, steps)
                race.add(name, _request(opened, plan, name, threads))
            race.check_equal()
            for done, work in enumerate(works):
                shape = f"{work.batch}x{work.sequence}"
                progress(f"warming up {shape}", done, steps)
                slowest = max(race.prepare(work, plan.warmup).values())
                turns = race.turns(
                    total_calls(plan.rounds, plan.seconds, slowest),
                    progress=lambda name, shape=shape, done=done: progress(f"{name} {shape}", done, steps),
                )
                peaks = {name: race.ask(name, {"do": "memory"}) for name in names}
                results += _rows(work, turns, peaks)
                ratios += _ratios(work, turns)
            facts = {name: race.facts[name] for name in names}
        memory: dict[str, Any] = {}
        for done, name in enumerate([name for name in names if name != "floor"] if plan.memory else [], len(works)):
            progress(f"{name} over {RUNS} shapes", done, steps)
            memory[name] = measure_memory(_request(opened, plan, name, threads), opened.manifest.max_length, rows)
    results.sort(key=lambda row: names.index(row["engine"]))
    return {
        "bundle": str(opened.path),
        "target": opened.manifest.target,
        "precision": opened.manifest.precision,
        "layout": opened.manifest.layout,
        "provider": facts["tfx"]["provider"],
        "threads": threads,
        "mode": plan.mode,
        "environment": environment(),
        "engines": {name: {**_facts(facts[name]), "memory": memory.get(name)} for name in names if name != "floor"},
        "lengths": None if rows is None else {"spec": plan.lengths, **histogram(rows)},
        "results": results,
        "ratios": ratios,
    }


def ratio(
    above: Sequence[Sequence[float]],
    below: Sequence[Sequence[float]],
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Divide turn by turn: the machine's drift is in both.

    Args:
        above: ms of the calls of each turn.
        below: the same of what is divided by.
        of: what stands for a turn's calls: their median where they are alike, their sum where they are not.

    Returns:
        ``ratio``, the median of the turns' ratios, and the smallest and largest as ``low`` and ``high``.
    """
    each = [of(a) / of(b) for a, b in zip(above, below, strict=True)]
    return {"ratio": statistics.median(each), "low": min(each), "high": max(each)}


def _threads(bundle: Bundle, plan: BenchPlan) -> int:
    cores = default_threads()
    tuning = bundle.manifest.tuning if plan.provider == "cpu" and not plan.engines else None
    tuned = tuning["threads"] if tuning is not None else None
    return plan.threads or (tuned if tuned is not None and tuned <= cores else cores)


def _request(bundle: Bundle, plan: BenchPlan, name: str, threads: int) -> dict[str, Any]:
    return {
        "engine": name,
        "bundle": str(bundle.path),
        "source": plan.source,
        "provider": plan.provider,
        "threads": threads,
    }


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: facts[key] for key in ("provider", "placement", "max_abs", "min_cosine", "load_s", "first_ms")}


def _rows(work: Work, turns: Sequence[Turn], peaks: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Return one row of ``results`` per engine."""
    padding = waste(work.batches)
    calls = sum(len(turn.ms["tfx"]) for turn in turns)
    tokens = sum(work.tokens(turn.first, len(turn.ms["tfx"])) for turn in turns)
    texts = sum(map(len, work.batches)) if work.whole else work.batch
    floor = _median(turns, "floor")
    rows = []
    for name in turns[0].ms:
        if name == "floor":
            continue
        times = [ms for turn in turns for ms in turn.ms[name]]
        p50, p90, p99 = (float(value) for value in np.percentile(times, (50, 90, 99)))
        typical = p50 if _of_turn(work) is statistics.median else sum(times) / len(times)
        cores = [turn.cores[name] for turn in turns if turn.cores.get(name) is not None]
        rows.append(
            {
                "engine": name,
                "batch": work.batch,
                "sequence": work.sequence,
                "tokens": round(tokens / calls),
                "texts": texts,
                "padding": padding,
                "p50_ms": p50,
                "p90_ms": p90,
                "p99_ms": p99,
                "tokens_per_s": tokens / calls / typical * 1e3,
                "texts_per_s": texts / typical * 1e3,
                "peak_rss_mb": peaks[name],
                "rounds": len(times),
                "cores": max((used for used in cores if used is not None), default=None),
                "others": statistics.median(turn.others for turn in turns),
                "floor_ms": floor,
                "above_floor": None if floor is None else ratio(_of(turns, name), _of(turns, "floor"), _of_turn(work)),
            }
        )
    return rows


def _ratios(work: Work, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [
        {
            "engine": name,
            "batch": work.batch,
            "sequence": work.sequence,
            **ratio(_of(turns, name), _of(turns, "tfx"), _of_turn(work)),
        }
        for name in turns[0].ms
        if name not in ("tfx", "floor")
    ]


def _of_turn(work: Work) -> Callable[[Sequence[float]], float]:
    """Calls of one shape have a typical time; those of a histogram only have a sum."""
    return statistics.median if work.whole or len(set(work.batches)) == 1 else sum


def _of(turns: Sequence[Turn], name: str) -> list[Sequence[float]]:
    return [turn.ms[name] for turn in turns]


def _median(turns: Sequence[Turn], name: str) -> float | None:
    times = [ms for turn in turns for ms in turn.ms.get(name, ())]
    return statistics.median(times) if times else None
