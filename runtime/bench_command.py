"""The command ``tfx bench``. It needs no torch unless an engine does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from . import show
from .options import FiniteRange, numbers, shared_options, where

__all__ = ["bench"]

# As bench.COMPARED and bench.MODES, which are not imported for the help alone; a test holds them equal.
_ENGINES = ("torch", "onnxruntime", "openvino", "sentence-transformers")
_MODES = ("latency", "throughput")
_SHORT = {"ort": "onnxruntime", "st": "sentence-transformers"}

_DISTURBED = 0.05
_BAR = 30


def _engines(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Read ``--compare torch --compare ort`` and ``--compare torch,ort``."""
    del context, parameter
    names = [_SHORT.get(name, name) for each in value for name in each.split(",")]
    for name in names:
        if name not in _ENGINES:
            raise click.BadParameter(f'found "{name}", wanted {", ".join(_ENGINES)}')
    return tuple(names)


@click.command()
@shared_options("bundle", "provider", "threads")
@click.option("--batch", callback=numbers, default="1,8", show_default=True, help="Rows per call.")
@click.option("--seq", callback=numbers, help="Tokens per row. [default: 16,128]")
@click.option(
    "--lengths",
    help="A length histogram in place of --seq: N,N,N, lognormal:MEDIAN,MAX, uniform:A,B, or a file of numbers or "
    "texts, one a line.",
)
@click.option("--count", type=click.IntRange(1, 10**7), default=64, show_default=True, help="Rows drawn from it.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn.")
@click.option(
    "--mode",
    type=click.Choice(_MODES),
    default="latency",
    show_default=True,
    help="Time a call of --batch rows as they come, or all --count rows at once, sorted and grouped.",
)
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Calls before the clock.")
@click.option("--rounds", type=click.IntRange(min=1), help="Timed calls per shape, in place of --seconds.")
@click.option(
    "--seconds", type=FiniteRange(min=0), default=2.0, show_default=True, help="Time per shape, 5 calls at least."
)
@click.option("--compare", "engines", multiple=True, callback=_engines, help=f"Time these too: {', '.join(_ENGINES)}.")
@click.option("--source", help="What the bundle was made of, for --compare: a checkpoint's folder or pkg.mod:factory.")
@click.option("--floor", is_flag=True, help="Time the model's matrix products alone too. [default: with --plot]")
@click.option("--memory", is_flag=True, help="Watch memory over 300 varying shapes, in a fresh process per engine.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw the result: .png, .svg or .pdf.")
@shared_options("json")
def bench(
    bundle: Path,
    provider: str,
    threads: int | None,
    batch: tuple[int, ...],
    seq: tuple[int, ...] | None,
    lengths: str | None,
    count: int,
    seed: int,
    mode: str,
    warmup: int,
    rounds: int | None,
    seconds: float,
    engines: tuple[str, ...],
    source: str | None,
    floor: bool,
    memory: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Time a bundle: latency, tokens per second, memory.

    BUNDLE is the folder to time, tfx-model when it is not given. Outputs are checked before anything is timed. Every
    engine has a process of its own and the same threads; they take turns, and ratios are taken within a turn.

    --compare runs torch eager, onnxruntime or openvino on a plain torch.onnx export, or sentence-transformers; what
    was exported from a checkpoint or module needs --source then.

    \b
    Example:
      tfx bench
      tfx bench my-model --batch 1,32 --seq 64 --threads 4 --json
      tfx bench my-model --lengths lognormal:60,256 --batch 16 --memory
      tfx bench my-model --lengths texts.txt --mode throughput --batch 32 --count 1000
      tfx bench --compare torch,onnxruntime --floor --plot bench.png
    """  # noqa: D301 - click wants the backspace character
    from .bench import BenchPlan
    from .bench import bench as measure
    from .plot import check_plot, plot

    if picture is not None:
        check_plot(picture)
    plan = BenchPlan(
        batch,
        seq,
        provider,
        threads,
        warmup,
        rounds,
        seconds,
        engines,
        source,
        lengths,
        count,
        seed,
        mode,
        floor or picture is not None,
        memory,
    )
    with show.bar() as advance:
        found = measure(bundle, plan, advance)
    if picture is not None:
        plot(found, picture)
        click.echo(f"drawn to {picture}", err=True)
    if as_json:
        show.print_json(found)
        return
    _print(found)


def _print(found: Mapping[str, Any]) -> None:
    if found["lengths"] is not None:
        _print_lengths(found["lengths"])
    floor = any(row["floor_ms"] is not None for row in found["results"])
    whole = found["mode"] == "throughput"
    ratios = {(each["engine"], each["batch"], each["sequence"]): each for each in found["ratios"]}
    columns = ["engine", "batch", "seq", "padding", "p50 ms", "p90 ms", "p99 ms", "tokens/s"]
    columns += ["texts/s"] * whole + ["times tfx"] * bool(ratios) + ["times floor"] * floor + ["peak MB"]
    rows = []
    for row in found["results"]:
        cells = [row["engine"], str(row["batch"]), str(row["sequence"]), f"{row['padding']:.0%}"]
        cells += [f"{row[key]:.2f}" for key in ("p50_ms", "p90_ms", "p99_ms")]
        cells += [f"{row['tokens_per_s']:.0f}"]
        cells += [f"{row['texts_per_s']:.1f}"] * whole
        if ratios:
            cells.append(_spread(ratios.get((row["engine"], row["batch"], row["sequence"]))))
        cells += [_spread(row["above_floor"])] * floor
        cells.append("?" if row["peak_rss_mb"] is None else f"{row['peak_rss_mb']:.0f}")
        rows.append(cells)
    show.print_table(columns, rows, left=("engine",))
    for name, engine in found["engines"].items():
        click.echo(f"{name}: loaded in {engine['load_s']:.2f} s, first call {engine['first_ms']:.1f} ms")
        if engine["memory"] is not None:
            click.echo(f"{name}: {_memory(engine['memory'])}")
    here = found["environment"]
    click.echo(f"{where(found['provider'], found['engines']['tfx']['placement'])}, {found['threads']} threads each")
    click.echo(f"{here['cpu']} ({' '.join(here['cpu_features'])}), onnxruntime {here['onnxruntime']}")
    others = max(row["others"] for row in found["results"])
    if others > _DISTURBED:
        click.echo(
            f"warning: other programs took {others:.0%} of all cores meanwhile; times are longer for it", err=True
        )


def _print_lengths(lengths: Mapping[str, Any]) -> None:
    most = max(each["count"] for each in lengths["bins"])
    for each in lengths["bins"]:
        bar = "#" * round(_BAR * each["count"] / most)
        click.echo(f"{each['from']:>5} - {each['to']:<5} {each['count']:>6} {bar}")
    click.echo(
        f"{lengths['count']} rows: median {lengths['median']:g}, mean {lengths['mean']:.1f}, p90 {lengths['p90']:g}, "
        f"longest {lengths['max']} tokens"
    )


def _spread(ratio: Mapping[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['ratio']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f})"


def _memory(found: Mapping[str, Any]) -> str:
    verdict = "a plateau" if found["plateau"] else "no plateau"
    peak = "" if found["peak_mb"] is None else f", peak {found['peak_mb']:.0f}"
    return (
        f"memory over {found['runs']} varying shapes: {verdict}, the last third added {found['growth']:.1%}; "
        f"{found['steady_mb']:.0f} MB steady{peak}"
    )
