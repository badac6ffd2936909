"""The command ``tfx tune``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..runtime import show
from ..runtime.options import FiniteRange, shared_options

__all__ = ["tune"]

# As tune.STAGES and bench.MODES, which are not imported for the help alone; a test holds them equal.
_STAGES = ("layout", "lowering", "precision", "threads", "spinning", "schedule")
_MODES = ("latency", "throughput")


def _stages(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Read ``layout,threads``."""
    del context, parameter
    names = tuple(value.split(","))
    for name in names:
        if name not in _STAGES:
            raise click.BadParameter(f'found "{name}", wanted {", ".join(_STAGES)}')
    return names


@click.command()
@shared_options("bundle")
@click.option(
    "--lengths",
    default="lognormal:60,256",
    show_default=True,
    help="How long your texts are: N,N,N, lognormal:MEDIAN,MAX, uniform:A,B, or a file of numbers or texts.",
)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Rows per call.")
@click.option(
    "--mode",
    type=click.Choice(_MODES),
    default="latency",
    show_default=True,
    help="Tune calls of --batch rows as they come, or Session.run_many on --count rows at once.",
)
@click.option(
    "--count", type=click.IntRange(1, 10**7), default=64, show_default=True, help="Rows drawn from --lengths."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn.")
@click.option("--threads", type=click.IntRange(min=1), help="Most threads to use. [default: physical cores]")
@click.option(
    "--min-cosine",
    type=FiniteRange(min=-1, max=1),
    help="Smallest cosine of a vector with the source's, which lets other precisions in. [default: the bundle's own "
    "tolerance, and its precision]",
)
@click.option(
    "--budget", type=FiniteRange(min=0), default=600.0, show_default=True, help="Seconds to begin candidates in."
)
@click.option(
    "--only",
    "stages",
    callback=_stages,
    default=",".join(_STAGES),
    show_default=True,
    help="What to try, in this order.",
)
@click.option(
    "--source",
    help="What the bundle was made of, a checkpoint's folder or pkg.mod:factory: for other layouts and precisions of "
    "a bundle that is ragged or quantised.",
)
@click.option("--fresh", is_flag=True, help="Forget what an earlier run found out.")
@shared_options("json")
def tune(bundle: Path, as_json: bool, **options: Any) -> None:
    """Find the fastest form of a bundle for your texts on this machine, and write it into the bundle.

    BUNDLE is the folder to tune, tfx-model when it is not given. One choice after the other is tried against the best
    so far: both stay loaded and take turns until they differ beyond noise. What is outside of the parity limit is not
    timed. A change is kept only when it is faster beyond noise. When a run is cut short, the next one goes on where it
    was.

    \b
    Example:
      tfx tune --lengths texts.txt
      tfx tune my-model --lengths lognormal:60,256 --min-cosine 0.995
      tfx tune my-model --mode throughput --only layout,threads,schedule --budget 120
    """  # noqa: D301 - click wants the backspace character
    from .tune import TunePlan
    from .tune import tune as run

    with show.bar() as advance:
        found = run(bundle, TunePlan(**options), progress=lambda what: advance(what, 0, 0))
    if as_json:
        show.print_json(found)
        return
    _print(found)


def _print(found: Mapping[str, Any]) -> None:
    show.print_table(
        ("stage", "candidate", "verdict", "times as long", "ms", "against", "cosine"),
        (
            (
                each["stage"],
                _changed(each),
                each["verdict"] + (f": {each['reason']}" if each["reason"] else ""),
                "" if each["ratio"] is None else f"{each['ratio']:.3f} ({each['low']:.3f} - {each['high']:.3f})",
                *("" if each[key] is None else f"{each[key]:.2f}" for key in ("candidate_ms", "against_ms")),
                "" if each["min_cosine"] is None else f"{each['min_cosine']:.6f}",
            )
            for each in found["tried"]
        ),
        left=("stage", "candidate", "verdict"),
    )
    winner, gain = found["winner"], found["gain"]
    if found["winner"] == found["start"]:
        click.echo("nothing was faster beyond noise: the bundle's graph stays as it is")
    else:
        click.echo("kept: " + _settings(winner))
        click.echo(f"{gain['gain']:.2f} times as fast as before ({gain['low']:.2f} - {gain['high']:.2f})")
    if found["resumed"]:
        click.echo(f"{found['resumed']} of {len(found['tried'])} candidates were tried by an earlier run")
    if not found["finished"]:
        click.echo("the time ran out before everything was tried; run it again to go on")
    click.echo(f"{found['seconds']:.0f} s; the log is in {found['bundle']}/tune.json")


def _changed(entry: Mapping[str, Any]) -> str:
    """What differs from the best that there was."""
    changes = {key: value for key, value in entry["candidate"].items() if value != entry["against"][key]}
    return _settings(changes)


def _settings(values: Mapping[str, Any]) -> str:
    parts = []
    for key, value in values.items():
        if key == "threads":
            parts.append(f"{value} thread{'s' if value != 1 else ''}")
        elif key == "spinning":
            parts.append("spinning" if value else "no spinning")
        elif key == "schedule":
            if value is not None:
                parts.append(f"{value['workers']} x {value['threads']} threads, {value['batch_tokens']} tokens a call")
        else:
            parts.append(str(value))
    return ", ".join(parts)
