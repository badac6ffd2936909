"""Generated apps: built as their READMEs say, and spoken to over their command line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfx.runtime.app import write_app
from tfx.runtime.bundle import Bundle

NAME = "embedder"

_WARNINGS = "-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror"
_SANITIZERS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"


@dataclass(frozen=True)
class Program:
    """A generated app that has been built.

    Attributes:
        lang: its language.
        folder: the project.
        headers: of onnxruntime, for C and C++.
        library: of onnxruntime, for C and C++.
        node: the command, for Node and the page.
        modules: the npm packages, for Node and the page.
    """

    lang: str
    folder: Path
    headers: Path | None = None
    library: Path | None = None
    node: Path | None = None
    modules: Path | None = None

    @property
    def command(self) -> list[str]:
        """How it is called, without options."""
        if self.lang in ("c", "cpp"):
            return [str(self.folder / "build" / NAME), "--library", str(self.library)]
        assert self.lang == "node", f"{self.lang} has no command line"
        return [str(self.node), str(self.folder / "cli.mjs")]

    def run(
        self,
        *arguments: str | Path,
        bundle: Path | None = None,
        text: str | bytes | None = None,
        command: Sequence[str] | None = None,
        timeout: float = 120,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run it.

        Args:
            arguments: of the command line.
            bundle: the folder; None takes the project's own.
            text: for stdin.
            command: in place of ``self.command``.
            timeout: in seconds.
            variables: of its environment.
        """
        options = [] if bundle is None else ["--bundle", str(bundle)]
        done = subprocess.run(
            [*(self.command if command is None else command), *options, *map(str, arguments)],
            input=text.encode() if isinstance(text, str) else text or b"",
            capture_output=True,
            env={**os.environ, **variables},
            timeout=timeout,
            check=False,
        )
        # stdout is UTF-8 whatever the locale says; stderr may quote bytes that are not.
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")
        )

    def answers(self, texts: Sequence[str], *arguments: str, bundle: Path | None = None) -> list[Any]:
        """Return what it says to texts, one JSON value each."""
        lines = "".join(json.dumps(text) + "\n" for text in texts)
        done = self.run(*arguments, "--jsonl", "-", bundle=bundle, text=lines)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def self_check(self, bundle: Path | None = None, **options: Any) -> tuple[int, dict[str, Any]]:
        """Return the exit code of ``--self-check`` and its report."""
        done = self.run("--self-check", "--json", bundle=bundle, **options)
        assert done.stdout.count("\n") == 1, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
        return done.returncode, json.loads(done.stdout)


def build(
    lang: str,
    folder: Path,
    bundle: Path,
    *,
    sanitize: bool = False,
    headers: Path | None = None,
    library: Path | None = None,
    node: Path | None = None,
    modules: Path | None = None,
) -> None:
    """Write a project to ``folder`` and build it; arguments as ``Program`` has them."""
    del library
    write_app(Bundle.open(bundle), lang, folder, name=NAME)
    if lang in ("c", "cpp"):
        flags = f"{_WARNINGS} {_SANITIZERS if sanitize else ''}"
        settings = {
            "CMAKE_BUILD_TYPE": "None" if sanitize else "Release",
            "CMAKE_C_FLAGS": flags,
            "CMAKE_CXX_FLAGS": flags,
            "ONNXRUNTIME_INCLUDE_DIR": headers,
        }
        _call(folder, "cmake", "-S", ".", "-B", "build", *(f"-D{key}={value}" for key, value in settings.items()))
        _call(folder, "cmake", "--build", "build", "--parallel", "2")
        return
    assert node is not None
    assert modules is not None
    # In place of `npm install`: the same packages, by the lock file of the tests.
    (folder / "node_modules").symlink_to(modules)
    if lang == "web":
        _call(folder, str(node), "vendor.mjs")


def _call(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
