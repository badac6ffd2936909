"""Requests share calls, take turns, leave when nobody waits for them, and fail alone."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from tfx.runtime.schedule import Schedule
from tfx.runtime.serve_batch import Batcher, BusyError, RowError
from tfx.runtime.text import Encoding


def sequence(length: int, value: int = 1) -> Encoding:
    return Encoding([value] * length, [0] * length)


class Model:
    """Gives (first id, length) for each sequence; holds calls while ``gate`` is closed."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def __call__(self, encodings):
        self.calls.append([(encoding.ids[0], len(encoding)) for encoding in encodings])
        self.entered.release()
        assert self.gate.wait(20)
        if any(encoding.ids[0] == 13 for encoding in encodings):
            raise RuntimeError("unlucky")
        values = np.array([(encoding.ids[0], len(encoding)) for encoding in encodings], np.float32)
        values[values[:, 0] == 99] = np.nan
        return values

    async def enter(self):
        """Wait until a call is inside."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=20)


def batcher(model, *, workers=1, batch_tokens=16, **options) -> Batcher:
    options = {"padded": False, "queue_tokens": 1000, **options}
    return Batcher(model, Schedule(workers, 1, batch_tokens), **options)


def run(main):
    """Run a coroutine function with a time limit."""
    return asyncio.run(asyncio.wait_for(main(), 30))


def test_vectors_come_in_order_and_calls_keep_to_the_budget():
    model = Model()

    async def main():
        queue = batcher(model)
        lengths = [3, 9, 1, 16, 40, 2, 5, 5]
        found = await queue.run([sequence(n, i) for i, n in enumerate(lengths)])
        assert [tuple(row) for row in found] == [(i, n) for i, n in enumerate(lengths)]
        assert all(row.dtype == np.float32 for row in found)
        await queue.close()
        return queue

    queue = run(main)
    assert all(sum(n for _, n in call) <= 16 or len(call) == 1 for call in model.calls)
    assert len(model.calls) < 8
    assert (queue.tokens, queue.rows) == (0, 0)


def test_requests_share_a_call():
    model = Model()

    async def main():
        queue = batcher(model, batch_tokens=64)
        model.gate.clear()
        first = asyncio.create_task(queue.run([sequence(4)]))
        await model.enter()
        rest = [asyncio.create_task(queue.run([sequence(4, i)])) for i in range(2, 9)]
        await asyncio.sleep(0)
        assert (queue.rows, queue.tokens) == (7, 28)
        model.gate.set()
        await asyncio.gather(first, *rest)
        await queue.close()

    run(main)
    assert [len(call) for call in model.calls] == [1, 7]


@pytest.mark.parametrize("padded", [False, True])
def test_padding_counts_where_it_is_computed(padded):
    model = Model()

    async def main():
        queue = batcher(model, batch_tokens=40, padded=padded)
        await queue.run([sequence(n) for n in (20, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2)])
        await queue.close()

    run(main)
    assert [len(call) for call in model.calls] == ([2, 9] if padded else [11])


def test_a_large_request_does_not_hold_up_a_small_one():
    model = Model()

    async def main():
        queue = batcher(model, batch_tokens=8)
        model.gate.clear()
        large = asyncio.create_task(queue.run([sequence(4, 1)] * 100))
        await model.enter()
        small = asyncio.create_task(queue.run([sequence(4, 2)]))
        await asyncio.sleep(0)
        model.gate.set()
        await small
        assert not large.done()
        await large
        await queue.close()

    run(main)
    assert any(ids == 2 for ids, _ in model.calls[1] + model.calls[2])


def test_a_full_queue_refuses_and_says_when_to_come_back():
    model = Model()

    async def main():
        queue = batcher(model, queue_tokens=20)
        model.gate.clear()
        first = asyncio.create_task(queue.run([sequence(10)]))
        await model.enter()  # it no longer waits
        second = asyncio.create_task(queue.run([sequence(10)]))
        await asyncio.sleep(0)
        with pytest.raises(BusyError) as caught:
            await queue.run([sequence(11)])
        assert 1 <= caught.value.retry_after <= 60
        third = asyncio.create_task(queue.run([sequence(10)]))
        await asyncio.sleep(0)
        assert queue.tokens == 20
        model.gate.set()
        await asyncio.gather(first, second, third)
        await queue.close()

    run(main)


def test_who_leaves_takes_the_work_along():
    model = Model()

    async def main():
        queue = batcher(model, batch_tokens=8)
        model.gate.clear()
        first = asyncio.create_task(queue.run([sequence(4)]))
        await model.enter()
        gone = asyncio.create_task(queue.run([sequence(8, 7)] * 5))
        stays = asyncio.create_task(queue.run([sequence(3, 2)]))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert (queue.rows, queue.tokens) == (1, 3)
        model.gate.set()
        await asyncio.gather(first, stays)
        with pytest.raises(asyncio.CancelledError):
            await gone
        await queue.close()

    run(main)
    assert not any(ids == 7 for call in model.calls for ids, _ in call)


@pytest.mark.parametrize(("bad", "reason"), [(13, "unlucky"), (99, "NaN")])
def test_one_bad_sequence_does_not_fail_its_mates(bad, reason):
    model = Model()

    async def main():
        queue = batcher(model, batch_tokens=64)
        model.gate.clear()
        first = asyncio.create_task(queue.run([sequence(4)]))
        await model.enter()
        good = asyncio.create_task(queue.run([sequence(4, 2), sequence(4, 3)]))
        wrong = asyncio.create_task(queue.run([sequence(4, 5), sequence(4, bad), sequence(4, 6)]))
        await asyncio.sleep(0)
        model.gate.set()
        assert [row[0] for row in await good] == [2, 3]
        with pytest.raises(RowError, match=f"row 1: .*{reason}") as caught:
            await wrong
        assert caught.value.row == 1
        await first
        assert (queue.rows, queue.tokens) == (0, 0)
        await queue.close()

    run(main)
    assert len(model.calls[1]) == 5  # they did share a call


@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_call_that_gives_another_number_of_rows_is_an_error(given):
    async def main():
        queue = batcher(lambda encodings: np.ones((given, 2), np.float32))
        if given != 1:
            with pytest.raises(RowError, match=f"the model gave {given} vectors for 1 texts"):
                await queue.run([sequence(4), sequence(4)])
        else:  # each by itself gets the one that it wants
            assert len(await queue.run([sequence(4), sequence(4)])) == 2
        await queue.close()

    run(main)


def test_no_sequences_are_no_vectors():
    async def main():
        queue = batcher(Model())
        assert await queue.run([]) == []
        await queue.close()

    run(main)


def test_a_request_that_failed_leaves_nothing_in_the_queue():
    model = Model()

    async def main():
        queue = batcher(model, batch_tokens=4)
        with pytest.raises(RowError):
            await queue.run([sequence(4, 13)] + [sequence(3, 7)] * 50)
        assert (queue.rows, queue.tokens) == (0, 0)
        assert [row[0] for row in await queue.run([sequence(2, 8)])] == [8]
        await queue.close()

    run(main)
    assert len(model.calls) < 10


def test_workers_run_at_the_same_time():
    model = Model()

    async def main():
        queue = batcher(model, workers=2, batch_tokens=4)
        model.gate.clear()
        task = asyncio.create_task(queue.run([sequence(4)] * 3))
        await model.enter()
        await model.enter()
        assert len(model.calls) == 2
        model.gate.set()
        await task
        await queue.close()

    run(main)


def test_a_request_with_nothing_beside_it_has_all_workers():
    model, lone = Model(), Model()

    async def main():
        queue = batcher(model, workers=2, batch_tokens=8, lone=lone)
        lone.gate.clear()
        first = asyncio.create_task(queue.run([sequence(4, 1), sequence(4, 2)]))
        await lone.enter()
        rest = [asyncio.create_task(queue.run([sequence(8, i)])) for i in range(3, 6)]
        await asyncio.sleep(0.05)
        assert model.calls == []  # all workers are taken
        model.gate.clear()
        lone.gate.set()
        assert [row[0] for row in await first] == [1, 2]
        await model.enter()
        await model.enter()  # one worker each, since there is more
        model.gate.set()
        await asyncio.gather(*rest)
        assert [row[0] for row in await queue.run([sequence(2, 9)])] == [9]
        with pytest.raises(RowError, match="unlucky"):
            await queue.run([sequence(2, 13)])
        await queue.close()

    run(main)
    assert [len(call) for call in lone.calls] == [2, 1, 1]
    assert sorted(call[0][0] for call in model.calls) == [3, 4, 5]


@pytest.mark.parametrize("several", ["requests", "calls"])
def test_who_is_not_alone_has_one_worker(several):
    model, lone = Model(), Model()

    async def main():
        queue = batcher(model, workers=2, batch_tokens=8, lone=lone)
        lone.gate.clear()
        first = asyncio.create_task(queue.run([sequence(4, 1)]))
        await lone.enter()
        # Two requests that fit into one call; one that takes two.
        more = [[sequence(4, 2)], [sequence(4, 3)]] if several == "requests" else [[sequence(8, 2), sequence(8, 3)]]
        rest = [asyncio.create_task(queue.run(each)) for each in more]
        await asyncio.sleep(0.05)
        lone.gate.set()
        await asyncio.gather(first, *rest)
        await queue.close()

    run(main)
    assert len(lone.calls) == 1
    assert sorted(each for call in model.calls for each in call) in ([(2, 4), (3, 4)], [(2, 8), (3, 8)])


def test_a_call_may_wait_to_be_filled_and_starts_when_it_is():
    model = Model()

    async def main():
        queue = batcher(model, batch_tokens=8, max_wait=20.0)
        first = asyncio.create_task(queue.run([sequence(4)]))
        await asyncio.sleep(0.05)
        assert model.calls == []
        await asyncio.gather(first, queue.run([sequence(4)]))
        await queue.close()

    run(main)
    assert [len(call) for call in model.calls] == [2]


def test_a_call_waits_no_longer_than_it_may():
    model = Model()

    async def main():
        queue = batcher(model, max_wait=0.01)
        await queue.run([sequence(4)])
        await queue.close()

    run(main)
    assert [len(call) for call in model.calls] == [1]


def test_calls_are_watched():
    seen = []

    async def main():
        queue = batcher(Model(), batch_tokens=64, watch=lambda *call: seen.append(call))
        await queue.run([sequence(4), sequence(6)])
        await queue.close()

    run(main)
    ((rows, tokens, seconds),) = seen
    assert (rows, tokens) == (2, 10)
    assert seconds >= 0
