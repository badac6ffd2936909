from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from tfx.cli import main
from tfx.errors import BundleError, ParityError
from tfx.runtime import self_check as module
from tfx.runtime.bundle import MANIFEST_NAME, Bundle, sha256_file
from tfx.runtime.golden import GOLDEN_NAME, load_golden, save_golden
from tfx.runtime.self_check import STAGES, self_check
from tfx.runtime.session import Session

TEXTS = ("cat", "the cat sat", "a b c d e f g h i j", "\U0001f408 \u0627")

REPORT = {
    "app", "passed", "stage", "problem", "runtime", "library", "provider", "precision", "target", "layout", "max_abs",
    "min_cosine", "stages", "batch_variance", "promised_batch_variance",
}  # fmt: skip


@pytest.fixture
def bundle(make_bundle) -> Bundle:
    return make_bundle(texts=TEXTS)


def resealed(bundle: Bundle, name: str) -> None:
    """Let the manifest say of a changed file what it is now, as whoever planted a fault could."""
    path = bundle.path / MANIFEST_NAME
    manifest = json.loads(path.read_text(encoding="utf-8"))
    file = bundle.path / name
    manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    path.write_text(json.dumps(manifest), encoding="utf-8")


def rerecorded(bundle: Bundle, change) -> None:
    """Change the case of texts."""
    *others, case = load_golden(bundle.path / GOLDEN_NAME)
    inputs = {name: values.copy() for name, values in case.inputs.items()}
    outputs = {name: values.copy() for name, values in case.outputs.items()}
    change(inputs, outputs)
    save_golden(bundle.path / GOLDEN_NAME, [*others, dataclasses.replace(case, inputs=inputs, outputs=outputs)])
    resealed(bundle, GOLDEN_NAME)


def test_every_stage_passes_and_says_what_it_compared(bundle):
    found = self_check(bundle.path)
    assert found.passed and found.failed is None
    found.check()
    report = found.to_json()
    assert {*REPORT, "tolerance", "placement", "cases", "texts"} == set(report)
    assert [stage["stage"] for stage in report["stages"]] == list(STAGES)
    assert [stage["checked"] for stage in report["stages"]] == [3, 1, len(TEXTS), 34, len(TEXTS)]
    assert all(stage["passed"] for stage in report["stages"])
    assert report["stage"] is None and report["problem"] is None
    assert report["app"] == "python" and report["provider"] == "cpu" and report["precision"] == "fp32"
    assert report["runtime"].startswith("onnxruntime 1.") and "onnxruntime" in report["library"]
    assert 0 <= report["max_abs"] < 1e-6 and report["min_cosine"] > 0.999999
    assert report["batch_variance"] < 1e-6 and report["promised_batch_variance"] is None
    assert [text["id"] for text in report["texts"]][1] == 'texts[1] "the cat sat"'
    assert report["texts"][3]["id"].isascii()
    json.dumps(report, allow_nan=False)


def test_what_was_promised_of_company_is_shown(make_bundle):
    quantization = {
        "scheme": "rows", "changed": 1, "kept": [], "calibration": {}, "worst_cosine": None, "batch_variance": 0.5,
        "padding_variance": None, "cpu": {}, "notes": {},
    }  # fmt: skip
    found = self_check(make_bundle(texts=TEXTS, quantization=quantization))
    assert found.to_json()["promised_batch_variance"] == 0.5


@pytest.mark.parametrize("pooling", [True, False])
def test_without_pooling_every_output_is_cut_to_the_text(make_bundle, pooling):
    found = self_check(make_bundle(texts=TEXTS, pooling=pooling))
    assert found.passed
    assert len(found.stages[-1].results or ()) == len(TEXTS) * (1 if pooling else 2)
    assert found.stages[-1].checked == len(TEXTS)


@pytest.mark.parametrize("changes", [{"tokenizer": False}, {}])
def test_a_bundle_without_texts_has_nothing_to_compare_in_two_stages(make_bundle, changes):
    found = self_check(make_bundle(**changes))
    assert found.passed
    assert [stage.checked for stage in found.stages if stage.stage in ("tokens", "vectors")] == [0, 0]
    assert found.to_json()["batch_variance"] is None


def without(bundle: Bundle, name: str, texts: bool) -> None:
    """Leave an output out of the cases of texts, or of the others."""
    cases = [
        dataclasses.replace(case, outputs={key: value for key, value in case.outputs.items() if key != name})
        if bool(case.texts) == texts
        else case
        for case in load_golden(bundle.path / GOLDEN_NAME)
    ]
    save_golden(bundle.path / GOLDEN_NAME, cases)
    resealed(bundle, GOLDEN_NAME)


@pytest.mark.parametrize(("texts", "named"), [(True, "texts"), (False, "b1-s1-full")])
def test_an_output_that_is_not_recorded(bundle, texts, named):
    without(bundle, "sentence_embedding", texts)
    with pytest.raises(ParityError, match=f"^outputs: golden: case {named} does not record sentence_embedding$"):
        self_check(bundle.path).check()


def test_a_golden_that_is_missing_or_damaged(bundle):
    path = bundle.path / GOLDEN_NAME
    content, sealed = path.read_bytes(), (bundle.path / MANIFEST_NAME).read_text(encoding="utf-8")
    for change, message in (
        (
            lambda case: dataclasses.replace(case, batch=5, texts=()),
            r"input_ids: found shape \(4, 8\), wanted \(5, seq",
        ),
        (lambda case: dataclasses.replace(case, inputs={**case.inputs, "z": np.ones(1)}), "records z, which is no inp"),
        (lambda case: dataclasses.replace(case, outputs={**case.outputs, "z": np.ones(1)}), "records z, which is no o"),
        (lambda case: dataclasses.replace(case, inputs={"input_ids": case.inputs["input_ids"]}), "not record atten"),
        (lambda case: dataclasses.replace(case, inputs={**case.inputs, "attention_mask": np.ones(4)}), "found shape"),
    ):
        *others, case = load_golden(path)
        save_golden(path, [*others, change(case)])
        resealed(bundle, GOLDEN_NAME)
        with pytest.raises(ParityError, match=f"^files: {GOLDEN_NAME}: case texts.*{message}"):
            self_check(bundle.path).check()
        path.write_bytes(content)
    path.write_bytes(b"x" * 100)
    resealed(bundle, GOLDEN_NAME)
    with pytest.raises(ParityError, match=r"^files: .* not a safetensors file"):
        self_check(bundle.path).check()
    manifest = json.loads(sealed)
    del manifest["files"][GOLDEN_NAME]
    (bundle.path / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
    result = CliRunner().invoke(main, ["verify", str(bundle.path), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["stage"]) == (1, "files")


def test_a_graph_that_the_runtime_refuses(bundle):
    bundle.model_path.write_bytes(b"\x08\x08")  # a model that has an IR version and nothing else
    resealed(bundle, bundle.model_path.name)
    with pytest.raises(ParityError, match=r"^runtime: .*model\.onnx"):
        self_check(bundle.path).check()


@pytest.mark.parametrize("texts", [(), TEXTS])
def test_a_tokenizer_that_cannot_be_opened(make_bundle, texts):
    bundle = make_bundle(texts=texts)
    (bundle.path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    resealed(bundle, "tokenizer.json")
    with pytest.raises(ParityError, match=r"^tokens: .*tokenizer\.json"):
        self_check(bundle.path).check()


def test_recorded_texts_of_a_bundle_without_tokenizer_are_not_compared(bundle):
    path = bundle.path / MANIFEST_NAME
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**manifest, "tokenizer": None}), encoding="utf-8")
    found = self_check(bundle.path)
    assert found.passed
    assert [stage.checked for stage in found.stages if stage.stage in ("tokens", "vectors")] == [0, 0]


def test_vectors_alone_that_are_no_numbers(bundle, monkeypatch):
    encode = Session.encode

    def other(self, texts, batch_size=32):
        found = encode(self, texts, batch_size)
        assert isinstance(found, np.ndarray)
        return found * np.nan if len(texts) == 1 else found

    monkeypatch.setattr(module.Session, "encode", other)
    found = self_check(bundle)
    assert found.to_json()["batch_variance"] is None
    with pytest.raises(ParityError, match=r"^vectors: .* NaN"):
        found.check()


def test_files(bundle):
    for change, message in (
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "the file is incomplete or altered"),
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), "altered: its sha256"),
        (lambda path: path.unlink(), "found nothing, wanted"),
    ):
        content = bundle.model_path.read_bytes()
        change(bundle.model_path)
        found = self_check(bundle.path)
        bundle.model_path.write_bytes(content)
        report = found.to_json()
        assert (report["passed"], report["stage"], len(report["stages"])) == (False, "files", 1)
        assert "model.onnx" in report["problem"] and message in report["problem"]
        assert report["runtime"] is report["library"] is report["max_abs"] is None
        with pytest.raises(ParityError, match=r"^files: .*model\.onnx"):
            found.check()


def test_a_manifest_that_cannot_be_read_is_no_report(bundle):
    (bundle.path / MANIFEST_NAME).write_text("{")
    with pytest.raises(BundleError, match="not JSON"):
        self_check(bundle.path)
    with pytest.raises(BundleError, match="found nothing"):
        self_check(bundle.path / "nowhere")


@pytest.mark.parametrize(
    ("name", "row", "place", "message"),
    [
        ("input_ids", 1, 2, r"texts\[1\] .the cat sat.: input_ids: token 2: found \d+, wanted 11$"),
        ("token_type_ids", 0, 0, r"texts\[0\] .cat.: token_type_ids: token 0: found 0, wanted 1$"),
    ],
)
def test_tokens(bundle, name, row, place, message):
    def change(inputs, outputs):
        del outputs
        inputs[name][row, place] = 11 if name == "input_ids" else 1

    rerecorded(bundle, change)
    found = self_check(bundle.path)
    assert found.failed is not None and found.failed.stage == "tokens"
    with pytest.raises(ParityError, match=f"^tokens: {message}"):
        found.check()


def test_a_text_of_another_length(bundle):
    def change(inputs, outputs):
        del outputs
        inputs["attention_mask"][0, 2] = 0  # "cat" was [CLS] cat [SEP]

    rerecorded(bundle, change)
    with pytest.raises(ParityError, match=r"^tokens: texts\[0\] .cat.: input_ids: found 3 tokens, wanted 2$"):
        self_check(bundle.path).check()


def test_a_tokenizer_that_is_none(bundle):
    (bundle.path / "tokenizer.json").write_text("{}")
    resealed(bundle, "tokenizer.json")
    with pytest.raises(ParityError, match=r"^tokens: .*tokenizer\.json: not a tokenizer"):
        self_check(bundle.path).check()


@pytest.mark.parametrize("value", [np.nan, np.inf, 5.0])
def test_outputs(bundle, value):
    def change(inputs, outputs):
        del inputs
        outputs["sentence_embedding"][2, 0] += value

    rerecorded(bundle, change)
    found = self_check(bundle.path)
    assert found.failed is not None and found.failed.stage == "outputs"
    assert len(found.stages) == 4
    with pytest.raises(ParityError, match=r"^outputs: parity failed on 1 of 34 .* sentence_embedding in texts"):
        found.check()
    json.dumps(found.to_json(), allow_nan=False)


def test_vectors(bundle, monkeypatch):
    encode = Session.encode

    def other(self, texts, batch_size=32):
        found = encode(self, texts, batch_size)
        assert isinstance(found, np.ndarray)
        return found[::-1] if len(texts) > 1 else found  # rows that were sorted by length and not put back

    monkeypatch.setattr(module.Session, "encode", other)
    found = self_check(bundle)
    assert found.failed is not None and found.failed.stage == "vectors"
    assert found.to_json()["batch_variance"] > 0.01
    with pytest.raises(ParityError, match=r"^vectors: parity failed on 4 of 4 .* in texts\[0\] .cat."):
        found.check()


def test_the_command_has_the_report_and_says_the_first_stage_that_differs(bundle):
    result = CliRunner().invoke(main, ["verify", str(bundle.path), "--json"])
    assert result.exit_code == 0
    assert set(json.loads(result.stdout)) > REPORT
    shown = CliRunner().invoke(main, ["verify", str(bundle.path)]).stdout
    assert all(stage in shown for stage in STAGES) and "alone or beside others" in shown

    rerecorded(bundle, lambda inputs, _: inputs["input_ids"].__setitem__((0, 1), 11))
    result = CliRunner().invoke(main, ["verify", str(bundle.path), "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["passed"], report["stage"]) == (False, "tokens")
