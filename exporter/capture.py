"""Source -> first graph: torch.onnx at opset 23, named dynamic axes, every weight stored once.

Example sizes are ours, never the user's: torch.export bakes an axis of size 0 or 1 into the graph. Axes are
traced as `Dim.AUTO`, so that an axis which the module pins to a number comes back as that number and is
refused here by name, instead of as an error in torch's words or as a graph that runs at one size only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from torch import Tensor, nn

from ..errors import SourceError
from ..models.pooling import Pooled
from ..runtime.tensors import TensorSpec, make_feeds
from .fusion import ORIGIN
from .metadata import keep_origins
from .probe import first_line, inference, located
from .quiet import quiet
from .sources import Source
from .tidy import tidy

__all__ = ["OPSET", "Positional", "bounded", "capture", "dynamic_axes"]

OPSET = 23
"""The first opset with Attention, RMSNormalization and RotaryEmbedding."""

_MAX_LENGTH = "tfx.max_length"
# Unlike each other and unlike usual widths, so that a baked size is recognised as such.
_BATCH, _SEQUENCE = 3, 7


def capture(source: Source) -> ir.Model:
    """Export a source.

    Returns:
        A model of standard operators at opset 23. Its inputs are those of the source, its outputs carry the names
        that the module returns them under; axes have the names of the source's inputs. Nodes keep the path
        of their torch module in the metadata. Weights are views of the live module's memory.

    Raises:
        SourceError: torch cannot export the module, or the graph would only run at some sizes.
    """
    shapes = {"batch": _BATCH, "sequence": min(_SEQUENCE, source.max_length or _SEQUENCE)}
    feeds = make_feeds(source.inputs, batch=_BATCH, sequence=shapes["sequence"], pattern="right")
    if shapes["sequence"] < 2:
        raise SourceError(f"{source.name}: takes sequences of {source.max_length}, wanted at least 2 to trace")
    tensors = tuple(torch.from_numpy(array) for array in feeds.values())
    bound = Positional(source)
    with inference(source.module), quiet():
        try:
            names = list(source.call(dict(zip(feeds, tensors, strict=True))))
        except (SourceError, MemoryError):
            raise
        except Exception as error:
            sizes = ", ".join(f"{axis} {size}" for axis, size in shapes.items())
            raise SourceError(
                f"{source.name}: does not run at {sizes}, so its graph would not either: {located(error)}"
            ) from error
        try:
            program = torch.export.export(bound, tensors, dynamic_shapes=(dynamic_axes(source.inputs),), strict=False)
        except MemoryError:
            raise
        except Exception as error:
            raise SourceError(f"{source.name}: torch.export failed: {_cause(error)}") from error
        symbols = _symbols(program, source)
        limit = _limit(program, symbols, source)
        try:
            # Not torch's own optimization: it takes an epsilon of 1e-12 for zero and drops the addition.
            exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, optimize=False, verbose=False)
        except MemoryError:
            raise
        except Exception as error:
            raise SourceError(f"{source.name}: torch.onnx failed: {_cause(error)}") from error
    assert exported is not None
    model = exported.model
    # Names of weights and nodes are those of the user's module, without our wrappers.
    prefix = "module.module" if isinstance(source.module, Pooled) else "module"
    _name(model, [spec.name for spec in source.inputs], names, source.name, prefix)
    _rename_axes(model, symbols)
    with quiet():
        # The values inside of torch.onnx's own functions come without a type.
        passes.ShapeInferencePass(strict_mode=False)(model)
    _check_outputs(model, source)
    keep_origins(model)
    for part in (model.graph, *model.graph.inputs, *model.graph.initializers.values()):
        part.metadata_props.clear()
    for node in model.graph.all_nodes():
        if path := node.metadata_props.pop(ORIGIN, "").removeprefix(prefix).strip("."):
            node.metadata_props[ORIGIN] = path
    tidy(model)
    _store_weights_once(model)
    _check_domains(model, source.name)
    if limit is not None:
        model.metadata_props[_MAX_LENGTH] = str(limit)
    return model


def bounded(source: Source, model: ir.Model) -> Source:
    """Return the source with the longest sequence that its captured graph holds for.

    torch.export notes a bound that no lookup shows, such as that of a table which is cut to the sequence.
    """
    limit = int(model.metadata_props.get(_MAX_LENGTH, 0)) or None
    lengths = [length for length in (source.max_length, limit) if length is not None]
    return replace(source, max_length=min(lengths, default=None))


class Positional(nn.Module):
    """Gives a module its inputs by keyword, and returns its tensors in the order of the wanted names."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.module = source.module
        self._source = source
        self._names = [spec.name for spec in source.inputs]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take the inputs in the source's order, return the outputs in theirs."""
        return tuple(self._source.call(dict(zip(self._names, tensors, strict=True))).values())


def dynamic_axes(inputs: Sequence[TensorSpec]) -> tuple[dict[int, Any], ...]:
    """Return torch.export's mark for every named axis, one mapping per input."""
    return tuple(
        {i: torch.export.Dim.AUTO for i, axis in enumerate(spec.shape) if isinstance(axis, str)} for spec in inputs
    )


def _cause(error: BaseException) -> str:
    """Return the innermost reason: torch wraps it in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def _symbols(program: torch.export.ExportedProgram, source: Source) -> dict[str, str]:
    """Return {torch's symbol: axis name}; an axis that became a number, or two names for one axis, are refused."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    traced = values[len(values) - len(source.inputs) :]  # parameters and buffers come first
    symbols: dict[str, str] = {}
    for spec, value in zip(source.inputs, traced, strict=True):
        for i, (axis, size) in enumerate(zip(spec.shape, value.shape, strict=True)):
            if isinstance(axis, int):
                continue
            # A pinned axis stays a SymInt, whose value has become a number.
            if str(size).isdigit():
                raise SourceError(
                    f'{source.name}: axis "{axis}" (axis {i} of input {spec.name}) is frozen at {size}: the module '
                    "turns its size into a Python number; keep it as x.shape[i], or declare a fixed size"
                )
            known = symbols.setdefault(str(size), axis)
            if known != axis:
                raise SourceError(
                    f'{source.name}: axes "{known}" and "{axis}" (axis {i} of input {spec.name}) always have the same '
                    "size; give them one name"
                )
    return symbols


def _limit(program: torch.export.ExportedProgram, symbols: Mapping[str, str], source: Source) -> int | None:
    """Return the largest sequence; a graph for longer than the shortest, or for some batches only, is refused."""
    longest = []
    for symbol, bounds in program.range_constraints.items():
        axis = symbols.get(str(symbol))
        if axis is None:
            continue
        lower = int(bounds.lower)
        if lower > 2:
            raise SourceError(f'{source.name}: the graph is only right for axis "{axis}" of at least {lower}')
        if bounds.upper.is_Integer:
            upper = int(bounds.upper)
            if axis == "batch":
                raise SourceError(f'{source.name}: the graph is only right for axis "batch" of at most {upper}')
            longest.append(upper)
    return min(longest, default=None)


def _name(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], name: str, prefix: str) -> None:
    """Give the graph's ends their names; whatever else is called so is renamed."""
    passes.OutputFixPass()(model)
    for name_, value in zip(inputs, model.graph.inputs, strict=True):
        value.name = name_
    for name_, value in zip(outputs, model.graph.outputs, strict=True):
        if name_ in inputs:
            raise SourceError(f'{name}: output "{name_}" has the name of an input')
        value.name = name_
    ends = {*inputs, *outputs}
    for value in list(model.graph.initializers.values()):
        short = (value.name or "").removeprefix(f"{prefix}.")
        if short not in ends and short not in model.graph.initializers:
            value.name = short
    passes.NameFixPass()(model)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    for node in model.graph.all_nodes():
        yield from node.outputs


def _rename_axes(model: ir.Model, symbols: Mapping[str, str]) -> None:
    """Write `batch * sequence` for `s43 * s50` everywhere."""
    if not symbols:
        return
    known = re.compile(r"\b(" + "|".join(map(re.escape, symbols)) + r")\b")
    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape(
                dim
                if isinstance(dim, int)
                else ir.SymbolicDim(None if dim.value is None else known.sub(lambda m: symbols[m[0]], str(dim.value)))
                for dim in value.shape
            )


def _check_outputs(model: ir.Model, source: Source) -> None:
    """Refuse an output whose first axis is the traced batch as a number."""
    if not any(spec.shape[:1] == ("batch",) for spec in source.inputs):
        return
    for value in model.graph.outputs:
        if value.shape is not None and len(value.shape) and value.shape[0] == _BATCH:
            raise SourceError(
                f'{source.name}: axis "batch" (axis 0 of output {value.name}) is frozen at {_BATCH}, '
                "wanted the batch size of the inputs"
            )


def _store_weights_once(model: ir.Model) -> None:
    """Merge equal weights. Transposed copies do not arise: see `tidy`, which keeps the transpose of a tied weight."""
    graph = model.graph
    kept: dict[Any, list[tuple[ir.Value, np.ndarray]]] = {}
    for name, value in list(graph.initializers.items()):
        if value.const_value is None:
            continue
        array = value.const_value.numpy()
        # A few elements tell almost all weights apart; only look-alikes are compared whole.
        step = max(1, array.size // 16)
        looks = (value.dtype, array.shape, array.flat[::step].tobytes() if array.size else b"")
        same = next((other for other, content in kept.get(looks, ()) if _equal(array, content)), None)
        if same is not None and not value.is_graph_output():
            value.replace_all_uses_with(same)
            del graph.initializers[name]
            continue
        kept.setdefault(looks, []).append((value, array))
    passes.RemoveUnusedNodesPass()(model)


def _equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Compare bit by bit: 0.0 and -0.0 differ, and a NaN equals itself."""
    if left.ctypes.data == right.ctypes.data and left.strides == right.strides:
        return True
    return np.array_equal(np.ascontiguousarray(left).view(np.uint8), np.ascontiguousarray(right).view(np.uint8))


def _check_domains(model: ir.Model, name: str) -> None:
    """Inline what functions are left, and refuse operators outside of ONNX."""
    if model.functions:
        passes.InlinePass()(model)
    foreign = sorted(
        {f"{node.domain}::{node.op_type}" for node in model.graph.all_nodes() if node.domain not in ("", "ai.onnx")}
    )
    if foreign:
        raise SourceError(f"{name}: torch.onnx left operators outside of standard ONNX: {', '.join(foreign)}")
    passes.RemoveUnusedOpsetsPass()(model)
    found = model.opset_imports.get("")
    if found != OPSET:
        raise SourceError(f"{name}: torch.onnx made opset {found}, wanted {OPSET}")
