"""``tfx tune``: which layout, lowering, precision and session settings are fastest for the texts of one application.

One choice after the other is tried against the best so far, on the user's own lengths: both stay loaded, in processes
of their own, and take turns (:mod:`..runtime.bench_race`) until they differ beyond noise or do not differ at all
(:mod:`.tune_log`). What does not reach the parity limit is not timed.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, TfxError
from ..runtime.bench import MODES, BenchPlan
from ..runtime.bench_race import Race, Work
from ..runtime.bundle import Bundle, sha256_file, write_bundle
from ..runtime.doctor import default_threads, environment
from ..runtime.lengths import histogram, holds_texts
from ..runtime.manifest import Manifest
from ..runtime.schedule import candidates as schedules
from ..runtime.schedule import tuned as tuned_schedule
from ..runtime.signals import sigterm_raises
from .tune_log import LOG_NAME, TuneLog, Verdict, judge
from .tune_variants import LOWERINGS, Limit, Variants, precisions

__all__ = ["STAGES", "Settings", "TunePlan", "tune"]

_GRAPH = ("layout", "lowering", "precision")
STAGES = (*_GRAPH, "threads", "spinning", "schedule")
"""What is tried, in this order: what changes the graph first, for it decides how threads are best used."""

_TURN_MS = 150.0
"""About how long a turn of the slower one takes: long beside the noise of clocks and of waking threads."""

_TURNS, _MOST_TURNS = 10, 40


@dataclasses.dataclass(frozen=True)
class Settings:
    """A point that tuning can reach.

    Attributes:
        layout: ``padded`` or ``ragged``.
        lowering: A name out of ``tune_variants.LOWERINGS``, or ``exported``: the graph as it is.
        precision: A name of :mod:`.precision`.
        threads: Threads inside an operator.
        spinning: Whether idle threads wait in a loop.
        schedule: What ``Session.run_many`` is told, ``None`` for latencies, where it plays no part.
    """

    layout: str
    lowering: str
    precision: str
    threads: int
    spinning: bool = True
    schedule: Mapping[str, int] | None = None

    @property
    def graph(self) -> tuple[str, str, str]:
        """What the graph is made of."""
        return self.layout, self.lowering, self.precision

    def to_json(self) -> dict[str, Any]:
        """By name, as the log has it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        parts = [self.layout, self.lowering, self.precision, f"{self.threads} threads"]
        parts += [] if self.spinning else ["no spinning"]
        if self.schedule is not None:
            parts.append("{workers} x {threads} x {batch_tokens} tokens".format(**self.schedule))
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class TunePlan:
    """What to tune for.

    Attributes:
        lengths: A length histogram, as :mod:`..runtime.lengths` reads it.
        batch: Rows of a call, in latency mode.
        mode: ``latency`` or ``throughput``, as :class:`BenchPlan` has them.
        count: Rows drawn from the histogram.
        seed: Of what is drawn.
        threads: Most threads to use, ``None`` for the physical cores of this machine.
        min_cosine: Smallest cosine of a vector with the source's, on the user's texts where ``lengths`` is a ``.txt``
            of them, on docstrings where the bundle has a tokenizer, else on the golden; ``None`` for the bundle's own
            tolerance, which lets no other precision in.
        budget: Seconds after which no new candidate is begun.
        stages: What to try, out of ``STAGES``.
        fresh: Forget what an earlier run found out.
        source: What the bundle was made of: a checkpoint's folder or pkg.mod:factory. A bundle that is ragged or
            quantised needs it for other layouts and precisions; one of a reference encoder never does.
    """

    lengths: str = "lognormal:60,256"
    batch: int = 8
    mode: str = "latency"
    count: int = 64
    seed: int = 0
    threads: int | None = None
    min_cosine: float | None = None
    budget: float = 600.0
    stages: Sequence[str] = STAGES
    fresh: bool = False
    source: str | None = None

    def check(self) -> None:
        """Refuses what contradicts itself.

        Raises:
            InputError: an unknown stage or mode, or a number out of its range.
        """
        for stage in self.stages:
            if stage not in STAGES:
                raise InputError(f'stage: found "{stage}", wanted one of {", ".join(STAGES)}')
        if self.mode not in MODES:
            raise InputError(f'mode: found "{self.mode}", wanted one of {", ".join(MODES)}')
        if self.min_cosine is not None and not -1 <= self.min_cosine <= 1:
            raise InputError(f"min_cosine: found {self.min_cosine}, wanted -1 to 1")
        if not self.budget >= 0:
            raise InputError(f"budget: found {self.budget}, wanted seconds, 0 or more")


Progress = Callable[[str], None]


def tune(bundle: str | Path, plan: TunePlan | None = None, *, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Tunes a bundle and writes the winner into it, with the log of what was tried.

    Args:
        bundle: The folder. It is replaced whole, at the end; until then it stays as it is.
        plan: What to tune for.
        progress: Told what is being done.

    Returns:
        ``start`` (what the bundle had), ``winner`` (settings by name; ``start`` where what won step by step is not
        faster in all), ``gain`` (times as fast as at the start, measured once more against
        it, with ``low`` and ``high``; 1 where nothing was kept), ``tried`` (the log's entries), ``lengths`` (the
        histogram), ``resumed`` (entries of an earlier run), ``finished`` and ``seconds``.

    Raises:
        InputError: The plan is wrong, the bundle cannot be written, or it is for another target than ``cpu`` and the
            stages would change its graph.
        ParityError: The bundle does not pass its own golden, or the winner, once written, does not.
        MachineError: A process died.
    """
    plan = plan or TunePlan()
    plan.check()
    opened = Bundle.open(bundle)
    target = opened.manifest.target
    if target != "cpu" and set(plan.stages) & set(_GRAPH):
        others = ",".join(stage for stage in STAGES if stage not in _GRAPH)
        raise InputError(
            f"{bundle}: found target {target}, wanted cpu: the fastest graph here would run nowhere else; "
            f"--only {others} leaves the graph as it is"
        )
    cores = default_threads() if plan.threads is None else plan.threads
    timed = BenchPlan((plan.batch,), lengths=plan.lengths, count=plan.count, seed=plan.seed, mode=plan.mode)
    rows = timed.rows(opened)
    assert rows is not None
    (work,) = timed.works(opened, rows)
    base = sha256_file(opened.model_path)
    setting = _setting(plan, cores, rows)
    started = time.monotonic()
    exported = _exported(opened.manifest, cores, plan.mode)
    log = TuneLog(opened.path, base, setting, exported.to_json(), fresh=plan.fresh)
    start = exported if log.winner is None else _read(log.winner)
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="tfx-tune-") as folder:
        texts = plan.lengths if opened.manifest.tokenizer is not None and holds_texts(plan.lengths) else None
        variants = Variants(opened, Path(folder), start.lowering, plan.source, texts)
        search = _Search(plan, log, variants, work, cores, started, progress)
        winner, finished = search.run(_read(log.best))
        gain = search.compare(winner, start) if winner != start else None
        if gain is not None and gain["gain"] < 1:  # what is there is better
            winner, gain = start, None
        progress("writing")
        made, manifest = variants.bundle(*winner.graph), variants.proven(*winner.graph)
        result = _write(opened, made, manifest, winner, log, finished=finished)
    log.remove()
    return {
        "bundle": str(result.path),
        "start": start.to_json(),
        "winner": winner.to_json(),
        "gain": gain or {"gain": 1.0, "low": 1.0, "high": 1.0},
        "tried": log.tried,
        "lengths": {"spec": plan.lengths, **histogram(rows)},
        "mode": plan.mode,
        "resumed": log.resumed,
        "finished": finished,
        "seconds": round(time.monotonic() - started, 1),
    }


class _Search:
    """One choice after the other against the best so far."""

    def __init__(
        self,
        plan: TunePlan,
        log: TuneLog,
        variants: Variants,
        work: Work,
        cores: int,
        started: float,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._log = log
        self._variants = variants
        self._work = work
        self._cores = cores
        self._started = started
        self._progress = progress
        self._limit = Limit.of(variants.base.manifest, plan.min_cosine)

    def run(self, best: Settings) -> tuple[Settings, bool]:
        """Returns the best settings from ``best`` on, and whether all stages were gone through."""
        for stage in STAGES:
            if stage not in self._plan.stages:
                continue
            # Each candidate differs from the best that there was when its stage began, maybe in an earlier run.
            entries = self._log.of(stage)
            began = _read(entries[0]["against"]) if entries else best
            for change in list(self._changes(stage, began)):
                known = any(change.items() <= entry["candidate"].items() for entry in entries)
                candidate = dataclasses.replace(best, **change)
                if known or candidate == best or dataclasses.replace(began, **change) == began:
                    continue
                if time.monotonic() - self._started > self._plan.budget:
                    return best, False
                self._progress(f"{stage}: {candidate}")
                entry = self._try(stage, candidate, best)
                self._log.add(entry)
                if entry["verdict"] == Verdict.FASTER:
                    best = candidate
        return best, True

    def _changes(self, stage: str, best: Settings) -> Iterator[dict[str, Any]]:
        if stage == "layout":
            for layout in ("ragged", "padded"):
                # A graph that is taken apart is put together again: by the usual lowering, where it is as exported.
                lowering = next(iter(LOWERINGS)) if best.lowering == "exported" else best.lowering
                if layout != best.layout:
                    yield {"layout": layout, "lowering": lowering}
        elif stage == "lowering":
            yield from ({"lowering": name} for name in LOWERINGS)
        elif stage == "precision":
            lowering = next(iter(LOWERINGS)) if best.lowering == "exported" else best.lowering
            for name in precisions(self._variants.base.manifest, self._limit):
                yield {"precision": name, "lowering": lowering}
        elif stage == "threads":
            yield from (
                {"threads": count} for count in sorted({self._cores, max(1, self._cores // 2), 1}, reverse=True)
            )
        elif stage == "spinning":
            yield {"spinning": not best.spinning}
        elif stage == "schedule" and self._plan.mode == "throughput":
            yield from ({"schedule": each.to_json()} for each in schedules(self._cores))

    def _try(self, stage: str, candidate: Settings, best: Settings) -> dict[str, Any]:
        """Makes, checks and times a candidate, and returns its entry of the log."""
        began = time.monotonic()
        entry: dict[str, Any] = {
            "stage": stage, "candidate": candidate.to_json(), "against": best.to_json(), "verdict": None, "reason": "",
            "ratio": None, "low": None, "high": None, "turns": 0, "candidate_ms": None, "against_ms": None,
            "min_cosine": None, "max_abs": None,
        }  # fmt: skip
        try:
            made = self._variants.bundle(*candidate.graph)
            agreement = self._variants.agreement(*candidate.graph)
            entry |= {"min_cosine": agreement.cosine, "max_abs": agreement.max_abs}
            problem = self._limit.problem(agreement)
            if problem is not None:
                entry |= {"verdict": Verdict.PARITY, "reason": problem}
            else:
                entry |= self._timed(candidate, made, best)
        except TfxError as error:
            entry |= {"verdict": Verdict.REFUSED, "reason": str(error)}
        except Exception as error:  # noqa: BLE001 - a candidate that fails must not end the others
            entry |= {"verdict": Verdict.REFUSED, "reason": f"unexpected {type(error).__name__}: {error}"}
        return {**entry, "seconds": round(time.monotonic() - began, 1)}

    def _timed(self, candidate: Settings, made: Bundle, best: Settings) -> dict[str, Any]:
        ratios: list[float] = []
        times: dict[str, list[float]] = {"candidate": [], "best": []}
        with Race() as race:
            race.add("candidate", _request(made, candidate))
            race.add("best", _request(self._variants.bundle(*best.graph), best))
            slowest = max(race.prepare(self._work, 2).values())
            calls = max(1, round(_TURN_MS / max(slowest, 1e-3)))
            while True:
                for turn in race.turns(calls * _TURNS):
                    ratios.append(sum(turn.ms["candidate"]) / sum(turn.ms["best"]))
                    for name, ms in times.items():
                        ms.append(sum(turn.ms[name]) / len(turn.ms[name]))
                late = time.monotonic() - self._started > self._plan.budget
                judged = judge(ratios, last=len(ratios) >= _MOST_TURNS or late)
                if judged.verdict is not None:
                    break
        return {
            **dataclasses.asdict(judged),
            "turns": len(ratios),
            "candidate_ms": _middle(times["candidate"]),
            "against_ms": _middle(times["best"]),
        }

    def compare(self, winner: Settings, start: Settings) -> dict[str, float]:
        """How many times as fast the winner is as the start, measured once more: steps do not just multiply."""
        self._progress(f"once more: {winner}")
        found = self._timed(winner, self._variants.bundle(*winner.graph), start)
        return {"gain": 1 / found["ratio"], "low": 1 / found["high"], "high": 1 / found["low"]}


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _request(bundle: Bundle, settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {"spinning": settings.spinning}
    if settings.schedule is not None:
        options["schedule"] = dict(settings.schedule)
    return {
        "engine": "tfx",
        "bundle": str(bundle.path),
        "source": None,
        "provider": "cpu",
        "threads": settings.threads,
        "options": options,
    }


def _setting(plan: TunePlan, cores: int, rows: Sequence[int]) -> dict[str, Any]:
    here = environment()
    return {
        **{key: getattr(plan, key) for key in ("lengths", "batch", "mode", "count", "seed", "min_cosine")},
        "cores": cores,
        "tokens": sum(rows),  # a file of lengths may have changed
        **{key: here[key] for key in ("cpu", "onnxruntime", "tfx")},
    }


def _exported(manifest: Manifest, cores: int, mode: str) -> Settings:
    """The settings of a bundle as it is: what it was tuned to for other texts, where these cores allow it."""
    tuning = manifest.tuning or {}
    schedule = None
    if mode == "throughput":
        schedule = (tuned_schedule(manifest.tuning, cores) or schedules(cores)[0]).to_json()
    threads = tuning.get("threads") or cores
    return Settings(
        manifest.layout,
        "exported",
        manifest.precision,
        threads if threads <= cores else cores,
        spinning=tuning.get("spinning") is not False,
        schedule=schedule,
    )


def _read(settings: Mapping[str, Any]) -> Settings:
    try:
        return Settings(**settings)
    except TypeError as error:
        raise InputError(f"{LOG_NAME}: found the settings {dict(settings)}; tune with --fresh") from error


def _write(
    opened: Bundle, made: Bundle, manifest: Manifest, winner: Settings, log: TuneLog, *, finished: bool
) -> Bundle:
    """Puts the winner in the place of the bundle, whole or not at all."""
    result = sha256_file(made.model_path)

    def fill(folder: Path) -> Manifest:
        for name in made.manifest.files:
            if name != LOG_NAME:
                shutil.copyfile(made.path / name, folder / name)
        (folder / LOG_NAME).write_text(log.text(winner.to_json(), result, finished=finished), encoding="utf-8")
        # Tuned for latencies, a bundle keeps the schedule that it has.
        schedule = (opened.manifest.tuning or {}).get("schedule") if winner.schedule is None else winner.schedule
        tuning = {
            "threads": winner.threads,
            "spinning": winner.spinning,
            "schedule": None if schedule is None else dict(schedule),
            "log": LOG_NAME,
        }
        return dataclasses.replace(manifest, tuning=tuning)

    return write_bundle(opened.path, fill, force=True)
