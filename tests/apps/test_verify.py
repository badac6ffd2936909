"""tfx verify --runtime: the app is built once, its report and exit code are passed on, and what is missing is named."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tfx import cli
from tfx.runtime import app_browser, app_verify, commands
from tfx.runtime.app_verify import RUNTIMES, cache_folder, prepared

from .bundles import planted
from .conftest import Once
from .faults import change_weights


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["verify", *map(str, arguments)], prog_name="tfx")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="module")
def sound(tiny: Callable[..., Path]) -> Path:
    return tiny()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, once: Once, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator:
    """A function of a language that makes its tools the first of the PATH; the cache is the run's own.

    npm is a script that gives the tests' own packages, which the lock file beside it names: nothing is fetched.
    """
    cache = once("cache", lambda folder: folder.mkdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def provide(lang: str) -> None:
        if lang in ("c", "cpp"):
            request.getfixturevalue("cmake")
            monkeypatch.setenv("ONNXRUNTIME_INCLUDE_DIR", str(request.getfixturevalue("onnxruntime_headers")))
            return
        node, modules = request.getfixturevalue("node"), request.getfixturevalue("node_modules")
        if lang == "web":
            request.getfixturevalue("chromium")
        # One place for all workers, since the tools' paths are a part of the cache's key.
        tools = once("tools", lambda folder: (folder.mkdir(), None)[1])
        (tools / "node").unlink(missing_ok=True)
        (tools / "node").symlink_to(node)
        script(tools / "npm", f'[ "$1" = --version ] && echo 1 && exit; ln -s "{modules}" node_modules')
        monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")

    yield provide


def test_the_command_offers_every_language():
    assert ("python", *RUNTIMES) == commands.RUNTIMES


@pytest.mark.parametrize("lang", RUNTIMES)
def test_an_app_checks_a_bundle(lang: str, machine: Callable[[str], None], sound: Path, tmp_path: Path):
    machine(lang)
    done = call(sound, "--runtime", lang, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["app"], report["passed"]) == (lang, True)
    [folder] = cache_folder().glob(f"{lang}-*")
    before = {each.name: each.stat().st_mtime_ns for each in folder.iterdir()}

    done = call(sound, "--runtime", lang, "--threads", "1")
    assert done.exit_code == 0, done.output
    for word in ("files", "runtime", "tokens", "outputs", "vectors", "passed: needed max abs", f"in {lang}"):
        assert word in done.stdout
    assert [each.name for each in cache_folder().glob(f"*{lang}-*")] == [folder.name]
    assert {each.name: each.stat().st_mtime_ns for each in folder.iterdir()} == before

    def change(values: Any) -> None:
        values[...] *= 1.5

    done = call(planted(sound, tmp_path / "b", lambda each: change_weights(each, change)), "--runtime", lang)
    assert done.exit_code == 1
    assert done.stderr.startswith("failed at outputs: ")
    assert len(done.stderr.splitlines()) == 1

    (tmp_path / "b" / "tfx.json").write_text("{")
    done = call(tmp_path / "b", "--runtime", lang)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "tfx.json" in done.stderr


@pytest.mark.parametrize(
    "option", [("--provider", "cpu"), ("--max-abs", "1"), ("--min-cosine", "0"), ("--no-optimize",)]
)
def test_an_app_keeps_to_the_bundles_own_tolerance(option: tuple[str, ...], sound: Path):
    done = call(sound, "--runtime", "node", *option)
    assert done.exit_code == 2
    assert f"{option[0]} is for --runtime python" in done.stderr


@pytest.mark.parametrize("lang", RUNTIMES)
def test_what_is_no_bundle_is_said_before_anything_is_built(lang: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = call(tmp_path, "--runtime", lang)
    assert (done.exit_code, "it has no tfx.json" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("lang", "tool", "remedy"),
    [
        ("c", "cmake", "apt-get install cmake g++"),
        ("cpp", "cmake", "apt-get install cmake g++"),
        ("node", "node", "https://nodejs.org"),
        ("web", "node", "https://nodejs.org"),
    ],
)
def test_a_missing_tool_is_named_with_its_remedy(lang: str, tool: str, remedy: str, sound: Path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    done = call(sound, "--runtime", lang)
    assert done.exit_code == 3
    assert done.stderr.startswith(f"error: {tool} is not installed, or not on the PATH")
    assert remedy in done.stderr


def test_an_old_node_is_refused(sound: Path, tmp_path: Path, monkeypatch):
    script(tmp_path / "node", "echo v18.20.4")
    script(tmp_path / "npm", "echo 9")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call(sound, "--runtime", "node")
    assert done.exit_code == 3
    assert "node: found v18.20.4" in done.stderr
    assert "wanted 20 or newer" in done.stderr


def tools_that(folder: Path, lang: str, behave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put tools on the PATH that give their version and otherwise behave so."""
    names = ("cmake", "cc", "c++") if lang in ("c", "cpp") else ("npm",)
    for name in names:
        script(folder / "bin" / name, f'[ "$1" = --version ] && echo 1 && exit; {behave}')
    script(folder / "bin" / "node", f'[ "$1" = --version ] && echo v20.0.0 && exit; {behave}')
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("lang", RUNTIMES)
def test_a_build_that_fails_says_why_and_leaves_nothing(lang: str, sound: Path, tmp_path: Path, monkeypatch):
    tools_that(tmp_path, lang, "echo 'npm error no such package'; echo more; exit 1", monkeypatch)
    done = call(sound, "--runtime", lang)
    assert done.exit_code == 3
    assert "cannot build the app: npm error no such package" in done.stderr
    assert list(cache_folder().iterdir()) == []


def test_the_reason_of_cmake_is_its_message(sound: Path, tmp_path: Path, monkeypatch):
    said = "echo 'CMake Error at CMakeLists.txt:33 (message):'; echo '  cJSON is missing:'; echo '  install it'; echo; "
    tools_that(tmp_path, "c", f"{said} echo '-- Configuring incomplete'; exit 1", monkeypatch)
    done = call(sound, "--runtime", "c")
    assert done.stderr.rstrip().endswith("cannot build the app: cJSON is missing: install it")


@pytest.mark.parametrize(
    ("behave", "code", "message"),
    [
        ("kill -SEGV $$", 3, "the app ended with signal 11 and no report"),
        ("echo nonsense", 3, "ended with exit code 0 and no report"),
        ("echo '{\"passed\": true}'; exit 1", 3, "ended with exit code 1 and no report"),
        ("echo 'error: tfx.json: not JSON' >&2; exit 2", 2, "runtime node: tfx.json: not JSON"),
        ("echo 'error: out of memory' >&2; exit 3", 3, "runtime node: out of memory"),
        ("echo 'at x.mjs'; echo 'TypeError: no' >&2; echo '  at y' >&2; exit 1", 3, "no report: TypeError: no"),
    ],
)
def test_an_app_that_gives_no_report(behave: str, code: int, message: str, sound: Path, tmp_path: Path, monkeypatch):
    tools_that(tmp_path, "node", "true", monkeypatch)
    prepared("node")
    script(tmp_path / "bin" / "node", f'[ "$1" = --version ] && echo v20.0.0 && exit; {behave}')
    done = call(sound, "--runtime", "node", "--json")
    assert (done.exit_code, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_app_that_cannot_be_started_any_more_is_built_once_more(sound: Path, tmp_path: Path, monkeypatch):
    """A library that it links to was replaced by a newer one."""
    program = "build/tfx-verify"
    lost = "echo 'error while loading shared libraries: libcjson.so.1' >&2; exit 127"
    said = '{"passed": true, "stage": null}'
    made = tmp_path / "made"
    fresh = script(tmp_path / "fresh", f"cat {tmp_path}/said")
    build = f"echo >> {made}; mkdir -p build; cp {fresh} {program}"
    tools_that(tmp_path, "c", f'[ "$1" = --build ] && {{ {build}; }}; true', monkeypatch)
    (tmp_path / "said").write_text(said)
    app = prepared("c")
    script(app / program, lost)
    assert app_verify.verify_by_app(sound, "c") == (0, json.loads(said))
    assert len(made.read_text()) == 2
    # It is not built again and again where that does not help.
    script(tmp_path / "bin" / "cmake", f'[ "$1" = --version ] && echo 1 && exit; echo >> {made}; exit 0')
    script(app / program, lost)
    with pytest.raises(app_verify.MachineError):
        app_verify.verify_by_app(sound, "c")


def test_a_cache_that_cannot_be_written(sound: Path, tmp_path: Path, monkeypatch):
    tools_that(tmp_path, "node", "true", monkeypatch)
    (tmp_path / "cache").write_text("a file")
    done = call(sound, "--runtime", "node")
    assert done.exit_code == 3
    assert f"{tmp_path / 'cache' / 'tfx' / 'apps'}: cannot be written" in done.stderr


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_a_cache_that_is_no_absolute_path_is_not_taken(value: str, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "tfx" / "apps"


def test_an_app_is_made_anew_when_its_sources_change(tmp_path: Path, monkeypatch):
    tools_that(tmp_path, "node", "true", monkeypatch)
    first = prepared("node")
    assert prepared("node") == first
    original = app_verify.sources

    def changed(lang: str) -> Iterator[tuple[str, Path]]:
        yield from original(lang)
        yield "more.mjs", script(tmp_path / "more.mjs", "")

    monkeypatch.setattr(app_verify, "sources", changed)
    assert prepared("node") != first


def test_what_nobody_uses_any_more_is_removed_when_another_is_built(tmp_path: Path, monkeypatch):
    tools_that(tmp_path, "node", "true", monkeypatch)
    names = ("node-unused", ".node-unfinished", "node-in-use", "c-of-another-language")
    for name in names:
        (cache_folder() / name / "part").mkdir(parents=True)
    long_ago = time.time() - 31 * 24 * 3600
    for name in ("node-unused", ".node-unfinished", "c-of-another-language"):
        os.utime(cache_folder() / name, (long_ago, long_ago))
    made = prepared("node")
    assert sorted(path.name for path in cache_folder().iterdir()) == sorted([made.name, *names[2:]])
    os.utime(made, (long_ago, long_ago))
    assert prepared("node") == made
    assert made.stat().st_mtime > time.time() - 3600  # this was a use


# ---- the page ----


@pytest.fixture
def page(tmp_path: Path) -> Path:
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text("<p>a page")
    (folder / "core.mjs").write_text("export {};")
    return folder


def browser(tmp_path: Path, behave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser that gets its address as ``$address``."""
    script(tmp_path / "chromium", f'for address in "$@"; do :; done; {behave}')
    monkeypatch.setattr(app_browser, "BROWSERS", (str(tmp_path / "chromium"),))


def posting(body: str) -> str:
    """What a browser does whose page posts this."""
    code = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], sys.argv[2].encode())"
    return f"'{sys.executable}' -c '{code}' \"${{address%%/index*}}${{address##*report=}}\" '{body}'; sleep 60"


def test_the_page_posts_its_report(page: Path, sound: Path, tmp_path: Path, monkeypatch):
    report = '{"passed":false,"problem":"x","stages":[],"exit_code":1}'
    browser(tmp_path, posting(report), monkeypatch)
    assert app_browser.report_of_page(page, sound)["exit_code"] == 1


@pytest.mark.parametrize("body", ["[]", "{}", '{"passed":true}'])
def test_what_is_no_report_is_not_taken(body: str, page: Path, sound: Path, tmp_path: Path, monkeypatch):
    browser(tmp_path, posting(body), monkeypatch)
    with pytest.raises(app_verify.MachineError, match="posted something that is no report"):
        app_browser.report_of_page(page, sound)


def test_a_browser_that_ends(page: Path, sound: Path, tmp_path: Path, monkeypatch):
    browser(tmp_path, "exit 4", monkeypatch)
    with pytest.raises(app_verify.MachineError, match="ended with status 4 before the page was done"):
        app_browser.report_of_page(page, sound)


def test_a_page_that_says_nothing(page: Path, sound: Path, tmp_path: Path, monkeypatch):
    browser(tmp_path, "sleep 60", monkeypatch)
    monkeypatch.setattr(app_browser, "_MINUTES", 0)
    with pytest.raises(app_verify.MachineError, match="gave no report within 0 minutes"):
        app_browser.report_of_page(page, sound)


def test_no_browser(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(app_verify.MachineError, match=r"found none of chromium.*apt-get install chromium"):
        app_browser.find_browser()


def test_the_server_gives_the_pages_folder_and_the_bundle_and_nothing_else(page: Path, sound: Path):
    import urllib.error
    import urllib.request

    def get(address: str, data: bytes | None = None) -> tuple[int, bytes, str]:
        try:
            with urllib.request.urlopen(server.url + address, data, timeout=10) as answer:
                return answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            return error.code, b"", ""
        except urllib.error.URLError:  # refused by its size, before it was read
            return 400, b"", ""

    with app_browser.PageServer(page, sound) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert get("index.html") == (200, b"<p>a page", "text/html")
        assert get("core.mjs")[2] == "text/javascript"
        assert get("checked/tfx.json")[1] == (sound / "tfx.json").read_bytes()
        for address in (
            "checked/",
            "checked",
            "../page/index.html",
            "checked/../../x",
            "checked/%2e%2e/x",
            "tfx.json",
            "x",
        ):
            status, body, _ = get(address)
            assert status == 404 or body in (b"<p>a page", (sound / "tfx.json").read_bytes()), address
        place = server.report.removeprefix("/")
        for address, data in ((place, b""), (place, b"no JSON"), ("report", b"{}"), (place, b"1" * (2 << 20))):
            assert get(address, data)[0] in (400, 404)
        assert server.reports.empty()
        assert get(place, b"{}")[0] == 204
        assert server.reports.get(timeout=5) == {}
