"""``fp16``: weights and products in half precision, for runtimes with half kernels (CUDA, WebGPU).

The graph's inputs and outputs stay float32. :mod:`.half_plan` decides what else does; here it is written down: one
Cast for each value that crosses over, in either direction, and one stored copy of every large weight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ...runtime.parity import compare
from ..fusion import origin
from ..guards import absorbing, constant, fixed
from ..no_ops import drop_no_ops
from . import PrecisionReport
from .half_plan import DERIVED, FLOAT, HALF, LIMIT, Plan, attention_inputs, plan
from .ranges import Range, element_types, observe, session_of

if TYPE_CHECKING:
    from ..targets import Target

__all__ = ["apply"]

_LARGE = 1024
_WHOLE = {"LayerNormalization": 1, "RMSNormalization": 1, "SimplifiedLayerNormalization": 1}
"""Operators whose further outputs, their statistics, are float32 in any case."""


def apply(model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]], *, target: Target) -> PrecisionReport:
    """Rewrites a lowered graph to half precision, in place.

    Args:
        model: Lowered.
        samples: Feeds by input name, at least one; run in fp32 to see which values would overflow.
        target: What the graph is for.

    Returns:
        Which nodes stay in fp32 and why, and which constants of masks are clamped.
    """
    del target  # The same for all.
    element_types(model)
    attention = attention_inputs(model.graph)
    seen = observe(model, samples, {value: heads for q, k, heads, _ in attention.values() for value in (q, k)})
    made = plan(model, seen.ranges, seen.norms)
    writer = _Writer(model.graph, made, seen.ranges)
    writer.write()
    drop_no_ops(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    passes.NameFixPass()(model)
    kept = [each for each in made.kept.items() if each[0].graph is not None and each[1] not in DERIVED]
    return PrecisionReport(
        scheme="weights and products in float16, sums in float32",
        changed=sum(made.is_half(node) and writer.is_product(node) for node in model.graph),
        kept=[{"where": origin(n) or str(n.name), "reason": why} for n, why in kept if n not in made.plain],
        calibration={"samples": len(samples)},
        worst_cosine=_worst_cosine(model, samples, seen.outputs),
        notes={"clamped": writer.clamped} if writer.clamped else {},
    )


def _worst_cosine(
    model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]], wanted: Sequence[Mapping[str, np.ndarray]]
) -> float:
    """The smallest cosine of any output vector with the same in fp32."""
    cosines = []
    with tempfile.TemporaryDirectory() as folder:
        session = session_of(model, Path(folder))
        for sample, outputs in zip(samples, wanted, strict=True):
            found = session.run(sample)
            cosines += [compare(found[name], values).min_cosine for name, values in outputs.items()]
    return float(np.min(cosines))


class _Writer:
    """Types values and puts Casts between halves and floats."""

    def __init__(self, graph: ir.Graph, made: Plan, ranges: Mapping[str, Range]) -> None:
        self._graph, self._plan, self._ranges = graph, made, ranges
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._halves: dict[ir.Value, ir.Value] = {}
        self.clamped: list[dict[str, Any]] = []

    def write(self) -> None:
        nodes = list(self._graph)
        floats = [v for v in self._graph.inputs if v.dtype == FLOAT]
        floats += [v for node in nodes for v in node.outputs if v.dtype == FLOAT]
        floats += [v for v in self._graph.initializers.values() if v.dtype == FLOAT and not v.is_graph_input()]
        outputs = [v for node in nodes if self._plan.is_half(node) for v in self._half_outputs(node)]
        for node in nodes:
            if self._plan.is_half(node):
                self._retype(node)
        for value in outputs:
            value.type = ir.TensorType(HALF)  # Not value.dtype: clones share types.
        for value in floats:
            self._cross(value)
        for position, value in enumerate(self._graph.outputs):
            if value in outputs:
                self._output(position, value)

    def is_product(self, node: ir.Node) -> bool:
        """Whether a node multiplies by a weight."""
        return node.op_type in ("MatMul", "Gemm") and any(fixed(value) is not None for value in node.inputs)

    def _half_outputs(self, node: ir.Node) -> list[ir.Value]:
        count = _WHOLE.get(node.op_type, len(node.outputs))
        values = list(node.outputs[:count])
        if node.op_type.startswith("Skip"):
            values = [*node.outputs[:1], *node.outputs[3:]]  # 1 and 2 are statistics.
        return [value for value in values if value.dtype == FLOAT]

    def _retype(self, node: ir.Node) -> None:
        """Rewrites attributes that say float32."""
        if node.op_type == "Cast" and node.outputs[0].dtype == FLOAT:
            node.attributes.add(ir.AttrInt64("to", HALF))
        value = node.attributes.get("value")
        if node.op_type == "ConstantOfShape":
            filled = np.float16(value.as_tensor().numpy() if value is not None else np.zeros(1))
            node.attributes.add(ir.AttrTensor("value", ir.tensor(filled)))

    def _cross(self, value: ir.Value) -> None:
        """Gives every reader of a value the element type that it wants."""
        tensor = fixed(value)
        uses = list(value.uses())
        halves = [use for use in uses if self._wants_half(use.node, value)]
        others = [use for use in uses if use not in halves and use.node.op_type not in ("Shape", "Size", "Cast")]
        # A Cast down or to a whole number takes either.
        if tensor is not None:
            if not halves:
                return
            half = self._half_constant(value, tensor)
            for use in halves:
                use.node.replace_input_with(use.idx, half)
            if others and tensor.size >= _LARGE:
                for use in others:
                    use.node.replace_input_with(use.idx, self._cast(half, FLOAT))
            return
        readers, to = (others, FLOAT) if value.dtype == HALF else (halves, HALF)
        for use in readers:
            use.node.replace_input_with(use.idx, self._cast(value, to))

    def _wants_half(self, node: ir.Node, value: ir.Value) -> bool:
        if node.op_type == "Cast" and node.outputs[0].dtype != HALF:
            return False
        return node.graph is self._graph and self._plan.is_half(node) and (value.dtype in (FLOAT, HALF))

    def _half_constant(self, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        if value not in self._halves:
            name = f"{value.name}_half"
            lazy = ir.LazyTensor(
                lambda: ir.tensor(self._clamp(tensor.numpy()).astype(np.float16)),
                dtype=HALF,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
            )
            made = ir.val(name, HALF, ir.Shape(tensor.shape.numpy()), const_value=lazy)
            self._graph.register_initializer(made)
            self._halves[value] = made
            if tensor.size < _LARGE:
                self._note(
                    str(value.name), float(np.min(tensor.numpy(), initial=0)), float(np.max(tensor.numpy(), initial=0))
                )
        return self._halves[value]

    @staticmethod
    def _clamp(array: np.ndarray) -> np.ndarray:
        edge = -float(absorbing(np.dtype(np.float16)))
        return np.where(np.abs(array) > LIMIT, np.clip(array, -edge, edge), array)

    def _note(self, where: str, low: float, high: float) -> None:
        edge = float(absorbing(np.dtype(np.float16)))
        for found, now in ((min(low, 0.0), edge), (max(high, 0.0), -edge)):
            note = {"where": where, "found": _json(found), "now": now}
            if abs(found) > abs(edge) and note not in self.clamped:
                self.clamped.append(note)

    def _cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """The value in another element type, by one Cast; clamped where it holds more than halves do."""
        if (value, to) not in self._casts:
            source = value
            if to == HALF and self._overflows(value):
                source = self._clamped(value)
            self._casts[value, to] = self._insert("Cast", [source], f"{value.name}_{to.name.lower()}", to, to=to)
        return self._casts[value, to]

    def _overflows(self, value: ir.Value) -> bool:
        """Whether a float may be no half: on the samples, by a constant of a mask, or as the caller likes."""
        found = self._ranges.get(str(value.name))
        seen = found is not None and found.peak > LIMIT
        return seen or value.is_graph_input() or bool(self._fills(value.producer(), 32))

    def _fills(self, node: ir.Node | None, depth: int) -> list[ir.Value]:
        """The constants that are no halves among the sources of a value that is made without weights and tokens."""
        if node is None or node not in self._plan.plain or depth == 0:
            return []
        fills: list[ir.Value] = []
        for value in node.inputs:
            tensor = fixed(value)
            if value is None or value.dtype != FLOAT:
                continue
            if tensor is None:
                fills += self._fills(value.producer(), depth - 1)
            elif float(np.abs(tensor.numpy()).max(initial=0)) > LIMIT:
                fills.append(value)
        return list(dict.fromkeys(fills))

    def _clamped(self, value: ir.Value) -> ir.Value:
        edge = float(absorbing(np.dtype(np.float16)))
        limits = []
        for bound, name in ((edge, "half_low"), (-edge, "half_high")):
            if name not in self._graph.initializers:
                tensor = ir.tensor(np.array(bound, np.float32), name=name)
                self._graph.register_initializer(ir.val(name, FLOAT, ir.Shape([]), const_value=tensor))
            limits.append(self._graph.initializers[name])
        for fill in self._fills(value.producer(), 32):
            array = constant(fill, "fill")
            self._note(str(fill.name), float(array.min()), float(array.max()))
        found = self._ranges.get(str(value.name))
        if found is not None and not self._fills(value.producer(), 32):
            self._note(str(value.name), found.low, found.high)
        return self._insert("Clip", [value, *limits], f"{value.name}_clamped", FLOAT)

    def _insert(
        self, op_type: str, inputs: list[ir.Value], name: str, kind: ir.DataType, **attributes: Any
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, name=name)
        made = node.outputs[0]
        made.name, made.dtype, made.shape = name, kind, inputs[0].shape
        after = inputs[0].producer()
        if after is not None:
            self._graph.insert_after(after, node)
        else:
            self._graph.insert_before(self._graph[0], node)
        return made

    def _output(self, position: int, value: ir.Value) -> None:
        """Keeps a graph output's name and float32."""
        name = value.name
        value.name = f"{name}_half"
        wide = self._cast(value, FLOAT)
        wide.name = name
        self._graph.outputs[position] = wide


def _json(number: float) -> float | str:
    return number if np.isfinite(number) else str(number)
