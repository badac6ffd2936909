"""A bundle checked by an app in another language: ``tfx verify --runtime c|cpp|node|web``.

The app is written and built once, into the user's cache folder, and again when its sources, this tfx or the tools that
build it have changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import BundleError, InputError, MachineError, TfxError
from .app import LANGUAGES, sources, write_sources
from .app_browser import report_of_page
from .manifest import MANIFEST_NAME

__all__ = ["RUNTIMES", "cache_folder", "command_of", "prepared", "rows", "verdict", "verify_by_app"]

RUNTIMES = tuple(LANGUAGES)

_NAME = "tfx-verify"
_MINUTES = 10
_KEPT_SECONDS = 30 * 24 * 3600
_DEBIAN = "apt-get install cmake g++ pkg-config libcjson-dev libssl-dev"
_OLDEST_NODE = 20
_NOT_STARTED = 127  # a dynamic loader's exit code


def verify_by_app(bundle: str | Path, runtime: str, threads: int | None = None) -> tuple[int, dict[str, Any]]:
    """Let an app check a bundle.

    Args:
        bundle: the folder. The app reads it itself, so a damaged one is a report like any other.
        runtime: one of ``RUNTIMES``.
        threads: inside an operator; None leaves it to the app.

    Returns:
        The app's exit code (0 passed, 1 failed, 3 this machine cannot) and its report.

    Raises:
        BundleError: there is no bundle, or the app cannot read its manifest.
        MachineError: a tool is missing, the app cannot be built or started, or it crashed.
    """
    if runtime not in RUNTIMES:
        raise InputError(f'runtime: found "{runtime}", wanted one of {", ".join(RUNTIMES)}')
    folder = Path(bundle).absolute()
    if not (folder / MANIFEST_NAME).is_file():
        raise BundleError(f"{bundle}: not a bundle: it has no {MANIFEST_NAME}")
    app = prepared(runtime)
    if runtime == "web":
        report = report_of_page(app, folder, threads)
        code = int(report.pop("exit_code", 1 - int(report["passed"])))
    else:
        options = ["--bundle", str(folder), *([] if threads is None else ["--threads", str(threads)])]
        words = [*options, "--self-check", "--json"]
        done = _run([*command_of(runtime, app), *words], app)
        if done.returncode == _NOT_STARTED:  # a library that it links to has changed since it was built
            shutil.rmtree(app, ignore_errors=True)
            app = prepared(runtime)
            done = _run([*command_of(runtime, app), *words], app)
        code = done.returncode
        try:
            report = json.loads(done.stdout)
            if report["passed"] != (code == 0):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise _failure(runtime, done) from None
    if code not in (0, 1) and report.get("stage") is None:  # nothing could be checked
        raise _error(code, f"runtime {runtime}: {report['problem']}")
    return code, report


def cache_folder() -> Path:
    """Return the folder that apps are kept in: of ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tfx" / "apps"  # noqa: PTH117


def prepared(runtime: str) -> Path:
    """Return the folder of a built app; it is made where the cache does not have it.

    Raises:
        MachineError: a tool is missing, or says that it cannot build the app.
    """
    tools = _tools(runtime)
    folder = cache_folder() / f"{runtime}-{_key(runtime, tools)}"
    if folder.is_dir():
        with contextlib.suppress(OSError):  # a cache that can only be read
            os.utime(folder)  # it is in use
        return folder
    fresh = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        fresh.mkdir(parents=True)
        write_sources(fresh, runtime, _NAME, "bundle")
        for step in _steps(runtime, tools):
            done = _run(step, fresh)
            if done.returncode != 0:
                raise MachineError(f"runtime {runtime}: {step[0]} cannot build the app: {_reason(done)}")
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    except OSError as error:
        raise MachineError(f"{folder.parent}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    _forget_unused(runtime)
    return folder


def _forget_unused(runtime: str) -> None:
    """Remove what other versions have built and nobody has used of late, or was never finished."""
    for pattern in (f"{runtime}-*", f".{runtime}-*"):
        for each in cache_folder().glob(pattern):
            with contextlib.suppress(OSError):  # another process was faster
                if time.time() - each.stat().st_mtime > _KEPT_SECONDS:
                    shutil.rmtree(each, ignore_errors=True)


def command_of(runtime: str, app: Path) -> list[str]:
    """Return how a built app is called: c, cpp and node have a command line."""
    return [_tool("node"), str(app / "cli.mjs")] if runtime == "node" else [str(app / "build" / _NAME), *_library()]


def _tools(runtime: str) -> list[str]:
    """Return what is needed to build and run an app; an error names the first that is missing."""
    if runtime in ("c", "cpp"):
        compiler = "CC" if runtime == "c" else "CXX"
        return [_tool("cmake"), _tool(os.environ.get(compiler) or {"c": "cc", "cpp": "c++"}[runtime])]
    node = _tool("node")
    found = re.match(r"v(\d+)", _run([node, "--version"]).stdout)
    if found is None or int(found[1]) < _OLDEST_NODE:
        version = found.string.strip() if found else "none that says its version"
        raise MachineError(f"node: found {version} ({node}), wanted {_OLDEST_NODE} or newer: see https://nodejs.org")
    return [node, _tool("npm")]


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        remedy = "see https://nodejs.org" if name in ("node", "npm") else f"on Debian: {_DEBIAN}"
        raise MachineError(f"{name} is not installed, or not on the PATH ({remedy})")
    return path


def _key(runtime: str, tools: Sequence[str]) -> str:
    """Return what a built app depends on, hashed."""
    digest = hashlib.sha256(f"{__version__} {sys.platform}".encode())
    for name, path in sources(runtime):
        digest.update(f"\n{name}\n".encode() + path.read_bytes())
    for tool in tools:
        digest.update(f"\n{tool} {_run([tool, '--version']).stdout}".encode())
    return digest.hexdigest()[:16]


def _steps(runtime: str, tools: Sequence[str]) -> list[list[str]]:
    if runtime in ("c", "cpp"):
        include = os.environ.get("ONNXRUNTIME_INCLUDE_DIR")
        where = [f"-DONNXRUNTIME_INCLUDE_DIR={include}"] if include else []
        configure = [tools[0], "-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release", *where]
        return [configure, [tools[0], "--build", "build", "--parallel"]]
    # Scripts of packages stay off: onnxruntime-node's would download a GPU library from elsewhere.
    install = [tools[1], "install", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--prefer-offline"]
    return [install, [tools[0], "vendor.mjs"]] if runtime == "web" else [install]


def _library() -> list[str]:
    """Return the option that names the library inside of Python's onnxruntime.

    None where there is no such library, or where ``$TFX_ONNXRUNTIME`` names one: the app reads that itself.
    """
    if os.environ.get("TFX_ONNXRUNTIME"):
        return []
    found = importlib.util.find_spec("onnxruntime")
    for folder in (found and found.submodule_search_locations) or ():
        names = sorted((Path(folder) / "capi").glob("libonnxruntime.*"))
        if names:
            return ["--library", str(names[0])]
    return []


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    # npm's and cmake's words are read for reasons, so they are asked for in English.
    variables = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_MINUTES * 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"{command[0]}: did not end within {_MINUTES} minutes") from None
    except OSError as error:
        raise MachineError(f"{command[0]}: cannot be started: {error.strerror or error}") from error


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return why a tool failed: the first error that it names, else its last line."""
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    for i, line in enumerate(lines):
        if line.startswith("CMake Error"):  # the text follows its place, until the calls that led there
            text = itertools.takewhile(lambda each: not each.startswith(("Call Stack", "--")), lines[i + 1 : i + 7])
            return " ".join(text)
        if re.search(r"\berror\b[:!]|npm ERR|npm error", line):
            return line
    return lines[-1] if lines else f"exit code {done.returncode}"


def _failure(runtime: str, done: subprocess.CompletedProcess[str]) -> TfxError:
    """Return the error of an app that gave no report."""
    said = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
    # An exception's own line stands before its trace.
    message = next((line for line in said if re.match(r"\w*Error\b", line)), said[-1]) if said else "it said nothing"
    if done.returncode in (2, 3) and said:
        return _error(done.returncode, f"runtime {runtime}: {message}")
    end = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return MachineError(f"runtime {runtime}: the app ended with {end} and no report: {message}")


def _error(code: int, message: str) -> TfxError:
    return BundleError(message) if code == 2 else MachineError(message)


def rows(report: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return the table of a report: stage, checked, max abs, cosine, verdict."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        (
            stage["stage"],
            str(stage.get("checked", "")),
            number(stage.get("max_abs"), ".2e"),
            number(stage.get("min_cosine"), ".8f"),
            "ok" if stage["passed"] else str(report["problem"] or "failed"),
        )
        for stage in report["stages"]
    ]


def verdict(report: Mapping[str, Any]) -> str:
    """Return a report in one line."""
    place = f"on {report['runtime']} ({report['provider']}) in {report['app']}"
    if not report["passed"]:
        return f"failed at {report['stage']}: {report['problem']}; {place}"
    parts = ["passed"]
    if report["max_abs"] is not None:
        parts.append(f"needed max abs {report['max_abs']:.2e}, cosine {report['min_cosine']:.8f}")
    if report["batch_variance"] is not None:
        promised = report["promised_batch_variance"]
        beside = "" if promised is None else f" (at export {promised:.2g})"
        parts.append(f"a text alone or beside others differs by {report['batch_variance']:.2g}{beside}")
    return f"{parts[0]}{': ' if len(parts) > 1 else ''}{'; '.join(parts[1:])}; {place}"
