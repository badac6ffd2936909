"""What is installed: the wheel holds package tfx and nothing else, and says what it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

import tfx
from tfx.cli import main
from tfx.runtime.app import LANGUAGES, sources

ROOT = Path(tfx.__file__).parent
APPS = ROOT / "runtime" / "apps"
MADE = (
    "runtime/apps/c/build/x/embedder",
    "runtime/apps/node/node_modules/onnxruntime-node/package.json",
    "runtime/apps/node/package-lock.json",
    "runtime/apps/web/vendor/ort.mjs",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy, so that building leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tfx-model", "node_modules")
    shutil.copytree(ROOT, folder / "clone", ignore=unwanted)
    for made in MADE:  # what somebody who tried the apps where they lie has there
        (folder / "clone" / made).parent.mkdir(parents=True, exist_ok=True)
        (folder / "clone" / made).write_text("made")
    code = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "clone", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.fixture(scope="module")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "tfx-model"
    sizes = {"d-model": 16, "heads": 2, "layers": 1, "d-ff": 32, "vocab-size": 50, "max-len": 40}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = CliRunner().invoke(main, ["export", *options, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def test_the_wheel_holds_only_tfx(wheel: zipfile.ZipFile):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"tfx", f"tfx_onnx-{tfx.__version__}.dist-info"}


def test_the_wheel_holds_every_module_and_no_test(wheel: zipfile.ZipFile):
    inside = {name for name in wheel.namelist() if name.startswith("tfx/")}
    folders = ("models", "exporter", "runtime")
    wanted = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    apps = {name for name in inside if name.startswith("tfx/runtime/apps/")}
    assert inside - apps == {f"tfx/{path.relative_to(ROOT).as_posix()}" for path in wanted} | {"tfx/py.typed"}


def test_the_wheel_holds_the_apps_and_nothing_that_was_made_of_them(wheel: zipfile.ZipFile):
    apps = {name.removeprefix("tfx/runtime/apps/") for name in wheel.namelist() if name.startswith("tfx/runtime/apps/")}
    for lang in LANGUAGES:
        assert {path.relative_to(APPS).as_posix() for _, path in sources(lang)} <= apps
    tracked = {path.relative_to(APPS).as_posix() for path in APPS.rglob("*") if path.is_file()}
    ours = {name for name in tracked if not set(name.split("/")) & {"node_modules", "build", "vendor"}}
    assert apps <= ours
    assert not [name for name in apps if name.endswith((".py", "package-lock.json"))]


def test_an_installed_wheel_writes_every_app(wheel: zipfile.ZipFile, tmp_path: Path, tiny_bundle: Path):
    wheel.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import tfx; from tfx.cli import main; "
        "assert tfx.__file__.startswith(sys.path[0]); main(prog_name='tfx')"
    )
    for lang in LANGUAGES:
        command = [sys.executable, "-c", code, tmp_path / "site", "app", tiny_bundle, "--lang", lang, "--out", lang]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        for name, path in sources(lang):
            assert (tmp_path / lang / name).stat().st_size >= path.stat().st_size - 200, name


def test_the_wheel_has_the_licence_and_the_command(wheel: zipfile.ZipFile):
    info = f"tfx_onnx-{tfx.__version__}.dist-info"
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "tfx = tfx.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()


def needed(extra: str = "", **machine: str) -> set[str]:
    environment = {"sys_platform": "linux", "platform_machine": "x86_64", "extra": extra, **machine}
    found: set[str] = set()
    for line in metadata.requires("tfx-onnx") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found.add(requirement.name)
    return found


@pytest.mark.parametrize(
    ("platform", "machine", "wanted"),
    [
        ("linux", "x86_64", "onnxruntime-gpu"),
        ("win32", "AMD64", "onnxruntime-gpu"),
        ("linux", "aarch64", "onnxruntime"),
        ("win32", "ARM64", "onnxruntime"),
        ("darwin", "arm64", "onnxruntime"),
        ("darwin", "x86_64", "onnxruntime"),
    ],
)
def test_exactly_one_onnxruntime_per_machine(platform: str, machine: str, wanted: str):
    found = needed(sys_platform=platform, platform_machine=machine)
    assert {name for name in found if name.startswith("onnxruntime")} == {wanted}


def test_the_core_needs_nothing_of_the_exporter():
    assert not needed() & {"torch", "onnx", "onnx-ir", "onnxscript", "onnx-shape-inference", "transformers"}
    assert needed("export") - needed() == {"torch", "onnx", "onnx-ir", "onnxscript", "onnx-shape-inference"}
    assert needed("hf") - needed() == {"transformers"}


def test_the_installed_version_is_the_packages():
    assert metadata.version("tfx-onnx") == tfx.__version__
