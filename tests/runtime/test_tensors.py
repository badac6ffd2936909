from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfx.errors import BundleError, InputError
from tfx.runtime.tensors import MASK_PATTERNS, TensorSpec, attended_positions, default_cases, make_feeds

IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"), "token_ids", 30)
MASK = TensorSpec("attention_mask", "int64", ("batch", "sequence"), "attention_mask", 2)
TYPES = TensorSpec("token_type_ids", "int64", ("batch", "sequence"), "token_type_ids", 2)
PAD = TensorSpec("src_key_padding_mask", "bool", ("batch", "sequence"), "padding_mask", 2)
POSITIONS = TensorSpec("position_ids", "int32", ("batch", "sequence"), "position_ids", 64)
PIXELS = TensorSpec("pixel_values", "float32", ("batch", 3, 4, 4), "features")


@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from(MASK_PATTERNS), st.integers(0, 1000))
def test_feeds_are_in_range_and_attend_somewhere(batch, sequence, pattern, seed):
    inputs = [IDS, MASK, TYPES, POSITIONS, PIXELS]
    feeds = make_feeds(inputs, batch=batch, sequence=sequence, pattern=pattern, seed=seed)
    for spec in inputs:
        assert feeds[spec.name].dtype == spec.dtype
        assert feeds[spec.name].shape == spec.resolve(batch, sequence)
    assert feeds["input_ids"].min() >= 0
    assert feeds["input_ids"].max() < 30
    assert set(np.unique(feeds["attention_mask"])) <= {0, 1}
    assert (feeds["attention_mask"].sum(1) >= 1).all()
    assert not np.array_equal(feeds["token_type_ids"], feeds["attention_mask"])
    np.testing.assert_array_equal(feeds["position_ids"][0], np.arange(sequence))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("full", [[1] * 6, [1] * 6, [1] * 6]),
        ("right", [[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]),
        ("left", [[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]),
    ],
)
def test_mask_patterns(pattern, expected):
    mask = make_feeds([MASK], batch=3, sequence=6, pattern=pattern)["attention_mask"]
    np.testing.assert_array_equal(mask, expected)


def test_holes_are_neither_left_nor_right_padding():
    mask = make_feeds([MASK], batch=3, sequence=7, pattern="holes")["attention_mask"]
    assert mask[:, 0].all()
    assert mask[:, -1].all()
    assert not mask[:, 3].any()


def test_mask_axes_between_batch_and_sequence_repeat_the_row():
    spec = TensorSpec("attention_mask", "bool", ("batch", 1, "sequence", "sequence"), "attention_mask")
    mask = make_feeds([spec], batch=2, sequence=4, pattern="right")["attention_mask"]
    assert mask.shape == (2, 1, 4, 4)
    np.testing.assert_array_equal(mask[1, 0, 0], mask[1, 0, 3])


@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from(MASK_PATTERNS), st.sampled_from(["bool", "int32"]))
def test_a_padding_mask_is_the_inverse_of_the_attention_mask(batch, sequence, pattern, dtype):
    pad = dataclasses.replace(PAD, dtype=dtype)
    sizes = {"batch": batch, "sequence": sequence, "pattern": pattern, "seed": 3}
    alone = make_feeds([IDS, pad], **sizes)[pad.name]
    both = make_feeds([pad, TYPES, MASK], **sizes)
    assert alone.dtype == both[pad.name].dtype == dtype
    np.testing.assert_array_equal(alone, 1 - make_feeds([IDS, MASK], **sizes)["attention_mask"])
    np.testing.assert_array_equal(both[pad.name], 1 - both["attention_mask"])
    assert not alone.all(axis=1).any()  # no row is ignored whole
    np.testing.assert_array_equal(attended_positions([PAD, MASK], both), both["attention_mask"] == 1)
    segments = make_feeds([pad, TYPES], **sizes)
    assert not np.array_equal(segments["token_type_ids"], segments[pad.name])


def test_attended_positions():
    feeds = {"attention_mask": np.array([[1, 1, 0]]), PAD.name: np.array([[True, False, False]])}
    np.testing.assert_array_equal(attended_positions([IDS, MASK], feeds), [[True, True, False]])
    np.testing.assert_array_equal(attended_positions([IDS, PAD], feeds), [[False, True, True]])
    np.testing.assert_array_equal(attended_positions([PAD, MASK], feeds), [[False, True, False]])
    assert attended_positions([IDS, TYPES], feeds) is None
    assert attended_positions([MASK], {}) is None


def test_a_padding_mask_of_floats_is_refused():
    with pytest.raises(BundleError, match=r'tensor\.dtype: found "float32", wanted one of bool, int8, .*, uint64$'):
        TensorSpec.from_json({**PAD.to_json(), "dtype": "float32"})


def test_same_seed_same_feeds():
    first, second, third = (make_feeds([IDS], batch=2, sequence=9, seed=seed)["input_ids"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, third)


@pytest.mark.parametrize("arguments", [{"batch": 0, "sequence": 1}, {"batch": 1, "sequence": 0}])
def test_sizes_below_one_are_refused(arguments):
    with pytest.raises(InputError, match="at least 1"):
        make_feeds([IDS], **arguments)


def test_unknown_pattern_is_refused():
    with pytest.raises(InputError, match='found "middle", wanted one of full, right, left, holes'):
        make_feeds([IDS], batch=1, sequence=1, pattern="middle")


def test_default_cases_reach_the_longest_sequence_in_every_pattern():
    cases = default_cases([IDS, MASK], None)
    assert {(case.batch, case.sequence) for case in cases} == {(1, 1), (1, 7), (3, 16), (2, 512)}
    assert len(cases) == 16
    assert len({case.id for case in cases}) == 16
    assert default_cases([IDS, PAD], None) == cases


def test_default_cases_are_clipped_and_have_no_pattern_without_a_mask():
    cases = default_cases([IDS], 5)
    assert [(case.batch, case.sequence, case.pattern) for case in cases] == [
        (1, 1, "full"),
        (1, 5, "full"),
        (3, 5, "full"),
        (2, 5, "full"),
    ]


@pytest.mark.parametrize("spec", [IDS, MASK, PAD, PIXELS])
def test_json_round_trip(spec):
    assert TensorSpec.from_json(spec.to_json()) == spec


def test_outputs_have_no_role_in_json():
    output = TensorSpec("y", "float32", ("batch", 4), "output")
    assert output.to_json() == {"name": "y", "dtype": "float32", "shape": ["batch", 4]}
    assert TensorSpec.from_json(output.to_json(), output=True) == output
