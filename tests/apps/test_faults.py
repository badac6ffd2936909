"""What is planted at each stage is found there, and named, by the self-check of every language."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import faults
from .bundles import planted, reseal
from .faults import Check, cases, change_golden, change_weights, check_by, silence_graph
from .programs import Program

LANGUAGES = ("python", "c", "cpp", "node", "web")
STAGES = ("files", "runtime", "tokens", "outputs", "vectors")


@pytest.fixture(scope="module", params=LANGUAGES)
def check(request: pytest.FixtureRequest) -> Check:
    return check_by(request.param, request)


@pytest.fixture(scope="module")
def sound(tiny: Callable[..., Path]) -> Path:
    return tiny()


def failed(found: tuple[int, dict[str, Any]], stage: str, *words: str) -> None:
    """The check stopped at a stage, and its problem is one line with these words."""
    code, report = found
    assert (code, report["passed"], report["stage"]) == (1, False, stage), report
    reached = STAGES[: STAGES.index(stage) + 1]
    assert [each["stage"] for each in report["stages"]] == list(reached)
    assert [each["passed"] for each in report["stages"]] == [True] * (len(reached) - 1) + [False]
    assert "\n" not in report["problem"]
    for word in words:
        assert word in report["problem"], report["problem"]
    json.dumps(report, allow_nan=False)


def test_nothing_is_found_in_a_sound_bundle(check: Check, sound: Path):
    code, report = check(sound)
    assert (code, report["passed"], report["stage"], report["problem"]) == (0, True, None, None)


def test_a_missing_file(check: Check, sound: Path, tmp_path: Path):
    bundle = planted(sound, tmp_path / "b", lambda folder: (folder / "tokenizer.json").unlink(), seal=False)
    failed(check(bundle), "files", "tokenizer.json")


def test_a_file_that_is_cut_off(check: Check, sound: Path, tmp_path: Path):
    def cut(folder: Path) -> None:
        content = (folder / faults.GOLDEN).read_bytes()
        (folder / faults.GOLDEN).write_bytes(content[:-100])

    size = (sound / faults.GOLDEN).stat().st_size
    failed(check(planted(sound, tmp_path / "b", cut, seal=False)), "files", faults.GOLDEN, str(size), str(size - 100))


def test_a_byte_of_a_weight(check: Check, sound: Path, tmp_path: Path):
    bundle = planted(sound, tmp_path / "b", lambda folder: change_weights(folder, flip), seal=False)
    failed(check(bundle), "files", faults.MODEL, "sha256")


def flip(values: np.ndarray) -> None:
    """One bit of one byte, in the exponent of a token's first number that every text has."""
    values.reshape(-1).view(np.uint8)[4 * 2 * values.shape[-1] + 3] ^= 0x04  # of id 2, which begins every text


def test_a_byte_of_a_weight_that_the_manifest_agrees_with(check: Check, sound: Path, tmp_path: Path):
    bundle = planted(sound, tmp_path / "b", lambda folder: change_weights(folder, flip))
    failed(check(bundle), "outputs")


def test_a_byte_of_a_weight_beside_the_model(check: Check, tiny: Callable[..., Path], tmp_path: Path):
    sound = tiny(external=True)
    bundle = planted(sound, tmp_path / "b", lambda folder: change_weights(folder, flip), seal=False)
    failed(check(bundle), "files", "model.onnx.data", "sha256")


def test_a_token(check: Check, sound: Path, tmp_path: Path):
    def change(ids: np.ndarray) -> None:
        ids[1, 0] += 1

    case = next(entry["id"] for entry in cases(sound) if entry.get("texts"))
    bundle = planted(sound, tmp_path / "b", lambda folder: change_golden(folder, f"{case}/inputs/input_ids", change))
    failed(check(bundle), "tokens", "text", "1")


def test_weights_that_are_not_numbers(check: Check, sound: Path, tmp_path: Path):
    def change(values: np.ndarray) -> None:
        values[...] = np.nan

    bundle = planted(sound, tmp_path / "b", lambda folder: change_weights(folder, change))
    failed(check(bundle), "outputs", "NaN")
    assert None in [stage.get("max_abs", 0) for stage in check(bundle)[1]["stages"]]


def test_outputs_that_are_constant_never_pass(check: Check, sound: Path, tmp_path: Path):
    """A graph that gives zeros whatever it gets, and a golden that wants them."""

    def silence(folder: Path) -> None:
        silence_graph(folder)
        for entry in cases(folder):
            for name in ("last_hidden_state", "sentence_embedding"):
                change_golden(folder, f"{entry['id']}/outputs/{name}", lambda values: values.fill(0))

    failed(check(planted(sound, tmp_path / "b", silence)), "outputs", "constant")


def test_a_recorded_output(check: Check, sound: Path, tmp_path: Path):
    def change(values: np.ndarray) -> None:
        values.reshape(-1)[0] += 0.01

    case = next(entry["id"] for entry in cases(sound) if not entry.get("texts"))
    name = f"{case}/outputs/sentence_embedding"
    bundle = planted(sound, tmp_path / "b", lambda folder: change_golden(folder, name, change))
    failed(check(bundle), "outputs", case, "sentence_embedding")


def test_a_tokenizer_of_another_model(check: Check, sound: Path, tmp_path: Path):
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_bytes())
        tokenizer["normalizer"]["lowercase"] = False
        path.write_text(json.dumps(tokenizer), encoding="utf-8")

    failed(check(planted(sound, tmp_path / "b", change)), "tokens", "text")


@pytest.mark.parametrize("of_texts", [True, False])
def test_an_output_that_a_case_does_not_record(check: Check, sound: Path, tmp_path: Path, of_texts: bool):
    case = next(entry["id"] for entry in cases(sound) if bool(entry.get("texts")) == of_texts)

    def change(tensors: dict[str, np.ndarray], entries: list[dict[str, Any]]) -> None:
        del tensors[f"{case}/outputs/sentence_embedding"], entries

    bundle = planted(sound, tmp_path / "b", lambda folder: faults.change_recorded(folder, change))
    failed(check(bundle), "outputs", f"case {case} does not record sentence_embedding")


def test_a_case_of_other_rows_than_it_says(check: Check, sound: Path, tmp_path: Path):
    def change(tensors: dict[str, np.ndarray], entries: list[dict[str, Any]]) -> None:
        del tensors
        entries[0]["batch"] += 1

    bundle = planted(sound, tmp_path / "b", lambda folder: faults.change_recorded(folder, change))
    failed(check(bundle), "files", faults.GOLDEN, cases(sound)[0]["id"])


@pytest.mark.parametrize("seal", [True, False])
def test_no_golden(check: Check, sound: Path, tmp_path: Path, seal: bool):
    bundle = planted(sound, tmp_path / "b", lambda folder: (folder / faults.GOLDEN).unlink(), seal=seal)
    failed(check(bundle), "files", faults.GOLDEN)


def test_bytes_behind_the_last_tensor(check: Check, sound: Path, tmp_path: Path):
    def change(folder: Path) -> None:
        with (folder / faults.GOLDEN).open("ab") as file:
            file.write(b"more")

    failed(check(planted(sound, tmp_path / "b", change)), "files", faults.GOLDEN)


@pytest.mark.parametrize("texts", [True, False])
def test_a_tokenizer_that_cannot_be_opened(check: Check, sound: Path, tmp_path: Path, texts: bool):
    def without_texts(tensors: dict[str, np.ndarray], entries: list[dict[str, Any]]) -> None:
        del tensors
        for entry in entries:
            entry.pop("texts", None)

    def change(folder: Path) -> None:
        (folder / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}', encoding="utf-8")
        if not texts:
            faults.change_recorded(folder, without_texts)

    failed(check(planted(sound, tmp_path / "b", change)), "tokens", "tokenizer.json")


def test_recorded_texts_without_a_tokenizer_are_not_compared(check: Check, sound: Path, tmp_path: Path):
    bundle = planted(sound, tmp_path / "b", lambda folder: (folder / "tokenizer.json").unlink())
    reseal(bundle, tokenizer=None)
    code, report = check(bundle)
    assert (code, report["passed"]) == (0, True), report
    assert [each["checked"] for each in report["stages"] if each["stage"] in ("tokens", "vectors")] == [0, 0]


def test_a_graph_that_the_runtime_refuses(check: Check, sound: Path, tmp_path: Path):
    def change(folder: Path) -> None:
        (folder / faults.MODEL).write_bytes(b"\x08\x08")

    bundle = planted(sound, tmp_path / "b", change)
    failed(check(bundle), "runtime", faults.MODEL)


# ---- what is not a failed check: exit codes 2 and 3 ----


@pytest.mark.parametrize("lang", ["c", "cpp", "node"])
@pytest.mark.parametrize("content", [None, b"", b"{", b'{"format": 99}'])
def test_a_manifest_that_cannot_be_read(lang: str, content: bytes | None, built, sound: Path, tmp_path: Path):
    bundle = planted(sound, tmp_path / "b", lambda _: None)
    (bundle / "tfx.json").unlink()
    if content is not None:
        (bundle / "tfx.json").write_bytes(content)
    done = built(lang).run("--self-check", "--json", bundle=bundle)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "tfx.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("lang", ["c", "cpp"])
def test_an_older_library(lang: str, built: Callable[..., Program], old_library, sound: Path):
    library = old_library("1.19.2")
    program = built(lang)
    command = [program.command[0], "--library", str(library)]
    code, report = program.self_check(sound, command=command)
    assert (code, report["stage"]) == (3, "runtime")
    for word in ("1.19.2", "1.20", str(library)):
        assert word in report["problem"], report["problem"]
    done = program.run("a text", bundle=sound, command=command)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "1.19.2" in done.stderr


@pytest.mark.parametrize("lang", ["c", "cpp"])
def test_the_oldest_library_that_will_do(lang: str, built: Callable[..., Program], old_library, sound: Path):
    program = built(lang)
    command = [program.command[0], "--library", str(old_library("1.20.1"))]
    code, report = program.self_check(sound, command=command)
    assert (code, report["problem"], report["runtime"]) == (0, None, "onnxruntime 1.20.1")


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory: pytest.TempPathFactory, cmake: str) -> Path:
    """A library that has what onnxruntime exports, and no version of its interface."""
    del cmake
    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake.c").write_text(
        "#include <stddef.h>\n"
        "#include <stdint.h>\n"
        "static const void *get(uint32_t version) { (void)version; return NULL; }\n"
        'static const char *version(void) { return "1.0.0-fake"; }\n'
        "struct base { const void *(*get)(uint32_t); const char *(*version)(void); };\n"
        "static const struct base BASE = {get, version};\n"
        "const struct base *OrtGetApiBase(void) { return &BASE; }\n"
    )
    library = folder / "libfake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "fake.c"], check=True, timeout=60)
    return library


@pytest.mark.parametrize("lang", ["c", "cpp"])
def test_a_library_without_the_interface(lang: str, built: Callable[..., Program], fake_library: Path, sound: Path):
    program = built(lang)
    code, report = program.self_check(sound, command=[program.command[0], "--library", str(fake_library)])
    assert (code, report["stage"]) == (3, "runtime")
    assert "1.0.0-fake" in report["problem"]


@pytest.mark.parametrize("lang", ["c", "cpp"])
@pytest.mark.parametrize("library", ["/no/such/library.so", "/bin/sh", "tfx.json"])
def test_no_library(lang: str, library: str, built: Callable[..., Program], sound: Path):
    program = built(lang)
    path = str(sound / library)  # an absolute name stays as it is
    code, report = program.self_check(sound, command=[program.command[0], "--library", path])
    assert (code, report["stage"], report["library"]) == (3, "runtime", path)
    assert path in report["problem"]


def test_a_bundle_that_is_sealed_again_is_sound(check: Check, sound: Path, tmp_path: Path):
    """The planting itself changes nothing."""
    bundle = planted(sound, tmp_path / "b", reseal)
    assert check(bundle)[0] == 0
