"""Reads what stands between the products of attention: ``softmax`` of scores, back to ``Q K^T``.

People scale before or after the mask, add one mask or three, fill with a value or keep where a condition holds,
and merge batch and heads into one axis on the way. All of it is one formula,

    scores = where(filled, value, factor * (Q K^T) + sum(factor_i * bias_i))

which is read here from the outside in, one operator at a time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import NEEDED_ELSEWHERE
from ..guards import Refuse, axis_of, constant, fixed, of_type, positive, rank, same_axis, scalar

__all__ = [
    "FILL_LIMIT", "Bias", "Fill", "Operand", "Scores", "operand", "own_sequence", "read_scores",
    "read_weights", "term_axes",
]  # fmt: skip

FILL_LIMIT = -1e6
"""A fill value above this could leave a masked key some weight, or be no lower than real scores.

The additive form assumes that every score is above the value in the graph (-1e9, the lowest float ...).
"""

_STEPS = 24


@dataclasses.dataclass(frozen=True)
class Bias:
    """``+ factor * value``.

    Attributes:
        value: What is added, broadcastable to the scores.
        factor: What it is multiplied with on the way out.
        rank: Rank of the scores where it is added.
    """

    value: ir.Value
    factor: float
    rank: int


@dataclasses.dataclass(frozen=True)
class Fill:
    """``where(condition, value, scores)``, or with ``masked`` false ``where(condition, scores, value)``.

    Attributes:
        condition: Bool, broadcastable to the scores.
        masked: Whether the condition marks what is filled, not what is kept.
        value: What is filled in, at most :data:`FILL_LIMIT`.
        rank: Rank of the scores where it is filled.
    """

    condition: ir.Value
    masked: bool
    value: float
    rank: int


@dataclasses.dataclass(frozen=True)
class Scores:
    """The formula.

    Attributes:
        q: Queries, (B, H, S, d) or (N, S, d).
        k_t: Keys, (B, H, d, T) or (N, d, T).
        factor: Of the product.
        terms: Biases and fills, the outermost first.
        apart: Values of rank 4 on the way that were or become rank 3: batch and heads stand there as somebody
            thinks they do.
    """

    q: ir.Value
    k_t: ir.Value
    factor: float
    terms: tuple[Bias | Fill, ...]
    apart: tuple[ir.Value, ...] = ()


@dataclasses.dataclass(frozen=True)
class Operand:
    """Q, K^T or V with batch and heads apart.

    Attributes:
        value: Rank 4, (B, H, ., .).
        swapped: Whether its last two axes stand the other way round.
        factor: A positive number that it is multiplied with.
    """

    value: ir.Value
    swapped: bool = False
    factor: float = 1.0

    def axis(self, axis: int) -> int | ir.SymbolicDim | None:
        """The size of an axis of the whole, swap included."""
        axis %= 4
        return axis_of(self.value, (0, 1, 3, 2)[axis] if self.swapped else axis)


def read_weights(value: ir.Value) -> tuple[ir.Value, frozenset[ir.Value], tuple[ir.Value, ...]]:
    """From the attention weights back to their softmax.

    Args:
        value: The weights as they meet V: behind a reshape, NaN guards, or zeros written over masked keys.

    Returns:
        The softmax's input, the conditions whose marked keys are zeroed afterwards, and the values of rank 4 that were
        reshaped (:attr:`Scores.apart`).

    Raises:
        Refuse: There is none (without a reason), or what stands between is none of these.
    """
    zeroed: set[ir.Value] = set()
    apart: list[ir.Value] = []
    inner: list[tuple[ir.Value, int]] = []
    users = 1
    for _ in range(_STEPS):
        node = value.producer()
        if node is None or node.domain:
            raise Refuse()
        inner.append((value, users))
        users = 1
        if node.op_type == "Softmax":
            last = (rank(value) or 0) - 1
            axis = node.attributes.get_int("axis", -1)
            if axis not in (-1, last):
                raise Refuse(f"softmax runs over axis {axis}, wanted the last", value)
            _used_by_nothing_else(inner)
            return _input(node, 0), frozenset(zeroed), tuple(apart)
        if node.op_type == "Reshape" and _heads_apart(_input(node, 0), value):
            apart.append(value if rank(value) == 4 else _input(node, 0))
            value = _input(node, 0)
        elif node.op_type == "Where" and _is_nan_guard(node):
            users = 2  # the guard tests it and passes it on
            value = _input(node, 2)
            if scalar(node.inputs[1], "replacement of NaN", value) != 0:
                found = scalar(node.inputs[1], "replacement of NaN")
                raise Refuse(f"NaN becomes {found:g}, wanted 0", value)
        elif node.op_type == "Where" and _zero(node.inputs[1], value):
            zeroed.add(_input(node, 0))
            value = _input(node, 2)
        else:
            raise Refuse()
        _rank_kept(node, value)
    raise Refuse()


def read_scores(
    value: ir.Value, zeroed: frozenset[ir.Value] = frozenset(), reshaped: tuple[ir.Value, ...] = ()
) -> Scores:
    """From a softmax's input back to the product.

    Args:
        value: The softmax's input.
        zeroed: Conditions whose marked keys are zeroed after the softmax.
        reshaped: Values of rank 4 that were reshaped after it.

    Raises:
        Refuse: It is no product with masks and biases, or an inner value is needed elsewhere.
    """
    factor, terms, apart = 1.0, [], [*reshaped]
    inner: list[tuple[ir.Value, int]] = []
    for _ in range(_STEPS):
        node = value.producer()
        inner.append((value, 1))
        if node is None or node.domain:
            raise Refuse(f"scores come from {_name(value)}, wanted a product of queries and keys", value)
        depth = rank(value)
        if node.op_type == "MatMul":
            q, k_t = _input(node, 0), _input(node, 1)
            if fixed(q) is not None or fixed(k_t) is not None:
                raise Refuse("scores are a product with a constant, wanted one of queries and keys", value)
            if any(
                fill not in {term.condition for term in terms if isinstance(term, Fill) and term.masked}
                for fill in zeroed
            ):
                raise Refuse("weights are zeroed by a condition that does not mask the scores", value)
            if zeroed and len(terms) > 1:
                raise Refuse("weights are zeroed by one of several masks, whose keys would still share the rest", value)
            _used_by_nothing_else(inner)
            return Scores(q, k_t, factor, tuple(terms), tuple(apart))
        if depth not in (3, 4):
            raise Refuse(f"scores have rank {depth}, wanted 3 or 4", value)
        if node.op_type in ("Mul", "Div"):
            number = 1 if node.op_type == "Div" or fixed(node.inputs[1]) is not None else 0
            found = positive(node.inputs[number], "scale", value)
            factor *= found if node.op_type == "Mul" else 1 / found
            value = _input(node, 1 - number)
        elif node.op_type in ("Add", "Sub"):
            index = _spine(node)
            terms.append(Bias(_input(node, 1 - index), factor if node.op_type == "Add" else -factor, depth))
            value = _input(node, index)
        elif node.op_type == "Where":
            fill = _fill(node, factor, depth, zeroed)
            terms.append(fill)
            value = _input(node, 2 if fill.masked else 1)
        elif node.op_type == "Reshape" and _heads_apart(_input(node, 0), value):
            apart.append(value if depth == 4 else _input(node, 0))
            value = _input(node, 0)
        else:
            raise Refuse(f"{node.op_type} stands between the softmax and the product of queries and keys", value)
        _rank_kept(node, value)
    raise Refuse(f"more than {_STEPS} operators stand between the softmax and the product", value)


def operand(value: ir.Value) -> Operand | None:
    """Q, K^T or V with batch and heads apart; ``None`` where they never were."""
    swapped, factor = False, 1.0
    for _ in range(_STEPS):
        if rank(value) == 4:
            return Operand(value, swapped, factor)
        node = value.producer()
        if node is None or node.domain or rank(value) != 3:
            return None
        if node.op_type == "Transpose" and node.attributes.get_ints("perm", ()) in ([0, 2, 1], (0, 2, 1)):
            swapped = not swapped
            value = _input(node, 0)
        elif node.op_type in ("Mul", "Div") and _positive(node.inputs[1]):
            found = positive(node.inputs[1], "scale", value)
            factor *= found if node.op_type == "Mul" else 1 / found
            value = _input(node, 0)
        elif node.op_type == "Reshape" and _heads_apart(value, _input(node, 0)):
            value = _input(node, 0)
        else:
            return None
    return None


def own_sequence(queries: Any, keys: Any, q: ir.Value) -> None:
    """Refuses keys of a sequence that has another name than the queries' own."""
    if not isinstance(queries, int) and not isinstance(keys, int) and not same_axis(queries, keys):
        raise Refuse(f"cross attention: queries of axis {queries} meet keys of axis {keys}, wanted their own", q)


def term_axes(term: Bias | Fill, scores: tuple[Any, ...]) -> None:
    """Refuses a mask that would broadcast the scores to more rows than they have.

    An axis of ``None`` is (B * H); its size is known from the graph's own shapes only.
    """
    mask = term.value if isinstance(term, Bias) else term.condition
    if mask.shape is None:
        raise Refuse("mask has unknown shape, wanted one that broadcasts to the scores", mask)
    if len(mask.shape) > len(scores):
        raise Refuse(f"mask has rank {len(mask.shape)}, the scores {len(scores)}", mask)
    offset = len(scores) - len(mask.shape)
    for axis, size in enumerate(mask.shape):
        wanted = scores[axis + offset]
        if size != 1 and wanted is not None and not same_axis(size, wanted):
            raise Refuse(f"mask axis {axis} is {size}, the scores have {wanted} there", mask)


def _fill(node: ir.Node, factor: float, depth: int, zeroed: frozenset[ir.Value]) -> Fill:
    masked = fixed(node.inputs[1]) is not None
    number = node.inputs[1 if masked else 2]
    if fixed(number) is None:
        raise Refuse("the value that masked scores are filled with is not a constant", *node.outputs)
    found = scalar(number, "mask value", node.outputs[0]) * factor
    condition = _input(node, 0)
    if condition in zeroed and masked and found <= FILL_LIMIT:
        found = -math.inf  # Zeros over what is masked: a row without a key is all zeros.
    if found > -math.inf:
        of_type(node.outputs[0], "scores", ir.DataType.FLOAT, ir.DataType.DOUBLE)
    if not found <= FILL_LIMIT:
        raise Refuse(f"mask value is {found:g}, wanted at most {FILL_LIMIT:g}", *([number] if number else []))
    return Fill(condition, masked, found, depth)


def _spine(node: ir.Node) -> int:
    """Which operand of a sum holds the product: the other one is a bias."""
    if node.op_type == "Sub":
        return 0
    found = [index for index in (0, 1) if _leads_to_product(node.inputs[index], _STEPS)]
    if not found:
        raise Refuse("neither side of a sum of scores is a product of queries and keys", *node.outputs)
    if len(found) == 2:
        # Both are products: the scores proper are the one that needs no broadcasting.
        whole = [i for i in found if _same_shape(node.inputs[i], node.outputs[0])]
        found = whole or found
    return found[0]


def _leads_to_product(value: ir.Value | None, steps: int, seen: set[ir.Value] | None = None) -> bool:
    seen = set() if seen is None else seen
    if value in seen:
        return False  # looked into already
    if value is not None:
        seen.add(value)
    node = value.producer() if value is not None else None
    if value is None or node is None or node.domain or steps == 0 or fixed(value) is not None:
        return False
    if node.op_type == "MatMul":
        return all(fixed(each) is None for each in node.inputs)
    if node.op_type in ("Mul", "Div", "Add", "Sub", "Where"):
        return any(_leads_to_product(each, steps - 1, seen) for each in node.inputs)
    if node.op_type == "Reshape":
        return _heads_apart(_input(node, 0), value) and _leads_to_product(node.inputs[0], steps - 1, seen)
    return False


def _heads_apart(one: ir.Value, other: ir.Value) -> bool:
    """Whether a reshape between the two only merges or splits the leading axes (B, H) and (B * H)."""
    if {rank(one), rank(other)} != {3, 4}:
        return False
    return all(same_axis(axis_of(one, axis), axis_of(other, axis)) for axis in (-2, -1))


def _rank_kept(node: ir.Node, x: ir.Value) -> None:
    """Refuses an operator on x, (batch * heads, ., .), that a mask of rank 4 stretches over a batch before those."""
    found = rank(node.outputs[0])
    if node.op_type != "Reshape" and found != rank(x):
        raise Refuse(f"{node.op_type} makes rank {found} of scores of rank {rank(x)}, wanted it kept", x)


def _same_shape(one: ir.Value | None, other: ir.Value) -> bool:
    if one is None or one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    return all(same_axis(a, b) for a, b in zip(one.shape, other.shape, strict=True))


def _used_by_nothing_else(inner: list[tuple[ir.Value, int]]) -> None:
    """Refuses unless each value feeds no more nodes than the formula has for it."""
    for value, users in inner:
        if value.is_graph_output() or len({user for user, _ in value.uses()}) > users:
            raise Refuse(NEEDED_ELSEWHERE, value)


def _is_nan_guard(node: ir.Node) -> bool:
    """``where(isnan(p), 0, p)``, which is what the canonical node does for a fully masked row."""
    test = node.inputs[0].producer() if node.inputs[0] is not None else None
    return test is not None and test.op_type == "IsNaN" and not test.domain and test.inputs[0] is node.inputs[2]


def _zero(value: ir.Value | None, beside: ir.Value) -> bool:
    """Whether a constant is one 0: zeros of a batch of their own would widen what they are written into."""
    return (
        fixed(value) is not None
        and not np.any(constant(value, "fill"))
        and scalar(value, "what masked keys get", beside) == 0
    )


def _positive(value: ir.Value | None) -> bool:
    tensor = fixed(value)
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(())) > 0


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise Refuse()
    return value


def _name(value: ir.Value) -> str:
    node = value.producer()
    return f"{node.domain}.{node.op_type}" if node is not None else f"{value.name}, an input or a weight"
