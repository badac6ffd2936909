"""An ``.onnx`` file of anybody's -> a model that the pipeline takes, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import version_converter

from ..errors import SourceError
from ..runtime.external import check_external_data
from ..runtime.tensors import DTYPES, MASK_ROLES, TensorSpec
from .capture import OPSET
from .kinds import role_of_use, use_of
from .metadata import keep_origins, restore_metadata
from .probe import first_line
from .quiet import quiet
from .shapes import infer_shapes
from .sources import role_of
from .tidy import tidy
from .versions import nodes

__all__ = ["input_specs", "load", "operators", "to_canonical_opset"]


def load(path: Path) -> ir.Model:
    """Loads an ``.onnx`` file; external weights stay on disk until they are used.

    Raises:
        SourceError: There is no such file, or it is not ONNX.
        BundleError: External data is missing, truncated or outside of the file's folder.
    """
    if not path.is_file():
        raise SourceError(f"{path}: found {'a folder' if path.is_dir() else 'nothing'}, wanted an .onnx file")
    check_external_data(path)
    try:
        with quiet():
            proto = onnx.load_model(path, load_external_data=False)
            _check_proto(proto, path)
            model = ir.from_proto(proto)
            ir.external_data.set_base_dir(model.graph, path.parent)
    except (MemoryError, OSError, SourceError):
        raise
    except Exception as error:  # a damaged file fails wherever its damage is met
        raise SourceError(f"{path}: not an ONNX file, or damaged") from error
    _check_sources(model, path)
    restore_metadata(model)
    return model


def _check_proto(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse what is newer than the onnx package, what is no tensor, and names that stand for two things."""
    if not proto.graph.output:
        raise SourceError(f"{path}: not an ONNX file, or damaged: it has no outputs")
    for domain, version in ((entry.domain, entry.version) for entry in proto.opset_import):
        newest = onnx.defs.onnx_opset_version()
        if domain in ("", "ai.onnx") and version > newest:
            raise SourceError(f"{path}: ai.onnx opset {version}, wanted at most {newest}; install a newer onnx")
    if proto.ir_version > onnx.IR_VERSION:
        raise SourceError(
            f"{path}: IR version {proto.ir_version}, wanted at most {onnx.IR_VERSION}; install a newer onnx"
        )
    for side, values in (("input", proto.graph.input), ("output", proto.graph.output)):
        for value in values:
            kind = value.type.WhichOneof("value") or "tensor_type"
            if kind != "tensor_type":
                name = kind.removesuffix("_type").replace("_", " ")
                raise SourceError(f"{path}: {side} {value.name} is a {name}, wanted a tensor".replace("a op", "an op"))
    _check_unique(proto.graph, path)


def _check_unique(graph: onnx.GraphProto, path: Path) -> None:
    """Refuse a name that two inputs, two initializers or two nodes of a graph give to a value."""
    made: dict[str, str] = {}
    nested: list[onnx.GraphProto] = []
    weights = [weight.name for weight in graph.initializer]
    named = [("input", value.name) for value in graph.input if value.name not in set(weights)]
    named += [("initializer", name) for name in weights]
    for node in graph.node:
        named += [(f"{node.op_type} {node.name}".rstrip(), name) for name in node.output if name]
        nested += [each for attribute in node.attribute for each in (attribute.g, *attribute.graphs) if each.node]
    for what, name in named:
        if name in made:
            raise SourceError(f"{path}: {name} is made twice, by {made[name]} and by {what}; wanted one name for each")
        made[name] = what
    for each in nested:
        _check_unique(each, path)


def _check_sources(model: ir.Model, path: Path) -> None:
    """Refuse what the pipeline would lose or rename: values from nowhere, and inputs that are outputs."""
    graph = model.graph
    _check_text(path, *model.opset_imports, *(value.name for value in (*graph.inputs, *graph.outputs)))
    for node in nodes(model):
        _check_text(path, node.domain, node.op_type, node.name, *(value.name for value in node.outputs))
        for value in node.inputs:
            if value is not None and value.graph is None and value.producer() is None:
                raise SourceError(
                    f"{path}: {value.name}, which {node.name or node.op_type} reads, is nowhere in the file "
                    "(sparse initializers are not supported)"
                )
    for value in graph.outputs:
        if value.is_graph_input():
            raise SourceError(f"{path}: output {value.name} is an input as it is; put an Identity between them")


def _check_text(path: Path, *names: str | None) -> None:
    """Refuse names that are not UTF-8, which protobuf gives as bytes."""
    for name in names:
        if not isinstance(name, str | None):
            raise SourceError(f"{path}: damaged: found {name!r} as a name, wanted text")


def to_canonical_opset(model: ir.Model, name: str) -> None:
    """Inlines functions, converts to the canonical opset and infers shapes, in place.

    Raises:
        SourceError: The model's opset cannot be converted.
    """
    if model.functions:
        for function in model.functions.values():
            for node in function:
                for value in node.outputs:
                    value.shape = None  # its axes are named alike at every call, whatever the call's sizes
        passes.InlinePass()(model)
    found = model.opset_imports.get("", OPSET)
    if found < OPSET:
        kept = {node.name: dict(node.metadata_props) for node in nodes(model) if node.name and node.metadata_props}
        wrong = f"{name}: opset {found} cannot be converted to {OPSET}"
        with quiet(), _failures() as failures:
            try:
                version_converter.convert_version(model, OPSET, fallback=True)
            except Exception as error:  # The converter raises what it likes.
                raise SourceError(f"{wrong}: {first_line(error)}") from error
        if failures:
            raise SourceError(f"{wrong}: {failures[0]}")
        for node in nodes(model):  # onnx's own converter drops it
            node.metadata_props.update(kept.get(node.name or "", {}))
    if model.opset_imports.get("", OPSET) != OPSET:
        raise SourceError(f"{name}: opset {found}, wanted one that converts to {OPSET}")
    keep_origins(model)
    tidy(model)  # Sizes that the graph computes are followed better once constants are folded.
    infer_shapes(model)


@contextmanager
def _failures() -> Iterator[list[str]]:
    """Hear what the converter only logs: the reason for leaving the model as it was."""
    reasons: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1]:
                reasons.append(first_line(record.exc_info[1]))

    logger, handler = logging.getLogger(version_converter.__name__), Hear()
    told, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield reasons
    finally:
        logger.removeHandler(handler)
        logger.propagate = told
        logger.setLevel(level)


def input_specs(model: ir.Model, name: str) -> tuple[TensorSpec, ...]:
    """The inputs of a model, their roles judged by use, name, type and axes.

    Integer inputs get a limit of the table they are looked up in, where that is a weight. An axis whose name
    comes first wherever it occurs is called ``batch``, whatever the file calls it. An initializer that is listed
    among the inputs is none: it has a value already.

    Raises:
        SourceError: An input is no tensor of known rank and type.
    """
    initializers = set(model.graph.initializers)
    specs: list[TensorSpec] = []
    values = [value for value in model.graph.inputs if value.name is not None and value.name not in initializers]
    for value in values:
        if value.dtype is None or value.shape is None:
            raise SourceError(f"{name}: input {value.name} has no known type and rank, wanted a tensor")
        if str(value.dtype.numpy()) not in DTYPES:
            raise SourceError(f"{name}: input {value.name} is {value.dtype}, wanted one of {', '.join(DTYPES)}")
        if 0 in value.shape:
            raise SourceError(f"{name}: input {value.name} has an axis of size 0, wanted at least 1")
    shapes = [
        [axis if isinstance(axis, int) else str(axis.value or f"axis_{i}") for i, axis in enumerate(value.shape or ())]
        for value in values
    ]
    later = {axis for axes in shapes for axis in axes[1:]}
    for value, axes in zip(values, shapes, strict=True):
        if axes and isinstance(axes[0], str) and axes[0] not in later:
            axes[0] = "batch"
        assert value.dtype is not None and value.name is not None
        kind, use = str(value.dtype.numpy()), use_of(value)
        role = role_of_use(use, role_of(value.name, kind, axes), kind, axes)
        specs.append(TensorSpec(value.name, kind, tuple(axes), role, use.table if role not in MASK_ROLES else None))
    return tuple(specs)


def operators(model: ir.Model) -> dict[str, int]:
    """How often each operator occurs, by ``domain::operator`` (bare for ai.onnx), most frequent first."""
    counts: dict[str, int] = {}
    for node in nodes(model):
        key = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
