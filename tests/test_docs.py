"""The documents are true of the code: commands, options, public names, files and targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

import tfx
from tfx import cli
from tfx.exporter.targets import TARGETS
from tfx.runtime.app import LANGUAGES

ROOT = Path(tfx.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
CALLS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("tfx ")]


def command(name: str) -> click.Command:
    found = cli.main.get_command(click.Context(cli.main), name)
    assert found is not None, f"the README names tfx {name}, which does not exist"
    return found


def test_every_command_has_an_example():
    assert {call.split()[1] for call in CALLS} == set(cli.COMMANDS)


@pytest.mark.parametrize("call", CALLS)
def test_every_example_parses(call: str):
    _, name, *arguments = shlex.split(call)
    command(name).make_context(name, arguments)


def test_every_public_name_is_in_the_readme_or_the_changelog():
    text = README + (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in tfx.__all__:
        assert name == "__version__" or f"tfx.{name}" in text or name == "TfxError" or name == "Source", name


@pytest.mark.parametrize(("heading", "names"), [("## Targets", TARGETS), ("### In other languages", LANGUAGES)])
def test_every_target_and_every_language_has_a_row(heading: str, names: Mapping[str, object]):
    section = re.split(r"^#+ ", README.partition(f"{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(names)


def test_every_file_of_the_house_is_named_and_every_name_is_a_file():
    table = ARCHITECTURE[ARCHITECTURE.index("## The house") : ARCHITECTURE.index("## A fusion")]
    named: set[str] = set()
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", cell):
            folder = name.rpartition("/")[0] if "/" in name else folder
            path = name if "/" in name or not folder else f"{folder}/{name}"
            assert (ROOT / path).exists(), f"ARCHITECTURE.md names {path}"
            named.add(path.rstrip("/"))
    for path in [*ROOT.glob("*.py"), *(ROOT / "exporter").glob("*.py"), *(ROOT / "runtime").glob("*.py")]:
        relative = path.relative_to(ROOT).as_posix()
        assert relative in named or path.name == "__init__.py", f"ARCHITECTURE.md does not name {relative}"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_links_lead_somewhere(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / name).parent.joinpath(target).exists(), target
