"""What the values of a graph really hold: its smallest and largest elements over calibration feeds, in fp32."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ...runtime.providers import StrictSession, create_session
from ..quiet import quiet
from ..save import save

__all__ = ["Observed", "Range", "element_types", "observe", "session_of"]

_SAME = frozenset(
    {
        "Abs", "Add", "BiasGelu", "Clip", "Concat", "Cos", "Div", "Erf", "Exp", "Expand", "FastGelu", "Flatten",
        "Gather", "Gelu", "Gemm", "Identity", "LayerNormalization", "Log", "MatMul", "Max", "Min", "Mul",
        "MultiHeadAttention", "Neg", "Pad", "Pow", "QuickGelu", "RMSNormalization", "Reciprocal", "ReduceMax",
        "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Reshape", "RotaryEmbedding", "ScatterND", "Sigmoid", "Sin",
        "SkipLayerNormalization", "Slice", "Softmax", "Sqrt", "Squeeze", "Sub", "Tanh", "Tile", "Transpose",
        "Unsqueeze",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Range:
    """The smallest and the largest element that a value held."""

    low: float
    high: float

    @property
    def peak(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))

    def merged(self, other: Range | None) -> Range:
        """The range that holds both."""
        return self if other is None else Range(min(self.low, other.low), max(self.high, other.high))


@dataclasses.dataclass
class Observed:
    """What :func:`observe` saw.

    Attributes:
        ranges: By the name of a float32 value of the main graph; those that were empty throughout are missing.
        norms: Largest norm of a head's row, by the names of the values that were asked for.
        outputs: The graph's outputs, one mapping for each sample.
    """

    ranges: dict[str, Range] = dataclasses.field(default_factory=dict)
    norms: dict[str, float] = dataclasses.field(default_factory=dict)
    outputs: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)


@quiet()
def element_types(model: ir.Model) -> None:
    """Gives every value of the main graph its element type where it is missing, in place.

    Lowering leaves what its rules write untyped, and ONNX's own inference stops at operators it does not know.
    """
    if all(value.dtype is not None for node in model.graph for value in node.outputs):
        return
    passes.ShapeInferencePass(strict_mode=False)(model)
    for node in model.graph:
        value = node.outputs[0]
        source = node.inputs[1 if node.op_type == "Where" else 0] if node.inputs else None
        known = source.dtype if source is not None else None
        if value.dtype is None and known is not None and (node.op_type in _SAME or node.op_type == "Where"):
            value.dtype = known


def session_of(model: ir.Model, folder: Path) -> StrictSession:
    """A session on the CPU without onnxruntime's graph optimization; the file is written to ``folder``."""
    path = folder / "model.onnx"
    save(model, path)
    return create_session(path, optimize=False)


def observe(
    model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]], row_norms: Mapping[ir.Value, int] | None = None
) -> Observed:
    """Runs the graph on samples and looks at every float32 value of the main graph.

    Args:
        model: Element types known; not changed.
        samples: Feeds by input name.
        row_norms: Values (..., H * d) and their number of heads H, whose largest norm of a head's row is wanted.
    """
    copy = model.clone()
    outputs = [str(value.name) for value in copy.graph.outputs]
    values = {
        str(value.name): value for node in copy.graph for value in node.outputs
        if value.dtype == ir.DataType.FLOAT and not isinstance(value.type, ir.SequenceType)
    }  # fmt: skip
    for name, value in values.items():
        for end in ("Min", "Max"):
            _watch(copy.graph, f"Reduce{end}", value, f"{name}/{end}")
    norms = {}
    for value, heads in (row_norms or {}).items():
        width = value.shape[-1] if value.shape is not None else None
        if isinstance(width, int) and value.name in values:
            norms[value.name] = f"{value.name}/norm"
            _watch(copy.graph, "ReduceMax", _squares(copy.graph, values[value.name], width // heads), norms[value.name])
    seen = Observed()
    for sample in samples:
        for name, array in sample.items():
            if array.dtype == np.float32 and array.size:
                found = Range(float(array.min()), float(array.max()))
                seen.ranges[name] = found.merged(seen.ranges.get(name))
    with tempfile.TemporaryDirectory() as folder:
        session = session_of(copy, Path(folder))
        for sample in samples:
            answers = session.run(sample)
            seen.outputs.append({name: answers[name] for name in outputs})
            for name in values:
                low, high = float(answers[f"{name}/Min"]), float(answers[f"{name}/Max"])
                if low <= high:  # Not so for NaN and what is empty.
                    seen.ranges[name] = Range(low, high).merged(seen.ranges.get(name))
            for name, answer in norms.items():
                seen.norms[name] = max(seen.norms.get(name, 0.0), float(answers[answer]) ** 0.5)
    return seen


def _squares(graph: ir.Graph, value: ir.Value, width: int) -> ir.Value:
    """The squared norms of a value's rows of ``width`` elements."""
    operands = {"rows": [-1, width], "axis": [1]}
    held = {}
    for what, numbers in operands.items():
        name = f"{value.name}/{what}"
        held[what] = ir.val(name, const_value=ir.tensor(np.array(numbers, np.int64), name=name))
        graph.register_initializer(held[what])
    rows = ir.node("Reshape", [value, held["rows"]])
    squares = ir.node("Mul", [rows.outputs[0], rows.outputs[0]])
    total = ir.node("ReduceSum", [squares.outputs[0], held["axis"]], {"keepdims": 0})
    for node, what in ((rows, "split"), (squares, "squares"), (total, "total")):
        node.outputs[0].name = f"{value.name}/{what}"
        graph.append(node)
    return total.outputs[0]


def _watch(graph: ir.Graph, op_type: str, value: ir.Value, name: str) -> None:
    """Makes a reduction of a whole value an output."""
    node = ir.node(op_type, [value], {"keepdims": 0})
    node.outputs[0].name, node.outputs[0].shape = name, ir.Shape([])
    node.outputs[0].dtype = ir.DataType.FLOAT
    graph.append(node)
    graph.outputs.append(node.outputs[0])
