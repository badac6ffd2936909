"""How commands speak: tables and JSON on stdout, progress on stderr and only on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click

__all__ = ["bar", "print_json", "print_table", "track"]

T = TypeVar("T")


def print_json(value: dict[str, Any]) -> None:
    """Write one JSON object on one line of stdout."""
    click.echo(json.dumps(value, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> None:
    """Write a table to stdout; numbers are aligned right, the columns named in ``left`` left."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column not in left)
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout)
    if not console.is_terminal:  # a pipe has no width: let rows be as long as they are
        console = Console(file=sys.stdout, width=200)
    console.print(table)


def track(items: Sequence[T]) -> Iterable[T]:
    """Yield the items; a terminal sees how far it is."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    return rich_track(items, "verifying", console=console, transient=True) if console.is_terminal else items


@contextlib.contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (what is being done, how many are done, how many there are) that a terminal shows."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    # Redrawn seldom: the bar must not take a core from what is being timed.
    with Progress(console=console, transient=True, refresh_per_second=1) as progress:
        task = progress.add_task("loading", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield tell
