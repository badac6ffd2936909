"""The command ``tfx embed``. It needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from . import show
from .options import shared_options

__all__ = ["embed"]

_SCHEDULES = ("auto", "threads", "packed")  # as embed.SCHEDULES, which is not imported for the help alone; a test holds


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@shared_options("bundle")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The file to write: .npy, .parquet or .jsonl."
)
@click.option("--column", default="text", show_default=True, help="Where the text is in .jsonl, .csv, .tsv, .parquet.")
@click.option(
    "--schedule",
    type=click.Choice(_SCHEDULES),
    default="auto",
    show_default=True,
    help="Small calls of one thread each, large calls on all threads, or what a short measurement shows faster.",
)
@click.option(
    "--batch-tokens", type=click.IntRange(min=1), help="Tokens in one call. [default: 256; packed 4096 or more]"
)
@click.option(
    "--resume", is_flag=True, help="Continue an unfinished run, or begin one; nothing is done where OUT is complete."
)
@click.option("--force", is_flag=True, help="Replace an existing --out; without --resume, also begin anew.")
@shared_options("provider")
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use. [default: physical cores]")
@shared_options("json")
def embed(
    source: Path,
    bundle: Path,
    out: Path,
    column: str,
    schedule: str,
    batch_tokens: int | None,
    resume: bool,
    force: bool,
    provider: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Turn every text of a file into a vector, in order.

    IN is a .txt (a text per line; an empty line is a text), .jsonl, .csv, .tsv or .parquet file; BUNDLE is the folder
    to run, tfx-model when it is not given, and must have pooling. All rows are checked before the first is run. Memory
    stays the same for any number of rows. A run that was ended, even by SIGKILL, goes on with --resume and writes the
    file that it would have written.

    \b
    Example:
      tfx embed texts.jsonl minilm --out vectors.npy
      tfx embed texts.csv minilm --column body --out vectors.parquet --resume
    """  # noqa: D301 - click wants the backspace character
    from .embed import EmbedPlan
    from .embed import embed as run
    from .embed_output import journal_of

    plan = EmbedPlan(source, out, bundle, column, provider, threads, schedule, batch_tokens, resume, force)
    try:
        with show.bar() as advance:
            found = run(plan, advance, lambda line: click.echo(f"notice: {line}", err=True))
    except (KeyboardInterrupt, SystemExit):
        if journal_of(out).exists():
            click.echo("what is done is kept: --resume continues it", err=True)
        raise
    if as_json:
        show.print_json(found)
        return
    if found["schedule"] is None:
        click.echo(f"{out} is complete: {found['rows']} vectors of {found['dimension']}; --force computes them anew")
        return
    resumed = f", {found['resumed_rows']} of them by earlier runs" if found["resumed_rows"] else ""
    rate = "" if found["texts_per_s"] is None else f", {found['texts_per_s']:.0f} texts/s"
    click.echo(f"{found['rows']} vectors of {found['dimension']} ({found['dtype']}) in {out}{resumed}")
    click.echo(f"{found['seconds']:.1f} s{rate}; {_describe(found['schedule'])}; {found['provider']}")


def _describe(schedule: dict[str, int]) -> str:
    from .schedule import Schedule

    return str(Schedule.from_json(schedule))
