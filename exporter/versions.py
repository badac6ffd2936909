"""The lowest opset and IR version that a graph's content allows.

A runtime refuses a file whose opset or IR version is newer than it knows, so tfx writes the lowest that
is true. A node is valid in an opset when that opset's schema has its attributes, takes its number of
inputs and outputs, and admits its element types (ONNX operator schemas, ``onnx.defs``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import onnx
import onnx.helper
import onnx_ir as ir

from ..errors import InputError
from .guards import fixed
from .targets import Target

METADATA_IR = 10
"""IR version that introduced metadata on nodes (ONNX 1.16)."""

_FLOOR = 17
"""Below this, operators change meaning without changing their signature; nothing here is written for it."""

_AXES_INPUT = {"ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceProd", "ReduceSumSquare"}
"""Reductions whose axes became an input in opset 18."""


_VALUES = {
    ("Pad", "mode", "wrap"): 19,
    ("Resize", "coordinate_transformation_mode", "half_pixel_symmetric"): 19,
    ("GridSample", "mode", "linear"): 20,
    ("GridSample", "mode", "cubic"): 20,
    ("ScatterElements", "reduction", "max"): 18,
    ("ScatterElements", "reduction", "min"): 18,
    ("ScatterND", "reduction", "max"): 18,
    ("ScatterND", "reduction", "min"): 18,
}
"""Values of attributes that came after the attribute itself: (operator, attribute, value) -> opset."""


def _text(attribute: ir.Attr) -> str:
    return attribute.as_string() if attribute.type == ir.AttributeType.STRING else ""


def _default(schema: onnx.defs.OpSchema, name: str) -> bytes:
    return schema.attributes[name].default_value.SerializeToString()


@functools.cache
def _schema(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def _valid(node: ir.Node, version: int, written: int) -> bool:
    """Whether a node that was written for one opset means the same in an older one."""
    schema, own = _schema(node.op_type, version), _schema(node.op_type, written)
    if schema is None or schema.deprecated or own is None:
        return False
    if not set(node.attributes) <= set(schema.attributes):
        return False
    for name, attribute in schema.attributes.items():
        if name in node.attributes:
            since = _VALUES.get((node.op_type, name, _text(node.attributes[name])), 0)
            if since > version:
                return False
        elif attribute.required or (name in own.attributes and _default(own, name) != _default(schema, name)):
            return False
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        return False
    if not len(node.outputs) <= schema.max_output:
        return False
    return all(
        _typed(values, formal, schema)
        for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs))
    )


def _typed(
    values: Iterable[ir.Value | None],
    formals: Sequence[onnx.defs.OpSchema.FormalParameter],
    schema: onnx.defs.OpSchema,
) -> bool:
    allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
    for index, value in enumerate(values):
        if value is None or value.dtype is None or not formals:
            continue
        formal = formals[min(index, len(formals) - 1)]
        kind = f"tensor({value.dtype.name.lower()})"
        if isinstance(value.type, ir.SequenceType):
            kind = f"seq({kind})"
        if kind not in allowed.get(formal.type_str, {formal.type_str}):
            return False
    return True


def nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of the graph and its subgraphs."""
    yield from ir.traversal.RecursiveGraphIterator(model.graph)


def lowest_opset(model: ir.Model) -> tuple[int, str]:
    """The lowest ai.onnx opset (17 or above) in which every node is valid.

    Reductions and splits that have an older form count as valid in 17: see :func:`settle`.

    Returns:
        The opset and the operator that needs it.
    """
    lowest, because = _FLOOR, ""
    newest = model.opset_imports.get("", onnx.defs.onnx_opset_version())
    for node in nodes(model):
        if node.domain not in ("", "ai.onnx") or (lowest == _FLOOR and _has_older_form(node)):
            continue
        version = lowest
        while version < newest and not _valid(node, version, newest):
            version += 1
        if version > lowest:
            lowest, because = version, node.op_type
    return lowest, because


def _constant_axes(node: ir.Node) -> list[int] | None:
    """The axes of a Reduce*-18 that Reduce*-13 could have as an attribute."""
    if node.op_type not in _AXES_INPUT or len(node.inputs) < 2:
        return None
    axes, older = fixed(node.inputs[1]), _schema(node.op_type, _FLOOR)
    # Without any axis the two mean different things: all axes, or none where the attribute says so.
    if axes is None or axes.size == 0 or older is None or not _typed(node.inputs[:1], older.inputs, older):
        return None
    return axes.numpy().tolist()


def _is_even_split(node: ir.Node) -> bool:
    """Whether a Split-18 has parts of equal size, which Split-13 makes without being told their number."""
    x = node.inputs[0] if node.op_type == "Split" and "num_outputs" in node.attributes else None
    if x is None or x.shape is None or any(each is not None for each in node.inputs[1:]):
        return False
    size = x.shape[node.attributes.get_int("axis", 0)]
    return isinstance(size, int) and size % len(node.outputs) == 0


def _has_older_form(node: ir.Node) -> bool:
    if not (_constant_axes(node) is not None or _is_even_split(node)):
        return False
    schema = _schema(node.op_type, _FLOOR)
    return schema is not None and all(
        _typed(values, formals, schema)
        for values, formals in ((node.inputs[:1], schema.inputs), (node.outputs, schema.outputs))
    )


def _to_older_form(model: ir.Model) -> None:
    """Reduce*-18 -> Reduce*-13: constant axes become an attribute. Split-18 -> Split-13: no number of parts."""
    for node in nodes(model):
        if _is_even_split(node):
            node.attributes.pop("num_outputs")
            continue
        axes = _constant_axes(node)
        if axes is not None:
            node.attributes["axes"] = ir.AttrInt64s("axes", axes)
            node.attributes.pop("noop_with_empty_axes", None)
            node.resize_inputs(1)


def settle(model: ir.Model, target: Target, opset: int | None) -> None:
    """Sets the opset and IR version of a lowered model, in place.

    Args:
        model: A model lowered for ``target``.
        target: Gives the caps and the default.
        opset: The ai.onnx opset asked for, or ``None``.

    Raises:
        InputError: The graph needs a newer opset than was asked for or than the target loads, or holds a
            domain that the target does not know.
    """
    wanted = target.default_opset if opset is None else opset
    lowest, because = lowest_opset(model)
    if wanted is not None and lowest > wanted:
        raise InputError(f"opset {wanted}: operator {because} needs opset {lowest}; ask for --opset {lowest}")
    version = wanted or lowest
    if version == _FLOOR:
        _to_older_form(model)
    if version > target.max_opset:
        raise InputError(
            f"target {target.name}: operator {because} needs opset {version}, it loads {target.max_opset} at most"
        )
    used = {node.domain for node in nodes(model)} | {""}
    foreign = sorted(used - target.domains)
    if foreign:
        raise InputError(
            f"target {target.name}: found operators of {', '.join(foreign)}, wanted only "
            f"{', '.join(sorted(domain or 'ai.onnx' for domain in target.domains))}"
        )
    imports = {domain: model.opset_imports.get(domain, 1) for domain in sorted(used)}
    model.opset_imports.clear()
    model.opset_imports.update({**imports, "": version})
    model.ir_version = ir_version(version)
    if model.ir_version > target.max_ir:
        raise InputError(f"target {target.name}: IR version {model.ir_version} is above its {target.max_ir}")


def ir_version(opset: int) -> int:
    """The IR version that came with an ai.onnx opset, 8 at least."""
    return max(8, onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)]))
