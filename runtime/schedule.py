"""Many sequences through one model: which go into one call, how many calls at once, and the results in order.

A batch padded to its longest row computes padding, and a batch on all cores leaves cores idle wherever an operator does
not divide. Two ways around it, of which measurement chooses (``fastest``): calls of few tokens, one thread each, as
many at once as there are cores; or one call of many tokens on all threads.

Rows come in blocks. A block's calls depend on nothing but its own rows and the schedule, so the same block gives the
same bits wherever a run starts. Several blocks are on their way: one is tokenized while others compute, and no core
waits for the end of a block.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..errors import InputError
from .text import Encoding

__all__ = [
    "Call",
    "Schedule",
    "blocks_of",
    "by_threads",
    "candidates",
    "fastest",
    "groups",
    "in_order",
    "packed",
    "sample",
    "tuned",
]

T = TypeVar("T")

Call = Callable[[list[Encoding]], Iterable[Any]]
"""Runs sequences together and returns one result for each."""

_AHEAD = 3  # blocks on their way: one is being tokenized, one computes, one follows
_ROUNDS = 3
_NEAR = 0.97  # a later candidate has to be this much faster: beyond the noise of a short measurement


@dataclass(frozen=True)
class Schedule:
    """How sequences are run.

    Attributes:
        workers: calls at once.
        threads: threads inside an operator of each call.
        batch_tokens: tokens in one call, padding counted where the layout computes it. A longer sequence goes alone.

    Raises:
        InputError: a number below 1.
    """

    workers: int
    threads: int
    batch_tokens: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"schedule.{name}: found {value!r}, wanted a whole number of at least 1")

    def to_json(self) -> dict[str, int]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Schedule:
        """Read what ``to_json`` returned.

        Raises:
            InputError: a field is missing, unknown or no number.
        """
        try:
            return cls(**value)
        except TypeError as error:
            raise InputError(f"schedule: found {dict(value)}, wanted workers, threads and batch_tokens") from error

    def __str__(self) -> str:
        calls = "1 call" if self.workers == 1 else f"{self.workers} calls"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{calls} at once, {threads} each, up to {self.batch_tokens} tokens a call"


def by_threads(cores: int, batch_tokens: int = 256) -> Schedule:
    """Return the schedule of small calls, one thread each, as many at once as there are cores."""
    return Schedule(cores, 1, batch_tokens)


def packed(cores: int, batch_tokens: int | None = None) -> Schedule:
    """Return the schedule of one large call at a time on all cores: 4096 tokens, more where many cores divide them."""
    return Schedule(1, cores, max(4096, 256 * cores) if batch_tokens is None else batch_tokens)


def candidates(cores: int, provider: str = "cpu") -> list[Schedule]:
    """Return the schedules worth trying; the first is what is taken without a measurement."""
    if provider != "cpu":  # a device divides a call by itself, and wants it large
        return [Schedule(1, 1, 16384)]
    found = [by_threads(cores), by_threads(cores, 1024), packed(cores)]
    if cores >= 8:  # memory bandwidth or a shared cache may favour something between
        found.append(Schedule(cores // 4, 4, 2048))
    return list(dict.fromkeys(found))


def tuned(tuning: Mapping[str, Any] | None, cores: int) -> Schedule | None:
    """Return the schedule in a manifest's ``tuning``; None without one, or where it wants more cores than there are."""
    if tuning is None or tuning["schedule"] is None:
        return None
    schedule = Schedule.from_json(tuning["schedule"])
    return schedule if schedule.workers * schedule.threads <= cores else None


def groups(lengths: Sequence[int], batch_tokens: int, *, padded: bool) -> list[list[int]]:
    """Divide sequences into calls.

    Neighbours in length share a call, so little of it is padding; long ones go first, so that short calls fill up the
    end, when cores run out of work.

    Args:
        lengths: tokens of each sequence.
        batch_tokens: tokens in one call.
        padded: count each row as long as the longest of its call, which is what a padded graph computes.

    Returns:
        Positions in ``lengths``, each exactly once. The same lengths give the same division.
    """
    found: list[list[int]] = []
    rows: list[int] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = max(1, lengths[rows[0]] if rows and padded else lengths[i])
        if rows and tokens + length > batch_tokens:
            found.append(rows)
            rows, tokens, length = [], 0, max(1, lengths[i])
        rows.append(i)
        tokens += length
    return [*found, rows] if rows else found


def blocks_of(items: Iterable[T], rows: int, size: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut a stream into blocks of at most ``rows`` items that together have about ``size``; one item may have more."""
    block: list[T] = []
    total = 0
    for item in items:
        block.append(item)
        total += size_of(item)
        if len(block) >= rows or total >= size:
            yield block
            block, total = [], 0
    if block:
        yield block


def in_order(
    blocks: Iterable[Sequence[T]],
    encode: Callable[[Sequence[T], int], list[Encoding]],
    call: Call,
    schedule: Schedule,
    *,
    padded: bool,
    first: int = 0,
) -> Generator[list[Any], None, None]:
    """Run blocks of rows and yield the results of each block, in order.

    Args:
        blocks: rows; a few blocks ahead are taken of it, in the thread that asks for results.
        encode: makes sequences of a block and the number of its first row; it has a thread of its own.
        call: runs sequences; called from ``schedule.workers`` threads at once.
        schedule: how the sequences are divided and how many calls run at once.
        padded: as in ``groups``.
        first: number of the first row.

    Raises:
        What ``blocks``, ``encode`` and ``call`` raise, where the block would have come: the blocks before it come
        first. Nothing runs on afterwards.
    """
    waiting: deque[Future[tuple[int, list[tuple[list[int], Future[Iterable[Any]]]]]]] = deque()
    encoder = ThreadPoolExecutor(1, "tfx-encode")
    callers = ThreadPoolExecutor(schedule.workers, "tfx-call")

    def start(block: Sequence[T], number: int) -> tuple[int, list[tuple[list[int], Future[Iterable[Any]]]]]:
        encodings = encode(block, number)
        division = groups([len(encoding) for encoding in encodings], schedule.batch_tokens, padded=padded)
        return len(encodings), [(rows, callers.submit(call, [encodings[i] for i in rows])) for rows in division]

    source = iter(blocks)
    failure: Exception | None = None
    try:
        while True:
            try:  # around the source alone: what a reader throws in at ``yield`` ends everything at once
                block = next(source, None)
            except Exception as error:  # noqa: BLE001 - raised below, behind the blocks that came before it
                failure = error
                break
            if block is None:
                break
            waiting.append(encoder.submit(start, block, first))
            first += len(block)
            if len(waiting) == _AHEAD:
                yield _collect(*waiting.popleft().result())
        while waiting:
            yield _collect(*waiting.popleft().result())
        if failure is not None:
            raise failure
    finally:
        encoder.shutdown(wait=True, cancel_futures=True)
        callers.shutdown(wait=True, cancel_futures=True)


def _collect(count: int, calls: list[tuple[list[int], Future[Iterable[Any]]]]) -> list[Any]:
    results: list[Any] = [None] * count
    for rows, call in calls:
        for row, result in zip(rows, call.result(), strict=True):
            results[row] = result
    return results


def sample(encodings: Sequence[Encoding], tokens: int) -> list[Encoding]:
    """Return some of the sequences, of all lengths alike, that have about so many tokens together."""
    total = sum(len(encoding) for encoding in encodings)
    by_length = sorted(encodings, key=len)
    count = max(1, min(len(by_length), round(len(by_length) * tokens / max(total, 1))))
    return [by_length[(2 * i + 1) * len(by_length) // (2 * count)] for i in range(count)]


def fastest(
    tried: Sequence[Schedule],
    call_of: Callable[[Schedule], Call],
    encodings: Sequence[Encoding],
    *,
    padded: bool,
    seconds: float = 0.25,
) -> tuple[Schedule, dict[Schedule, float]]:
    """Time schedules on the same sequences, in turns, and choose.

    Args:
        tried: the schedules; of nearly equal ones the first is chosen.
        call_of: gives the function that runs sequences under a schedule.
        encodings: what is to be run; a sample of all their lengths is timed.
        padded: as in ``groups``.
        seconds: about how long one schedule takes in one of the three rounds.

    Returns:
        The schedule, and tokens per second of each (the median round).
    """
    calls = {schedule: call_of(schedule) for schedule in tried}

    def timed(schedule: Schedule, chosen: Sequence[Encoding]) -> float:
        start = time.perf_counter()
        for _ in in_order([chosen], lambda block, _: list(block), calls[schedule], schedule, padded=padded):
            pass
        return time.perf_counter() - start

    # A first look sizes the sample, and takes on it what first calls cost.
    few = sample(encodings, 512 * max(schedule.workers for schedule in tried))
    for schedule in tried:
        timed(schedule, few)
    rate = _tokens(few) / timed(tried[0], few)
    chosen = sample(encodings, max(_tokens(few), round(rate * seconds)))
    times: dict[Schedule, list[float]] = {schedule: [] for schedule in tried}
    for turn in range(_ROUNDS):
        for i in range(len(tried)):
            schedule = tried[(i + turn) % len(tried)]
            times[schedule].append(timed(schedule, chosen))
    medians = {schedule: statistics.median(found) for schedule, found in times.items()}
    best = tried[0]
    for schedule in tried[1:]:
        if medians[schedule] < _NEAR * medians[best]:
            best = schedule
    return best, {schedule: _tokens(chosen) / median for schedule, median in medians.items()}


def _tokens(encodings: Sequence[Encoding]) -> int:
    return sum(len(encoding) for encoding in encodings)
