"""The whole road: source -> capture -> raise -> lower -> verified bundle."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from torch import nn

from ..errors import InputError, ParityError, TfxError
from ..runtime.bundle import DEFAULT_BUNDLE, Bundle, ensure_free, write_bundle
from ..runtime.doctor import cpu_features
from ..runtime.golden import GOLDEN_NAME, GoldenCase, save_golden
from ..runtime.manifest import Manifest
from ..runtime.parity import TOLERANCES, verify
from ..runtime.providers import StrictSession, create_session
from ..runtime.tensors import TensorSpec
from ..runtime.text import TextEncoder
from . import targets
from .calibration import Calibration, calibrate, spread
from .capture import bounded, capture
from .golden import record
from .layout import apply_layout
from .pipeline import Report, check_counts, lower_model, raise_model
from .precision import PrecisionReport, apply_precision
from .precision import check as check_precision
from .precision.variance import gate, measure
from .save import save
from .sources import Source

__all__ = ["MODEL_NAME", "export"]

MODEL_NAME = "model.onnx"

_PACKAGES = ("tfx-onnx", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime-gpu", "onnxruntime", "transformers")

Step = Callable[[str], None]


def export(
    source: Source | Callable[[], Source],
    out: str | Path = DEFAULT_BUNDLE,
    *,
    target: str = "cpu",
    layout: str | None = None,
    precision: str = "fp32",
    calibration: str | Path | None = None,
    opset: int | None = None,
    force: bool = False,
    check: bool = True,
    expect: Mapping[str, int] | None = None,
    max_inline_bytes: int | None = None,
    step: Step = lambda _: None,
) -> Bundle:
    """Exports a source to a bundle that has been raised, lowered and verified.

    Args:
        source: What to export, or a function that makes it (then its memory is released before verifying).
        out: The folder to make.
        target: ``cpu``, ``cuda``, ``web`` or ``portable``.
        layout: ``padded`` or ``ragged``; ``None`` takes the target's own, ragged on a CPU and the
            web where the graph allows it.
        precision: A name in :data:`.precision.PRECISIONS`.
        calibration: A ``.txt``, ``.jsonl`` or ``.npz`` of samples that a precision is calibrated and judged on; when
            ``None`` docstrings of the standard library, or random inputs for a source without a tokenizer.
        opset: ai.onnx opset to write; the target's default when ``None``.
        force: Replace a bundle that is there.
        check: Compare the written model with the live module on the golden before the bundle appears.
        expect: Canonical counts that must be found; the source's own when ``None``.
        max_inline_bytes: Weights larger than this go to an external data file; the target's own limit when ``None``.
        step: Told what is being done.

    Returns:
        The bundle.

    Raises:
        InputError: The destination, the source or an option is wrong; nothing has been written.
        CountError: The canonical counts are not the expected ones.
        ParityError: The written model does not give the module's numbers.
    """
    if isinstance(source, nn.Module):
        raise InputError("source: found a torch module; give tfx.module(module, inputs), which knows its inputs")
    profile = targets.get(target)
    profile.check_opset(opset)
    kind = check_precision(precision, target)
    if calibration is not None and not kind.module:
        raise InputError(f"calibration: precision {precision} takes none")
    ensure_free(out, force)
    step("loading")
    live = source if isinstance(source, Source) else source()
    del source
    step("capturing")
    model = capture(live)
    live = bounded(live, model)
    model.metadata_props.clear()
    step("recording")
    encoder = _encoder(live)
    golden = record(live, encoder=encoder)
    step("raising")
    report = raise_model(model)
    check_counts(report.counts, live.expected or {} if expect is None else expect)
    step("lowering")
    arranged = apply_layout(model, layout, profile, live.inputs, report.refusals)
    lower_model(model, profile, report, opset=opset, packed=kind.attention)
    samples, quantized = Calibration([], ""), None
    if kind.module:
        step("calibrating")
        samples = calibrate(live.inputs, calibration, encoder=encoder, max_length=live.max_length)
        quantized = apply_precision(model, precision, samples.feeds, target=profile)
        quantized.calibration["source"] = samples.source
    passes.CheckerPass()(model)
    outputs = tuple(_output(value) for value in model.graph.outputs)
    parts: list[Any] = [live, model]
    del live, model

    def fill(folder: Path) -> Manifest:
        step("writing")
        written, graph = parts
        parts.clear()
        inline = profile.inline_bytes if max_inline_bytes is None else max_inline_bytes
        save(graph, folder / MODEL_NAME, max_inline_bytes=inline)
        save_golden(folder / GOLDEN_NAME, golden)
        for file in written.files:
            shutil.copyfile(file, folder / file.name)
        manifest = _manifest(written, graph, report, outputs, target, arranged, precision)
        if quantized is not None:
            manifest = dataclasses.replace(manifest, quantization=quantized.to_json())
        del written, graph
        gc.collect()  # The module's weights make room for the session's.
        if not check:
            return manifest
        step("verifying")
        with shown_as(folder, out):
            session = create_session(folder / MODEL_NAME)
            try:
                manifest = dataclasses.replace(manifest, parity=_verify(session, golden, manifest))
            except ParityError as error:
                if arranged == "ragged" and layout is None:
                    raise ParityError(f"{error}; padding was left out: layout padded computes it") from error
                raise
            if quantized is None:
                return manifest
            return dataclasses.replace(manifest, quantization=_measured(session, quantized, samples.feeds, manifest))

    return write_bundle(out, fill, force=force)


@contextlib.contextmanager
def shown_as(path: Path, name: str | Path) -> Iterator[None]:
    """Lets errors speak of the file that was asked for, not of the temporary one that becomes it."""
    try:
        yield
    except TfxError as error:
        raise type(error)(str(error).replace(str(path), str(name))) from error


def _output(value: ir.Value) -> TensorSpec:
    if value.dtype is None or value.shape is None or value.name is None:
        raise InputError(f"output {value.name}: its type or shape is unknown")
    axes = tuple(axis if isinstance(axis, int) else str(axis.value or "unknown") for axis in value.shape)
    return TensorSpec(value.name, str(value.dtype.numpy()), axes, "output")


def _manifest(
    source: Source,
    model: ir.Model,
    report: Report,
    outputs: tuple[TensorSpec, ...],
    target: str,
    layout: str,
    precision: str,
) -> Manifest:
    return Manifest(
        source={"kind": source.kind, "name": source.name, "sha256": source.sha256, **_notes(source)},
        inputs=source.inputs,
        outputs=outputs,
        max_length=source.max_length,
        pad_id=source.pad_id,
        target=target,
        precision=precision,
        layout=layout,
        model={
            "file": MODEL_NAME,
            "opset": model.opset_imports[""],
            "ir_version": model.ir_version,
            "domains": sorted(model.opset_imports),
        },
        counts=report.counts,
        tolerance=TOLERANCES[precision].to_json(),
        pooling=source.pooling,
        tokenizer=source.tokenizer,
        refusals=tuple(r.to_json() for r in report.refusals),
        versions=_versions(),
    )


def _notes(source: Source) -> dict[str, Any]:
    return {"notes": dict(source.notes)} if source.notes else {}


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _encoder(source: Source) -> TextEncoder | None:
    """The tokenizer among the files that a source brings along."""
    if source.tokenizer is None:
        return None
    path = next(file for file in source.files if file.name == source.tokenizer["file"])
    limits = [limit for limit in (source.tokenizer["max_length"], source.max_length) if limit is not None]
    return TextEncoder(path, source.inputs, source.pad_id, min(limits, default=None))


def _verify(session: StrictSession, golden: list[GoldenCase], manifest: Manifest) -> dict[str, Any]:
    """Compares the file that was written with what was recorded."""
    report = verify(
        session.run, golden, TOLERANCES[manifest.precision], inputs=manifest.inputs, outputs=manifest.outputs
    )
    report.check()
    return {
        "passed": report.passed,
        "max_abs": report.max_abs,
        "min_cosine": report.min_cosine,
        "provider": session.provider,
        "cases": len(golden),
    }


def _measured(
    session: StrictSession, report: PrecisionReport, samples: list[dict[str, np.ndarray]], manifest: Manifest
) -> dict[str, Any]:
    """The manifest's ``quantization``, with what only the written file can say."""
    found = measure(
        session.run,
        spread(samples, _COMPANY),
        manifest.inputs,
        manifest.outputs,
        pad_id=manifest.pad_id,
        max_length=manifest.max_length,
    )
    gate(found, manifest.precision)
    return {
        **report.to_json(),
        "batch_variance": found.batch,
        "padding_variance": found.padding,
        "cpu": {"features": cpu_features()},
    }


_COMPANY = 12
"""Samples that are run beside others and padded."""
