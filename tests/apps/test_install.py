"""install.sh: nothing is done twice, lists are fetched only when needed, what is missing is said, signatures count."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from . import toolchain

TOOLS = (
    "bash",
    "cat",
    "cmp",
    "cp",
    "dirname",
    "grep",
    "head",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sh",
    "tail",
    "touch",
    "uname",
)
PACKAGES = "g++ cmake pkg-config libcjson-dev libssl-dev chromium fonts-liberation"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A machine of scripts: each says in ``calls`` how it was called. ``fake(name, behave)`` adds one."""
    folder, commands = tmp_path / "clone" / "tests" / "apps", tmp_path / "bin"
    folder.mkdir(parents=True)
    commands.mkdir()
    for name in ("install.sh", "toolchain.py", "package-lock.json"):
        shutil.copy(toolchain.FOLDER / name, folder)
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (commands / name).symlink_to(found)

    def fake(name: str, behave: str = "true") -> None:
        script = commands / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/calls"\n{behave}\n')
        script.chmod(0o755)

    def install(**variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "calls").write_text("")
        return subprocess.run(
            ["bash", folder / "install.sh", commands / "python"],
            env={"PATH": str(commands), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    install.fake = fake  # pyright: ignore[reportFunctionMemberAccess]
    install.folder = tmp_path  # pyright: ignore[reportFunctionMemberAccess]
    fake("id", "echo 0")
    fake("cc", "cat >/dev/null")
    fake("python", "exit 1")
    fake("dpkg-deb", 'mkdir -p "$3/usr/include/onnxruntime"; touch "$3/usr/include/onnxruntime/onnxruntime_c_api.h"')
    return install


def complete(machine) -> None:
    """Put everything there."""
    for name in ("g++", "cmake", "pkg-config", "chromium", "apt-get"):
        machine.fake(name)
    clone = machine.folder / "clone"
    tools = clone / "build" / "tools"
    for file in (
        "onnxruntime-headers/onnxruntime_c_api.h",
        "onnxruntime-1.19.2/libonnxruntime.so",
        "onnxruntime-1.20.1/libonnxruntime.so",
    ):
        (tools / file).parent.mkdir(parents=True)
        (tools / file).touch()
    modules = clone / "tests" / "apps" / "node_modules"
    modules.mkdir()
    shutil.copy(toolchain.FOLDER / "package-lock.json", modules / ".installed")


def calls(machine, *names: str) -> list[str]:
    lines = (machine.folder / "calls").read_text().splitlines()
    return [line for line in lines if line.split()[0] in names]


def test_nothing_is_done_where_all_is_there(machine):
    complete(machine)
    done = machine(TFX_APPS="required")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert calls(machine, "apt-get", "python", "npm", "dpkg-deb") == []


GET = 'for each in "$@"; do case $each in install) echo > "$0.done"; for t in g++ cmake pkg-config chromium; do '
GET += 'cp "$0" "$(dirname "$0")/$t"; done;; esac; done'


def test_packages_are_installed_without_new_lists_where_the_old_ones_do(machine):
    complete(machine)
    for name in ("g++", "chromium"):
        (machine.folder / "bin" / name).unlink()
    machine.fake("apt-get", GET)
    done = machine(TFX_APPS="required")
    assert done.returncode == 0, done.stderr
    [call] = calls(machine, "apt-get")
    assert call == "apt-get install -qq --yes --no-install-recommends g++ chromium fonts-liberation"


def test_lists_are_fetched_when_an_install_fails_without(machine):
    complete(machine)
    (machine.folder / "bin" / "cmake").unlink()
    first = f'case $1 in update) touch "{machine.folder}/lists";; esac; [ -f "{machine.folder}/lists" ] || exit 100; '
    machine.fake("apt-get", first + GET)
    done = machine(TFX_APPS="required")
    assert done.returncode == 0, done.stderr
    assert [call.split()[1] for call in calls(machine, "apt-get")] == ["install", "update", "install"]


@pytest.mark.parametrize(("required", "code"), [("", 0), ("required", 1)])
def test_another_user_than_root_is_told_what_is_missing(required: str, code: int, machine):
    complete(machine)
    for name in ("g++", "cmake", "pkg-config", "chromium"):
        (machine.folder / "bin" / name).unlink()
    machine.fake("id", "echo 1000")
    machine.fake("cc", "exit 1")
    done = machine(TFX_APPS=required)
    assert done.returncode == code
    lines = done.stderr.splitlines()
    assert lines[0] == f"missing: {PACKAGES}: install as root: apt-get install {PACKAGES}"
    assert calls(machine, "apt-get") == []


def test_a_machine_without_anything_is_told_all_of_it(machine):
    machine.fake("cc", "exit 1")
    done = machine()
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line.startswith("missing: ")]
    assert len(said) == 5
    for line, word in zip(said, ("apt-get install", "C headers", "1.19.2", "1.20.1", "Node 20 or newer"), strict=True):
        assert word in line


@pytest.mark.parametrize("root", [True, False])
def test_headers_come_signed_through_folders_of_their_own(root: bool, machine):
    complete(machine)
    shutil.rmtree(machine.folder / "clone" / "build" / "tools" / "onnxruntime-headers")
    machine.fake("id", "echo 0" if root else "echo 1000")
    keep = f'[ -f sources.list ] && cat sources.list > "{machine.folder}/sources"; case $* in *download*) touch '
    machine.fake("apt-get", keep + '"libonnxruntime-dev_1_amd64.deb";; esac')
    done = machine(TFX_APPS="required")
    assert done.returncode == 0, done.stderr
    update, download = calls(machine, "apt-get")
    for call in (update, download):
        for option in ("State", "Cache", "Etc::sourcelist", "Etc::sourceparts"):
            assert f"-o Dir::{option}={machine.folder}/clone/build/tools/apt.new" in call
    assert update.endswith(" update")
    assert download.endswith(" download libonnxruntime-dev")
    sources = (machine.folder / "sources").read_text()
    assert sources.startswith("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ")
    assert sources.endswith(" trixie main\n")
    assert not (machine.folder / "clone" / "build" / "tools" / "apt.new").exists()


def test_headers_that_are_not_signed_are_not_taken(machine):
    complete(machine)
    shutil.rmtree(machine.folder / "clone" / "build" / "tools" / "onnxruntime-headers")
    machine.fake("apt-get", "echo 'NO_PUBKEY 1234'; exit 100")
    done = machine()
    assert "missing: onnxruntime's C headers" in done.stderr
    assert [call.split()[-1] for call in calls(machine, "apt-get")] == ["update", "-qq"]  # the second is for its keys
    assert calls(machine, "dpkg-deb") == []


def test_checks_of_signatures_are_nowhere_turned_off():
    text = (toolchain.FOLDER / "install.sh").read_text(encoding="utf-8")
    for word in ("trusted", "allow-unauthenticated", "AllowUnauthenticated", "AllowInsecure", "no-check", "--insecure"):
        assert word not in text


def test_the_makefile_and_ci_call_it():
    root = toolchain.FOLDER.parent.parent
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert "tests/apps/install.sh $(BIN)/python" in makefile
    assert "export TFX_APPS=required" in (root / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(toolchain.FOLDER / "install.sh", os.X_OK)
