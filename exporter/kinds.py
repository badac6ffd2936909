"""What the inputs of somebody's graph mean, judged by how the graph uses them, then by name; or as a user says.

The proof of ``tfx optimize`` feeds a model it knows nothing about: ids must lie in their table, and a mask must be a
mask, with the polarity that the graph gives it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..runtime.tensors import MASK_ROLES, ROLES, TensorSpec
from .guards import fixed

__all__ = ["Use", "given", "role_of_use", "use_of"]

_MOVES = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Flatten", "Slice", "Transpose", "Tile", "Concat",
     "Dropout"}
)  # fmt: skip
_STEPS = 400
_FEW = 4
"""Ids of a table of this many rows are segments rather than words."""


@dataclasses.dataclass(frozen=True)
class Use:
    """What becomes of an input.

    Attributes:
        table: Rows that its numbers choose from, less what is added to them first; ``None`` when it chooses none.
        mask: ``attention_mask`` or ``padding_mask`` where it decides what is attended.
        angle: It becomes the argument of a sine or cosine: a position.
    """

    table: int | None = None
    mask: str | None = None
    angle: bool = False


@dataclasses.dataclass(frozen=True)
class _State:
    """A value on the way from the input: still its numbers, or a truth about them."""

    flipped: bool = False
    exact: bool = True
    offset: int = 0


def use_of(value: ir.Value) -> Use:
    """Follows an input forward."""
    table: int | None = None
    masks: list[str] = []
    angle = False
    seen: set[tuple[int, _State]] = set()
    waiting = [(value, _State())]
    while waiting and len(seen) < _STEPS:
        at, state = waiting.pop(0)
        if (id(at), state) in seen:
            continue
        seen.add((id(at), state))
        for node, index in at.uses():
            if node.domain not in ("", "ai.onnx"):
                if (node.op_type, index) in (("Attention", 3), ("MultiHeadAttention", 4)):
                    masks.append(_mask(state.flipped))
                continue
            if node.op_type == "Gather" and index == 1 and state.exact:
                rows = _rows(node)
                if rows is not None:
                    table = min(rows - state.offset, rows if table is None else table)
                continue
            if node.op_type in ("Cos", "Sin"):
                angle = True
                continue
            found = _polarity(node, index, state)
            if found is not None:
                masks.append(found)
                continue
            after = _after(node, index, state)
            if after is not None:
                waiting.extend((output, after) for output in node.outputs[:1])
    return Use(table, masks[0] if masks else None, angle)


def _mask(flipped: bool) -> str:
    return "padding_mask" if flipped else "attention_mask"


def _rows(gather: ir.Node) -> int | None:
    """Rows of the weight that a Gather looks up in."""
    table = gather.inputs[0]
    if table is None or table.shape is None or len(table.shape) != 2 or gather.attributes.get_int("axis", 0) != 0:
        return None
    rows = table.shape[0]
    return rows if isinstance(rows, int) and rows > 0 and fixed(table) is not None else None


def _polarity(node: ir.Node, index: int, state: _State) -> str | None:
    """What a node that masks says about the input: which of its values hides a key."""
    if node.op_type == "Where" and index == 0:
        if _low(node.inputs[1]):  # hidden where true
            return _mask(not state.flipped)
        return _mask(state.flipped) if _low(node.inputs[2]) else None
    if node.op_type == "Mul" and _low(node.inputs[1 - index]):
        return _mask(not state.flipped)  # what is 1 becomes the large negative number
    if node.op_type == "Attention" and index == 3:
        return _mask(state.flipped)
    return None


def _after(node: ir.Node, index: int, state: _State) -> _State | None:
    """What the node's output still says of the input, ``None`` when nothing that matters here."""
    kind = node.op_type
    if kind in _MOVES:
        return state if index == 0 or kind == "Concat" else None
    if kind == "Gather":  # of the input's own numbers
        return state if index == 0 else None
    other = _number(node.inputs[1 - index]) if len(node.inputs) == 2 else None
    if kind == "Not" or (kind == "Sub" and index == 1 and other == 1):
        return _State(not state.flipped, exact=False)
    if kind == "Equal" and other in (0, 1):
        return _State(state.flipped != (other == 0), exact=False)
    if kind in ("Greater", "GreaterOrEqual") and index == 0 and other is not None and 0 <= other <= 1:
        return dataclasses.replace(state, exact=False)
    if kind == "Add" and other is not None and state.exact and float(other).is_integer():
        return dataclasses.replace(state, offset=state.offset + int(other))
    if kind in ("And", "BitwiseAnd", "Mul", "MatMul", "Einsum", "Where"):
        return dataclasses.replace(state, exact=False)
    return None


def _number(value: ir.Value | None) -> float | None:
    tensor = fixed(value)
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def _low(value: ir.Value | None) -> bool:
    """Whether a constant holds one number that hides a key once it is added."""
    tensor = fixed(value)
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(()).astype(np.float64)) <= -100


def role_of_use(use: Use, named: str, dtype: str, axes: Sequence[str | int]) -> str:
    """An input's role.

    Args:
        use: What the graph does with it.
        named: The role that its name suggests.
        dtype: Numpy name of its type.
        axes: Sizes and names.
    """
    whole = "int" in dtype
    if use.table is not None and whole:
        if named in ("token_type_ids", "position_ids"):
            return named
        return "token_type_ids" if use.table <= _FEW else "token_ids"
    # A mask of floats on more than two axes is added to the scores as it is.
    if use.mask is not None and len(axes) >= 2 and (len(axes) == 2 or dtype == "bool" or whole):
        return use.mask
    if use.angle and whole:
        return "position_ids"
    return named


def given(specs: Sequence[TensorSpec], texts: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Corrects specs by what a user says: ``NAME[:DTYPE:AXES][=ROLE[:LIMIT]]`` each.

    Raises:
        InputError: It does not fit the model; says what was found and wanted.
    """
    found = {spec.name: spec for spec in specs}
    told: set[str] = set()
    for text in texts:
        where = f'--input "{text}"'
        left, equals, right = text.rpartition("=")
        if not equals or text in found:
            left, equals, right = text, "", ""
        name, axes = left, None
        if left not in found:  # names may hold colons: "input_1:0"
            name, *rest = left.rsplit(":", 2)
            if name not in found or len(rest) != 2:
                known = ", ".join(found) or "none"
                raise InputError(
                    f"{where}: found no input of that name, wanted NAME[:DTYPE:AXES][=ROLE[:LIMIT]] of {known}"
                )
            if rest[0] != found[name].dtype:
                raise InputError(f"{where}: found dtype {rest[0]}, wanted {found[name].dtype} as the file has it")
            axes = _axes(rest[1], found[name], where)
        elif not equals:
            raise InputError(f"{where}: says nothing of {name}, wanted :DTYPE:AXES or =ROLE[:LIMIT] behind it")
        if name in told:
            raise InputError(f"{where}: {name} is given twice")
        told.add(name)
        spec = found[name] if axes is None else dataclasses.replace(found[name], shape=axes)
        found[name] = _with_role(spec, right, where) if equals else spec
    return tuple(found.values())


def _axes(listing: str, spec: TensorSpec, where: str) -> tuple[str | int, ...]:
    entries = [entry.strip() for entry in listing.split(",")] if listing else []
    axes = [int(entry) if re.fullmatch("[0-9]{1,9}", entry) else entry for entry in entries]
    for axis in axes:
        if axis == 0 or (isinstance(axis, str) and not axis.isidentifier()):
            raise InputError(f'{where}: found axis "{axis}", wanted a name (batch, sequence) or a size of at least 1')
    fits = len(axes) == len(spec.shape) and all(
        not isinstance(own, int) or axis == own for axis, own in zip(axes, spec.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{where}: found axes {listing}, the file has {','.join(map(str, spec.shape)) or 'none'}")
    return tuple(axes)


def _with_role(spec: TensorSpec, text: str, where: str) -> TensorSpec:
    role, colon, limit = text.partition(":")
    if role not in ROLES[:-1]:
        raise InputError(f'{where}: found role "{role}", wanted one of {", ".join(ROLES[:-1])}')
    if role not in ("features", *MASK_ROLES) and "int" not in spec.dtype:
        raise InputError(f"{where}: found role {role} for {spec.dtype}, wanted integers")
    if role in MASK_ROLES and len(spec.shape) < 2:
        raise InputError(f"{where}: found role {role} for {len(spec.shape)} axes, wanted at least 2")
    if not colon:
        return dataclasses.replace(spec, role=role)
    if not re.fullmatch("[0-9]{1,9}", limit) or int(limit) < 1:
        raise InputError(f'{where}: found limit "{limit}", wanted a whole number of at least 1')
    return dataclasses.replace(spec, role=role, limit=int(limit))
