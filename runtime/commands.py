"""The commands ``tfx run``, ``verify`` and ``doctor``. They need no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from . import show
from .options import FiniteRange, shared_options, where

__all__ = ["RUNTIMES", "doctor", "run", "verify"]

RUNTIMES = ("python", "c", "cpp", "node", "web")  # as app_verify.RUNTIMES, not imported for the help; a test holds


@click.command()
@shared_options("bundle")
@click.option("--text", "texts", multiple=True, help="A text; repeat the option for more.")
@click.option(
    "--input", "arrays", type=click.Path(path_type=Path), help="An .npz file with one array per input, by name."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the outputs to this .npz or .json file.")
@click.option("--force", is_flag=True, help="Replace an existing --out.")
@shared_options("provider", "threads", "json")
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
@shared_options("bundle", "provider", "threads")
@click.option("--max-abs", type=FiniteRange(min=0), help="Largest allowed difference. [default: the bundle's]")
@click.option(
    "--min-cosine",
    type=FiniteRange(min=-1, max=1),
    help="Smallest allowed cosine per vector. [default: the bundle's]",
)
@click.option("--no-optimize", is_flag=True, help="Turn onnxruntime's own graph optimization off.")
@click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    default="python",
    show_default=True,
    help="Let an app in another language check it; it is built first.",
)
@shared_options("json")
@click.pass_context
def verify(
    context: click.Context,
    bundle: Path,
    provider: str,
    threads: int | None,
    max_abs: float | None,
    min_cosine: float | None,
    no_optimize: bool,
    runtime: str,
    as_json: bool,
) -> None:
    """Check a bundle against the outputs that its source gave at export.

    BUNDLE is the folder to check, tfx-model when it is not given. Exit code 1 names the first stage that differs:
    files, runtime, tokens of recorded texts, outputs of the graph, vectors of the texts.

    \b
    Example:
      tfx verify
      tfx verify my-model --provider cuda --json
      tfx verify my-model --runtime node
    """  # noqa: D301 - click wants the backspace character
    if runtime != "python":
        _verify_by_app(context, bundle, runtime, threads, as_json)
        return
    from . import app_verify
    from .bundle import Bundle
    from .parity import Tolerance
    from .self_check import self_check

    opened = Bundle.unchecked(bundle)
    tolerance = Tolerance(**opened.manifest.tolerance)
    if max_abs is not None:
        tolerance = dataclasses.replace(tolerance, max_abs=max_abs)
    if min_cosine is not None:
        tolerance = dataclasses.replace(tolerance, min_cosine=min_cosine, min_token_cosine=None)
    found = self_check(opened, provider, not no_optimize, tolerance, threads, progress=show.track)
    report = found.parity
    if as_json:
        show.print_json(found.to_json())
    elif report is not None:
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
    if not as_json:
        _print_stages(found.to_json())
    found.check()
    if not as_json and report is not None:
        click.echo(f"{report.summary()}, on {where(report.provider, report.placement)}")
        click.echo(app_verify.verdict(found.to_json()))


def _verify_by_app(context: click.Context, bundle: Path, runtime: str, threads: int | None, as_json: bool) -> None:
    from . import app_verify

    for name in ("provider", "max_abs", "min_cosine", "no_optimize"):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} is for --runtime python; an app keeps to the bundle's own tolerance")
    code, report = app_verify.verify_by_app(bundle, runtime, threads)
    if as_json:
        show.print_json(report)
    else:
        _print_stages(report)
        click.echo(app_verify.verdict(report), err=code != 0)
    context.exit(code)


def _print_stages(report: Mapping[str, Any]) -> None:
    """Show a self-check's report, whichever language it comes from."""
    from .app_verify import rows

    show.print_table(("stage", "checked", "max abs", "cosine", "verdict"), rows(report), left=("stage", "verdict"))


@click.command()
@shared_options("json")
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
