"""Texts to tokens beside the event loop: small requests do not wait for large ones, and what nobody waits for ends.

A text is tokenized whole before it is cut, so its characters are the work, whatever the number of its tokens. Requests
of few characters have a thread of their own, and so have those with a huge text, which nothing can interrupt; the
others take turns in a third one, some of their texts at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .serve_batch import BusyError
from .text import Encoding

__all__ = ["TokenizeQueue"]

Item = TypeVar("Item", bound=Sized)

_SMALL = 16_384  # characters of a request, and of a text that is not huge
_SHARE = 4  # a request counts as no more than this part of the limit, so that none alone fills the queue
_SLICE = 65_536  # characters between turns: tens of milliseconds
_PER_TOKEN = 4  # characters


class TokenizeQueue:
    """Three threads that tokenize; made and used in one event loop.

    Args:
        queue_tokens: tokens that may wait for the model. So many characters as make them may wait here, in each
            thread; a request that finds nothing waiting is taken whatever its size.
    """

    def __init__(self, queue_tokens: int) -> None:
        self._limit = max(_PER_TOKEN * queue_tokens, _SLICE)
        self._small, self._large, self._huge = (_Lane(f"tfx-encode-{name}") for name in ("small", "large", "huge"))

    async def run(
        self, items: Sequence[Item], encode: Callable[[Sequence[Item], int], list[Encoding]]
    ) -> list[Encoding]:
        """Tokenize the items of a request; cancelled, it leaves the queue after the slice that runs.

        Args:
            items: texts, or lists of token ids.
            encode: given some of the items and the number of their first, returns their tokens.

        Raises:
            BusyError: too much waits.
        """
        sizes = [len(item) for item in items]
        total = min(sum(sizes), self._limit // _SHARE)
        lane = self._huge if max(sizes, default=0) > _SMALL else self._large
        if sum(sizes) <= _SMALL:
            lane = self._small
        if lane.waiting and lane.waiting + total > self._limit:
            raise BusyError(1)
        lane.waiting += total
        try:
            found: list[Encoding] = []
            for start, stop in _slices(sizes):
                loop = asyncio.get_running_loop()
                found += await loop.run_in_executor(lane.thread, encode, items[start:stop], start)
            return found
        finally:
            lane.waiting -= total

    def close(self) -> None:
        """Wait for what runs; nothing else is run."""
        for lane in (self._small, self._large, self._huge):
            lane.thread.shutdown(wait=True, cancel_futures=True)


class _Lane:
    """A thread, and the characters of the requests that wait for it or are in it."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, name)  # the tokenizer itself divides a slice among cores
        self.waiting = 0


def _slices(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of runs of items of about ``_SLICE`` characters, at least one item in each."""
    found: list[tuple[int, int]] = []
    start = held = 0
    for i, size in enumerate(sizes):
        if i > start and held + size > _SLICE:
            found.append((start, i))
            start, held = i, 0
        held += size
    return [*found, (start, len(sizes))]
