"""Environments of the peers: one venv each, outside of the repository, made of a pinned file in ``requirements/``.

They are never tfx's own: onnxruntime and onnxruntime-gpu own the same files, and sentence-transformers' ONNX backend
wants another transformers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tfx.errors import InputError, MachineError

__all__ = ["HOME", "NAMES", "ensure"]

REQUIREMENTS = Path(__file__).parent / "requirements"
HOME = Path.home() / ".cache" / "tfx-bench-peers"
NAMES = tuple(sorted(file.stem for file in REQUIREMENTS.glob("*.txt")))

_MARK = ".installed"  # holds what the environment was made of


def ensure(
    name: str,
    home: Path = HOME,
    *,
    pip_flags: Sequence[str] = (),
    step: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make an environment where it is missing or made of something else.

    Args:
        name: one of ``NAMES``.
        home: the folder that holds the environments.
        pip_flags: for ``pip install``, such as an index of small wheels.
        step: told what is being done.

    Returns:
        The environment's interpreter.

    Raises:
        InputError: there is no such environment.
        MachineError: its packages cannot be installed.
    """
    if name not in NAMES:
        raise InputError(f'environment: found "{name}", wanted one of {", ".join(NAMES)}')
    folder, needed = home / name, REQUIREMENTS / f"{name}.txt"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    mark = folder / _MARK
    if mark.exists() and mark.read_text(encoding="utf-8") == needed.read_text(encoding="utf-8"):
        return python
    step(f"making {folder}")
    home.mkdir(parents=True, exist_ok=True)
    _call([sys.executable, "-m", "venv", str(folder)], name)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _call([*pip, *pip_flags, "-r", str(needed)], name)
    mark.write_text(needed.read_text(encoding="utf-8"), encoding="utf-8")
    return python


def _call(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise MachineError(f"environment {name}: cannot be made: {(last or ['?'])[-1].strip()}")
