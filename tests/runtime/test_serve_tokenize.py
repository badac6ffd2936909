"""Large requests do not hold up small ones while texts are tokenized, take turns, and end when their client leaves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tfx.runtime.serve_batch import BusyError
from tfx.runtime.serve_tokenize import TokenizeQueue

LARGE = "a" * 60_000


class Tokenizer:
    """Notes (first number, first characters) of what it is given; a large text waits inside until ``gate`` is open."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[str]]] = []
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, texts, first):
        self.calls.append((first, [text[:2] for text in texts]))
        self.entered.release()
        if len(texts[0]) > 20_000:
            assert self.gate.wait(20)
        return list(texts)


def run(main):
    """Run a coroutine function with a tokenizer and a queue of 131,072 tokens, with a time limit."""

    async def limited():
        tokenizer, queue = Tokenizer(), TokenizeQueue(131_072)
        try:
            await asyncio.wait_for(main(tokenizer, lambda texts: queue.run(texts, tokenizer)), 30)
        finally:
            tokenizer.gate.set()
            queue.close()
        return tokenizer

    return asyncio.run(limited())


async def entered(tokenizer) -> None:
    assert await asyncio.to_thread(tokenizer.entered.acquire, timeout=20)


def test_a_small_request_passes_a_large_one():
    async def main(tokenizer, ask):
        large = asyncio.create_task(ask([LARGE]))
        await entered(tokenizer)
        assert await ask(["hello"]) == ["hello"]
        assert not large.done()
        tokenizer.gate.set()
        assert await large == [LARGE]

    run(main)


def test_large_requests_take_turns_and_keep_their_order():
    async def main(tokenizer, ask):
        first = asyncio.create_task(ask(["1" + LARGE] * 3))
        await entered(tokenizer)
        second = asyncio.create_task(ask(["2" + LARGE, "3" + LARGE]))
        await asyncio.sleep(0)
        tokenizer.gate.set()
        assert await first == ["1" + LARGE] * 3
        assert await second == ["2" + LARGE, "3" + LARGE]

    tokenizer = run(main)
    assert tokenizer.calls == [(0, ["1a"]), (0, ["2a"]), (1, ["1a"]), (1, ["3a"]), (2, ["1a"])]


def test_who_leaves_is_not_tokenized_to_the_end():
    async def main(tokenizer, ask):
        running = asyncio.create_task(ask(["1" + LARGE] * 5))
        await entered(tokenizer)
        waiting = asyncio.create_task(ask(["2" + LARGE]))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        tokenizer.gate.set()
        assert await ask(["3" + LARGE]) == ["3" + LARGE]

    assert [texts for _, texts in run(main).calls] == [["1a"], ["3a"]]


def test_more_characters_than_may_wait_are_refused_and_other_requests_are_not():
    async def main(tokenizer, ask):
        huge = [asyncio.create_task(ask(["1" * 2_000_000])) for _ in range(4)]
        await entered(tokenizer)
        with pytest.raises(BusyError):
            await ask([LARGE])
        assert await ask(["hello"]) == ["hello"]
        assert len(await ask(["hello " * 100] * 60)) == 60
        tokenizer.gate.set()
        await asyncio.gather(*huge)
        assert await ask([LARGE]) == [LARGE]

    run(main)


def test_one_request_of_many_texts_turns_no_other_away():
    async def main(tokenizer, ask):
        texts = ["a" * 10_000] * 400
        many = asyncio.create_task(ask(texts))
        await entered(tokenizer)
        assert len(await ask(["b" * 10_000] * 10)) == 10
        assert not many.done()
        assert await many == texts

    run(main)


def test_many_short_texts_are_one_slice():
    async def main(tokenizer, ask):
        assert await ask([""] * 5000) == [""] * 5000

    assert len(run(main).calls) == 1
