"""``Session.run_many``: any number of texts or token ids, in order, from one thread or from many."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfx.errors import BundleError, FeedError
from tfx.runtime import session as module
from tfx.runtime.schedule import Schedule
from tfx.runtime.session import Session
from tfx.runtime.tensors import make_feeds
from tfx.runtime.text import Encoding

WORDS = ("the", "cat", "sat", "on", "a", "mat", "dog", "ran")
TEXTS = [" ".join(itertools.islice(itertools.cycle(WORDS), i % 8, i % 8 + 1 + i % 6)) for i in range(150)]


@pytest.fixture(scope="module")
def shared(shared_bundle):
    return Session(shared_bundle, threads=2)


@pytest.fixture
def session(bundle):
    return Session(bundle, threads=1)


@pytest.mark.parametrize("schedule", [None, Schedule(2, 1, 24), Schedule(3, 1, 1), Schedule(1, 2, 4096)])
def test_vectors_are_those_of_the_texts_alone_in_the_order_given(shared, schedule):
    found = np.stack(list(shared.run_many(iter(TEXTS), schedule=schedule)))
    singles = np.concatenate([shared.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(found, singles, atol=1e-6)
    assert found.dtype == np.float32


def test_token_ids_and_encodings_are_taken_beside_texts(session):
    items = ["the cat", [2, 4, 5, 3], np.array([2, 4, 5, 3], np.int32), Encoding([2, 4, 5, 3], [0] * 4)]
    found = np.stack(list(session.run_many(items)))
    np.testing.assert_array_equal(found, np.repeat(found[:1], 4, axis=0))
    np.testing.assert_allclose(found[:1], session.encode(["the cat"]), atol=1e-6)


def test_segments_of_encodings_count(session):
    first, second = session.run_many([Encoding([2, 4, 3], [0, 0, 0]), Encoding([2, 4, 3], [0, 1, 1])])
    assert not np.allclose(first, second)


def test_without_pooling_each_item_has_its_outputs_without_padding(make_bundle):
    session = Session(make_bundle(pooling=False))
    for text, found in zip(TEXTS, session.run_many(TEXTS), strict=True):
        expected = session.run(session.tokenize([text]))
        assert set(found) == {"last_hidden_state", "sentence_embedding"}
        for name, values in found.items():
            np.testing.assert_allclose(values, expected[name][0], atol=1e-6)


def test_an_endless_stream(session):
    texts = itertools.cycle(TEXTS)
    stream = session.run_many(texts, schedule=Schedule(2, 1, 256))
    found = np.stack(list(itertools.islice(stream, 300)))
    np.testing.assert_allclose(found[:150], found[150:], atol=1e-6)
    np.testing.assert_allclose(found[:150], session.encode(TEXTS), atol=1e-6)


def test_nothing_in_gives_nothing(session):
    assert list(session.run_many([])) == []


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (None, r"items\[70\]: found NoneType, wanted a text or token ids"),
        ([2.5], r"items\[70\]: found list, wanted a text or token ids"),
        ([[2]], r"items\[70\]: found list, wanted a text or token ids"),
        ([], r"items\[70\]: found 0 tokens, wanted 1 to 24"),
        ([2] * 25, r"items\[70\]: found 25 tokens, wanted 1 to 24"),
        ([2, 12], r"items\[70\]: found the token id 12, wanted ids of 0 to 11"),
        ([-1], r"items\[70\]: found the token id -1, wanted ids of 0 to 11"),
        ("\ud800", r"items\[70\]: no valid Unicode"),
    ],
)
def test_a_wrong_item_is_named_by_its_number(session, monkeypatch, item, message):
    monkeypatch.setattr(module, "_BLOCK_ROWS", 16)
    stream = session.run_many([*TEXTS[:70], item, *TEXTS[70:]], schedule=Schedule(2, 1, 64))
    assert len(list(itertools.islice(stream, 64))) == 64  # whole blocks before it
    with pytest.raises(FeedError, match=message):
        next(stream)


def test_one_string_is_no_list_of_texts(session):
    with pytest.raises(FeedError, match="found one string"):
        session.run_many("cat")


def test_texts_need_a_tokenizer_and_token_ids_need_none(make_bundle):
    session = Session(make_bundle(tokenizer=False))
    assert next(session.run_many([[2, 4, 3]])).shape == (5,)
    with pytest.raises(BundleError, match="has no tokenizer"):
        list(session.run_many(["cat"]))


def test_a_block_gives_the_same_bits_wherever_a_run_begins(session, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ROWS", 16)
    schedule = Schedule(2, 1, 48)
    whole = list(session.run_blocks(session.blocks(TEXTS), schedule))
    rest = list(session.run_blocks(session.blocks(TEXTS[48:]), schedule, first=48))
    assert len(whole) == 10
    np.testing.assert_array_equal(np.concatenate(whole[3:]), np.concatenate(rest))


def test_many_items_are_measured_and_few_are_not(session, monkeypatch):
    monkeypatch.setattr(module, "MEASURED_ROWS", 100)
    monkeypatch.setattr(module, "_BLOCK_ROWS", 16)
    asked = []
    choose = session.choose_schedule

    def remember(items, cores=None, tried=None):
        asked.append(list(items))
        return choose(items, cores, tried)

    monkeypatch.setattr(session, "choose_schedule", remember)
    expected = session.encode(TEXTS)
    np.testing.assert_allclose(np.stack(list(session.run_many(TEXTS[:99]))), expected[:99], atol=1e-6)
    assert asked == []
    np.testing.assert_allclose(np.stack(list(session.run_many(iter(TEXTS), cores=2))), expected, atol=1e-6)
    assert asked == [TEXTS[:112]]  # whole blocks


def test_a_choice_is_one_of_those_measured(session):
    chosen, rates = session.choose_schedule(TEXTS, cores=2)
    assert chosen in rates
    assert {(each.workers, each.threads) for each in rates} == {(2, 1), (1, 2)}
    assert all(rate > 0 for rate in rates.values())


# A Session is safe to call from many threads


def test_threads_share_a_session_whatever_they_ask_for(shared):
    """run, encode and run_many under schedules that need a second session, all at once."""
    inputs = shared.bundle.manifest.inputs
    batches = [make_feeds(inputs, batch=2, sequence=1 + i % 20, seed=i) for i in range(12)]
    expected_runs = [shared.run(feeds)["sentence_embedding"] for feeds in batches]
    expected = shared.encode(TEXTS)
    jobs = [
        lambda: (np.stack(list(shared.run_many(TEXTS, schedule=Schedule(2, 1, 64)))), expected),
        lambda: (np.stack(list(shared.run_many(TEXTS, schedule=Schedule(1, 3, 512)))), expected),
        lambda: (shared.encode(TEXTS, batch_size=7), expected),
        lambda: (np.stack([shared.run(each)["sentence_embedding"] for each in batches]), np.stack(expected_runs)),
    ]
    with ThreadPoolExecutor(8) as pool:
        for found, wanted in pool.map(lambda job: job(), jobs * 4):
            np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_model_is_loaded_once_for_threads_that_ask_at_once(shared_bundle, monkeypatch):
    session = Session(shared_bundle, threads=2)
    loaded = []
    load = session._load

    def count(threads, **options):
        loaded.append(threads)
        return load(threads, **options)

    monkeypatch.setattr(session, "_load", count)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: list(session.run_many(TEXTS[:20], schedule=Schedule(2, 1, 64))), range(12)))
        list(pool.map(lambda _: list(session.run_many(TEXTS[:20], schedule=Schedule(1, 2, 64))), range(12)))
    assert loaded == [1]
