"""What does each lowering of the cpu target bring, and what would its alternatives? See README.md in this folder.

Example:
    python benchmarks/passes.py --json passes.json
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rounds import file_engine, load, ratio, run, surroundings, timed_in_turns, write_json

from tfx.errors import CheckError
from tfx.exporter import targets
from tfx.exporter.capture import capture
from tfx.exporter.golden import record
from tfx.exporter.lowering import RULES
from tfx.exporter.lowering.attention import AttentionMask, AttentionPrimitives, MultiHeadAttention, PackedAttention
from tfx.exporter.lowering.gelu import (
    BiasGelu,
    ContribGelu,
    FastBiasGelu,
    FastGelu,
    GeluErfPrimitives,
    GeluTanhPrimitives,
)
from tfx.exporter.lowering.layer_norm import SkipLayerNorm
from tfx.exporter.pipeline import Report, lower_model, raise_model
from tfx.exporter.save import save
from tfx.exporter.sources import Source, reference
from tfx.models.config import EncoderConfig
from tfx.runtime.doctor import default_threads
from tfx.runtime.golden import save_golden
from tfx.runtime.show import print_table
from tfx.runtime.tensors import default_cases

if TYPE_CHECKING:
    import onnx_ir as ir

    from tfx.exporter.fusion import Fusion

SHAPES = ((1, 16), (1, 128), (8, 128))
CPU = RULES["cpu"]
_TRIAL = "trial"


@dataclass(frozen=True)
class Variant:
    """One graph in one kind of session.

    Attributes:
        rules: what lowers the canonical graph.
        load_fusions: let onnxruntime's own SkipLayerNormFusion work when it loads the graph; tfx's sessions stop it.
    """

    rules: Sequence[type[Fusion]]
    load_fusions: bool = False


@dataclass(frozen=True)
class Question:
    """Variants that are timed in turns; ratios are to the first one.

    Attributes:
        name: what is asked.
        variants: by name.
        tanh: the encoder has tanh GELU.
        fires: a rule that must have fired in every variant but the first, so that something is compared at all.
    """

    name: str
    variants: Mapping[str, Variant]
    tanh: bool = False
    fires: type[Fusion] | None = None


def _alone(rule: type[Fusion]) -> Question:
    # onnxruntime's CPU kernel of ai.onnx Attention only runs with the mask that AttentionMask gives it.
    return Question(
        rule.__name__,
        {"off": Variant((AttentionMask,)), "on": Variant((rule, AttentionMask))},
        tanh=rule in (FastBiasGelu, FastGelu),
        fires=rule,
    )


def _instead(*rules: type[Fusion], of: Sequence[type[Fusion]]) -> Variant:
    return Variant((*rules, *(rule for rule in CPU if rule not in of)))


_ATTENTION = (PackedAttention, MultiHeadAttention)
_ERF = (BiasGelu, ContribGelu)
_TANH = (FastBiasGelu, FastGelu)
_CHOICE = Variant(CPU)

QUESTIONS = (
    # What a difference means: these two are the same.
    Question("noise", {"once": _CHOICE, "twice": _CHOICE}),
    Question("all", {"off": Variant((AttentionMask,)), "on": _CHOICE}),
    *(_alone(rule) for rule in (*CPU, SkipLayerNorm)),
    Question(
        "attention",
        {
            "com.microsoft Attention": _CHOICE,
            "MultiHeadAttention": _instead(MultiHeadAttention, of=_ATTENTION),
            "ai.onnx Attention": _instead(AttentionMask, of=_ATTENTION),
            "primitives": _instead(AttentionPrimitives, of=_ATTENTION),
        },
    ),
    Question(
        "gelu",
        {
            "BiasGelu": _CHOICE,
            "Add, com.microsoft Gelu": _instead(ContribGelu, of=_ERF),
            "Add, ai.onnx Gelu": _instead(of=_ERF),
            "Add, Erf primitives": _instead(GeluErfPrimitives, of=_ERF),
        },
    ),
    Question(
        "gelu tanh",
        {
            "FastGelu with bias": _CHOICE,
            "Add, FastGelu": _instead(FastGelu, of=_TANH),
            "Add, ai.onnx Gelu": _instead(of=_TANH),
            "Add, Tanh primitives": _instead(GeluTanhPrimitives, of=_TANH),
        },
        tanh=True,
    ),
    Question(
        "layer norm",
        {
            "Add, LayerNormalization": _CHOICE,
            "SkipLayerNormalization": _instead(SkipLayerNorm, of=()),
            "fused at load": Variant(CPU, load_fusions=True),
        },
    ),
)


class Bench:
    """Captures each encoder once and lowers it in many ways.

    Args:
        config: the encoder, without its activation.
        folder: for files.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._captured: dict[bool, tuple[Source, ir.Model, Report, Path]] = {}

    def _encoder(self, tanh: bool) -> tuple[Source, ir.Model, Report, Path]:
        if tanh not in self._captured:
            source = reference(EncoderConfig(**self._config, activation="gelu_tanh" if tanh else "gelu"))
            model = capture(source)
            golden = self._folder / f"golden-{tanh}.safetensors"
            save_golden(golden, record(source, default_cases(source.inputs, 64)))
            self._captured[tanh] = (source, model, raise_model(model), golden)
        return self._captured[tanh]

    def engine(self, question: Question, name: str, threads: int) -> dict[str, Any]:
        """Lower and write one variant.

        Raises:
            CheckError: the rule in question did not fire.
        """
        variant = question.variants[name]
        source, canonical, raised, golden = self._encoder(question.tanh)
        model, report = canonical.clone(), Report(counts=dict(raised.counts))
        RULES[_TRIAL] = tuple(variant.rules)
        try:
            lower_model(model, dataclasses.replace(targets.get("cpu"), name=_TRIAL), report)
        finally:
            del RULES[_TRIAL]
        first = name == next(iter(question.variants))
        if question.fires is not None and not first and not report.fired.get(question.fires.id()):
            raise CheckError(f"{question.name}: {question.fires.id()} did not fire, so there is nothing to compare")
        path = self._folder / f"{len(list(self._folder.iterdir()))}.onnx"
        save(model, path)
        return file_engine(path, golden, source.inputs, threads, () if variant.load_fusions else None)


def measure(
    questions: Sequence[Question],
    config: Mapping[str, Any],
    *,
    threads: int,
    rounds: int,
    seconds: float,
    patience: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Time the variants of each question; every variant is checked against torch first.

    Args:
        questions: what to compare.
        config: the encoder, without its activation.
        threads: of every session.
        rounds: see ``rounds.timed_in_turns``, as what follows.
        seconds: as said.
        patience: as said.
        progress: as said.

    Returns:
        One entry per question, variant and shape: ``question``, ``variant``, ``baseline``, ``batch``, ``sequence``,
        ``ms``, ``rounds_ms``, ``others``, ``max_abs`` and ``ratio`` {median, min, max} to the baseline.

    Raises:
        ParityError: a variant's outputs differ from torch's.
    """
    results = []
    with tempfile.TemporaryDirectory(prefix="tfx-passes-") as folder:
        bench = Bench(config, Path(folder))
        for question in questions:
            engines = {name: bench.engine(question, name, threads) for name in question.variants}
            found = timed_in_turns(
                engines,
                SHAPES,
                rounds=rounds,
                seconds=seconds,
                starts=min(3, rounds),
                patience=patience,
                progress=lambda what, question=question: progress(f"{question.name}: {what}"),
            )
            baseline = next(iter(engines))
            results += [
                {
                    "question": question.name,
                    "variant": name,
                    "baseline": baseline,
                    "batch": shape[0],
                    "sequence": shape[1],
                    "ms": statistics.median(times),
                    "rounds_ms": times,
                    "others": found.others[shape],
                    "max_abs": found.engines[name]["max_abs"],
                    "ratio": ratio(times, ms[baseline]),
                }
                for shape, ms in found.ms.items()
                for name, times in ms.items()
            ]
    return results


def _show(results: Sequence[Mapping[str, Any]]) -> None:
    cells: dict[tuple[str, str], list[str]] = {}
    for row in results:
        spread = row["ratio"]
        text = f"{spread['median']:.3f} ({spread['min']:.3f} - {spread['max']:.3f})"
        alone = row["variant"] == row["baseline"]
        cells.setdefault((row["question"], row["variant"]), []).append(f"{row['ms']:.2f} ms" if alone else text)
    shapes = (f"{batch}x{sequence}" for batch, sequence in SHAPES)
    print_table(
        ("question", "variant", *shapes), ((*key, *each) for key, each in cells.items()), ("question", "variant")
    )


@click.command()
@click.option(
    "--only", multiple=True, type=click.Choice([q.name for q in QUESTIONS]), help="This question; repeatable."
)
@click.option("--d-model", default=768, show_default=True)
@click.option("--heads", default=12, show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Turns of each variant.")
@click.option("--seconds", type=click.FloatRange(min=0), default=0.2, show_default=True, help="Time of a turn, about.")
@click.option("--threads", type=click.IntRange(min=1), help="Of each session. [default: physical cores]")
@click.option("--quick", is_flag=True, help="A tiny encoder and short turns: does it work at all?")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure to this file.")
def main(
    only: tuple[str, ...],
    d_model: int,
    heads: int,
    layers: int,
    rounds: int,
    seconds: float,
    threads: int | None,
    quick: bool,
    json_file: Path | None,
) -> None:
    """Time each lowering alone, on and off, and the alternatives to what the cpu target chose."""
    if quick:
        d_model, heads, layers, rounds, seconds = 32, 4, 1, 2, 0.0
    config = {
        "d_model": d_model, "heads": heads, "layers": layers, "d_ff": 4 * d_model, "vocab_size": 1000, "max_len": 128,
    }  # fmt: skip
    count = default_threads() if threads is None else threads
    before = load()
    results = measure(
        [question for question in QUESTIONS if not only or question.name in only],
        config,
        threads=count,
        rounds=rounds,
        seconds=seconds,
        patience=0 if quick else 3,
        progress=lambda what: click.echo(what, err=True),
    )
    where = surroundings(count, before)
    _show(results)
    here = where["environment"]
    click.echo(f"{count} threads each, {here['cpu']} ({' '.join(here['cpu_features'])}), load {where['load']}")
    write_json(json_file, {**where, "config": config, "rounds": rounds, "results": results})


if __name__ == "__main__":
    run(main)
