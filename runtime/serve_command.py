"""The command ``tfx serve``. It needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import show
from .options import FiniteRange, shared_options

__all__ = ["serve"]


@click.command()
@shared_options("bundle")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; others than this one's own loopback let other machines in.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@shared_options("provider")
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use. [default: physical cores]")
@click.option(
    "--max-batch-tokens",
    type=click.IntRange(min=1),
    help="Tokens in one call of the model. [default: what the bundle was tuned to, else 256; 16384 on a GPU]",
)
@click.option(
    "--single-copy", is_flag=True, help="Hold the weights once, not twice; a request that comes alone is then slower."
)
@click.option(
    "--max-wait-ms",
    type=FiniteRange(0, 1000),
    default=0.0,
    show_default=True,
    help="How long a text waits for others to share its call while a core is free.",
)
@click.option(
    "--queue",
    "queue_tokens",
    type=click.IntRange(min=1),
    default=131072,
    show_default=True,
    help="Tokens that may wait; requests on top are answered with 429.",
)
@click.option("--max-texts", type=click.IntRange(min=1), default=2048, show_default=True, help="Texts in one request.")
@click.option(
    "--max-body", type=click.IntRange(min=1), default=4194304, show_default=True, help="Bytes in one request."
)
@click.option("--refuse-long", is_flag=True, help="Answer texts longer than the model takes with 400, not by a cut.")
@click.option("--model-name", help="What clients call the model. [default: the folder's name]")
@click.option(
    "--stop-seconds",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="How long a stop waits for requests that run.",
)
@click.option("--access-log", is_flag=True, help="A line for each request on stderr; never its texts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout as soon as it can be reached.")
def serve(
    bundle: Path,
    host: str,
    port: int,
    provider: str,
    threads: int | None,
    max_batch_tokens: int | None,
    single_copy: bool,
    max_wait_ms: float,
    queue_tokens: int,
    max_texts: int,
    max_body: int,
    refuse_long: bool,
    model_name: str | None,
    stop_seconds: int,
    access_log: bool,
    as_json: bool,
) -> None:
    """Answer HTTP requests with the vectors of their texts.

    BUNDLE is the folder to run, tfx-model when it is not given, and must have pooling. POST /embed takes {"texts":
    [...]}, POST /v1/embeddings what OpenAI's clients send; /docs describes both. Requests that come together share
    calls of the model. SIGTERM and Ctrl+C end it once what runs is answered.

    \b
    Example:
      tfx serve minilm
      curl http://127.0.0.1:8080/embed -H 'Content-Type: application/json' -d '{"texts": ["The cat sat."]}'
    """  # noqa: D301 - click wants the backspace character
    from .schedule import Schedule
    from .serve import ServePlan
    from .serve import serve as run

    plan = ServePlan(
        bundle,
        host,
        port,
        provider,
        threads,
        max_batch_tokens,
        single_copy,
        max_wait_ms,
        queue_tokens,
        max_texts,
        max_body,
        refuse_long,
        model_name,
        stop_seconds,
        access_log,
    )

    def started(found: dict[str, Any]) -> None:
        schedule = found["schedule"]
        if as_json:
            show.print_json(found)
        else:
            url, how = found["url"], Schedule.from_json(schedule)
            click.echo(f"serving {found['model']} at {url} ({how}); API: {url}/docs; Ctrl+C stops it", err=True)
        if found["copies"] == 1 and schedule["workers"] > 1 and provider == "cpu" and not single_copy:
            click.echo("notice: no memory for the weights twice: a request that comes alone has one core", err=True)
        if found["open"]:
            click.echo(f"notice: whoever reaches {host} can use it: there is no password and no encryption", err=True)

    run(plan, started)
