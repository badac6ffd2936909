"""Options that commands share, and how they read and say things."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from .providers import PROVIDERS

__all__ = ["FiniteRange", "numbers", "shared_options", "where"]


class FiniteRange(click.FloatRange):
    """A number between bounds; NaN compares false with every bound, so click lets it through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; click calls this."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def shared_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the arguments and options that commands share, by name."""
    available = {
        "bundle": click.argument("bundle", default="tfx-model", type=click.Path(path_type=Path)),
        "provider": click.option(
            "--provider", type=click.Choice(list(PROVIDERS)), default="cpu", show_default=True, help="Where to run."
        ),
        "threads": click.option(
            "--threads", type=click.IntRange(min=1), help="Threads inside an operator. [default: physical cores]"
        ),
        "json": click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
    }

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for name in reversed(names):
            command = available[name](command)
        return command

    return add


def numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read ``1,8``."""
    del context, parameter
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f'found "{value}", wanted whole numbers with commas between, such as 1,8') from None


def where(provider: str | None, placement: Mapping[str, int] | None) -> str:
    """Return the provider and how many nodes it and others run."""
    nodes = ", ".join(f"{name} {count} nodes" for name, count in (placement or {}).items())
    return f"{provider} ({nodes or 'node placement unknown'})"
