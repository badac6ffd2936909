"""Sequences into calls, calls onto threads, results in order."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfx.errors import InputError
from tfx.runtime import schedule as module
from tfx.runtime.schedule import (
    Schedule,
    blocks_of,
    by_threads,
    candidates,
    fastest,
    groups,
    in_order,
    packed,
    sample,
)
from tfx.runtime.text import Encoding


def encoding(length: int) -> Encoding:
    return Encoding([7] * length, [0] * length)


def encode(block, first):
    """Rows are their own tokens: row i has the id i."""
    del first
    return [Encoding([row] * (1 + row % 5), [0] * (1 + row % 5)) for row in block]


def double(encodings):
    return [2 * each.ids[0] for each in encodings]


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tfx-")]


# Division


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000), st.booleans())
def test_every_sequence_is_in_one_call_within_the_budget(lengths, batch_tokens, padded):
    division = groups(lengths, batch_tokens, padded=padded)
    assert sorted(itertools.chain.from_iterable(division)) == list(range(len(lengths)))
    for rows in division:
        own = [lengths[row] for row in rows]
        tokens = len(rows) * max(own) if padded else sum(own)
        assert len(rows) == 1 or tokens <= batch_tokens
        assert own == sorted(own, reverse=True)
    longest = [lengths[rows[0]] for rows in division]
    assert longest == sorted(longest, reverse=True)
    assert division == groups(lengths, batch_tokens, padded=padded)


def test_padding_counts_where_it_is_computed():
    assert groups([10, 3, 3], 20, padded=True) == [[0, 1], [2]]
    assert groups([10, 3, 3], 20, padded=False) == [[0, 1, 2]]


@given(st.lists(st.integers(0, 50), max_size=80), st.integers(1, 9), st.integers(1, 120))
def test_blocks_hold_all_items_in_order_and_start_anew_at_each_end(sizes, rows, size):
    blocks = list(blocks_of(sizes, rows, size, lambda each: each))
    assert list(itertools.chain.from_iterable(blocks)) == sizes
    for block in blocks:
        assert 1 <= len(block) <= rows
        assert sum(block[:-1]) < size
    # What a run that is continued relies on: cutting from any block's start gives the same blocks.
    for i in range(len(blocks)):
        rest = list(itertools.chain.from_iterable(blocks[i:]))
        assert list(blocks_of(rest, rows, size, lambda each: each)) == blocks[i:]


# Schedules


def test_schedules_are_read_as_they_are_written():
    schedule = Schedule(3, 2, 512)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert str(schedule) == "3 calls at once, 2 threads each, up to 512 tokens a call"
    assert str(packed(1, 9)) == "1 call at once, 1 thread each, up to 9 tokens a call"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"workers": 0, "threads": 1, "batch_tokens": 1}, r"schedule\.workers: found 0"),
        ({"workers": 1, "threads": True, "batch_tokens": 1}, r"schedule\.threads: found True"),
        ({"workers": 1, "threads": 1, "batch_tokens": 1.5}, r"schedule\.batch_tokens: found 1\.5"),
        ({"workers": 1, "threads": 1}, "wanted workers, threads and batch_tokens"),
        ({"workers": 1, "threads": 1, "batch_tokens": 1, "x": 1}, "wanted workers, threads and batch_tokens"),
    ],
)
def test_wrong_schedules(value, message):
    with pytest.raises(InputError, match=message):
        Schedule.from_json(value)


@pytest.mark.parametrize("cores", [1, 2, 7, 8, 64])
def test_candidates_use_all_cores_and_no_more(cores):
    found = candidates(cores)
    assert found[0] == by_threads(cores)
    assert len(set(found)) == len(found)
    assert all(cores // 2 < each.workers * each.threads <= cores for each in found)
    assert packed(cores) in found


def test_large_calls_grow_with_the_cores_that_divide_them():
    assert [packed(cores).batch_tokens for cores in (1, 16, 64)] == [4096, 4096, 16384]


def test_a_device_gets_one_large_call_at_a_time():
    assert [(each.workers, each.threads) for each in candidates(8, "cuda")] == [(1, 1)]


# Running


@pytest.mark.parametrize("schedule", [Schedule(1, 1, 3), Schedule(4, 1, 3), Schedule(3, 2, 1000)])
def test_results_come_in_order_however_long_calls_take(schedule):
    noise = random.Random(0)

    def call(encodings):
        time.sleep(noise.random() / 500)
        return double(encodings)

    rows = list(range(57))
    blocks = blocks_of(rows, 10, 10**6, lambda _: 1)
    found = list(in_order(blocks, encode, call, schedule, padded=True))
    assert [len(block) for block in found] == [10] * 5 + [7]
    assert list(itertools.chain.from_iterable(found)) == [2 * row for row in rows]
    assert not our_threads()


def test_so_many_calls_run_at_once():
    meeting = threading.Barrier(3)

    def call(encodings):
        meeting.wait(timeout=20)  # breaks unless three are here
        return double(encodings)

    assert list(in_order([range(6)], encode, call, Schedule(3, 1, 1), padded=True)) == [[0, 2, 4, 6, 8, 10]]


def test_no_worker_waits_for_the_end_of_a_block():
    """A call of the first block that only ends when the second block has begun."""
    begun = threading.Event()

    def call(encodings):
        if encodings[0].ids[0] == 100:
            begun.set()
        elif encodings[0].ids[0] == 0:
            assert begun.wait(timeout=20)
        return double(encodings)

    assert list(in_order([[0], [100]], encode, call, Schedule(2, 1, 8), padded=True)) == [[0], [200]]


def test_little_is_read_ahead():
    taken = []

    def endless():
        for i in itertools.count():
            taken.append(i)
            yield [i]

    stream = in_order(endless(), encode, double, Schedule(2, 1, 8), padded=True)
    for i in range(20):
        assert next(stream) == [2 * i]
        assert len(taken) <= i + 4
    stream.close()
    assert not our_threads()


def test_the_number_of_the_first_row_of_each_block_is_told():
    told = []

    def remember(block, first):
        told.append((list(block), first))
        return encode(block, first)

    list(in_order([[1, 2], [3], [4, 5]], remember, double, Schedule(1, 1, 8), padded=True, first=100))
    assert told == [([1, 2], 100), ([3], 102), ([4, 5], 103)]


@pytest.mark.parametrize("where", ["blocks", "encode", "call"])
def test_an_error_comes_in_its_place_and_ends_everything(where):
    class OddError(Exception):
        pass

    called = []

    def blocks():
        for i in range(100):
            if where == "blocks" and i == 5:
                raise OddError
            yield [i]

    def encoding_of(block, first):
        if where == "encode" and block[0] == 5:
            raise OddError
        return encode(block, first)

    def call(encodings):
        called.append(encodings[0].ids[0])
        if where == "call" and encodings[0].ids[0] == 5:
            raise OddError
        return double(encodings)

    stream = in_order(blocks(), encoding_of, call, Schedule(1, 1, 8), padded=True)
    assert [next(stream) for _ in range(5)] == [[2 * i] for i in range(5)]
    with pytest.raises(OddError):
        next(stream)
    assert not our_threads()
    assert max(called) < 10


# Choosing


class Clock:
    """Time that passes as calls say, and not as a busy machine has it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lock = threading.Lock()

    def perf_counter(self) -> float:
        return self.now

    def call_of(self, ms_per_token):
        def of(schedule):
            def call(encodings):
                with self.lock:
                    self.now += ms_per_token[schedule] / 1000 * sum(map(len, encodings))
                return [0] * len(encodings)

            return call

        return of


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("ms_per_token", "best"),
    [
        ((3, 2, 3), 1),
        ((1, 2, 3), 0),
        ((3, 2, 1), 2),
        ((2, 2, 2), 0),  # of equally fast ones the first
        ((2, 1.99, 1.98), 0),  # nothing beyond noise
        ((2, 1.9, 1.89), 1),
    ],
)
def test_the_fastest_schedule_is_chosen(clock, ms_per_token, best):
    tried = [Schedule(2, 1, 64), Schedule(2, 1, 128), Schedule(1, 2, 512)]
    costs = dict(zip(tried, ms_per_token, strict=True))
    encodings = [encoding(n) for n in range(1, 60)]
    chosen, rates = fastest(tried, clock.call_of(costs), encodings, padded=False)
    assert chosen == tried[best]
    for schedule in tried:
        assert rates[schedule] == pytest.approx(1000 / costs[schedule])


def test_measuring_takes_about_the_time_it_is_given(clock):
    tried = [Schedule(2, 1, 64), Schedule(1, 2, 512)]
    encodings = [encoding(1 + n % 60) for n in range(100_000)]
    fastest(tried, clock.call_of(dict.fromkeys(tried, 0.01)), encodings, padded=False, seconds=0.25)
    assert clock.now == pytest.approx(2 * 3 * 0.25, rel=0.1)


def test_a_sample_has_all_lengths_alike():
    encodings = [encoding(n) for n in [1] * 50 + [10] * 30 + [100] * 20]
    random.Random(0).shuffle(encodings)
    lengths = [len(each) for each in sample(encodings, 235)]  # a tenth
    assert lengths == [1] * 5 + [10] * 3 + [100] * 2
    assert len(sample(encodings, 10**6)) == 100
    assert len(sample(encodings, 0)) == 1
