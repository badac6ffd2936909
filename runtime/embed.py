"""Texts of a file to vectors in a file: in constant memory, and continued after a kill without losing a row.

The result depends on the input, the bundle and the schedule, and not on where a run was interrupted: rows are computed
in blocks that always are the same, and a run that is continued takes over the schedule that the first one measured.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FeedError, InputError
from . import embed_rows
from .bundle import DEFAULT_BUNDLE, Bundle, sha256_file
from .doctor import default_threads, peak_rss_mb
from .embed_output import Spool, check_out, is_complete
from .manifest import MANIFEST_NAME
from .schedule import Schedule, by_threads, candidates, packed, tuned
from .session import MEASURED_ROWS, Session
from .signals import sigterm_raises
from .text import text_encoder, vector_output

__all__ = ["SCHEDULES", "EmbedPlan", "embed"]

SCHEDULES: Mapping[str, str] = {
    "auto": "measured on the first texts where there are 4096 and more",
    "threads": "as many calls at once as there are threads, one thread each, few tokens a call",
    "packed": "one call at a time on all threads, many tokens a call",
}

Progress = Callable[[str, int, int], None]
"""Told what is done, how many rows are done and how many there are."""


@dataclass(frozen=True)
class EmbedPlan:
    """What ``tfx embed`` is asked for.

    Attributes:
        source: a file of texts, one of ``embed_rows.SUFFIXES``.
        out: a file for vectors, one of ``embed_output.SUFFIXES``.
        bundle: the folder; its model must pool.
        column: where the text is, in files that have columns.
        provider: where to run.
        threads: cores to use, None for the physical ones.
        schedule: one of ``SCHEDULES``.
        batch_tokens: tokens in one call, None for what goes with the schedule.
        resume: continue an unfinished run, or begin one where there is none.
        force: replace ``out``; begin anew where a run is unfinished and ``resume`` is not set.
    """

    source: Path
    out: Path
    bundle: Path = Path(DEFAULT_BUNDLE)
    column: str = "text"
    provider: str = "cpu"
    threads: int | None = None
    schedule: str = "auto"
    batch_tokens: int | None = None
    resume: bool = False
    force: bool = False


def embed(
    plan: EmbedPlan, progress: Progress | None = None, notice: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Compute the vector of every text of a file.

    Args:
        plan: what is asked for.
        progress: told after every call of the model, from several threads.
        notice: given a line for a person where an option has no effect.

    Returns:
        rows, dimension, dtype, out, schedule (None where nothing was left to do), tried (tokens per second of schedules
        that were measured), resumed_rows (done by earlier runs), seconds, texts_per_s (of this run), provider,
        peak_rss_mb.

    Raises:
        InputError: a wrong input or row, named; an output that exists or cannot be written; a run that cannot be
            continued with these options. Nothing appears at ``out`` then.
        BundleError: the bundle is damaged, or has no tokenizer or no pooling.
        MachineError: the provider does not run here, a package is missing, or memory ran out.
    """
    if plan.schedule not in SCHEDULES:
        raise InputError(f'schedule: found "{plan.schedule}", wanted one of {", ".join(SCHEDULES)}')
    check_out(plan.out, resume=plan.resume, force=plan.force)
    tell = progress or (lambda what, done, total: None)
    tell("reading", 0, 0)
    rows = embed_rows.count_texts(plan.source, plan.column)
    bundle = Bundle.open(plan.bundle)
    identity = _identity(plan, bundle, rows)
    if is_complete(plan.out, identity, resume=plan.resume, force=plan.force):
        return _result(plan, identity, resumed=rows)
    with sigterm_raises():
        spool = Spool.resume(plan.out, identity, force=plan.force) if plan.resume else None
        resumed = 0 if spool is None else spool.done
        tried: Mapping[Schedule, float] = {}
        if spool is None:
            schedule, tried = _schedule(plan, bundle, rows)
        else:
            schedule = Schedule.from_json(spool.identity["schedule"])
            if notice is not None and not _asks_for(plan, schedule):
                notice(f"the unfinished run's schedule is kept, so that the file is the same: {schedule}")
        # Threads as the schedule wants them, so that the model is loaded once.
        session = Session(bundle, provider=plan.provider, threads=schedule.threads)
        if spool is None:
            identity["schedule"] = schedule.to_json()
            spool = Spool.begin(plan.out, identity, force=plan.force)
        start = time.perf_counter()
        count = _Count(tell, resumed, rows)
        try:
            texts = islice(embed_rows.read_texts(plan.source, plan.column, resumed), rows - resumed)
            for vectors in session.run_blocks(session.blocks(texts), schedule, first=resumed, done=count):
                spool.write(np.stack(vectors))
            seconds = time.perf_counter() - start
            if spool.done != rows:
                raise InputError(f"{plan.source}: found {spool.done} rows, {rows} at the beginning: it has changed")
            spool.finish()
        except FeedError as error:  # a text without tokens is only found now
            said = re.sub(r"^items\[(\d+)\]", lambda found: f"{plan.source} row {found[1]}", str(error))
            raise FeedError(said) from error
        finally:
            spool.close()
    return {
        **_result(plan, identity, resumed),
        "schedule": schedule.to_json(),
        "tried": [{**each.to_json(), "tokens_per_s": rate} for each, rate in tried.items()],
        "seconds": seconds,
        "texts_per_s": (rows - resumed) / seconds if rows > resumed else None,
        "provider": session.provider,
    }


def _result(plan: EmbedPlan, identity: Mapping[str, Any], resumed: int) -> dict[str, Any]:
    """Return what ``embed`` does where nothing is left to do."""
    return {
        "rows": identity["rows"],
        "dimension": identity["dimension"],
        "dtype": identity["dtype"],
        "out": str(plan.out),
        "schedule": None,
        "tried": [],
        "resumed_rows": resumed,
        "seconds": 0.0,
        "texts_per_s": None,
        "provider": plan.provider,
        "peak_rss_mb": peak_rss_mb(),
    }


class _Count:
    """Counts rows as calls finish them, and tells how far a run is."""

    def __init__(self, tell: Progress, resumed: int, rows: int) -> None:
        self._tell = tell
        self._resumed = resumed
        self._rows = rows
        self._done = 0
        self._start = time.perf_counter()
        self._lock = threading.Lock()

    def __call__(self, rows: int) -> None:
        with self._lock:
            self._done += rows
            rate = self._done / (time.perf_counter() - self._start)
            self._tell(f"{rate:.0f} texts/s", self._resumed + self._done, self._rows)


def _asks_for(plan: EmbedPlan, schedule: Schedule) -> bool:
    """Return whether a schedule is what the options ask for, or they ask for none."""
    cores = plan.threads or schedule.workers * schedule.threads
    named = {"threads": by_threads(cores), "packed": packed(cores)}.get(plan.schedule, schedule)
    return (
        (schedule.workers > 1) == (named.workers > 1)
        and schedule.workers * schedule.threads == cores
        and schedule.batch_tokens == (plan.batch_tokens or schedule.batch_tokens)
    )


def _identity(plan: EmbedPlan, bundle: Bundle, rows: int) -> dict[str, Any]:
    """Return what has to be the same when a run is continued."""
    import onnxruntime

    text_encoder(bundle)  # there has to be one
    output = vector_output(bundle)
    return {
        "input_sha256": sha256_file(plan.source),
        "column": plan.column,
        "bundle_sha256": sha256_file(bundle.path / MANIFEST_NAME),
        "onnxruntime": onnxruntime.__version__,
        "provider": plan.provider,
        "rows": rows,
        "dimension": output.shape[1],
        "dtype": output.dtype,
    }


def _schedule(plan: EmbedPlan, bundle: Bundle, rows: int) -> tuple[Schedule, Mapping[Schedule, float]]:
    """Return the schedule of a new run, and what was measured to choose it."""
    cores = plan.threads or default_threads()
    tried = candidates(cores, plan.provider)
    if plan.schedule == "auto" and plan.provider == "cpu" and plan.threads is None and plan.batch_tokens is None:
        known = tuned(bundle.manifest.tuning, cores)
        if known is not None:
            return known, {}
    if plan.schedule != "auto":
        tried = [by_threads(cores) if plan.schedule == "threads" else packed(cores)]
    if plan.batch_tokens is not None:
        tried = list(dict.fromkeys(Schedule(each.workers, each.threads, plan.batch_tokens) for each in tried))
    if len(tried) == 1 or rows < MEASURED_ROWS:
        return tried[0], {}
    session = Session(bundle, provider=plan.provider, threads=tried[0].threads)
    texts = list(islice(embed_rows.read_texts(plan.source, plan.column), MEASURED_ROWS))
    return session.choose_schedule(texts, tried=tried)
