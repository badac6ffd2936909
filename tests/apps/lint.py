"""The style of the apps' sources: clang-format, ESLint, and TypeScript's checks of JavaScript with its comments' types.

What is not installed is said; with TFX_APPS=required that fails. ``python tests/apps/lint.py`` needs no other argument.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import toolchain

from tfx.runtime.app import APPS, LANGUAGES, sources

ROOT = APPS.parent.parent
_NATIVE = (".c", ".h", ".cpp", ".hpp")

# The page and its worker have different globals, which no one program can have; those of a service worker are not
# known to the checker without a cast at every use.
_WORKERS = ("worker.mjs",)
_PROJECTS = {
    "node": ("node", (), ["ES2023"], ["node"]),
    "page": ("web", ("vendor.mjs", "sw.js", *_WORKERS), ["ES2023", "DOM", "DOM.Iterable", "DOM.AsyncIterable"], []),
    "worker": ("web", ("page",), ["ES2023", "WebWorker", "WebWorker.AsyncIterable"], []),
}


def native() -> Iterator[str]:
    """Yield what clang-format says about C and C++."""
    files = [str(path.relative_to(ROOT)) for path in sorted(APPS.rglob("*")) if path.suffix in _NATIVE]
    command = [str(Path(sys.executable).with_name("clang-format")), "--dry-run", "-Werror"]
    yield from _said([*command, *(file for file in files if "/build/" not in file)], ROOT)


def eslint(node: Path) -> Iterator[str]:
    """Yield what ESLint says about JavaScript."""
    script = toolchain.NODE_MODULES / "eslint" / "bin" / "eslint.js"
    config = toolchain.FOLDER / "eslint.config.mjs"
    yield from _said([str(node), str(script), "--config", str(config), str(APPS)], ROOT)


def types(node: Path) -> Iterator[str]:
    """Yield what TypeScript says, project by project, about files by the names that they have here."""
    script = str(toolchain.NODE_MODULES / "typescript" / "bin" / "tsc")
    for name, (lang, without, lib, packages) in _PROJECTS.items():
        if not (APPS / lang).is_dir():
            continue
        folder = ROOT / "build" / "lint" / name
        shutil.rmtree(folder, ignore_errors=True)
        names: dict[str, str] = {}
        for target, source in sources(lang):
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / target)
            names[target] = str(source.relative_to(ROOT))
        (folder / "node_modules").symlink_to(toolchain.NODE_MODULES)
        chosen = [target for target in names if _checked(name, target, without)]
        (folder / "tsconfig.json").write_text(json.dumps(_settings(lib, packages, chosen)))
        for line in _said([str(node), script, "--project", str(folder), "--pretty", "false"], folder):
            place = re.match(r"[^\s(]+", line)
            known = names.get(place[0], "") if place else ""
            yield f"{known}{line[len(place[0]) :]} [{name}]" if place and known else line


def _checked(project: str, target: str, without: Sequence[str]) -> bool:
    if not target.endswith((".mjs", ".js", ".d.ts")):
        return False
    if project == "worker":
        return target in _WORKERS
    return target not in without


def _settings(lib: list[str], packages: list[str], files: list[str]) -> dict[str, object]:
    return {
        "compilerOptions": {
            "allowJs": True,
            "checkJs": True,
            "noEmit": True,
            "strict": bool(packages),  # the core is held to its types once, beside Node's
            "noImplicitReturns": True,
            "noFallthroughCasesInSwitch": True,
            "skipLibCheck": True,
            "target": "ES2023",
            "module": "nodenext" if packages else "esnext",
            "moduleResolution": "nodenext" if packages else "bundler",
            "lib": lib,
            "types": packages,
        },
        "files": files,
    }


def _said(command: Sequence[str], folder: Path) -> Iterator[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        yield from lines or [f"{command[0]} ended with status {done.returncode}"]


def main() -> int:
    """Print what is wrong; return the exit code."""
    found = list(native())
    folder = toolchain.node_folder()
    if folder is not None and (toolchain.NODE_MODULES / ".installed").is_file():
        found += [*eslint(folder / "node"), *types(folder / "node")]
    else:
        sys.stderr.write("JavaScript is not checked: Node or its packages are missing (see tests/apps/install.sh)\n")
        if os.environ.get("TFX_APPS") == "required":
            return 1
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    assert set(LANGUAGES) >= {lang for lang, *_ in _PROJECTS.values()}
    sys.exit(main())
