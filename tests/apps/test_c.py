"""The C library and its command line: in every form of a bundle, misused, on damaged files, from several threads."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfx.runtime.session import Session

from .bundles import LENGTH, reseal
from .conftest import Once
from .programs import Program

FOLDER = Path(__file__).resolve().parent
FORMS = (
    {},
    {"precision": "int8"},
    {"external": True},
    {"target": "portable"},
    {"target": "portable", "external": True},
    {"layout": "padded"},
    {"tokenizer": "bpe"},
    {"pooling": "none"},
)
TEXTS = ("a text", "", "Another one, which is longer than the first: café 日本語 🙂", "[SEP] x", "word " * 200)


@pytest.fixture(scope="module")
def plain(built: Callable[..., Program]) -> Program:
    return built("c")


@pytest.fixture(scope="module")
def sanitized(built: Callable[..., Program]) -> Program:
    return built("c", sanitize=True)


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: "-".join(map(str, form.values())) or "fp32")
def form(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    return tiny(**request.param)


@pytest.fixture(scope="module")
def linked(built: Callable[..., Program], once: Once) -> Callable[[str], Path]:
    """A function of a C file here to the program that it makes with the sanitized library."""
    program = built("c", sanitize=True)

    def compile_(name: str) -> Path:
        def fill(folder: Path) -> None:
            folder.mkdir()
            source = ["-I", program.folder / "include", "-I", program.folder / "src", FOLDER / f"{name}.c"]
            library = [program.folder / "build" / "libtfx.a", "-lcjson", "-lcrypto", "-ldl", "-lm", "-lpthread"]
            flags = ["-std=c11", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
            sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
            command = ["cc", "-D_POSIX_C_SOURCE=200809L", *flags, *sanitizers, *source, *library, "-o", folder / name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr

        return once(f"linked-{name}", fill) / name

    return compile_


@pytest.fixture(scope="module")
def driver(linked: Callable[[str], Path], onnxruntime_library: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function of a command, a bundle and stdin to what ``driver_c`` does."""
    path = linked("driver_c")

    def call(command: str, bundle: Path, text: str = "") -> subprocess.CompletedProcess[str]:
        words = [str(path), command, str(onnxruntime_library), str(bundle)]
        return subprocess.run(words, input=text, capture_output=True, text=True, timeout=120, check=False)

    return call


# ---- every form of a bundle ----


@pytest.mark.parametrize("sanitize", [False, True])
def test_the_self_check_passes(built: Callable[..., Program], form: Path, sanitize: bool):
    code, report = built("c", sanitize=sanitize).self_check(form)
    assert (code, report["passed"], report["problem"]) == (0, True, None)
    assert [stage["stage"] for stage in report["stages"]] == ["files", "runtime", "tokens", "outputs", "vectors"]
    assert all(stage["checked"] > 0 for stage in report["stages"])


def test_tokens_and_outputs_are_python_s(plain: Program, form: Path):
    session = Session(form)
    feeds = session.tokenize(TEXTS)
    tokens = plain.answers(TEXTS, "--tokens", bundle=form)
    lengths = [len(answer["ids"]) for answer in tokens]
    assert max(lengths) == LENGTH  # the last text is cut
    for row, answer in enumerate(tokens):
        assert answer["ids"] == feeds["input_ids"][row, : lengths[row]].tolist()
    raw = plain.answers(TEXTS, "--raw", bundle=form)
    for text, answer in zip(TEXTS, raw, strict=True):
        wanted = session.run(session.tokenize([text]))
        assert list(answer) == list(wanted)
        for name, values in wanted.items():
            np.testing.assert_allclose(np.array(answer[name]), values[0], atol=2e-5)


def test_vectors_are_python_s(plain: Program, form: Path):
    session = Session(form)
    if session.bundle.manifest.pooling is None:
        done = plain.run("a text", bundle=form)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--raw" in done.stderr
        return
    found = np.array(plain.answers(TEXTS, bundle=form))
    np.testing.assert_allclose(found, np.asarray(session.encode(TEXTS)), atol=2e-5)


def test_without_a_tokenizer_there_is_nothing_to_tokenize(plain: Program, tiny: Callable[..., Path]):
    bundle = tiny(tokenizer=None)
    code, report = plain.self_check(bundle)
    checked = {stage["stage"]: stage["checked"] for stage in report["stages"]}
    assert (code, checked["tokens"], checked["vectors"]) == (0, 0, 0)
    assert checked["outputs"] > 0
    done = plain.run("a text", bundle=bundle)
    assert done.returncode == 2
    assert "no tokenizer" in done.stderr


def test_without_a_golden_there_is_nothing_to_compare_with(plain: Program, tiny: Callable[..., Path], tmp_path: Path):
    bundle = copied(tiny(), tmp_path / "b")
    (bundle / "golden.safetensors").write_bytes(b"\0" * 100)
    reseal(bundle)
    code, report = plain.self_check(bundle)
    assert (code, report["stage"], "golden.safetensors" in report["problem"]) == (1, "files", True)
    (bundle / "golden.safetensors").unlink()
    reseal(bundle)
    code, report = plain.self_check(bundle)
    assert (code, report["stage"], "nothing to compare with" in report["problem"]) == (1, "files", True)
    assert plain.run("a text", bundle=bundle).returncode == 0


# ---- the command line ----


def test_a_batch_gives_what_single_texts_give(plain: Program, tiny: Callable[..., Path]):
    texts = [" ".join(["word"] * (1 + i % 40)) for i in range(70)]  # three batches
    done = plain.run(*texts, bundle=tiny())
    together = np.array([json.loads(line) for line in done.stdout.splitlines()])
    alone = np.array(plain.answers(texts, bundle=tiny()))
    assert together.shape == alone.shape
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_the_project_s_own_bundle_from_another_folder(plain: Program, tmp_path: Path):
    done = subprocess.run([*plain.command, "a text"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == plain.run("a text").stdout
    assert len(json.loads(done.stdout)) == 64


def test_lines_are_answered_one_by_one(plain: Program, tiny: Callable[..., Path]):
    command = [*plain.command, "--bundle", tiny(), "--tokens", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in ("one", "two\r", "", "three"):
            process.stdin.write(f"{text}\n")
            answer = json.loads(process.stdout.readline())  # before the next line is there
            assert answer == plain.answers([text.strip()], "--tokens", bundle=tiny())[0]
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_cut_text_is_said_to_be_cut(plain: Program, tiny: Callable[..., Path]):
    done = plain.run("short", "word " * 200, bundle=tiny())
    assert done.returncode == 0
    assert done.stderr.startswith(f"note: texts[1]: cut to {LENGTH} tokens")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"ok\nbad \xff\n", ("texts[1]", "UTF-8")),
        (b"ok\na\x00b\n", ("texts[1]", "NUL")),
    ],
)
def test_a_line_that_is_no_text(sanitized: Program, tiny: Callable[..., Path], line: bytes, words: tuple[str, ...]):
    done = sanitized.run("-", bundle=tiny(), text=line)
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1  # the line before it
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("line", ['{"a": 1}', "3", "nothing", '"a', '"a" "b"', '"a\\u0000b"', '"\\ud800"', ""])
def test_a_line_that_is_no_json_string(sanitized: Program, tiny: Callable[..., Path], line: str):
    done = sanitized.run("-", "--jsonl", bundle=tiny(), text=f'"ok"\n{line}\n')
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    assert done.stderr.startswith("error: texts[1]: ")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--nothing"],
        ["--threads", "0", "a"],
        ["--threads", "two", "a"],
        ["--threads", "99999999999", "a"],
        ["a", "--bundle"],
        ["--tokens", "--raw", "a"],
        ["--json", "a"],
        ["--jsonl", "a"],
        ["a", "-"],
        ["--self-check", "a"],
        ["--bundle", "/no/such/folder", "a"],
        ["--bundle", "/etc/passwd", "a"],
        ["--bundle", "", "a"],
    ],
)
def test_wrong_usage(plain: Program, words: list[str]):
    done = plain.run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_options_and_texts_that_look_like_them(plain: Program, tiny: Callable[..., Path]):
    assert "usage:" in plain.run("--help").stdout
    assert plain.run("--version").stdout.strip()
    done = plain.run("--threads", "1", "--", "--raw", "-", bundle=tiny())
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)


def test_the_report_for_people(plain: Program, tiny: Callable[..., Path]):
    done = plain.run("--self-check", bundle=tiny(precision="int8"))
    assert done.returncode == 0
    for words in ("files", "outputs", "passed", "batch variance", "promised"):
        assert words in done.stdout


def test_a_full_disk_is_said(plain: Program, tiny: Callable[..., Path]):
    with Path("/dev/full").open("wb") as full:
        command = [*plain.command, "--bundle", str(tiny()), "a text"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "standard output" in done.stderr


def test_the_library_of_the_environment(plain: Program, tiny: Callable[..., Path], tmp_path: Path):
    command = plain.command[:1]
    done = plain.run("a text", bundle=tiny(), command=command, TFX_ONNXRUNTIME=str(plain.library))
    assert done.returncode == 0
    done = plain.run("a text", bundle=tiny(), command=command, TFX_ONNXRUNTIME=str(tmp_path / "none.so"))
    assert done.returncode == 3
    assert f"wanted API version 20 in {tmp_path / 'none.so'}, found none" in done.stderr


@pytest.mark.parametrize("megabytes", [30, 60, 100, 140, 180])
def test_too_little_memory_is_said(plain: Program, tiny: Callable[..., Path], megabytes: int):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    command = [*plain.command, "--threads", "1", "--bundle", str(tiny()), "a text"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=60, check=False)
    assert done.returncode in (0, 3), done.stderr
    assert done.returncode == 0 or done.stderr.startswith("error: ")


# ---- the library ----


def feeds_of(session: Session, text: str = "a text of some words", dtype: str = "int64") -> list[dict[str, Any]]:
    feeds = session.tokenize([text, "short"])
    return [
        {"name": name, "dtype": dtype, "shape": list(values.shape), "values": values.astype(int).ravel().tolist()}
        for name, values in feeds.items()
    ]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64", "int16"])
def test_integers_of_any_width(driver, tiny: Callable[..., Path], dtype: str):
    session = Session(tiny())
    inputs = feeds_of(session, dtype=dtype)
    done = driver("run", tiny(), json.dumps({"inputs": inputs}))
    assert done.returncode == 0, done.stderr
    wanted = session.run(session.tokenize(["a text of some words", "short"]))
    mask = np.array(inputs[1]["values"]).reshape(inputs[1]["shape"]) == 1
    for name, values in json.loads(done.stdout).items():
        found, judged = np.array(values), mask if wanted[name].ndim == 3 else slice(None)
        np.testing.assert_allclose(found[judged], wanted[name][judged], atol=2e-5)


@pytest.fixture(scope="module")
def narrow(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with a graph whose ids are int32."""
    import onnx

    folder = tmp_path_factory.mktemp("narrow") / "bundle"
    shutil.copytree(tiny(), folder)
    model = onnx.load(folder / "model.onnx")
    (given,) = (each for each in model.graph.input if each.name == "input_ids")
    given.type.tensor_type.elem_type = onnx.TensorProto.INT32
    for node in model.graph.node:
        node.input[:] = ["input_ids_wide" if name == "input_ids" else name for name in node.input]
    model.graph.node.insert(0, onnx.helper.make_node("Cast", ["input_ids"], ["input_ids_wide"], to=7))
    onnx.save(model, folder / "model.onnx")
    inputs = json.loads((folder / "tfx.json").read_bytes())["inputs"]
    reseal(folder, inputs=[{**each, "dtype": "int32"} if each["name"] == "input_ids" else each for each in inputs])
    return folder


def test_int64_for_a_graph_of_int32(driver, plain: Program, narrow: Path, tiny: Callable[..., Path]):
    session = Session(tiny())
    done = driver("run", narrow, json.dumps({"inputs": feeds_of(session)}))
    assert done.returncode == 0, done.stderr
    assert done.stdout == driver("run", tiny(), json.dumps({"inputs": feeds_of(session)})).stdout
    assert plain.answers(TEXTS, bundle=narrow) == plain.answers(TEXTS, bundle=tiny())
    inputs = feeds_of(session)
    inputs[0]["values"][0] = 1 << 31
    done = driver("run", narrow, json.dumps({"inputs": inputs}))
    assert (done.returncode, "input_ids: found 2147483648 (int64), wanted int32" in done.stderr) == (2, True)


def test_float16_outputs_are_handed_over_as_float32(plain: Program, tiny: Callable[..., Path], tmp_path: Path):
    import onnx

    bundle = copied(tiny(), tmp_path / "b")
    model = onnx.load(bundle / "model.onnx")
    for output in model.graph.output:
        output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        for node in model.graph.node:
            node.output[:] = [f"{name}_wide" if name == output.name else name for name in node.output]
            node.input[:] = [f"{name}_wide" if name == output.name else name for name in node.input]
        model.graph.node.append(onnx.helper.make_node("Cast", [f"{output.name}_wide"], [output.name], to=10))
    onnx.save(model, bundle / "model.onnx")
    outputs = json.loads((bundle / "tfx.json").read_bytes())["outputs"]
    tolerance = {"max_abs": None, "min_cosine": 0.9999}
    reseal(bundle, outputs=[{**each, "dtype": "float16"} for each in outputs], tolerance=tolerance)
    found = np.array(plain.answers(TEXTS, bundle=bundle), np.float32)
    assert (found == found.astype(np.float16)).all()
    np.testing.assert_allclose(found, np.array(plain.answers(TEXTS, bundle=tiny())), atol=1e-3)
    assert plain.self_check(bundle)[0] == 0


def _change(index: int, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda inputs: inputs[index].update(fields)


def _value(index: int, value: float) -> Callable[[list[dict[str, Any]]], None]:
    return lambda inputs: inputs[index]["values"].__setitem__(0, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_change(0, dtype="float32"), "input_ids: found float32, wanted int64"),
        (_change(0, name="ids"), 'found "ids", wanted only input_ids'),
        (_change(1, name="input_ids"), "input_ids twice"),
        (_value(0, 400), "input_ids: found 400, wanted values of 0 to 399"),
        (_value(0, -1), "input_ids: found -1"),
        (_value(1, 2), "attention_mask: found 2, wanted 0 or 1"),
        (_change(0, shape=[4], values=[1] * 4), "input_ids: found shape (4), wanted (batch, sequence)"),
        (_change(1, shape=[1, 2], values=[1] * 2), "attention_mask: found batch 1, wanted 2 as in input_ids"),
        (_change(1, shape=[2, 3], values=[1] * 6), "attention_mask: found sequence 3"),
        (_change(0, shape=[2, 1 << 60], values=[]), "input_ids"),
        (_change(0, shape=[-1, 2], values=[]), "input_ids"),
        (lambda inputs: inputs.pop(0), "input_ids: missing"),
        (lambda inputs: inputs.pop(1), "attention_mask: missing, and input_ids has rows that begin or end"),
    ],
)
def test_inputs_that_are_wrong(driver, tiny: Callable[..., Path], change: Callable[[Any], None], words: str):
    inputs = feeds_of(Session(tiny()))
    change(inputs)
    done = driver("run", tiny(), json.dumps({"inputs": inputs}))
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(("rows", "length", "words"), [(2, LENGTH + 1, f"at most {LENGTH}"), (2, 0, "length 0")])
def test_lengths_that_no_model_has(driver, tiny: Callable[..., Path], rows: int, length: int, words: str):
    values = [5] * (rows * length)
    inputs = [{"name": "input_ids", "dtype": "int64", "shape": [rows, length], "values": values}]
    done = driver("run", tiny(), json.dumps({"inputs": inputs}))
    assert (done.returncode, words in done.stderr) == (2, True)


def test_a_batch_of_no_rows_gives_none(driver, tiny: Callable[..., Path]):
    inputs = [{"name": "input_ids", "dtype": "int64", "shape": [0, 3], "values": []}]
    done = driver("run", tiny(), json.dumps({"inputs": inputs}))
    assert done.returncode == 0, done.stderr
    assert set(map(json.dumps, json.loads(done.stdout).values())) == {"[]"}


def test_a_missing_mask_attends_everywhere(driver, tiny: Callable[..., Path]):
    inputs = [{"name": "input_ids", "dtype": "int64", "shape": [1, 4], "values": [2, 7, 8, 3]}]
    done = driver("run", tiny(), json.dumps({"inputs": inputs}))
    wanted = Session(tiny()).run({"input_ids": [[2, 7, 8, 3]]})
    np.testing.assert_allclose(
        np.array(json.loads(done.stdout)["sentence_embedding"]), wanted["sentence_embedding"], atol=2e-5
    )


def test_threads_share_an_encoder(driver, tiny: Callable[..., Path]):
    texts = "\n".join("word " * (1 + i % 30) for i in range(40))
    done = driver("threads", tiny(), texts)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


def test_misuse_is_said_and_leaves_nothing(driver, tiny: Callable[..., Path]):
    done = driver("misuse", tiny())
    assert done.returncode == 0, done.stderr
    *failures, again = done.stdout.splitlines()
    assert again == "again: same"
    found = {line.partition(":")[0]: line for line in failures}
    assert found.pop("quiet") == "quiet: 2"
    wanted = {
        "none": "empty list",
        "null": "texts[0]: found NULL",
        "bytes": "texts[1]: not UTF-8",
        "raw": "texts[1]: not UTF-8",
        "tokens": "not UTF-8",
        "rank": "input_ids: no array",
        "name": "without a name",
        "folder": "/no/such/folder: found nothing",
        "threads": "threads: found -1",
    }
    assert found.keys() == wanted.keys()
    for key, words in wanted.items():
        assert words in found[key]
        assert found[key].startswith(f"{key}: 2: ")
        assert found[key].endswith(": empty")


# ---- as the README says ----


@pytest.fixture(scope="module")
def example(plain: Program) -> str:
    """The README's program."""
    blocks = (plain.folder / "README.md").read_text(encoding="utf-8").split("```c\n")
    assert len(blocks) == 2
    return blocks[1].partition("```")[0]


def test_the_example_with_the_installed_library(
    plain: Program, tiny: Callable[..., Path], example: str, tmp_path: Path
):
    command = ["cmake", "--install", plain.folder / "build", "--prefix", tmp_path / "usr"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=60)
    (tmp_path / "example.c").write_text(example)
    (link,) = (word.strip("`. ") for word in (plain.folder / "README.md").read_text().splitlines() if "-ltfx" in word)
    (library,) = (tmp_path / "usr").rglob("libtfx.a")
    folders = ["-I", tmp_path / "usr" / "include", "-L", library.parent]
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", tmp_path / "example.c", *folders, *link.split()]
    subprocess.run([*map(str, command), "-o", str(tmp_path / "example")], check=True, timeout=60)
    check_example(plain, tmp_path / "example", tiny())


def test_the_example_in_a_project_of_its_own(plain: Program, tiny: Callable[..., Path], example: str, tmp_path: Path):
    shutil.copytree(plain.folder, tmp_path / "tfx", ignore=shutil.ignore_patterns("build", "bundle"))
    (tmp_path / "main.c").write_text(example)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(mine LANGUAGES C)\nadd_executable(mine main.c)\n"
        "add_subdirectory(tfx EXCLUDE_FROM_ALL)\ntarget_link_libraries(mine PRIVATE tfx)\n"
    )
    settings = ["-DCMAKE_BUILD_TYPE=None", f"-DONNXRUNTIME_INCLUDE_DIR={plain.headers}"]
    for command in (["-S", ".", "-B", "build", *settings], ["--build", "build", "--parallel", "2"]):
        subprocess.run(["cmake", *command], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    check_example(plain, tmp_path / "build" / "mine", tiny())


def check_example(program: Program, example: Path, bundle: Path) -> None:
    done = program.run(bundle, "one", "two", command=[str(example)], TFX_ONNXRUNTIME=str(program.library))
    first = program.answers(["one"], bundle=bundle)[0][0]
    assert (done.returncode, done.stdout) == (0, f"2 vectors of 64, {first:g} ...\n"), done.stderr
    done = program.run("/no/such", "one", command=[str(example)])
    assert (done.returncode, done.stderr[:7]) == (2, "error: ")


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("ONNXRUNTIME_INCLUDE_DIR=OFF", "libonnxruntime-dev"),
        ("CJSON_LIBRARY=OFF", "libcjson-dev"),
        ("CMAKE_DISABLE_FIND_PACKAGE_OpenSSL=ON", "libssl-dev"),
    ],
)
def test_what_is_missing_when_building_is_named(plain: Program, tmp_path: Path, setting: str, remedy: str):
    words = [f"-DONNXRUNTIME_INCLUDE_DIR={plain.headers}", f"-D{setting}"]
    command = ["cmake", "-S", str(plain.folder), "-B", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.count("CMake Error") == 1
    assert remedy in done.stderr


# ---- files that are damaged on purpose ----


@pytest.mark.parametrize("kind", ["manifest", "golden", "model"])
def test_damaged_copies_are_refused_or_read(linked, tiny: Callable[..., Path], tmp_path: Path, kind: str):
    name = {"manifest": "tfx.json", "golden": "golden.safetensors", "model": "model.onnx"}[kind]
    words = [linked("fuzz_c"), kind, tiny(external=True) / name, tmp_path / "copy", "300"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rounds, refused = map(int, done.stdout.split())
    assert rounds == 300
    assert refused > 50


def copied(bundle: Path, folder: Path) -> Path:
    shutil.copytree(bundle, folder)
    return folder


def set_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    manifest = json.loads((folder / "tfx.json").read_bytes())
    change(manifest)
    (folder / "tfx.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format=2), "format: found 2, this app reads format 1"),
        (lambda m: m.update(format="1"), "format"),
        (lambda m: m.pop("pad_id"), "pad_id: missing"),
        (lambda m: m.update(pad_id=-1), "pad_id: found -1"),
        (lambda m: m.update(pad_id=1e300), "pad_id"),
        (lambda m: m.update(max_length=0), "max_length: found 0"),
        (lambda m: m.update(inputs=[]), "inputs: found none"),
        (lambda m: m["inputs"].append(m["inputs"][0]), "twice"),
        (lambda m: m["inputs"][0].update(role="x"), 'role: found "x", wanted one of token_ids'),
        (lambda m: m["inputs"][0].update(dtype="int65"), 'dtype: found "int65"'),
        (lambda m: m["inputs"][0].update(dtype="int32"), "input_ids is not in tfx.json, or of another type"),
        (lambda m: m["inputs"][0].update(shape=["a"] * 9), "more than 8 axes"),
        (lambda m: m["inputs"][0].update(shape=[0.5]), "axes"),
        (lambda m: m["outputs"].pop(), "pooling.output"),
        (
            lambda m: m["model"].update(file="../model.onnx"),
            'model.file: found "../model.onnx", wanted a bare',
        ),
        (lambda m: m["model"].update(file="/etc/passwd"), "bare file name"),
        (lambda m: m["model"].update(file=".."), "bare file name"),
        (lambda m: m["model"].update(file="other.onnx"), '"other.onnx" is not among the files'),
        (lambda m: m["tokenizer"].update(file="a\\b"), "bare file name"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}), "bare file name"),
        (lambda m: m["files"].update({"x": {"bytes": 1, "sha256": "0" * 64}}), "found nothing, wanted 1 bytes"),
        (lambda m: m["files"]["model.onnx"].update(sha256="A" * 64), "64 hexadecimal digits"),
        (lambda m: m["files"]["model.onnx"].update(sha256="0" * 64), "altered"),
        (lambda m: m["files"]["model.onnx"].update(bytes=5), "wanted 5"),
        (lambda m: m["tolerance"].update(min_cosine=2), "min_cosine: found 2"),
        (lambda m: m.update(layout="x"), "layout"),
        (lambda m: m.update(target="a\x00b"), "NUL"),
    ],
)
def test_a_manifest_that_is_wrong(sanitized: Program, tiny: Callable[..., Path], tmp_path: Path, change, words: str):
    bundle = set_manifest(copied(tiny(), tmp_path / "b"), change)
    done = sanitized.run("a text", bundle=bundle)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_manifest_that_nests_without_end(sanitized: Program, tiny: Callable[..., Path], tmp_path: Path):
    bundle = copied(tiny(), tmp_path / "b")
    for content in (b"[" * 2_000_000, b'{"a":' * 100_000, b'{"format": 1} x', b'{"format": 1, "target": "\xff"}'):
        (bundle / "tfx.json").write_bytes(content)
        done = sanitized.run("a text", bundle=bundle)
        assert done.returncode == 2
        assert "tfx.json: not " in done.stderr


def test_moved_weights_are_found(plain: Program, tiny: Callable[..., Path], tmp_path: Path):
    bundle = copied(tiny(external=True), tmp_path / "other name")
    done = subprocess.run(
        [*plain.command, "--bundle", "other name", "a text"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.run("a text", bundle=tiny(external=True)).stdout
    weights = bundle / "model.onnx.data"
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    done = plain.run("a text", bundle=bundle)
    assert (done.returncode, f"found {size - 1} bytes, wanted {size}" in done.stderr) == (2, True)
    reseal(bundle)  # now only the model itself can tell
    done = plain.run("a text", bundle=bundle)
    assert (done.returncode, f"found {size - 1} bytes, wanted at least" in done.stderr) == (2, True)
    weights.unlink()
    done = plain.run("a text", bundle=bundle)
    assert (done.returncode, f"{weights}: found nothing, wanted {size - 1} bytes" in done.stderr) == (2, True)
    reseal(bundle)
    done = plain.run("a text", bundle=bundle)
    assert (done.returncode, '"model.onnx.data" is not among the files' in done.stderr) == (2, True)


def test_a_link_out_of_the_folder_is_not_followed(plain: Program, tiny: Callable[..., Path], tmp_path: Path):
    bundle = copied(tiny(), tmp_path / "b")
    model = bundle / "model.onnx"
    model.rename(tmp_path / "model.onnx")
    model.symlink_to(tmp_path / "model.onnx")
    done = plain.run("a text", bundle=bundle)
    assert (done.returncode, "leaves the bundle" in done.stderr) == (2, True)
    model.unlink()
    (tmp_path / "model.onnx").rename(bundle / "inside.onnx")
    model.symlink_to("inside.onnx")  # as volumes present their files
    assert plain.run("a text", bundle=bundle).returncode == 0


@pytest.mark.parametrize("name", ["model.onnx", "golden.safetensors"])
def test_a_pipe_in_place_of_a_file(plain: Program, tiny: Callable[..., Path], tmp_path: Path, name: str):
    bundle = copied(tiny(), tmp_path / "b")
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    done = plain.run("--self-check", bundle=bundle)
    assert (done.returncode, name in done.stderr) == (1, True)
