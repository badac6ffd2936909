"""What the apps are built and run with, each app built once, and bundles for them.

Where a compiler, Node or a browser is missing, what needs it skips and says so; with TFX_APPS=required it fails.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from filelock import FileLock

from . import bundles, toolchain
from .programs import Program, build

Once = Callable[[str, Callable[[Path], None]], Path]


def missing(what: str) -> NoReturn:
    """Skip, or fail where everything has to be there."""
    reason = f"{what}; tests/apps/install.sh says how to get it"
    if os.environ.get("TFX_APPS") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """A function that makes a folder for all workers of a run: the first that asks makes it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-apps"
    root.mkdir(exist_ok=True)

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder = root / name / "made"
        folder.parent.mkdir(exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not (folder.parent / "done").exists():
                shutil.rmtree(folder, ignore_errors=True)
                fill(folder)
                (folder.parent / "done").touch()
        return folder

    return make


@pytest.fixture(scope="session")
def onnxruntime_headers() -> Path:
    """The folder of ``onnxruntime_c_api.h``."""
    if not (toolchain.HEADERS / "onnxruntime_c_api.h").is_file():
        missing("onnxruntime's C headers are not there")
    return toolchain.HEADERS


@pytest.fixture(scope="session")
def onnxruntime_library() -> Path:
    """The library inside of Python's onnxruntime."""
    import onnxruntime

    found = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.*"))
    if not found:
        missing("Python's onnxruntime has no library of its own")
    return found[0]


@pytest.fixture(scope="session")
def old_library() -> Callable[[str], Path]:
    """A function of a version (1.19.2, which is too old, or 1.20.1, the oldest that will do) to its library."""

    def find(version: str) -> Path:
        return toolchain.old_library(version) or missing(f"onnxruntime {version} is not there")

    return find


@pytest.fixture(scope="session")
def cmake() -> str:
    """The command; a C and a C++ compiler are there too."""
    for command in ("cmake", "cc", "c++"):
        if shutil.which(command) is None:
            missing(f"{command} is not there")
    return "cmake"


@pytest.fixture(scope="session")
def node() -> Path:
    """The command of a Node that is new enough; ``npm`` lies beside it."""
    folder = toolchain.node_folder()
    return missing("Node 20 or newer is not there") if folder is None else folder / "node"


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The packages of ``package.json`` here."""
    if not (toolchain.NODE_MODULES / ".installed").is_file():
        missing("the npm packages are not there")
    return toolchain.NODE_MODULES


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's command."""
    return toolchain.chromium() or missing("Chromium is not there")


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest, once: Once, tiny: Callable[..., Path]) -> Callable[..., Program]:
    """A function of a language (``c``, ``cpp``, ``node``, ``web``) to its program, built once.

    ``sanitize=True`` builds C and C++ with the address and undefined-behaviour sanitizers.
    """

    def get(lang: str, sanitize: bool = False) -> Program:
        if lang in ("c", "cpp"):
            request.getfixturevalue("cmake")
            headers, library = map(request.getfixturevalue, ("onnxruntime_headers", "onnxruntime_library"))
            needs = {"headers": headers, "library": library}
        else:
            needs = {"node": request.getfixturevalue("node"), "modules": request.getfixturevalue("node_modules")}
        bundle = tiny()
        name = f"{lang}-sanitized" if sanitize else lang
        folder = once(name, lambda folder: build(lang, folder, bundle, sanitize=sanitize, **needs))
        return Program(lang, folder, **needs)

    return get


@pytest.fixture(scope="session")
def tiny(once: Once) -> Callable[..., Path]:
    """A function of ``bundles.export_tiny``'s options to a bundle that tests only read."""

    def get(**options: object) -> Path:
        name = "-".join(["tiny", *(f"{key}={value}" for key, value in sorted(options.items()))])
        return once(name, lambda folder: bundles.export_tiny(folder, **options))  # pyright: ignore[reportArgumentType]

    return get


@pytest.fixture(scope="session")
def minilm(once: Once) -> Callable[..., Path]:
    """A function of a precision (fp32, int8) to a bundle of the real all-MiniLM-L6-v2 that tests only read."""

    def get(precision: str = "fp32") -> Path:
        return once(f"minilm-{precision}", lambda folder: bundles.export_minilm(folder, precision))

    return get
