"""The `tfx` command: a group whose commands are imported only when called.

The one-line help of each command stands in the table here, so `tfx --help` imports neither torch nor
onnxruntime. Errors become one line on stderr and an exit code:

    0    done
    1    the check failed (parity, expected counts)
    2    usage or bad input, and anything unexpected
    3    this machine cannot (provider, library, memory)
    130  interrupted
"""

from __future__ import annotations

import importlib
import re
import traceback
from typing import Any, NoReturn

import click

from . import __version__
from .errors import DependencyError, InputError, MachineError, TfxError

__all__ = ["COMMANDS", "LazyGroup", "main"]

# name -> (module:attribute, one line of help). The order is the order of `tfx --help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "export": ("exporter.commands:export", "Export an encoder, a checkpoint or a module to a bundle."),
    "optimize": ("exporter.commands:optimize", "Optimize an .onnx file for a target."),
    "inspect": ("exporter.commands:inspect", "Show what a bundle or an .onnx file holds."),
    "verify": ("runtime.commands:verify", "Check a bundle against its recorded outputs."),
    "run": ("runtime.commands:run", "Run a bundle on text or on arrays."),
    "embed": ("runtime.embed_command:embed", "Turn every text of a file into a vector."),
    "serve": ("runtime.serve_command:serve", "Answer HTTP requests with the vectors of their texts."),
    "app": ("runtime.app_command:app", "Write a C, C++, Node or browser app around a bundle."),
    "bench": ("runtime.bench_command:bench", "Time a bundle: latency, tokens/s, memory."),
    "tune": ("exporter.tune_command:tune", "Find the fastest form of a bundle for your texts, and keep it."),
    "doctor": ("runtime.commands:doctor", "Show what can run on this machine and what is missing."),
}


class LazyGroup(click.Group):
    """A click group that knows its commands from a table and imports each when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None when the table has no such name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(f".{module}", __package__), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table; click's own version imports every command for its help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the group's own options; a usage error becomes one line."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            _usage(error)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; every error becomes one line and an exit code."""
        try:
            return super().invoke(ctx)
        except click.exceptions.Exit:
            raise
        except click.UsageError as error:
            _usage(error)
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            ctx.exit(130)
        except Exception as error:  # noqa: BLE001 - the last place where an error can be made readable
            _fail(error, debug=bool(ctx.params.get("debug")))


def _stop(message: str, exit_code: int) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    raise click.exceptions.Exit(exit_code)


def _usage(error: click.UsageError) -> NoReturn:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error  # its message is the help itself
    hint = f" (see: {error.ctx.command_path} --help)" if error.ctx is not None else ""
    _stop(error.format_message() + hint, InputError.exit_code)


def _fail(error: Exception, *, debug: bool) -> NoReturn:
    if debug:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    if isinstance(error, ImportError):
        error = DependencyError.from_import(error) or error
    memory = None if isinstance(error, MachineError) else _memory(error)
    if memory is not None:
        _stop(f"out of memory: {memory}" if memory else "out of memory", MachineError.exit_code)
    if isinstance(error, TfxError):
        _stop(str(error), error.exit_code)
    if isinstance(error, click.ClickException):
        _stop(error.format_message(), InputError.exit_code)
    hint = "" if debug else " (tfx --debug ... shows where)"
    _stop(f"unexpected {type(error).__name__}: {error}{hint}", TfxError.exit_code)


def _memory(error: BaseException | None) -> str | None:
    """Return what was too large when memory ran out, None when it did not; torch says so by a RuntimeError."""
    while error is not None:
        if isinstance(error, MemoryError):
            return str(error)
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            size = re.search(r"tried to allocate \d+ bytes", str(error))
            return size[0] if size else ""
        error = error.__cause__
    return None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tfx")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def main(debug: bool) -> None:
    """Turn a PyTorch Transformer encoder into a verified, fast ONNX bundle.

    \b
    Example:
      tfx export --d-model 768
      tfx verify
      tfx bench
    """  # noqa: D301 - click's own mark for text that is not wrapped
    # `debug` is read from the context by LazyGroup.invoke.
