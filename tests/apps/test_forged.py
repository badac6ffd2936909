"""C and C++ on bundles that no export makes: nothing wrong passes, nothing small takes much, messages stay messages."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import tfx

from . import forged
from .conftest import Once
from .forged import IDS, TOKENIZER, cast, golden, raw_golden, write
from .programs import Program

FOLDER = Path(__file__).resolve().parent
PLACES = {
    "a/inputs/ids": {"dtype": "I64", "shape": [1, 3], "data_offsets": [0, 24]},
    "a/outputs/y": {"dtype": "F32", "shape": [1, 3], "data_offsets": [24, 36]},
}
DATA = IDS.tobytes() + IDS.astype(np.float32).tobytes()


@pytest.fixture(scope="module", params=["c", "cpp"])
def program(request: pytest.FixtureRequest, built: Callable[..., Program]) -> Program:
    return built(request.param, sanitize=True)


@pytest.fixture(scope="module")
def in_c(built: Callable[..., Program]) -> Program:
    return built("c", sanitize=True)


def with_tokenizer(manifest: dict[str, Any]) -> None:
    manifest["tokenizer"] = {"file": "tokenizer.json", "max_length": None}


def test_what_is_forged_here_is_sound_unless_something_is_wrong(program: Program, tmp_path: Path):
    code, report = program.self_check(write(tmp_path / "b"))
    assert (code, report["problem"], [stage["checked"] for stage in report["stages"]]) == (0, None, [2, 1, 0, 1, 0])
    bundle = write(
        tmp_path / "c",
        recorded=golden(texts=["a b c"]),
        change=with_tokenizer,
        tokenizer_json=json.dumps(TOKENIZER).encode(),
    )
    code, report = program.self_check(bundle)
    assert (code, report["problem"], [stage["checked"] for stage in report["stages"]]) == (0, None, [3, 1, 1, 1, 1])


# ---- the self-check passes nothing that is wrong ----


def two_outputs(manifest: dict[str, Any]) -> None:
    manifest["outputs"].append({**forged.OUTPUT, "name": "z"})


@pytest.mark.parametrize(
    ("options", "stage", "words"),
    [
        ({"recorded": b""}, "files", "nothing to compare with"),
        ({"recorded": raw_golden({}, b"")}, "files", "case a has no inputs or no outputs"),
        ({"recorded": raw_golden(PLACES, DATA + b"junk")}, "files", "found 4 bytes behind the last tensor"),
        (
            {"recorded": raw_golden({**PLACES, "a/outputs/z": PLACES["a/outputs/y"]}, DATA)},
            "files",
            "begins at byte 24, wanted 36",
        ),
        (
            {
                "recorded": raw_golden(
                    {**PLACES, "a/outputs/y": {**PLACES["a/outputs/y"], "data_offsets": [28, 40]}}, DATA + b"hole"
                )
            },
            "files",
            "a/outputs/y begins at byte 28, wanted 24",
        ),
        ({"recorded": golden(batch=99)}, "files", "found shape (1, 3), wanted (99, 3)"),
        ({"recorded": golden(sequence=None)}, "files", "sequence: missing"),
        ({"recorded": golden(pattern=None)}, "files", "pattern: missing"),
        ({"recorded": golden({"a/inputs/x": IDS, "a/outputs/y": IDS})}, "files", "does not record ids"),
        (
            {"recorded": golden({"a/inputs/ids": IDS, "a/outputs/y": IDS.astype("f"), "a/outputs/z": IDS})},
            "files",
            "records z, which is no output",
        ),
        (
            {"recorded": golden({"a/inputs/ids": IDS, "a/inputs/x": IDS, "a/outputs/y": IDS.astype("f")})},
            "files",
            "found 2 inputs, wanted the 1",
        ),
    ],
)
def test_a_golden_that_is_damaged(program: Program, tmp_path: Path, options: Any, stage: str, words: str):
    code, report = program.self_check(write(tmp_path / "b", **options))
    assert (code, report["stage"]) == (1, stage)
    assert words in report["problem"]


def test_every_output_is_recorded(program: Program, tiny: Callable[..., Path], tmp_path: Path):
    """What is not recorded could be NaN; also where only the case of the texts lacks it."""
    from .bundles import planted
    from .faults import GOLDEN

    def forget(only: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            from safetensors import safe_open
            from safetensors.numpy import save_file

            with safe_open(folder / GOLDEN, framework="numpy") as file:
                metadata = file.metadata()
                kept = {
                    name: file.get_tensor(name).copy()
                    for name in file.keys()  # noqa: SIM118 - the file is no mapping
                    if not (name.startswith(only) and name.endswith("/outputs/sentence_embedding"))
                }
            save_file(kept, folder / GOLDEN, metadata=metadata)

        return change

    for i, only in enumerate(("", "text")):
        code, report = program.self_check(planted(tiny(), tmp_path / str(i), forget(only)))
        assert (code, report["stage"]) == (1, "outputs")
        assert report["problem"].startswith("golden: case ")
        assert report["problem"].endswith(" does not record sentence_embedding")


def test_a_text_without_recorded_numbers_fails(program: Program, tmp_path: Path):
    """Its one output has no row for a text, so there is nothing to compare."""
    bundle = write(
        tmp_path / "b",
        recorded=golden(texts=["a b c"]),
        change=lambda m: (with_tokenizer(m), m["outputs"][0].update(shape=["rows", "sequence"])),
        tokenizer_json=json.dumps(TOKENIZER).encode(),
    )
    code, report = program.self_check(bundle)
    assert (code, report["stage"], "nothing to compare" in report["problem"]) == (1, "vectors", True)


def test_a_text_that_is_another_number_alone_fails(program: Program, tmp_path: Path):
    """Alone it is infinite, beside another right: no tolerance knows of it but the variance's."""
    rows = np.array([[1, 2, 3], [2, 2, 3]], np.int64)
    nodes = [
        cast(name="f"),
        helper.make_node("Shape", ["ids"], ["rows"], start=0, end=1),
        helper.make_node("Sub", ["rows", "one"], ["others"]),
        helper.make_node("Cast", ["others"], ["o"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["o", "o"], ["scale"]),
        helper.make_node("Mul", ["f", "scale"], ["y"]),
    ]
    bundle = write(
        tmp_path / "b",
        nodes,
        constants={"one": np.array([1])},
        recorded=golden({"a/inputs/ids": rows, "a/outputs/y": rows.astype("f")}, batch=2, texts=["a b c", "b b c"]),
        change=with_tokenizer,
        tokenizer_json=json.dumps(TOKENIZER).encode(),
    )
    code, report = program.self_check(bundle)
    assert (code, report["stage"], report["batch_variance"]) == (1, "vectors", None)
    assert "alone and beside others" in report["problem"]


def test_values_too_large_for_a_cosine_fail(program: Program, tmp_path: Path):
    large = IDS * 1e200
    bundle = write(
        tmp_path / "b",
        [cast(TensorProto.DOUBLE, "f"), helper.make_node("Mul", ["f", "k"], ["y"])],
        constants={"k": np.array(1e200)},
        kind=TensorProto.DOUBLE,
        recorded=golden({"a/inputs/ids": IDS, "a/outputs/y": -large}),
        change=lambda m: m["outputs"][0].update(dtype="float64"),
    )
    code, report = program.self_check(bundle)
    assert (code, report["stage"], report["min_cosine"]) == (1, "outputs", None)
    assert "cosine none" in report["problem"]


@pytest.mark.parametrize("texts", [None, ["a b c"]])
def test_a_tokenizer_that_cannot_be_used_fails_with_and_without_texts(program: Program, tmp_path: Path, texts: Any):
    bundle = write(
        tmp_path / "b",
        recorded=golden(texts=texts),
        change=with_tokenizer,
        tokenizer_json=b'{"model": {"type": "Unigram"}}',
    )
    code, report = program.self_check(bundle)
    assert (code, report["stage"], "Unigram" in report["problem"]) == (1, "tokens", True)


def test_texts_without_a_tokenizer_are_nothing_to_do(program: Program, tmp_path: Path):
    code, report = program.self_check(write(tmp_path / "b", recorded=golden(texts=["a b c"])))
    assert (code, report["problem"], [stage["checked"] for stage in report["stages"]]) == (0, None, [2, 1, 0, 1, 0])


# ---- hostile files ----


def test_more_axes_than_there_can_be(program: Program, tmp_path: Path):
    """The graph says nothing of them, and what was in the memory is not printed."""
    nodes = [cast(name="f"), helper.make_node("Unsqueeze", ["f", "axes"], ["y"])]
    code, report = program.self_check(write(tmp_path / "b", nodes, constants={"axes": np.arange(2, 9)}))
    assert (code, report["problem"]) == (1, "a: y: found rank 9, wanted 2 as in tfx.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(outputs=[{**forged.OUTPUT, "name": f"y{i}"} for i in range(50_000)]), "found 50000"),
        (
            lambda m: m["files"].update({f"f{i}": {"bytes": 0, "sha256": "0" * 64} for i in range(50_000)}),
            "found 50002",
        ),
        (lambda m: m.update(surprise=1), 'unknown key "surprise"'),
        (lambda m: m["inputs"][0].update(surprise=1), 'inputs[0]: found the unknown key "surprise"'),
        (lambda m: m["outputs"][0].update(role="x"), 'outputs[0]: found the unknown key "role"'),
        (lambda m: m["tolerance"].update(surprise=1), 'tolerance: found the unknown key "surprise"'),
        (lambda m: m["counts"].update(surprise=1), 'counts: found the unknown key "surprise"'),
        (lambda m: m["counts"].pop("gelu"), "counts.gelu: missing"),
        (lambda m: m.update(pooling={"mode": "x", "normalize": True, "output": "y"}), 'pooling.mode: found "x"'),
        (lambda m: m.update(pooling={"mode": "cls", "output": "y"}), "pooling.normalize: missing"),
        (lambda m: m.update(tuning={"thread": 1}), 'tuning: found the unknown key "thread"'),
        (lambda m: m.update(tuning={"schedule": {"workers": 1}}), "tuning.schedule.threads: missing"),
        (lambda m: m.update(tuning={"log": "none"}), '"none" is not among the files'),
        (lambda m: m.update(quantization={"scheme": "x", "changed": 1}), "quantization.kept: missing"),
        (lambda m: m.update(refusals=[{"rule": "x"}]), "refusals.where: missing"),
        (lambda m: m.update(parity={"passed": True}), "parity.max_abs: missing"),
        (lambda m: m.update(versions={"x": 1}), "versions.x: found 1"),
        (lambda m: m["model"].pop("opset"), "model.opset: missing"),
        (lambda m: m["model"].update(domains=[1]), "model.domains: found 1"),
        (lambda m: m["source"].pop("kind"), "source.kind: missing"),
        (lambda m: m.pop("parity"), "parity: missing"),
    ],
)
def test_a_manifest_is_refused_as_by_python(in_c: Program, tmp_path: Path, change: Callable[[Any], Any], words: str):
    bundle = write(tmp_path / "b", change=change)
    done = in_c.run("--self-check", bundle=bundle, timeout=20)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_the_manifest_is_not_written_to_a_terminal_as_it_is(program: Program, tmp_path: Path):
    bundle = write(tmp_path / "b", change=lambda m: m.update(precision="\x1b[31m" + "é" * 20, target="a\nb"))
    code, report = program.self_check(bundle)  # valid UTF-8, although it is cut
    assert (code, report["target"]) == (0, "a b")
    assert report["precision"].startswith(" [31mé")
    done = program.run("--self-check", bundle=bundle)
    assert (done.returncode, "\x1b" in done.stdout) == (0, False)
    assert len(done.stdout.splitlines()) == 6


# ---- the library ----


@pytest.mark.parametrize("lang", ["c", "cpp"])
def test_a_model_that_is_newer_than_the_library(
    lang: str, built: Callable[..., Program], old_library: Callable[..., Path], tmp_path: Path
):
    program = built(lang)  # this onnxruntime leaks a few bytes of its own here
    bundle = write(tmp_path / "b", opset=23)
    command = [program.command[0], "--library", str(old_library("1.20.1"))]
    code, report = program.self_check(bundle, command=command)
    assert (code, report["stage"]) == (3, "runtime")
    assert "found IR version 8 and opset 23, newer than onnxruntime 1.20.1 reads; install" in report["problem"]
    assert len(report["problem"]) < 300
    assert program.run("a", bundle=bundle, command=command).returncode == 3


def test_a_refusal_names_no_place_in_the_library_s_source(
    in_c: Program, old_library: Callable[..., Path], tmp_path: Path
):
    bundle = write(tmp_path / "b", [helper.make_node("Nothing", ["ids"], ["y"])])
    for library in (str(old_library("1.20.1")), str(in_c.library)):
        code, report = in_c.self_check(bundle, command=[in_c.command[0], "--library", library])
        assert (code, report["stage"]) == (1, "runtime")
        assert "Nothing" in report["problem"]
        assert "/onnxruntime" not in report["problem"].replace(library, "")


def test_a_later_major_release_is_asked_itself(program: Program, cmake: str, tmp_path: Path):
    del cmake
    (tmp_path / "fake.c").write_text(
        "#include <stddef.h>\n"
        "static const void *get(unsigned version) { (void)version; return NULL; }\n"
        'static const char *version(void) { return "2.0.0"; }\n'
        "struct base { const void *(*get)(unsigned); const char *(*version)(void); };\n"
        "static const struct base BASE = {get, version};\n"
        "const struct base *OrtGetApiBase(void) { return &BASE; }\n"
    )
    library = tmp_path / "libfake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "fake.c"], check=True, timeout=60)
    command = [program.command[0], "--library", str(library)]
    code, report = program.self_check(write(tmp_path / "b"), command=command)
    assert (code, report["stage"]) == (3, "runtime")
    assert "found onnxruntime 2.0.0 without it" in report["problem"]


# ---- the command line ----


@pytest.mark.parametrize("lang", ["c", "cpp"])
def test_a_line_that_memory_does_not_hold_is_said(lang: str, built: Callable[..., Program], tmp_path: Path):
    program = built(lang)  # the sanitizers need more address space than there would be
    bundle = write(tmp_path / "b", change=with_tokenizer, tokenizer_json=json.dumps(TOKENIZER).encode())

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))

    command = [*program.command, "--threads", "1", "--bundle", str(bundle), "--tokens", "-"]
    done = subprocess.run(
        command,
        input=b"a\n" + b" " * (300 << 20) + b"\nb\n",
        capture_output=True,
        preexec_fn=limit,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.count(b"\n") == 1
    assert done.stderr.startswith(b"error: ")


def test_help_says_how_texts_begin_with_a_dash(program: Program):
    assert "  --  " in program.run("--help").stdout


def test_a_nul_is_named_alike(in_c: Program, built: Callable[..., Program], tmp_path: Path):
    bundle = write(tmp_path / "b", change=with_tokenizer, tokenizer_json=json.dumps(TOKENIZER).encode())
    said = [each.run("--tokens", "-", bundle=bundle, text=b"a\nb\x00c\n") for each in (in_c, built("cpp"))]
    assert {done.stderr for done in said} == {"error: texts[1]: holds a NUL character\n"}


def test_the_version_is_the_package_s(program: Program):
    assert program.run("--version").stdout.strip() == tfx.__version__


def test_options_are_checked_alike(built: Callable[..., Program], once: Once, tmp_path: Path):
    """Also where a self-check is given them, and stdin may be closed: see driver_options.c."""
    program = built("c", sanitize=True)

    def fill(folder: Path) -> None:
        folder.mkdir()
        flags = ["-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-D_POSIX_C_SOURCE=200809L"]
        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        source = ["-I", program.folder / "include", "-I", program.folder / "src", FOLDER / "driver_options.c"]
        library = [program.folder / "build" / "libtfx.a", "-lcjson", "-lcrypto", "-ldl", "-lm", "-lpthread"]
        command = ["cc", *flags, *sanitizers, *source, *library, "-o", folder / "driver"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    driver = once("driver-options", fill) / "driver"
    bundle = write(tmp_path / "b", change=with_tokenizer, tokenizer_json=json.dumps(TOKENIZER).encode())
    done = subprocess.run(
        list(map(str, [driver, program.library, bundle])), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "all as wanted\n"), done.stderr


# ---- building ----


@pytest.mark.parametrize("standard", ["c++17", "c++20", "c++23"])
def test_the_header_s_example_compiles_in_every_standard(built: Callable[..., Program], tmp_path: Path, standard: str):
    program = built("cpp", sanitize=True)
    head = (program.folder / "include" / "tfx.hpp").read_text(encoding="utf-8").partition("*/")[0]
    example = [line.removeprefix(" *     ") for line in head.splitlines() if line.startswith(" *     ")]
    assert len(example) == 2
    one = 'std::vector<std::vector<float>> one = encoder.embed({"a text"});'
    each = 'std::vector<float> vector = encoder.embed("a text"); vector = encoder.embed(std::string("a text"));'
    body = "\n".join([*example, one, each])
    (tmp_path / "example.cpp").write_text(f'#include "tfx.hpp"\nint main() {{\n{body}\n}}\n')
    include = [f"-I{program.folder / 'include'}", f"-I{program.folder / 'core' / 'include'}"]
    command = ["c++", f"-std={standard}", "-Wall", "-Wextra", "-fsyntax-only", *include, str(tmp_path / "example.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lang", ["c", "cpp"])
def test_another_project_s_kind_of_build_is_left_alone(lang: str, built: Callable[..., Program], tmp_path: Path):
    program = built(lang, sanitize=True)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(yours LANGUAGES C CXX)\n"
        f"add_subdirectory({program.folder} embedder EXCLUDE_FROM_ALL)\n"
        'message(STATUS "kind=[${CMAKE_BUILD_TYPE}]")\n'
    )
    command = ["cmake", "-S", ".", "-B", "build", f"-DONNXRUNTIME_INCLUDE_DIR={program.headers}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "kind=[]" in done.stdout
