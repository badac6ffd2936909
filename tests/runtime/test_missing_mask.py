"""A mask that is not given is made up only for rows that do not look padded."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

from tfx.errors import FeedError
from tfx.runtime.feeds import FeedChecker
from tfx.runtime.golden import GoldenCase, save_golden
from tfx.runtime.tensors import TensorSpec

IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"), "token_ids", 10)
MASK = TensorSpec("attention_mask", "int64", ("batch", "sequence"), "attention_mask", 2)


@pytest.mark.parametrize("rows", [[[5, 6, 0]], [[0, 5, 6]], [[5, 6, 7], [5, 0, 0]]])
def test_padded_rows_need_their_mask(rows: list[list[int]]):
    check = FeedChecker([IDS, MASK], None, pad_id=0)
    with pytest.raises(
        FeedError,
        match=r"^attention_mask: missing, and input_ids has rows that begin or end with the padding id 0; give",
    ):
        check({"input_ids": rows})
    mask = (np.array(rows) != 0).astype(np.int64)
    np.testing.assert_array_equal(check({"input_ids": rows, "attention_mask": mask})[0]["attention_mask"], mask)


@pytest.mark.parametrize("rows", [[[5, 0, 6]], [[5, 6, 7]], [[0]]])
def test_other_rows_attend_everywhere(rows: list[list[int]]):
    feeds, _ = FeedChecker([IDS, MASK], None, pad_id=0)({"input_ids": rows})
    assert (feeds["attention_mask"] == 1).all()


def test_feeds_that_are_no_mapping_are_refused():
    with pytest.raises(FeedError, match="feeds: found ndarray, wanted arrays by input name: input_ids"):
        FeedChecker([IDS], None)(np.ones((1, 2), np.int64))  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")
def test_a_golden_can_be_read_by_whom_the_umask_allows(tmp_path):
    case = GoldenCase("a", 1, 2, "full", {"x": np.ones((1, 2))}, {"y": np.ones((1, 2))})
    before = os.umask(0o022)
    try:
        save_golden(tmp_path / "golden.safetensors", [case])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "golden.safetensors").stat().st_mode) == 0o644
