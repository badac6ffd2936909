from __future__ import annotations

import math

import numpy as np
import pytest

from tfx.errors import ParityError
from tfx.runtime.golden import GoldenCase
from tfx.runtime.parity import TOLERANCES, Tolerance, compare, verify, verify_bundle
from tfx.runtime.tensors import TensorSpec

EXACT = Tolerance(0.0, 1.0 - 1e-12)


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_equal_arrays_need_no_tolerance():
    found = compare(values(2, 3, 4), values(2, 3, 4))
    assert found.problem is None
    assert found.max_abs == 0
    assert found.min_cosine == pytest.approx(1, abs=1e-12)


def test_cosine_and_difference_match_the_formula():
    a, b = values(4, 8), values(4, 8, seed=1)
    found = compare(a, b)
    cosines = [np.dot(x, y) / math.sqrt(np.dot(x, x) * np.dot(y, y)) for x, y in zip(a, b, strict=True)]
    assert found.min_cosine == pytest.approx(min(cosines), abs=1e-6)
    assert found.max_abs == pytest.approx(np.abs(a - b).max())


def test_only_attended_positions_count():
    expected, mask = values(2, 3, 4), np.array([[1, 1, 0], [0, 1, 1]])
    actual = expected.copy()
    actual[0, 2] = np.nan
    actual[1, 0] = 1e9
    assert compare(actual, expected, mask) == compare(expected, expected, mask)
    assert compare(actual, expected).problem == "output holds NaN or infinity"
    actual[1, 1, 0] += 0.5
    assert compare(actual, expected, mask).max_abs == pytest.approx(0.5)


def test_positions_that_a_padding_mask_ignores_do_not_count():
    expected, pad = values(2, 3, 4), np.array([[False, False, True], [True, False, False]])
    actual = np.where(pad[..., None], 1e9, expected)
    case = GoldenCase("c", 2, 3, "right", {"pad": pad}, {"hidden": expected})
    spec = TensorSpec("pad", "bool", ("batch", "sequence"), "padding_mask")
    assert verify(lambda feeds: {"hidden": actual}, [case], EXACT, inputs=[spec]).passed
    assert not verify(lambda feeds: {"hidden": actual}, [case], EXACT).passed
    actual[0, 0] += 1
    assert not verify(lambda feeds: {"hidden": actual}, [case], EXACT, inputs=[spec]).passed


def test_pooled_vectors_as_wide_as_the_batch_is_long_are_judged_whole():
    expected, mask = values(3, 4), np.zeros((3, 4), np.int64)
    mask[:, 0] = 1
    actual = expected.copy()
    actual[0, 3] += 1
    assert compare(actual, expected, mask).max_abs == pytest.approx(1)
    assert compare(actual, expected, mask, ("batch", 4)).max_abs == pytest.approx(1)
    assert compare(actual, expected, mask, ("batch", "sequence")).max_abs == 0


@pytest.mark.parametrize(
    ("actual", "problem"),
    [
        (np.full((2, 4), np.nan, np.float32), "NaN"),
        (np.where(np.arange(8).reshape(2, 4) == 3, np.inf, 0.5), "infinity"),
        (np.zeros((2, 4), np.float32), "constant (0 everywhere)"),
        (np.full((2, 4), 0.5, np.float32), "constant (0.5 everywhere)"),
        (values(2, 5), "shape (2, 5), wanted (2, 4)"),
        (values(4, 2), "shape (4, 2), wanted (2, 4)"),
    ],
)
def test_what_never_passes(actual, problem):
    found = compare(actual, values(2, 4))
    assert problem in (found.problem or "")
    assert not Tolerance(None, None).allows(found)


def test_a_faulty_expectation_never_passes_either():
    for expected in (np.full((2, 4), np.nan), np.zeros((2, 4))):
        assert not Tolerance(None, None).allows(compare(expected, expected))


def test_one_element_is_constant_by_nature():
    one = np.ones((1, 1), np.float32)
    assert EXACT.allows(compare(one, one))


def test_no_attended_position_is_nothing_to_judge():
    assert "nothing to judge" in (compare(values(1, 2, 3), values(1, 2, 3), np.zeros((1, 2))).problem or "")


def test_a_vanished_vector_is_not_similar():
    expected = values(2, 4)
    actual = expected.copy()
    actual[1] = 0
    assert compare(actual, expected).min_cosine == 0


def cases():
    found = []
    for seed in range(2):
        x = values(1, 3, seed=seed)
        found.append(GoldenCase(f"c{seed}", 1, 3, "full", {"x": x}, {"a": x + 1, "b": -x}))
    return found


def test_outputs_are_compared_by_name_in_any_order():
    report = verify(lambda feeds: {"b": -feeds["x"], "a": feeds["x"] + 1}, cases(), EXACT)
    assert report.passed
    assert len(report.cases) == 4
    report.check()


def test_a_planted_swap_of_outputs_is_caught():
    report = verify(lambda feeds: {"a": -feeds["x"], "b": feeds["x"] + 1}, cases(), TOLERANCES["int8"])
    assert not report.passed
    with pytest.raises(ParityError, match=r"parity failed on 4 of 4 outputs: max abs .* first a in c0"):
        report.check()


def test_a_missing_output_is_an_error_that_lists_the_others():
    with pytest.raises(ParityError, match="output b is missing in c0; found a"):
        verify(lambda feeds: {"a": feeds["x"] + 1}, cases(), EXACT)


def test_no_case_is_no_proof():
    with pytest.raises(ParityError, match="found no golden case"):
        verify(lambda feeds: {}, [], EXACT)


def test_nan_in_one_case_fails_the_report_and_stays_json():
    report = verify(lambda feeds: {"a": feeds["x"] * np.nan, "b": -feeds["x"]}, cases(), Tolerance(None, None))
    found = report.to_json()
    assert found["passed"] is False
    assert found["max_abs"] is None
    assert found["cases"][0]["problem"] == "output holds NaN or infinity"
    assert found["cases"][1]["passed"] is True


def test_the_mask_is_found_by_role():
    spec = TensorSpec("visible", "int64", ("batch", "sequence"), "attention_mask", 2)
    mask, hidden = np.array([[1, 1, 0]]), values(1, 3, 4)
    case = GoldenCase("c", 1, 3, "right", {"visible": mask}, {"h": hidden})
    zeroed = hidden * mask[..., None]
    assert verify(lambda feeds: {"h": zeroed}, [case], EXACT, inputs=[spec]).passed
    assert not verify(lambda feeds: {"h": zeroed}, [case], EXACT).passed


@pytest.mark.parametrize("optimize", [True, False])
def test_a_bundle_passes_its_own_golden(bundle, optimize):
    report = verify_bundle(bundle, optimize=optimize)
    assert report.passed, report.summary()
    assert report.max_abs < 1e-6
    assert {case.output for case in report.cases} == {"last_hidden_state", "sentence_embedding"}


@pytest.mark.parametrize("fault", ["swapped", "reduced mask", "nan", "constant"])
def test_planted_faults_in_a_bundle_are_caught(make_bundle, tiny_reference, fault):
    """The golden is right, the model is not (seen from the other side: the recorded outputs differ)."""

    def faulty(feeds):
        outputs = tiny_reference(feeds)
        if fault == "swapped":
            feeds = {**feeds, "token_type_ids": feeds["attention_mask"], "attention_mask": feeds["token_type_ids"]}
            return tiny_reference(feeds)
        if fault == "reduced mask":  # a length in place of a mask: right on right padding only
            lengths = feeds["attention_mask"].sum(1, keepdims=True)
            mask = (np.arange(feeds["attention_mask"].shape[1]) < lengths).astype(np.int64)
            return tiny_reference({**feeds, "attention_mask": mask})
        value = np.nan if fault == "nan" else 0.25
        return {name: np.full_like(output, value) for name, output in outputs.items()}

    report = verify_bundle(make_bundle(expected=faulty), tolerance=TOLERANCES["int8"])
    assert not report.passed
    if fault == "reduced mask":
        failed = {case.id.rsplit("-")[-1] for case in report.cases if not case.passed}
        assert failed == {"left", "holes"}
