"""Requests that come at the same time share calls: a queue of tokens in front of a few threads that run the model.

A call starts as soon as a worker is free, with as many waiting sequences as fit into the schedule's tokens, so there is
nothing to wait for when the machine is idle, and calls are full when it is not. A request that fits into one call and
finds nothing else to be done takes the threads of all workers, so that a lone client does not wait for one core while
the others rest; where several wait, a core for each brings more. Requests take turns: one of a thousand texts does not
hold up one of a single text. A sequence that fails is run again by itself, and fails alone.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from .schedule import Call, Schedule, groups
from .text import Encoding

__all__ = ["Batcher", "BusyError", "RowError"]

_LOOK_AHEAD = 4  # calls' worth of tokens among which neighbours in length are looked for
_LONGEST_RETRY = 60  # seconds

Watch = Callable[[int, int, float], None]
"""Told the rows, tokens and seconds of each call, in the event loop's thread."""


class BusyError(Exception):
    """The queue is full.

    Attributes:
        retry_after: seconds, at least 1, after which there is probably room.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class RowError(Exception):
    """One sequence of a request failed.

    Attributes:
        row: its number in the request.
        reason: what the call raised.
    """

    def __init__(self, row: int, reason: Exception) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row = row
        self.reason = reason


@dataclass(eq=False)
class _Job:
    """A request: its sequences, those that wait (in order, longest first) and what has come out so far."""

    encodings: Sequence[Encoding]
    done: asyncio.Future[list[np.ndarray]]
    since: float
    waiting: dict[int, None] = field(default_factory=dict)
    found: dict[int, np.ndarray] = field(default_factory=dict)


class Batcher:
    """Runs sequences of many requests in shared calls; made and used in one event loop.

    Args:
        call: runs sequences and returns one vector (d,) for each; called from ``schedule.workers`` threads at once.
        schedule: calls at once, and tokens in each.
        padded: count each row as long as the longest of its call, which is what a padded graph computes.
        queue_tokens: tokens that may wait; more are refused.
        max_wait: seconds that a sequence may wait for others to fill its call, although a worker is free.
        watch: told of each call.
        lone: runs sequences as ``call`` does, on the threads of all workers; None where there is no such thing.
    """

    def __init__(
        self,
        call: Call,
        schedule: Schedule,
        *,
        padded: bool,
        queue_tokens: int,
        max_wait: float = 0.0,
        watch: Watch | None = None,
        lone: Call | None = None,
    ) -> None:
        self._call = call
        self._lone = lone
        self._schedule = schedule
        self._padded = padded
        self._queue_tokens = queue_tokens
        self._max_wait = max_wait
        self._watch = watch or (lambda rows, tokens, seconds: None)
        self._pool = ThreadPoolExecutor(schedule.workers, "tfx-call")
        self._free = schedule.workers
        self._jobs: deque[_Job] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._seconds_per_token = 0.0  # of late, of all workers together
        self.tokens = 0
        self.rows = 0

    def check(self, tokens: int) -> None:
        """Refuse a request of so many tokens that would not fit.

        Raises:
            BusyError: it would not.
        """
        if self.tokens + tokens > self._queue_tokens:
            seconds = math.ceil(self.tokens * self._seconds_per_token)
            raise BusyError(min(max(seconds, 1), _LONGEST_RETRY))

    async def run(self, encodings: Sequence[Encoding]) -> list[np.ndarray]:
        """Run a request's sequences and return their vectors, float32 (d,), in order; cancelled, it leaves the queue.

        Raises:
            BusyError: there is no room.
            RowError: a sequence failed, or its vector holds NaN or infinity.
        """
        if not encodings:
            return []
        self.check(sum(len(encoding) for encoding in encodings))
        loop = asyncio.get_running_loop()
        job = _Job(encodings, loop.create_future(), loop.time())
        order = sorted(range(len(encodings)), key=lambda row: -len(encodings[row]))
        job.waiting = dict.fromkeys(order)
        self.tokens += sum(len(encoding) for encoding in encodings)
        self.rows += len(encodings)
        self._jobs.append(job)
        self._dispatch()
        try:
            return await job.done
        finally:
            self._drop(job)

    async def close(self) -> None:
        """Wait for the calls that run; nothing else is run."""
        if self._timer is not None:
            self._timer.cancel()
        for job in list(self._jobs):
            self._drop(job)
        # Not in the event loop's thread, where requests that are cancelled still want to be answered.
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    def _drop(self, job: _Job) -> None:
        """Take out of the queue what of a request still waits there."""
        for row in list(job.waiting):
            self._leave(job, row)
        if job in self._jobs:
            self._jobs.remove(job)

    def _leave(self, job: _Job, row: int) -> None:
        del job.waiting[row]
        self.tokens -= len(job.encodings[row])
        self.rows -= 1

    def _dispatch(self) -> None:
        """Start calls while there are workers and sequences."""
        loop = asyncio.get_running_loop()
        while self._free and self._jobs:
            wait = self._wait(loop.time())
            if wait > 0:
                if self._timer is None:
                    self._timer = loop.call_later(wait, self._waited)
                return
            batch = self._take()
            call, workers = self._call, 1
            one_request = not self._jobs and len({job for job, _ in batch}) == 1
            if self._lone is not None and one_request and self._free == self._schedule.workers:
                call, workers = self._lone, self._free
            self._free -= workers
            future = self._pool.submit(self._timed, call, [job.encodings[row] for job, row in batch])
            deliver = functools.partial(self._deliver, batch, workers)
            future.add_done_callback(lambda done, deliver=deliver: loop.call_soon_threadsafe(deliver, done))

    def _waited(self) -> None:
        self._timer = None
        self._dispatch()

    def _wait(self, now: float) -> float:
        """Return how long the next call may wait for more sequences."""
        if not self._max_wait or self.tokens >= self._schedule.batch_tokens:
            return 0.0
        return min(job.since for job in self._jobs) + self._max_wait - now

    def _take(self) -> list[tuple[_Job, int]]:
        """Take the sequences of one call out of the queue: the one whose turn it is, and its neighbours in length."""
        ahead = list(self._in_turn(_LOOK_AHEAD * self._schedule.batch_tokens))
        lengths = [len(job.encodings[row]) for job, row in ahead]
        division = groups(lengths, self._schedule.batch_tokens, padded=self._padded)
        chosen = [ahead[i] for i in next(group for group in division if 0 in group)]
        for job, row in chosen:
            self._leave(job, row)
        first = self._jobs.popleft()  # its turn is over
        self._jobs.append(first)
        for job in dict.fromkeys(job for job, _ in chosen):
            if not job.waiting:
                self._jobs.remove(job)
        return chosen

    def _in_turn(self, tokens: int) -> Iterator[tuple[_Job, int]]:
        """Yield waiting sequences, one of each request after the other, until there are so many tokens."""
        turns = deque((job, iter(job.waiting)) for job in self._jobs)
        while turns and tokens > 0:
            job, rows = turns.popleft()
            row = next(rows, None)
            if row is not None:
                tokens -= len(job.encodings[row])
                turns.append((job, rows))
                yield job, row

    def _timed(self, call: Call, encodings: list[Encoding]) -> tuple[list[np.ndarray | Exception], float]:
        start = time.perf_counter()
        return self._rows(call, encodings), time.perf_counter() - start

    def _rows(self, call: Call, encodings: list[Encoding]) -> list[np.ndarray | Exception]:
        """Run sequences; what a row raises takes the place of its vector."""
        try:
            values = [np.asarray(row, np.float32) for row in call(encodings)]
            if len(values) != len(encodings):
                raise ArithmeticError(f"the model gave {len(values)} vectors for {len(encodings)} texts")
        except Exception as error:  # noqa: BLE001 - whatever it is, each request has to hear of its own
            if len(encodings) == 1:
                return [error]
            return [self._rows(call, [encoding])[0] for encoding in encodings]
        return [row if np.isfinite(row).all() else ArithmeticError("the model gave NaN or infinity") for row in values]

    def _deliver(
        self, batch: list[tuple[_Job, int]], workers: int, done: Future[tuple[list[np.ndarray | Exception], float]]
    ) -> None:
        """Hand a call's vectors to their requests, in the event loop's thread."""
        self._free += workers
        if done.cancelled():
            return
        rows, seconds = done.result()
        tokens = sum(len(job.encodings[row]) for job, row in batch)
        lately = seconds / tokens * workers / self._schedule.workers
        self._seconds_per_token += (lately - self._seconds_per_token) / (8 if self._seconds_per_token else 1)
        self._watch(len(batch), tokens, seconds)
        for (job, row), found in zip(batch, rows, strict=True):
            if job.done.done():  # failed or cancelled meanwhile
                continue
            if isinstance(found, Exception):
                job.done.set_exception(RowError(row, found))
                self._drop(job)  # nobody wants its other rows
                continue
            job.found[row] = found
            if len(job.found) == len(job.encodings):
                job.done.set_result([job.found[i] for i in range(len(job.encodings))])
        self._dispatch()
