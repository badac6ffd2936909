"""Captured models, and runs of their graphs that share no code with the pipeline."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from click.testing import Result
from onnx.reference import ReferenceEvaluator
from torch import nn

from tfx.exporter.capture import capture
from tfx.exporter.pipeline import Report, lower_model, optimize
from tfx.exporter.probe import inference
from tfx.exporter.sources import Source, parse_input, reference
from tfx.exporter.targets import get
from tfx.models.config import EncoderConfig

Arrays = dict[str, np.ndarray]
Call = Callable[..., Result]
Runner = Callable[[Mapping[str, np.ndarray]], Arrays]

MASK = "attention_mask:int64:batch,sequence"
LOWERINGS = [("cpu", None), ("cuda", None), ("web", None), *(("portable", opset) for opset in range(17, 24))]
SIZES = ["--d-model", "16", "--heads", "2", "--layers", "2", "--d-ff", "32", "--vocab-size", "50", "--max-len", "40"]
TINY: dict[str, Any] = {"d_model": 16, "heads": 2, "layers": 2, "d_ff": 32, "vocab_size": 50, "max_len": 40}


@functools.cache
def encoder(**options: Any) -> tuple[Source, ir.Model]:
    """A tiny reference encoder and its captured graph, which callers copy."""
    source = reference(EncoderConfig(**{**TINY, **options}))
    return source, capture(source)


def source_of(module: nn.Module, *inputs: str, **fields: Any) -> Source:
    """A module with the weights that it has."""
    return Source(module.eval(), tuple(map(parse_input, inputs)), "module", "mine", "0" * 64, **fields)


def torch_answers(source: Source, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """What the live module returns."""
    with inference(source.module):
        returned = source.call({name: torch.tensor(array) for name, array in feeds.items()})
    return {name: tensor.detach().numpy() for name, tensor in returned.items()}


def lowered(
    model: ir.Model, target: str, opset: int | None = None, raised: Report | None = None
) -> tuple[ir.Model, Report]:
    """A lowered copy, and what the pipeline says about it; ``raised`` comes with a model that has been raised."""
    copy = model.clone()
    if raised is None:
        report = optimize(copy, get(target), opset=opset)
    else:
        report = dataclasses.replace(raised, fired={**raised.fired}, refusals=[*raised.refusals])
        lower_model(copy, get(target), report, opset=opset)
    onnx.checker.check_model(ir.to_proto(copy))
    return copy, report


def run(model: ir.Model | onnx.ModelProto, *, optimized: bool = False) -> Runner:
    """onnxruntime on one thread, without its own optimizations unless they are asked for."""
    proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def answer(feeds: Mapping[str, np.ndarray]) -> Arrays:
        arrays: Any = session.run(names, dict(feeds))
        return dict(zip(names, arrays, strict=True))

    return answer


def evaluate(model: ir.Model | onnx.ModelProto) -> Runner:
    """The ONNX reference evaluator: the operators' own definition, in numpy."""
    evaluator = ReferenceEvaluator(model if isinstance(model, onnx.ModelProto) else ir.to_proto(model))
    names = [str(name) for name in evaluator.output_names]

    def answer(feeds: Mapping[str, np.ndarray]) -> Arrays:
        arrays: Any = evaluator.run(None, dict(feeds))
        return dict(zip(names, arrays, strict=True))

    return answer


def assert_close(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], atol: float) -> None:
    """Same names in the same order, same shapes and types, finite, and within an absolute tolerance."""
    assert list(found) == list(wanted)
    for name, expected in wanted.items():
        assert found[name].shape == expected.shape, name
        assert found[name].dtype == expected.dtype, name
        assert np.isfinite(found[name]).all(), name
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=atol, err_msg=name)


def masks(*rows: str) -> np.ndarray:
    """``masks("110", "011")`` -> int64 (2, 3)."""
    return np.array([[int(mark) for mark in row] for row in rows])


def weights(model: ir.Model) -> Arrays:
    """Copies of the initializers."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: tensor.numpy().copy() for name, tensor in tensors.items() if tensor is not None}


def nodes_of(model: ir.Model, op_type: str, domain: str = "") -> list[ir.Node]:
    """The nodes of one operator, in order."""
    return [node for node in model.graph if (node.domain, node.op_type) == (domain, op_type)]


def parse(text: str, constants: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()) -> ir.Model:
    """A model in ONNX's own text form, with initializers, its shapes inferred."""
    proto = onnx.parser.parse_model(text)
    for name, value in dict(constants).items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and folder below a folder, hidden ones too, without what Python caches."""
    found = (path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in found}


def said(result: Result, code: int = 2) -> str:
    """The one line of a command's error; nothing else may have been said."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")
