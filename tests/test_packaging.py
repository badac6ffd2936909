"""What is installed: the wheel holds package tfx and nothing else, and says what it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tfx

ROOT = Path(tfx.__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy, so that building leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tfx-model")
    shutil.copytree(ROOT, folder / "clone", ignore=unwanted)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "clone", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_only_tfx(wheel: zipfile.ZipFile):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"tfx", f"tfx_onnx-{tfx.__version__}.dist-info"}


def test_the_wheel_holds_every_module_and_no_test(wheel: zipfile.ZipFile):
    inside = {name for name in wheel.namelist() if name.startswith("tfx/")}
    folders = ("models", "exporter", "runtime")
    wanted = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    assert inside == {f"tfx/{path.relative_to(ROOT).as_posix()}" for path in wanted} | {"tfx/py.typed"}


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
