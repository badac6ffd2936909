"""How the encoders of the zoo become ONNX files: tfx's capture, torch's two exporters, and what users keep on disk."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor
from zoo import Row, make

from tfx.exporter.capture import Positional, capture, dynamic_axes
from tfx.exporter.probe import inference
from tfx.exporter.quiet import quiet
from tfx.exporter.sources import Source, parse_input
from tfx.runtime.tensors import make_feeds

__all__ = ["FOREIGN", "captured", "export", "feeds", "source"]

OUTPUT = "last_hidden_state"
DYNAMO = (18, 20, 23)
TORCHSCRIPT = (13, 17)
FOREIGN = (
    *(f"dynamo {opset}" for opset in DYNAMO),
    *(f"torchscript {opset}" for opset in TORCHSCRIPT),
    "dynamo 18, onnxruntime basic",
    "torchscript 17, onnxruntime basic",
)
"""What :func:`export` makes. torch.onnx with dynamo offers no opset below 18."""


def source(row: Row) -> Source:
    """The row as tfx takes it."""
    module = make(row)
    return Source(module, tuple(parse_input(text) for text in row.inputs), "module", row.name, "0" * 64)


def feeds(row: Row, batch: int, sequence: int, pattern: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Generated inputs; token ids stay inside of the zoo's vocabulary."""
    specs = [parse_input(text) for text in row.inputs]
    return make_feeds(specs, batch=batch, sequence=sequence, pattern=pattern, seed=seed)


def captured(of: Source) -> ir.Model:
    """Tfx's own way."""
    return capture(of)


def export(row: Row, route: str, path: Path, base: Path | None = None) -> None:
    """Writes a foreign file.

    Args:
        row: The encoder.
        route: One of :data:`FOREIGN`.
        path: The file to write.
        base: For a route through onnxruntime, the exporter's file where it is there already.

    Raises:
        Exception: The exporter cannot do it: whatever it raises.
    """
    first, _, then = route.partition(", ")
    exporter, _, opset = first.partition(" ")
    if base is None or not then:
        (_dynamo if exporter == "dynamo" else _torchscript)(row, int(opset), path)
        base = path
    if then:
        _basic(base, path)


def _tensors(row: Row) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in feeds(row, 3, 7, "right").values())


def _dynamo(row: Row, opset: int, path: Path) -> None:
    """torch.onnx as its users call it, with its own optimization."""
    of = source(row)
    with inference(of.module), quiet():
        program = torch.export.export(
            Positional(of), _tensors(row), dynamic_shapes=(dynamic_axes(of.inputs),), strict=False
        )
        made = torch.onnx.export(
            program, dynamo=True, opset_version=opset, verbose=False,
            input_names=[spec.name for spec in of.inputs], output_names=[OUTPUT],
        )  # fmt: skip
        assert made is not None
        made.save(path)


def _torchscript(row: Row, opset: int, path: Path) -> None:
    of = source(row)
    axes = {spec.name: {i: axis for i, axis in enumerate(spec.shape) if isinstance(axis, str)} for spec in of.inputs}
    with inference(of.module), quiet(), warnings.catch_warnings(), _without_stdout():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Positional(of), _tensors(row), str(path), dynamo=False, opset_version=opset,
            input_names=[spec.name for spec in of.inputs], output_names=[OUTPUT],
            dynamic_axes={**axes, OUTPUT: {0: "batch", 1: "sequence"}},
        )  # fmt: skip


@contextlib.contextmanager
def _without_stdout() -> Iterator[None]:
    """Torch prints the graph of what it cannot export, and from C++."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _basic(base: Path, path: Path) -> None:
    """A file as onnxruntime writes it after its own optimizations of level basic."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(  # noqa: TID251 - what users run, not what tfx ships
        base.read_bytes(), options, providers=["CPUExecutionProvider"]
    )
