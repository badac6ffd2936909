from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner, Result

import tfx
from tfx import cli
from tfx.errors import BundleError, CountError, ProviderError


def planted(monkeypatch: pytest.MonkeyPatch, body: Callable[[], Any]) -> None:
    """Put a command named `planted` in the table's place."""
    command = click.Command("planted", callback=body)
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: command if name == "planted" else None)


def tfx_run(*args: str) -> Result:
    return CliRunner().invoke(cli.main, list(args), prog_name="tfx")


def raiser(error: BaseException) -> Callable[[], NoReturn]:
    def body() -> NoReturn:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BundleError("tfx-model: not there"), 2, "error: tfx-model: not there"),
        (CountError("gelu: found 0, wanted 12"), 1, "error: gelu: found 0, wanted 12"),
        (ProviderError("cuda: no libcuda"), 3, "error: cuda: no libcuda"),
        (BundleError("two\n  lines"), 2, "error: two lines"),
        (MemoryError(), 3, "error: out of memory"),
        (MemoryError("of 4 GiB"), 3, "error: out of memory: of 4 GiB"),
        (TypeError("bad"), 2, "error: unexpected TypeError: bad (tfx --debug ... shows where)"),
        (click.FileError("x.npz", "no such file"), 2, "error: Could not open file 'x.npz': no such file"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
        (
            ModuleNotFoundError("No module named 'onnx'", name="onnx"),
            3,
            'error: onnx is not installed; install it with: pip install "tfx-onnx[export]"',
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
):
    planted(monkeypatch, raiser(error))
    done = tfx_run("planted")
    assert (done.exit_code, done.stderr, done.stdout) == (code, line + "\n", "")


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch):
    planted(monkeypatch, raiser(TypeError("bad")))
    done = tfx_run("--debug", "planted")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr and done.stderr.endswith("error: unexpected TypeError: bad\n")


def test_the_commands_own_exit_code_passes(monkeypatch: pytest.MonkeyPatch):
    def body() -> None:
        click.get_current_context().exit(1)

    planted(monkeypatch, body)
    assert tfx_run("planted").exit_code == 1


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("nothing",), "No such command 'nothing'"),
        (("--nothing",), "--nothing"),
        (("planted", "--nothing"), "--nothing"),
    ],
)
def test_wrong_usage_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], found: str):
    planted(monkeypatch, lambda: None)
    done = tfx_run(*args)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and found in done.stderr and len(done.stderr.splitlines()) == 1
    assert "--help)" in done.stderr


def test_help_lists_every_command_in_order():
    done = tfx_run("--help")
    assert done.exit_code == 0
    section = done.stdout.partition("Commands:")[2]
    assert [line.split()[0] for line in section.splitlines() if line.strip()] == list(cli.COMMANDS)


def test_no_arguments_show_the_help():
    done = tfx_run()
    assert done.exit_code == 2
    assert "Commands:" in done.output


def test_version():
    assert tfx.__version__ in tfx_run("--version").stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_json_and_an_example(name: str):
    command = cli.main.get_command(click.Context(cli.main), name)
    assert command is not None
    assert command.name == name
    assert any("--json" in param.opts for param in command.params)
    assert "Example" in (command.help or "")


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to a child alone")
def test_control_c_is_130_without_a_traceback():
    code = """
import click, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
from tfx import cli
def body():
    print("ready", flush=True)
    time.sleep(60)
cli.LazyGroup.get_command = lambda self, ctx, name: click.Command("planted", callback=body)
cli.main(["planted"])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None and p.stdout.readline() == "ready\n"
        time.sleep(0.1)
        p.send_signal(signal.SIGINT)
        _, stderr = p.communicate(timeout=30)
    assert (p.returncode, stderr) == (130, "interrupted\n")
