"""The C++ layer and its command line: what the C one says, to the last digit; exceptions, moves, threads, builds."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tfx.runtime.app import APPS

from .conftest import Once
from .programs import Program
from .test_c import FORMS, TEXTS

FOLDER = Path(__file__).resolve().parent
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIBRARIES = ("-lcjson", "-lcrypto", "-ldl", "-lm", "-lpthread")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sanitized"])
def program(request: pytest.FixtureRequest, built: Callable[..., Program]) -> Program:
    return built("cpp", sanitize=request.param)


@pytest.fixture(scope="module")
def in_c(built: Callable[..., Program]) -> Program:
    return built("c")


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: "-".join(map(str, form.values())) or "fp32")
def form(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    return tiny(**request.param)


def compile_(program: Program, source: Path, target: Path, *flags: str) -> None:
    """Build a program on the library that CMake has made, with g++ alone."""
    core = program.folder / "core"
    include = ["-I", program.folder / "include", "-I", core / "include"]
    library = [program.folder / "build" / "libtfx.a", *LIBRARIES]
    command = ["c++", "-std=c++17", *WARNINGS, *flags, *include, source, *library, "-o", target]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


# ---- the command line ----


def test_the_self_check_passes(program: Program, form: Path) -> None:
    code, report = program.self_check(form)
    assert (code, report["passed"], report["problem"], report["app"]) == (0, True, None, "cpp")
    assert all(stage["checked"] > 0 for stage in report["stages"])


@pytest.mark.parametrize("how", [[], ["--tokens"], ["--raw"]], ids=["vectors", "tokens", "raw"])
def test_answers_are_those_of_c(program: Program, in_c: Program, form: Path, how: list[str]) -> None:
    alone = program.run(*how, "--threads", "1", *TEXTS, bundle=form)
    wanted = in_c.run(*how, "--threads", "1", *TEXTS, bundle=form)
    assert (alone.returncode, alone.stdout, alone.stderr) == (wanted.returncode, wanted.stdout, wanted.stderr)
    assert alone.stdout or not how


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--nothing"],
        ["--threads", "0", "a"],
        ["a", "--bundle"],
        ["--tokens", "--raw", "a"],
        ["--jsonl", "a"],
        ["a", "-"],
        ["--bundle", "/no/such/folder", "a"],
        ["--bundle", "/no/such/folder", "--self-check"],
        ["--bundle", "/etc/passwd", "a"],
        ["--library", "/no/such.so", "a"],
        ["--library", "/no/such.so", "--self-check"],
        ["--version"],
        ["--tokens", "--", "--raw", "-"],
    ],
)
def test_words_are_understood_as_in_c(program: Program, in_c: Program, words: list[str]) -> None:
    found, wanted = program.run(*words), in_c.run(*words)
    assert (found.returncode, found.stderr) == (wanted.returncode, wanted.stderr)
    assert found.stdout == wanted.stdout
    assert "usage:" in program.run("--help").stdout


@pytest.mark.parametrize(
    ("line", "jsonl"),
    [
        (b"ok\nbad \xff\n", False),
        (b"ok\na\x00b\n", False),
        (b"ok\r\nlast line without end", False),
        (b"\n\n", False),
        (b"", False),
        (b'"ok"\n"a\\nb"\n', True),
        (b'"ok"\n3\n', True),
        (b'"ok"\n{"a": 1}\n', True),
        (b'"ok"\n"a\\u0000b"\n', True),
        (b'"ok"\n"\\ud800"\n', True),
        (b'"ok"\n\n', True),
        (b'"ok"\n"\xff"\n', True),
    ],
)
def test_lines_are_answered_as_in_c(program: Program, in_c: Program, line: bytes, jsonl: bool) -> None:
    words = ["--tokens", *(["--jsonl"] if jsonl else []), "-"]
    found, wanted = program.run(*words, text=line), in_c.run(*words, text=line)
    assert (found.returncode, found.stdout) == (wanted.returncode, wanted.stdout)
    assert found.stderr.startswith("error: texts[1]: ") if found.returncode else not found.stderr


def test_lines_are_answered_one_by_one(program: Program) -> None:
    command = [*program.command, "--tokens", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in ("one", "", "three"):
            process.stdin.write(f"{text}\n")
            assert json.loads(process.stdout.readline())["ids"]  # before the next line is there
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_full_disk_is_said(program: Program) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*program.command, "a"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "standard output" in done.stderr


# ---- the layer ----


@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])
def test_the_layer(
    built: Callable[..., Program], once: Once, tiny: Callable[..., Path], onnxruntime_library: Path, sanitize: bool
) -> None:
    """Exceptions, moves, tensors, threads; see driver_cpp.cpp."""
    program = built("cpp", sanitize=sanitize)

    def fill(folder: Path) -> None:
        folder.mkdir()
        flags = ["-g", "-O1", *(SANITIZERS if sanitize else ())]
        compile_(program, FOLDER / "driver_cpp.cpp", folder / "driver", *flags)

    driver = once(f"driver-cpp-{sanitize}", fill) / "driver"
    for bundle in (tiny(), tiny(precision="int8"), tiny(target="portable", external=True)):
        command = [str(driver), str(onnxruntime_library), str(bundle), str(tiny(pooling="none"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stdout) == (0, "all as wanted\n"), done.stderr


def test_the_example_of_the_readme(built: Callable[..., Program], tmp_path: Path) -> None:
    program = built("cpp")
    readme = (program.folder / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```cpp\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "example.cpp").write_text(example, encoding="utf-8")
    compile_(program, tmp_path / "example.cpp", tmp_path / "example")
    command = [str(tmp_path / "example"), str(program.folder / "bundle"), "a text", "another"]
    bundle = program.folder / "bundle"
    assert bundle.is_dir() or "bundle at `/" in readme
    if not bundle.is_dir():
        (command[1],) = re.findall(r"bundle at `(.*?)`", readme)
    done = subprocess.run(
        command, capture_output=True, text=True, env={"TFX_ONNXRUNTIME": str(program.library)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("64 values, the first is ") == 2


def test_a_cmake_project_on_top(built: Callable[..., Program], onnxruntime_headers: Path, tmp_path: Path) -> None:
    """As the README says: the folder in a project of one's own."""
    program = built("cpp")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(yours LANGUAGES C CXX)\n"
        f"add_subdirectory({program.folder} embedder EXCLUDE_FROM_ALL)\n"
        "add_executable(yours main.cpp)\ntarget_link_libraries(yours PRIVATE tfx-cpp)\n"
    )
    (tmp_path / "main.cpp").write_text("#include <tfx.hpp>\n" + "int main() { return tfx_version()[0] == 0; }\n")
    configure = ["cmake", "-S", ".", "-B", "build", f"-DONNXRUNTIME_INCLUDE_DIR={onnxruntime_headers}"]
    for command in (configure, ["cmake", "--build", "build"], ["build/yours"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_source_builds_where_it_lies(cmake: str, onnxruntime_headers: Path, tmp_path: Path) -> None:
    """Without `tfx app`, the C sources are those beside it."""
    found = [cmake, "-S", str(APPS / "cpp"), "-B", str(tmp_path), f"-DONNXRUNTIME_INCLUDE_DIR={onnxruntime_headers}"]
    done = subprocess.run(found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
