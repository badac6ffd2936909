"""How long do raising and lowering take, and does that grow with the layers? See README.md in this folder.

Example:
    python benchmarks/raising.py --json raising.json
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rounds import load, run, surroundings, write_json
from routes import captured, export, source
from zoo import Row

from tfx.exporter.foreign import load as load_model
from tfx.exporter.foreign import to_canonical_opset
from tfx.exporter.pipeline import check_counts, lower_model, raise_model
from tfx.exporter.targets import get
from tfx.models.config import EncoderConfig
from tfx.models.encoder import Encoder
from tfx.runtime.show import print_table

if TYPE_CHECKING:
    import onnx_ir as ir

LAYERS = (12, 24, 48)
FEW_LAYERS = (4, 8, 16)
GRAPHS = ("capture", "torchscript 17")
TINY: dict[str, Any] = {"d_model": 16, "heads": 2, "d_ff": 32}
LARGE: dict[str, Any] = {"d_model": 768, "heads": 12, "d_ff": 3072}


def _row(layers: int, sizes: dict[str, Any]) -> Row:
    config = EncoderConfig(layers=layers, vocab_size=99, max_len=64, **sizes)
    counts = {"attention": layers, "layer_norm": 2 * layers, "gelu": layers}
    return Row("reference", lambda: Encoder(config), counts=counts)


def _graph(row: Row, route: str, folder: Path) -> Callable[[], ir.Model]:
    """Makes the graph anew at each call, as raising takes it: loaded, at the canonical opset, with shapes."""
    if route == "capture":
        return captured(source(row)).clone
    path = folder / "graph.onnx"
    export(row, route, path)

    def make() -> ir.Model:
        model = load_model(path)
        to_canonical_opset(model, path.name)
        return model

    return make


def measure(row: Row, route: str, rounds: int) -> dict[str, float]:
    """The quickest of several runs, in seconds of processor time: other programs only ever add to it.

    Raises:
        CountError: the graph was not raised whole.
    """
    best = {"raise": float("inf"), "lower": float("inf")}
    with tempfile.TemporaryDirectory(prefix="tfx-raising-") as folder:
        make = _graph(row, route, Path(folder))
        for _ in range(rounds):
            model = make()
            before = time.process_time()
            report = raise_model(model)
            between = time.process_time()
            lower_model(model, get("cpu"), report)
            after = time.process_time()
            check_counts(report.counts, row.counts)
            best = {"raise": min(best["raise"], between - before), "lower": min(best["lower"], after - between)}
    return best


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs, of which one counts.")
@click.option("--quick", is_flag=True, help="Few layers, small weights, one run: does it work at all?")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure to this file.")
def main(rounds: int, quick: bool, json_file: Path | None) -> None:
    """Time raising and lowering of the reference encoder at 12, 24 and 48 layers, d 768."""
    before = load()
    results: list[dict[str, Any]] = []
    depths = FEW_LAYERS if quick else LAYERS
    for route in GRAPHS:
        for layers in depths:
            found = measure(_row(layers, TINY if quick else LARGE), route, 1 if quick else rounds)
            results.append({"graph": route, "layers": layers, **found})
            click.echo(f"{route}, {layers} layers: done", err=True)
    growth: dict[str, float] = {}
    for route in GRAPHS:
        few, *_, many = (each["raise"] + each["lower"] for each in results if each["graph"] == route)
        growth[route] = many / few / (depths[-1] / depths[0])
    print_table(
        ("graph", "layers", "raise s", "lower s"),
        [(each["graph"], str(each["layers"]), f"{each['raise']:.2f}", f"{each['lower']:.2f}") for each in results],
        left=("graph",),
    )
    for route, ratio in growth.items():
        least, most = depths[0], depths[-1]
        click.echo(f"{route}: time({most}) / time({least}) / {most // least} = {ratio:.2f} (1 is linear)")
    write_json(json_file, {**surroundings(1, before), "results": results, "growth": growth})


if __name__ == "__main__":
    run(main)
