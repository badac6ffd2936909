"""The command as it is typed, and a bundle for it to find."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tfx.cli import main

from . import checkpoints
from .running import SIZES, Call


@pytest.fixture
def tfx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A function that runs ``tfx`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="tfx")

    return call


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the tiny reference encoder, made by the command; not to be changed."""
    folder = tmp_path_factory.mktemp("made") / "tfx-model"
    result = CliRunner().invoke(main, ["export", *SIZES, "--out", str(folder)])
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, tfx: Call) -> Path:
    """The working folder, with a copy of that bundle in the default place."""
    del tfx
    shutil.copytree(made, tmp_path / "tfx-model")
    return tmp_path


@pytest.fixture(scope="session")
def bert(tmp_path_factory) -> Path:
    folder = checkpoints.save(tmp_path_factory.mktemp("checkpoints") / "tiny-bert", max_position_embeddings=24)
    checkpoints.save_tokenizer(folder)
    return folder


@pytest.fixture
def copy(bert, tmp_path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "copy"))
