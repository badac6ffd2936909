"""When a candidate counts as faster, and the log that tuning goes on from."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tfx.errors import InputError
from tfx.exporter.tune_log import LOG_NAME, TuneLog, Verdict, judge


def drawn(median: float, spread: float, count: int, seed: int = 0) -> list[float]:
    return list(median * np.exp(np.random.default_rng(seed).normal(0, spread, count)))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.8] * 10, Verdict.FASTER),
        (drawn(0.8, 0.05, 10), Verdict.FASTER),
        ([1.2] * 10, Verdict.SLOWER),
        (drawn(1.2, 0.05, 10), Verdict.SLOWER),
        ([1.0] * 10, Verdict.SAME),
        (drawn(1.0, 0.002, 20), Verdict.SAME),
        # Faster, but by less than is worth a change.
        ([0.995] * 10, Verdict.SAME),
        # One wild turn of many is no gain, and the median of few is no proof.
        ([1.0] * 9 + [0.1], Verdict.SAME),
        ([0.5] * 4, None),
        (drawn(0.97, 0.2, 10), None),
    ],
)
def test_verdicts(ratios, verdict):
    found = judge(ratios)
    assert found.verdict == verdict
    assert found.low <= found.ratio <= found.high


def test_without_more_turns_undecided_is_no_difference():
    assert judge([0.5] * 4, last=True).verdict == Verdict.SAME
    assert judge([0.5] * 10, last=True).verdict == Verdict.FASTER


def test_chance_alone_seldom_looks_like_a_gain():
    """Of engines that are alike, judged after 10, 20, 30 and 40 turns as tuning does."""
    wrong = 0
    for seed in range(200):
        ratios = drawn(1, 0.1, 40, seed)
        for count in (10, 20, 30, 40):
            verdict = judge(ratios[:count], last=count == 40).verdict
            if verdict is not None:
                wrong += verdict == Verdict.FASTER
                break
    assert wrong <= 4


def test_a_small_gain_is_found_with_enough_turns():
    assert judge(drawn(0.95, 0.03, 40), last=True).verdict == Verdict.FASTER


START = {"threads": 2}
ENTRY = {"stage": "threads", "candidate": {"threads": 1}, "against": {"threads": 2}, "verdict": Verdict.SLOWER}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "bundle"
    made.mkdir()
    return made


def test_what_was_found_is_on_disk_at_once(folder):
    log = TuneLog(folder, "a" * 64, {"cores": 2}, START)
    assert log.resumed == 0
    log.add(ENTRY)
    # As after a kill: nothing was closed.
    again = TuneLog(folder, "a" * 64, {"cores": 2}, START)
    assert again.resumed == 1
    assert again.of("threads") == [ENTRY]
    assert again.of("layout") == []
    assert again.winner is None
    # Beside the bundle: what is inside of it is all listed.
    assert list(folder.iterdir()) == []
    again.remove()
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("change", [{"base": "b" * 64}, {"setting": {"cores": 4}}, {"fresh": True}])
def test_another_model_or_setting_begins_anew(folder, change):
    TuneLog(folder, "a" * 64, {"cores": 2}, START).add(ENTRY)
    given = {"base": "a" * 64, "setting": {"cores": 2}, **change}
    assert TuneLog(folder, **given, start=START).resumed == 0


@pytest.mark.parametrize("content", ["", "junk", "[]", '{"tried": 3}', '{"format": 1, "tried": [{"verdict": "won"}]}'])
def test_a_damaged_log_is_begun_anew(folder, content):
    (folder.parent / f".bundle.{LOG_NAME}").write_text(content)
    assert TuneLog(folder, "a" * 64, {"cores": 2}, START).resumed == 0


def test_a_log_in_the_bundle_is_gone_on_with(folder):
    """Time ran out: the model is another one now, but what was tried was tried."""
    log = TuneLog(folder, "a" * 64, {"cores": 2}, START)
    log.add(ENTRY)
    (folder / LOG_NAME).write_text(log.text({"threads": 1}, "c" * 64, finished=False))
    log.remove()
    again = TuneLog(folder, "c" * 64, {"cores": 2}, {"threads": 9})
    assert (again.resumed, again.winner, again.start) == (1, {"threads": 1}, START)
    assert TuneLog(folder, "d" * 64, {"cores": 2}, START, fresh=True).resumed == 0
    found = json.loads((folder / LOG_NAME).read_text())
    assert (found["base"], found["result"], found["finished"]) == ("a" * 64, "c" * 64, False)


def test_the_entries_lead_from_the_last_winner_to_the_best(folder):
    def entry(candidate, against, verdict):
        return {**ENTRY, "candidate": {"threads": candidate}, "against": {"threads": against}, "verdict": verdict}

    log = TuneLog(folder, "a" * 64, {"cores": 2}, START)
    assert log.best == START
    log.add(entry(1, 2, Verdict.FASTER))
    log.add(entry(3, 2, Verdict.FASTER))  # against what is no longer the best
    log.add(entry(4, 1, Verdict.SLOWER))
    assert log.best == {"threads": 1}
    (folder / LOG_NAME).write_text(log.text({"threads": 8}, "c" * 64, finished=True))
    log.remove()
    again = TuneLog(folder, "c" * 64, {"cores": 2}, START)
    assert again.best == {"threads": 8}
    again.add(entry(9, 8, Verdict.FASTER))
    assert again.best == {"threads": 9}


def test_numbers_that_are_not_finite_are_kept_as_null(folder):
    log = TuneLog(folder, "a" * 64, {"cores": 2}, START)
    log.add({**ENTRY, "min_cosine": float("nan"), "max_abs": float("inf"), "ratio": 0.5})
    (kept,) = TuneLog(folder, "a" * 64, {"cores": 2}, START).tried
    assert (kept["min_cosine"], kept["max_abs"], kept["ratio"]) == (None, None, 0.5)
    assert log.tried == [kept]
    # As Python may have written it.
    content = {"format": 1, "base": "a" * 64, "setting": {"cores": 2}, "start": START}
    log._path.write_text(json.dumps({**content, "tried": [{**ENTRY, "min_cosine": float("nan")}]}))
    (kept,) = TuneLog(folder, "a" * 64, {"cores": 2}, START).tried
    assert kept["min_cosine"] is None


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        TuneLog(tmp_path / "nowhere" / "bundle", "a" * 64, {}, START)
