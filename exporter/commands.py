"""The commands ``tfx export``, ``optimize`` and ``inspect``. What they do needs torch or onnx, their help does not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import InputError
from ..runtime import show
from ..runtime.bundle import DEFAULT_BUNDLE
from ..runtime.manifest import COUNTS
from .precision import PRECISIONS, table
from .targets import DATA_SUFFIX, LAYOUTS, TARGETS

__all__ = ["export", "inspect", "optimize"]

_STEPS = ("loading", "capturing", "recording", "raising", "lowering", "calibrating", "writing", "verifying")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
_target = click.option(
    "--target",
    type=click.Choice(list(TARGETS)),
    default="cpu",
    show_default=True,
    help="What the graph is lowered for.",
)
_layout = click.option(
    "--layout",
    type=click.Choice(list(LAYOUTS)),
    help="padded: (batch, sequence, d). ragged: attended tokens only, zeros elsewhere. "
    "[default: export for cpu and web: ragged where the graph allows it; else as it is]",
)
_opset = click.option("--opset", type=int, help="ai.onnx opset to write, 17 to 23. [default: the target's]")


def _counts(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, int] | None:
    """Read ``attention=12,gelu=12``."""
    del context, parameter
    if value is None:
        return None
    found: dict[str, int] = {}
    for part in value.split(","):
        name, _, number = part.partition("=")
        if name not in COUNTS or not number.isdigit():
            raise click.BadParameter(f'found "{part}", wanted NAME=COUNT with a NAME of {", ".join(COUNTS)}')
        found[name] = int(number)
    return found


_expect = click.option("--expect", callback=_counts, help="Fail unless these are found: attention=12,layer_norm=24.")


def _model_options(command: Callable[..., None]) -> Callable[..., None]:
    """The reference encoder's configuration."""
    whole = click.IntRange(max=2**31)
    options = [
        click.option("--d-model", type=whole, help="Width of the encoder. [default: 768]"),
        click.option("--heads", type=whole, help="Attention heads. [default: 12]"),
        click.option("--layers", type=whole, help="Encoder layers. [default: 12]"),
        click.option("--d-ff", type=whole, help="Width of the feed-forward part. [default: 3072]"),
        click.option("--vocab-size", type=whole, help="Tokens in the vocabulary. [default: 30522]"),
        click.option("--max-len", type=whole, help="Longest sequence. [default: 5000]"),
        click.option("--norm", type=click.Choice(["post", "pre"]), help="Where the norms stand. [default: post]"),
        click.option("--activation", type=click.Choice(["gelu", "gelu_tanh", "relu"]), help="[default: gelu]"),
        click.option("--positions", type=click.Choice(["sinusoidal", "learned"]), help="[default: sinusoidal]"),
        click.option("--combine", type=click.Choice(["add", "concat"]), help="Positions and tokens. [default: add]"),
        click.option("--layer-norm-eps", type=float, help="[default: 1e-5]"),
        click.option("--pad-id", type=whole, help="Token that pads a batch. [default: 0]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(epilog=f"\b\nPrecisions:\n{table()}")
@_model_options
@click.option("--seed", type=int, help="Seed of the reference encoder's weights. [default: 0]")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A Hugging Face or sentence-transformers folder.")
@click.option("--allow-pickle", is_flag=True, help="Read pickled weights too; only from people you trust.")
@click.option("--module", "factory", help="pkg.mod:factory, a function that returns a torch module.")
@click.option("--input", "inputs", multiple=True, help="name:dtype:axes of an input of --module.")
@click.option("--output", "outputs", multiple=True, help="An output of --module to export, in this order.")
@click.option("--pooling", type=click.Choice(["none", "cls", "mean"]), help="One vector per text, in the graph.")
@click.option("--normalize/--no-normalize", default=None, help="Unit length for that vector.")
@_target
@_layout
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="fp32",
    show_default=True,
    help="What weights and products are kept in; see the table below.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Samples that a precision is calibrated on: .txt, .jsonl (strings or objects with text) or .npz. "
    "[default: docstrings of Python's standard library]",
)
@_opset
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE, show_default=True)
@click.option("--force", is_flag=True, help="Replace the bundle that is there.")
@click.option("--no-verify", is_flag=True, help="Do not compare the bundle with the live module.")
@_expect
@_json
def export(
    seed: int | None,
    checkpoint: Path | None,
    allow_pickle: bool,
    factory: str | None,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    pooling: str | None,
    normalize: bool | None,
    target: str,
    layout: str | None,
    precision: str,
    calibration: Path | None,
    opset: int | None,
    out: Path,
    force: bool,
    no_verify: bool,
    expect: dict[str, int] | None,
    as_json: bool,
    **config: Any,
) -> None:
    """Export an encoder, a checkpoint or a module to a bundle.

    Without --checkpoint or --module the reference encoder of the given sizes is exported, with random
    weights.

    \b
    Example:
      tfx export --d-model 768
      tfx export --checkpoint ./all-MiniLM-L6-v2 --out minilm
      tfx export --module my_package.model:make --input input_ids:int64:batch,sequence
    """  # noqa: D301 - click's own mark for text that is not wrapped
    given = {name: value for name, value in config.items() if value is not None}
    origin = _Origin(checkpoint, factory, given, seed, inputs, outputs, pooling, normalize, allow_pickle)
    origin.check()
    from .export import export as export_bundle

    started = time.perf_counter()
    with _steps() as step:
        bundle = export_bundle(
            origin.maker(),
            out,
            target=target,
            layout=layout,
            precision=precision,
            calibration=calibration,
            opset=opset,
            force=force,
            check=not no_verify,
            expect=expect,
            step=step,
        )
    manifest = bundle.manifest.to_json()
    seconds = time.perf_counter() - started
    if as_json:
        keys = ("source", "target", "precision", "layout", "model", "counts", "refusals", "parity", "max_length")
        told = {**{key: manifest[key] for key in keys}, "quantization": manifest.get("quantization")}
        show.print_json({"bundle": str(out), **told, "seconds": round(seconds, 3)})
        return
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    model = manifest["model"]
    form = f"target {target}, {manifest['layout']}, opset {model['opset']}, IR {model['ir_version']}"
    click.echo(f"{out}: {_sized(size)}, {form}")
    click.echo(f"found {_listed(manifest['counts'])}")
    if data := manifest["files"].get(f"{model['file']}{DATA_SUFFIX}"):
        click.echo(
            f"weights   {_sized(data['bytes'])} in {model['file']}{DATA_SUFFIX}, which goes wherever the model goes"
        )
    _refusals(manifest["refusals"])
    if "quantization" in manifest:
        _quantized(manifest["precision"], manifest["quantization"])
    parity = manifest["parity"]
    if parity is None:
        click.echo("not verified")
    else:
        click.echo(
            f"verified on {parity['cases']} cases: max abs {parity['max_abs']:.3g}, "
            f"cosine {parity['min_cosine']:.8f}, on {parity['provider']}"
        )
    click.echo(f"{seconds:.1f} s")


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What the options say about the source; ``config``, and ``None`` elsewhere, hold only what was given."""

    checkpoint: Path | None
    factory: str | None
    config: Mapping[str, Any]
    seed: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    pooling: str | None
    normalize: bool | None
    allow_pickle: bool

    def check(self) -> None:
        """Refuse options that would be ignored."""
        if self.checkpoint is not None and self.factory is not None:
            raise InputError("--checkpoint and --module: found both, wanted one source")
        other = "--checkpoint" if self.checkpoint is not None else "--module" if self.factory is not None else None
        wrong = [f"--{name.replace('_', '-')}" for name in self.config] if other else []
        if other and self.seed is not None:
            wrong.append("--seed")
        if self.factory is None:
            wrong += [name for name, value in (("--input", self.inputs), ("--output", self.outputs)) if value]
        elif self.pooling is not None or self.normalize is not None:
            wrong.append("--pooling" if self.pooling is not None else "--normalize")
        if self.checkpoint is None and self.allow_pickle:
            wrong.append("--allow-pickle")
        if wrong:
            raise InputError(f"{', '.join(wrong)}: not an option of {other or 'the reference encoder'}")

    def maker(self) -> Callable[[], Any]:
        """Return a function that makes the source: whoever calls it is the only one to hold the weights."""
        from . import sources

        if self.checkpoint is not None:
            from .checkpoint import checkpoint

            return functools.partial(checkpoint, self.checkpoint, self.pooling, self.normalize, self.allow_pickle)
        if self.factory is not None:
            return functools.partial(sources.module, self.factory, self.inputs, list(self.outputs) or None)
        from ..models.config import EncoderConfig

        pooled = {"pooling": self.pooling or "none", "normalize": bool(self.normalize)}
        return functools.partial(sources.reference, EncoderConfig(**{**self.config, **pooled}), self.seed or 0)


@click.command()
@click.argument("source", metavar="IN.onnx", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file to write.")
@_target
@_layout
@_opset
@click.option("--input", "inputs", multiple=True, help="What an input is: NAME[:DTYPE:AXES][=ROLE[:LIMIT]].")
@click.option("--inputs", "feeds", type=click.Path(path_type=Path), help="An .npz of arrays by name to compare on.")
@click.option("--force", is_flag=True, help="Replace --out when it is there.")
@_expect
@_json
def optimize(source: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Optimize an .onnx file for a target.

    The result is compared with the input on generated inputs; where they differ nothing is written.

    What an input is, is told by its use in the graph and its name. Where that is wrong, say its role (token_ids,
    attention_mask, padding_mask, token_type_ids, position_ids, features) and the bound of its numbers, or the names
    and sizes of its axes; or give arrays.

    \b
    Example:
      tfx optimize encoder.onnx --out encoder-cpu.onnx --target cpu
      tfx optimize in.onnx --out out.onnx --input ids=token_ids:30522 --input keep=attention_mask
      tfx optimize in.onnx --out out.onnx --input pixels:float32:batch,3,224,224
      tfx optimize in.onnx --out out.onnx --inputs batch.npz
    """  # noqa: D301 - click's own mark for text that is not wrapped
    from .optimizing import optimize as optimize_file

    with _steps() as step:
        found = optimize_file(source, out, step=step, **options)
    if as_json:
        show.print_json(found)
        return
    show.print_table(
        ("", "nodes", *COUNTS, "on disk"),
        (
            (
                when,
                str(found[when]["nodes"]),
                *(str(found[when]["canonical"][name]) for name in COUNTS),
                _sized(found[when]["on_disk"]),
            )
            for when in ("before", "after")
        ),
        left=("",),
    )
    if found["after"]["layout"] != found["before"]["layout"]:
        click.echo("layout    ragged now, padded before: outputs at ignored positions are zeros")
    _refusals(found["refusals"])
    if found["after"]["canonical"] == found["before"]["canonical"] and not found["refusals"]:
        click.echo("nothing to raise: no attention, norm or GELU in pieces was found")
    parity = found["parity"]
    if parity["skipped"]:
        click.echo(f"{len(parity['skipped'])} cases left out, the input itself fails on them: {parity['skipped'][0]}")
    click.echo(f"{out}: equal to {source} on {parity['cases']} outputs, max abs {parity['max_abs']:.3g}")


@click.command()
@click.argument("path", metavar="[BUNDLE|FILE.onnx]", default=DEFAULT_BUNDLE, type=click.Path(path_type=Path))
@_expect
@_json
def inspect(path: Path, expect: dict[str, int] | None, as_json: bool) -> None:
    """Show what a bundle or an .onnx file holds.

    --expect judges the counts of the file as it is (canonical), not what could be raised.

    \b
    Example:
      tfx inspect
      tfx inspect encoder.onnx --json
      tfx inspect encoder-cpu.onnx --expect attention=12,layer_norm=25
    """  # noqa: D301 - click's own mark for text that is not wrapped
    from .inspection import check_expected
    from .inspection import inspect as describe

    found = describe(path)
    if as_json:
        show.print_json(found)
    else:
        _describe(path, found)
    check_expected(found, expect or {})


def _describe(path: Path, found: Mapping[str, Any]) -> None:
    click.echo(f"{path}: {found['nodes']} nodes, {_sized(found['bytes'])}, IR {found['ir_version']}")
    if "bundle" in found:
        made = found["bundle"]
        click.echo(f"bundle    for {made['target']}, {made['precision']}, {made['layout']}")
    click.echo("domains   " + ", ".join(f"{domain} {version}" for domain, version in found["domains"].items()))
    click.echo(f"canonical {_listed(found['canonical'])}")
    if "raisable" in found and found["raisable"] != found["canonical"]:
        click.echo(f"raisable  {_listed(found['raisable'])}")
    for side in ("inputs", "outputs"):
        for tensor in found[side]:
            axes = "unknown" if tensor["shape"] is None else ", ".join(str(axis) for axis in tensor["shape"])
            click.echo(f"{side[:-1]:<9} {tensor['name']}: {tensor['dtype']} ({axes})")
    click.echo("operators " + ", ".join(f"{name} {count}" for name, count in found["ops"].items()))
    _refusals(found["refusals"])


def _refusals(refusals: list[Mapping[str, str]]) -> None:
    for refusal in refusals:
        click.echo(f"refused   {refusal['rule']} at {refusal['where']}: {refusal['reason']}")


def _quantized(precision: str, found: Mapping[str, Any]) -> None:
    samples = found["calibration"].get("samples", 0)
    worst = "" if found["worst_cosine"] is None else f", worst cosine {found['worst_cosine']:.5f} on {samples} samples"
    click.echo(f"{precision}: {found['changed']} products and tables{worst}")
    for each in found["kept"]:
        click.echo(f"kept      {each['where']}: {each['reason']}")
    for name in ("batch", "padding"):
        if found.get(f"{name}_variance") is not None:
            click.echo(f"{name} variance {found[f'{name}_variance']:.3g}")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "no canonical node"


def _sized(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


@contextlib.contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """A progress bar over the steps, on a terminal."""
    with show.bar() as tell:
        yield lambda what: tell(what, _STEPS.index(what), len(_STEPS))
