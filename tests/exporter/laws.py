"""Builds the graph that a rule describes, runs graphs, and makes feeds: what the laws are proven with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxruntime
from onnx.reference import ReferenceEvaluator

from tfx.exporter.fusion import Arg, Derived, Fusion, GraphWriter

SHAPES = [(batch, sequence) for batch in (1, 3) for sequence in (1, 7, 33)]


def build(
    rule: Fusion,
    *,
    replace: Mapping[str, Any] | None = None,
    writer: Callable[..., Any] | None = None,
    swap: bool = False,
    without: Container[str] = (),
) -> ir.Model:
    """The unfused graph of a rule: its own ``unfused`` (mostly its ``pattern``) run with a graph builder.

    Open attributes named in ``without`` are left out, so that the operator's defaults hold.
    """
    own = type(rule).unfused is not Fusion.unfused
    names = list(inspect.signature(rule.unfused if own else rule.pattern).parameters)[1:]
    arguments = {**rule.example(), **(replace or {})}
    values: dict[str, ir.Value] = {}
    before = GraphWriter()
    # What is computed comes after what it is computed from.
    for name, given in sorted(arguments.items(), key=lambda item: isinstance(item[1], Derived)):
        if isinstance(given, Derived):
            values[name] = given.write(before, values)
        elif isinstance(given, Arg):
            kind = ir.DataType.from_numpy(np.dtype(given.dtype))
            values[name] = ir.val(name, kind, ir.Shape(given.shape))
            values[name].meta["scale"] = given.scale
        elif given is not None:
            values[name] = ir.val(name, const_value=ir.tensor(given, name=name))
    opened = {
        operator: {name: value for name, value in attributes.items() if name not in without}
        for operator, attributes in rule.open_attributes().items()
    }
    op = GraphWriter(opened, swap=swap)
    bound = {name: values.get(name) for name in names}
    outputs = writer(op, **bound) if writer else rule.unfused(op, *bound.values())
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    for index, node in enumerate(before.nodes):
        node.name = f"before_{index}"
    nodes = [*before.nodes, *op.nodes]
    used = {value for node in nodes for value in node.inputs}
    inputs = [v for n, v in values.items() if v and v in used and isinstance(arguments[n], Arg)]
    constants = [v for n, v in values.items() if v and v in used and isinstance(arguments[n], np.ndarray)]
    for index, value in enumerate(outputs):
        value.name = f"y{index}"
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, initializers=constants,
        opset_imports={"": rule.example_opset, "com.microsoft": 1}, name="unfused",
    )  # fmt: skip
    model = ir.Model(graph, ir_version=10)
    passes.NameFixPass()(model)
    passes.RemoveUnusedNodesPass()(model)  # what another variant derives
    passes.ShapeInferencePass()(model)
    if any(value.dtype is None for value in outputs):
        _infer_contrib(model)
    return model


def _infer_contrib(model: ir.Model) -> None:
    """Types and shapes of outputs of onnxruntime's own operators, which onnx does not know."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    for value, found in zip(model.graph.outputs, session.get_outputs(), strict=True):
        value.dtype = {"tensor(float)": ir.DataType.FLOAT}[found.type]
        value.shape = ir.Shape(found.shape)


Runner = Callable[[Mapping[str, np.ndarray]], list[Any]]


def runner(model: ir.Model) -> Runner:
    """A function from feeds to outputs: onnxruntime without graph optimisation.

    Graphs with ai.onnx's Attention or RotaryEmbedding go to the ONNX reference evaluator: onnxruntime's kernels do
    not take every mask and table.
    """
    proto = ir.to_proto(model)
    if any(n.op_type in ("Attention", "RotaryEmbedding") and not n.domain for n in model.graph):
        evaluator = ReferenceEvaluator(proto)
        return lambda feeds: list(evaluator.run(None, dict(feeds)))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda feeds: list(session.run(None, dict(feeds)))


def feeds(model: ir.Model, batch: int, sequence: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal floats; bool masks with full, left, right and holed rows, one of them without any key."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.shape is not None and value.dtype is not None and value.name is not None
        sizes = {"B": batch, "S": sequence}
        shape = [axis if isinstance(axis, int) else sizes[str(axis.value)] for axis in value.shape]
        if value.dtype == ir.DataType.BOOL:
            rows = rng.random(shape) < 0.6
            rows[0, ..., -1] = True
            if seed % 3 == 1:
                rows[-1] = False
            if seed % 3 == 2:
                rows[...] = True
            made[value.name] = rows
        else:
            made[value.name] = (value.meta["scale"] * rng.standard_normal(shape)).astype(value.dtype.numpy())
    return made


def check(model: ir.Model) -> None:
    """The ONNX checker, on what it knows (standard operators)."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)


def operators(model: ir.Model) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in model.graph]
