"""The commands ``tfx run``, ``verify``, ``bench`` and ``doctor``. They need no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from . import show
from .providers import PROVIDERS

__all__ = ["bench", "doctor", "run", "verify"]


class _FiniteRange(click.FloatRange):
    """A number between bounds; NaN compares false with every bound, so click lets it through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def _options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read ``1,8``."""
    del context, parameter
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f'found "{value}", wanted whole numbers with commas between, such as 1,8') from None


@click.command()
@_options("bundle")
@click.option("--text", "texts", multiple=True, help="A text; repeat the option for more.")
@click.option(
    "--input", "arrays", type=click.Path(path_type=Path), help="An .npz file with one array per input, by name."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the outputs to this .npz or .json file.")
@click.option("--force", is_flag=True, help="Replace an existing --out.")
@_options("provider", "threads", "json")
def run(
    bundle: Path,
    texts: tuple[str, ...],
    arrays: Path | None,
    out: Path | None,
    force: bool,
    provider: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Run a bundle on text or on arrays.

    BUNDLE is the folder to run, tfx-model when it is not given. Texts longer than the model takes are cut.

    \b
    Example:
      tfx run --text "The cat sat." --text "A dog ran."
      tfx run my-model --input batch.npz --out result.npz
    """  # noqa: D301 - click wants the backspace character
    from . import arrays as files
    from .session import Session

    if bool(texts) == (arrays is not None):
        raise click.UsageError("give either --text or --input")
    if out is not None:
        files.check_target(out, force)
    feeds = None if arrays is None else files.read_npz(arrays)
    session = Session(bundle, provider=provider, threads=threads)
    if feeds is None:
        found = session.encode(list(texts))
        pooling = session.bundle.manifest.pooling or {}
        outputs = found if isinstance(found, dict) else {pooling["output"]: found}
    else:
        outputs = session.run(feeds)
    if out is not None:
        files.write(out, outputs)
    if as_json:
        show.print_json({"outputs": {name: files.nested(values) for name, values in outputs.items()}})
        return
    for name, values in outputs.items():
        click.echo(f"{name}: {values.dtype} {tuple(values.shape)}")
        if out is None:
            for line in files.excerpt(values):
                click.echo(f"  {line}")
    if out is not None:
        click.echo(f"written to {out}", err=True)


@click.command()
@_options("bundle", "provider", "threads")
@click.option("--max-abs", type=_FiniteRange(min=0), help="Largest allowed difference. [default: the bundle's]")
@click.option(
    "--min-cosine",
    type=_FiniteRange(min=-1, max=1),
    help="Smallest allowed cosine per vector. [default: the bundle's]",
)
@click.option("--no-optimize", is_flag=True, help="Turn onnxruntime's own graph optimization off.")
@_options("json")
def verify(
    bundle: Path,
    provider: str,
    threads: int | None,
    max_abs: float | None,
    min_cosine: float | None,
    no_optimize: bool,
    as_json: bool,
) -> None:
    """Check a bundle against the outputs that its source gave at export.

    BUNDLE is the folder to check, tfx-model when it is not given. Exit code 1 says that outputs differ.

    \b
    Example:
      tfx verify
      tfx verify my-model --provider cuda --json
    """  # noqa: D301 - click wants the backspace character
    from .bundle import Bundle
    from .parity import Tolerance, verify_bundle

    opened = Bundle.open(bundle)
    own = opened.manifest.tolerance
    tolerance = Tolerance(
        own["max_abs"] if max_abs is None else max_abs, own["min_cosine"] if min_cosine is None else min_cosine
    )
    report = verify_bundle(opened, provider, not no_optimize, tolerance, threads, progress=show.track)
    if as_json:
        show.print_json(report.to_json())
    else:
        show.print_table(
            ("case", "output", "max abs", "cosine", "verdict"),
            (
                (
                    case.id,
                    case.output,
                    f"{case.comparison.max_abs:.2e}",
                    f"{case.comparison.min_cosine:.8f}",
                    "ok" if case.passed else case.comparison.problem or "differs",
                )
                for case in report.cases
            ),
            left=("case", "output", "verdict"),
        )
    report.check()
    if not as_json:
        click.echo(f"{report.summary()}, on {_where(report.provider, report.placement)}")


@click.command()
@_options("bundle", "provider", "threads")
@click.option("--batch", callback=_numbers, default="1,8", show_default=True, help="Rows per call.")
@click.option("--seq", callback=_numbers, help="Tokens per row. [default: 16,128]")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Calls before the clock.")
@click.option("--rounds", type=click.IntRange(min=1), help="Timed calls per shape, in place of --seconds.")
@click.option(
    "--seconds", type=_FiniteRange(min=0), default=2.0, show_default=True, help="Time per shape, 5 calls at least."
)
@click.option(
    "--compare", "engines", multiple=True, type=click.Choice(["torch", "onnxruntime"]), help="Time this engine too."
)
@click.option("--source", help="What the bundle was made of, for --compare: a checkpoint's folder or pkg.mod:factory.")
@_options("json")
def bench(
    bundle: Path,
    provider: str,
    threads: int | None,
    batch: tuple[int, ...],
    seq: tuple[int, ...] | None,
    warmup: int,
    rounds: int | None,
    seconds: float,
    engines: tuple[str, ...],
    source: str | None,
    as_json: bool,
) -> None:
    """Time a bundle: latency, tokens per second, memory.

    BUNDLE is the folder to time, tfx-model when it is not given. Outputs are checked before anything is timed.
    --compare runs torch eager, or onnxruntime on a plain torch.onnx export; a checkpoint or module needs --source then.

    \b
    Example:
      tfx bench
      tfx bench my-model --batch 1,32 --seq 64 --threads 4 --json
      tfx bench --compare torch --compare onnxruntime
    """  # noqa: D301 - click wants the backspace character
    from .bench import BenchPlan
    from .bench import bench as measure

    plan = BenchPlan(batch, seq, provider, threads, warmup, rounds, seconds, engines, source)
    with show.bar() as advance:
        found = measure(
            bundle, plan, lambda engine, shape, done, total: advance(f"{engine} {shape[0]}x{shape[1]}", done, total)
        )
    if as_json:
        show.print_json(found)
        return
    show.print_table(
        ("engine", "batch", "seq", "p50 ms", "p90 ms", "p99 ms", "tokens/s", "peak MB"),
        (
            (
                row["engine"],
                str(row["batch"]),
                str(row["sequence"]),
                *(f"{row[key]:.2f}" for key in ("p50_ms", "p90_ms", "p99_ms")),
                f"{row['tokens_per_s']:.0f}",
                "?" if row["peak_rss_mb"] is None else f"{row['peak_rss_mb']:.0f}",
            )
            for row in found["results"]
        ),
        left=("engine",),
    )
    here = found["environment"]
    click.echo(f"{_where(found['provider'], found['engines']['tfx']['placement'])}, {found['threads']} threads")
    click.echo(f"{here['cpu']} ({' '.join(here['cpu_features'])}), onnxruntime {here['onnxruntime']}")


@click.command()
@_options("json")
def doctor(as_json: bool) -> None:
    """Show what can run on this machine and what is missing.

    Every provider is tried, not looked up.

    \b
    Example:
      tfx doctor
    """  # noqa: D301 - click wants the backspace character
    from .doctor import diagnose, listing

    found = diagnose()
    if as_json:
        show.print_json(found)
        return
    for key, value in found["environment"].items():
        click.echo(f"{key:<15} {' '.join(value) or 'unknown' if isinstance(value, list) else value}")
    for name, state in found["providers"].items():
        problem = (state["problem"] or "").removeprefix(f"provider {name} ")
        click.echo(f"provider {name:<6} {problem or 'runs'}")
    for use, packages in found["packages"].items():
        click.echo(f"to {use}: {listing(packages)}")
    for warning in found["warnings"]:
        click.echo(f"warning: {warning}")


def _where(provider: str | None, placement: Mapping[str, int] | None) -> str:
    """Return the provider and how many nodes it and others run."""
    nodes = ", ".join(f"{name} {count} nodes" for name, count in (placement or {}).items())
    return f"{provider} ({nodes or 'node placement unknown'})"
