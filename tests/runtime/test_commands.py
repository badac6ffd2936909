"""The commands as a user types them: exit codes, one line of error, one JSON object on stdout."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from tfx.cli import main
from tfx.runtime.session import Session


@pytest.fixture
def tfx(tmp_path, monkeypatch):
    """Return a function that runs ``tfx`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return call


def said(result, code):
    """Return the error line; nothing else may have been said."""
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


# run


def test_run_text_prints_the_vector(tfx, bundle):
    result = tfx("run", "--text", "the cat sat")
    assert result.exit_code == 0
    head, row = result.stdout.splitlines()
    assert head == "sentence_embedding: float32 (1, 5)"
    vectors = Session(bundle).encode(["the cat sat"])
    assert isinstance(vectors, np.ndarray)
    np.testing.assert_allclose(json.loads(row), np.ravel(vectors), rtol=1e-5)


def test_run_json_is_one_object_of_nested_lists(tfx, bundle):
    result = tfx("run", "--text", "cat", "--text", "a dog ran", "--json")
    assert result.exit_code == 0
    outputs = json.loads(result.stdout)["outputs"]
    expected = Session(bundle).encode(["cat", "a dog ran"])
    np.testing.assert_array_equal(np.array(outputs["sentence_embedding"], np.float32), expected)


@pytest.mark.parametrize("out", ["out.npz", "out.json"])
def test_run_arrays_from_and_to_files(tfx, bundle, tmp_path, tiny_reference, out):
    case = bundle.golden()[4]
    np.savez(tmp_path / "batch.npz", **case.inputs)
    result = tfx("run", "tfx-model", "--input", "batch.npz", "--out", out)
    assert result.exit_code == 0, result.output
    if out.endswith(".npz"):
        found = dict(np.load(tmp_path / out))
    else:
        found = {name: np.array(v) for name, v in json.loads((tmp_path / out).read_text())["outputs"].items()}
    for name, expected in tiny_reference(case.inputs).items():
        np.testing.assert_allclose(found[name], expected, atol=1e-6)
    assert "exists; use --force" in said(tfx("run", "--input", "batch.npz", "--out", out), 2)
    assert tfx("run", "--input", "batch.npz", "--out", out, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "give either --text or --input"),
        (["run", "--text", "a", "--input", "x.npz"], "give either --text or --input"),
        (["run", "--input", "absent.npz"], "absent.npz: cannot be read: No such file or directory"),
        (["run", "--text", "a", "--out", "x.csv"], "x.csv: found the ending .csv, wanted one of .npz, .json"),
        (["run", "nowhere", "--text", "a"], "nowhere: found nothing, wanted a bundle folder"),
        (["run", "--text", "a", "--provider", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["run", "--text", "a", "--threads", "0"], "0 is not in the range x>=1"),
        (["verify", "nowhere"], "nowhere: found nothing"),
        (["verify", "--max-abs", "inf"], "inf is not a finite number"),
        (["verify", "--max-abs", "nan"], "nan is not a finite number"),
        (["verify", "--max-abs", "-1"], "-1.0 is not in the range x>=0"),
        (["verify", "--min-cosine", "nan"], "nan is not a finite number"),
        (["verify", "--min-cosine", "1.1"], "1.1 is not in the range -1<=x<=1"),
        (["bench", "--seconds", "nan"], "nan is not a finite number"),
        (["bench", "--batch", "one"], 'found "one", wanted whole numbers'),
        (["bench", "--batch", "0"], "batch: found 0, wanted at least 1"),
        (["bench", "--batch", "99999999999", "--seq", "4"], "found 99999999999 x 4, wanted at most 16777216 tokens"),
        (["bench", "--batch", "99999999999", "--seq", "99"], "sequence: found 99, wanted at most 24"),
        (["bench", "--seq", "99"], "sequence: found 99, wanted at most 24"),
        (["bench", "--rounds", "0"], "0 is not in the range x>=1"),
        (["bench", "nowhere"], "nowhere: found nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tfx, bundle, arguments, message):
    assert message in said(tfx(*arguments), 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_ids", np.full((1, 3), 12), "input_ids: found 12, wanted values of 0 to 11"),
        ("input_ids", np.ones((1, 25), int), "input_ids: found sequence length 25, wanted at most 24"),
        ("input_ids", np.ones(3, int), "input_ids: found shape (3,), wanted (batch, sequence)"),
        ("input_ids", np.ones((1, 3)), "input_ids: found float64, wanted int64"),
        ("input_ids", np.ones((1, 0), int), "input_ids: found sequence length 0, wanted at least 1"),
        ("ids", np.ones((1, 3), int), 'feeds: found "ids", wanted only input_ids'),
    ],
)
def test_bad_feeds_write_nothing(tfx, bundle, tmp_path, name, value, message):
    np.savez(tmp_path / "batch.npz", **{name: value})
    assert message in said(tfx("run", "--input", "batch.npz", "--out", "out.npz"), 2)
    assert not (tmp_path / "out.npz").exists()


def test_a_damaged_bundle(tfx, bundle):
    path = bundle.path / "model.onnx"
    path.write_bytes(path.read_bytes()[:-10])
    for arguments, code in ((["run", "--text", "a"], 2), (["verify"], 1), (["bench"], 2)):
        assert "model.onnx: found" in said(tfx(*arguments), code)


# verify


def test_verify_passes_and_says_by_how_much(tfx, bundle):
    result = tfx("verify")
    assert result.exit_code == 0
    assert "parity passed on 32 outputs: max abs" in result.stdout
    assert "on cpu (" in result.stdout
    found = json.loads(tfx("verify", "--json", "--no-optimize", "--threads", 1).stdout)
    assert found["passed"] is True
    assert found["max_abs"] < 1e-6
    assert len(found["cases"]) == 32
    assert {"id", "output", "max_abs", "min_cosine", "passed"} <= set(found["cases"][0])


@pytest.mark.parametrize("as_json", [False, True])
def test_verify_fails_with_exit_1_and_still_reports(tfx, make_bundle, tiny_reference, as_json):
    make_bundle(expected=lambda feeds: {k: v[..., ::-1] for k, v in tiny_reference(feeds).items()})
    result = tfx("verify", *(["--json"] if as_json else []))
    assert "parity failed on 32 of 32 outputs" in said(result, 1)
    if as_json:
        assert json.loads(result.stdout)["passed"] is False


def test_verify_tolerance_is_overridable(tfx, bundle):
    assert "allowed 0" in said(tfx("verify", "--max-abs", 0), 1)
    assert tfx("verify", "--max-abs", 1, "--min-cosine", 0.5).exit_code == 0


# bench and doctor


def test_bench_table_and_json(tfx, bundle):
    result = tfx("bench", "--batch", 2, "--seq", "4,8", "--rounds", 5, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.stdout
    assert "1 threads" in result.stdout
    result = tfx("bench", "--batch", 2, "--seq", 4, "--rounds", 5, "--threads", 1, "--json")
    found = json.loads(result.stdout)
    assert found["provider"] == "cpu"
    assert found["threads"] == 1
    assert len(found["results"]) == 1
    assert result.stderr == ""


@pytest.mark.parametrize("command", [["bench", "--json"], ["verify", "--json"], ["run", "--text", "a", "--json"]])
def test_cuda_without_a_gpu_is_exit_3_with_the_remedy_and_no_number(tfx, bundle, command):
    from tfx.runtime.providers import provider_problem

    result = tfx(*command, "--provider", "cuda")
    if provider_problem("cuda") is None:
        assert result.exit_code == 0
        return
    assert "--provider cpu" in said(result, 3)
    assert result.stdout == ""


def test_doctor(tfx):
    result = tfx("doctor")
    assert result.exit_code == 0
    assert "provider cpu    runs" in result.stdout
    assert "onnxruntime missing" not in result.stdout
    assert set(json.loads(tfx("doctor", "--json").stdout)) == {"environment", "providers", "packages", "warnings"}


@pytest.mark.parametrize("command", ["run", "verify", "bench", "doctor"])
def test_help_shows_the_example_on_lines_of_its_own(tfx, command):
    lines = tfx(command, "--help").stdout.splitlines()
    assert lines[lines.index("  Example:") + 1].startswith(f"    tfx {command}")
