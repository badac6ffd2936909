"""The lines of each README build its project and check it, as tfx app says; what they install is what is tested."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tfx.runtime.app import APPS, LANGUAGES, next_lines, write_app
from tfx.runtime.app_browser import report_of_page
from tfx.runtime.bundle import Bundle

from . import toolchain

NAME = "readme-app"


def typed(folder: Path) -> list[str]:
    """The lines that a README has typed, comments left out."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_lines_of_the_readme_are_those_that_the_command_says(
    lang: str, tiny: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
):
    variables = {**os.environ, "npm_config_prefer_offline": "true"}
    if lang in ("c", "cpp"):
        request.getfixturevalue("cmake")
        root = tmp_path / "onnxruntime"
        root.mkdir()
        (root / "include").symlink_to(request.getfixturevalue("onnxruntime_headers"))
        library = str(request.getfixturevalue("onnxruntime_library"))
        variables |= {"ONNXRUNTIME_ROOT": str(root), "TFX_ONNXRUNTIME": library}
    else:
        request.getfixturevalue("node_modules")  # npm has the packages in its cache then
        variables["PATH"] = f"{request.getfixturevalue('node').parent}{os.pathsep}{variables['PATH']}"
    bundle = Bundle.open(tiny())
    folder = write_app(bundle, lang, tmp_path / NAME)
    lines = next_lines(lang, NAME, NAME)[1:]
    document = typed(folder)
    places = [document.index(line) for line in lines]
    assert places == sorted(places)
    if lang == "web":
        assert lines.pop() == "npm start"  # serves until it is ended
    done = subprocess.run(
        ["sh", "-e", "-c", "\n".join(lines)],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if lang == "web":
        request.getfixturevalue("chromium")
        assert report_of_page(folder, folder / "bundle")["passed"]
    else:
        assert "passed" in done.stdout
    # Nothing that was made stands in the way of writing it anew.
    write_app(bundle, lang, folder, force=True)


@pytest.mark.parametrize("lang", ["node", "web"])
def test_the_packages_of_a_project_are_those_of_the_tests(lang: str):
    def read(path: Path) -> dict[str, str]:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {**found["dependencies"], **found.get("devDependencies", {})}

    tested = read(toolchain.FOLDER / "package.json")
    for name, version in read(APPS / lang / "package.json").items():
        assert version.lstrip("~") == tested[name]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_project_says_what_it_may_be_used_for(lang: str):
    text = (APPS / lang / "README.md").read_text(encoding="utf-8")
    assert "LICENSE" in text
    assert "0BSD" in text
