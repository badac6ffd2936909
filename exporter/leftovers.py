"""Attention, norms and GELU that are still in pieces after raising, each with what is different about it.

A rule that matched and refused has said why itself. Here is what matched no rule: a Softmax between two products, a
mean of squares under a root, an Erf, the Tanh and the sigmoid of a GELU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from . import raising
from .fusion import MEANING, Refusal, origin
from .guards import fixed
from .versions import nodes

__all__ = ["leftovers"]

_PRODUCTS = frozenset({"MatMul", "Einsum", "Gemm"})
_BETWEEN = frozenset(
    {"Mul", "Div", "Add", "Sub", "Where", "Cast", "Reshape", "Transpose", "Identity", "Dropout", "Expand", "Squeeze",
     "Unsqueeze", "Flatten"}
)  # fmt: skip
"""What attention rules can read between the first product and the softmax, somewhere."""

_AFTER = frozenset({"Where", "Mul", "Cast", "Dropout", "Identity", "Reshape", "Transpose"})
_LONG = 12
_LAST = (-1,)


def leftovers(model: ir.Model, known: Sequence[Refusal]) -> list[Refusal]:
    """What no rule took and no rule has spoken of.

    Args:
        model: A raised graph.
        known: What rules said themselves.
    """
    told = {refusal.where for refusal in known}
    found: list[Refusal] = []
    for node in nodes(model):
        look = _LOOKS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if look is None or any(each.name in told for each in _ahead(node)):
            continue
        for rule, where, reason in look(node):
            if where.name not in told:
                told.add(where.name or "")
                found.append(Refusal(rule, where.name or "", reason, origin(where) or origin(node)))
    return found


_Told = Iterator[tuple[str, ir.Node, str]]


# --- attention


def _softmax(node: ir.Node) -> _Told:
    after = _products(node.outputs[0])
    before = _back(node.inputs[0])
    if not after or before is None:
        return
    product, steps = before
    last, passed = after[0]
    chain = [product.op_type, *(step.op_type for step in reversed(steps)), "Softmax", *passed, last.op_type]
    yield (
        "attention_pieces",
        last,
        _attention(node, product, steps, passed) or (f"{', '.join(chain)} matches no attention rule"),
    )


def _attention(softmax: ir.Node, product: ir.Node, steps: Sequence[ir.Node], passed: Sequence[str]) -> str | None:
    """What keeps a softmax between two products from being an attention."""
    x = softmax.inputs[0]
    axis = softmax.attributes.get_int("axis", -1)
    if axis != -1 and (x is None or x.shape is None or axis != len(x.shape) - 1):
        return f"the softmax is over axis {axis}, wanted the last"
    if x is not None and x.dtype not in (None, ir.DataType.FLOAT):
        return f"scores are {x.dtype.name if x.dtype else 'of unknown type'}, wanted FLOAT"
    if product.op_type != "MatMul":
        return f"the scores are made by {product.op_type}, wanted MatMul"
    if any(fixed(value) is not None for value in product.inputs):
        return "the scores are a product with a weight, wanted queries and keys"
    strange = [step.op_type for step in steps if step.op_type not in _BETWEEN]
    if strange:
        return f"{strange[-1]} stands between the product and the softmax, wanted a scale and a mask"
    for value in (*(step.outputs[0] for step in steps), product.outputs[0], softmax.outputs[0]):
        if value.is_graph_output() or len({user for user, _ in value.uses()}) > 1:
            made = value.producer()
            return f"what {made.op_type if made else 'a node'} gives is an output or feeds another node, wanted one use"
    if "Mul" in passed:
        return "Mul stands between the softmax and the second product, wanted the weights as they are"
    sources = [_root(value) for value in product.inputs]
    if None not in sources and sources[0] is not sources[1]:
        queries, keys = ((source.name or "") if source is not None else "" for source in sources)
        return f"keys come from {keys}, queries from {queries} (cross attention), wanted one sequence"
    return None


def _products(value: ir.Value, depth: int = 3) -> list[tuple[ir.Node, list[str]]]:
    """The products that a softmax reaches through masks, casts and dropout, each with what lies between."""
    found: list[tuple[ir.Node, list[str]]] = []
    for user, _ in value.uses():
        if user.op_type in _PRODUCTS:
            found.append((user, []))
        elif depth and user.op_type in _AFTER:
            found += [(each, [user.op_type, *passed]) for each, passed in _products(user.outputs[0], depth - 1)]
    return found


def _back(value: ir.Value | None, depth: int = _LONG) -> tuple[ir.Node, list[ir.Node]] | None:
    """The product that a softmax's argument comes from, and the nodes between, the last one first."""
    node = value.producer() if value is not None else None
    if node is None or not depth:
        return None
    if node.op_type in _PRODUCTS:
        return node, []
    if node.op_type in ("Gather", "Shape", "Softmax", "LayerNormalization", "Attention"):
        return None
    # A mask is computed too, but the scores come first nearly always: of an Add, and behind a Where's condition.
    operands = node.inputs[1:] if node.op_type == "Where" else node.inputs
    for operand in operands[:3]:
        found = None if fixed(operand) is not None else _back(operand, depth - 1)
        if found is not None:
            return found[0], [node, *found[1]]
    return None


def _root(value: ir.Value | None) -> ir.Value | None:
    """What queries or keys are projected from."""
    projected = False
    for _ in range(_LONG):
        node = value.producer() if value is not None else None
        if node is None:
            return value if projected else None
        if node.op_type in ("MatMul", "Gemm"):
            if projected or fixed(node.inputs[1]) is None:
                return value if projected else None
            projected = True
        elif projected and node.op_type not in ("Reshape", "Transpose", "Identity", "Cast"):
            return value
        elif node.op_type not in _BETWEEN and node.op_type not in ("Split", "Slice", "Gather"):
            return None
        value = node.inputs[0]
    return None


# --- norms


def _sqrt(node: ir.Node) -> _Told:
    if node.op_type == "Pow" and _number(node, 1) != 0.5:
        return
    mean, epsilon = _mean(node.inputs[0])
    square = mean.inputs[0].producer() if mean is not None and mean.inputs[0] is not None else None
    if mean is None or square is None or not _is_square(square):
        return
    x = square.inputs[0]
    centred = x.producer() if x is not None else None
    meaning = "layer_norm" if centred is not None and centred.op_type == "Sub" else "rms_norm"
    yield _rule(meaning), node, _norm(node, mean, x, epsilon) or f"a mean of squares that matches no {meaning} rule"


def _norm(root: ir.Node, mean: ir.Node, x: ir.Value | None, epsilon: bool) -> str | None:
    axes = _axes(mean)
    size = len(x.shape) if x is not None and x.shape is not None else None
    if axes is None or len(axes) != 1 or axes[0] not in (_LAST if size is None else (-1, size - 1)):
        return f"ReduceMean is over axes {axes}, wanted the last alone"
    if mean.attributes.get_int("keepdims", 1) != 1:
        return "ReduceMean drops the axis, wanted keepdims=1"
    if x is not None and x.dtype not in (None, ir.DataType.FLOAT):
        return f"x is {x.dtype.name if x.dtype else 'of unknown type'}, wanted FLOAT"
    if not epsilon:
        return "no epsilon is added under the root, wanted a positive number"
    divided = [user for each in (root, *_users(root, "Reciprocal")) for user in _users(each, "Div", "Mul")]
    if not divided:
        return "nothing is divided by the root, wanted x"
    scaled = [
        user for each in divided for user in _users(each, "Mul") if any(fixed(v) is not None for v in user.inputs)
    ]
    return None if scaled else "no weight follows the division, wanted a scale as long as the last axis"


def _mean(value: ir.Value | None) -> tuple[ir.Node | None, bool]:
    """The ReduceMean under a root, and whether a number is added to it."""
    epsilon = False
    for _ in range(4):
        node = value.producer() if value is not None else None
        if node is None:
            break
        if node.op_type == "ReduceMean":
            return node, epsilon
        if node.op_type not in ("Add", "Cast", "Reshape", "Unsqueeze", "Max", "Clip", "Identity"):
            break
        epsilon |= node.op_type == "Add" and _number(node, 1) is not None
        value = node.inputs[0]
    return None, False


def _is_square(node: ir.Node) -> bool:
    return (node.op_type == "Mul" and node.inputs[0] is node.inputs[1]) or (
        node.op_type == "Pow" and _number(node, 1) == 2
    )


def _axes(node: ir.Node) -> list[int] | None:
    if "axes" in node.attributes:
        return list(node.attributes.get_ints("axes") or ())
    tensor = fixed(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if tensor is None else [int(axis) for axis in tensor.numpy().ravel()]


# --- GELU


def _erf(node: ir.Node) -> _Told:
    made = node.inputs[0].producer() if node.inputs[0] is not None else None
    number = _number(made, 1) if made is not None and made.op_type in ("Mul", "Div") else None
    added = [user for user in _users(node, "Add") if _number(user, 1) is not None]
    if made is None or not number:
        reason = "the argument of Erf is not divided by a number, wanted 1.41421"
    elif not math.isclose(root := number if made.op_type == "Div" else 1 / number, math.sqrt(2), rel_tol=1e-5):
        reason = f"the argument of Erf is divided by {root:.6g}, wanted 1.41421"
    elif not added or not math.isclose(_number(added[0], 1) or 0, 1):
        reason = f"{_number(added[0], 1) if added else 'nothing'} is added to Erf, wanted 1"
    else:
        reason = "an Erf that matches no GELU rule"
    yield "gelu_erf", node, reason


def _tanh(node: ir.Node) -> _Told:
    numbers, cubed = _factors(node.inputs[0])
    if cubed:
        shown = ", ".join(f"{number:.6g}" for number in sorted(numbers)) or "no number"
        yield (
            "gelu_tanh",
            node,
            f"the argument of Tanh holds {shown}, wanted 0.797885 (x + 0.044715 x^3)",
        )


def _factors(value: ir.Value | None, depth: int = 6) -> tuple[set[float], bool]:
    """The numbers in an argument of Tanh, and whether something is cubed in it."""
    node = value.producer() if value is not None else None
    if node is None or not depth or node.op_type not in ("Mul", "Add", "Pow", "Cast"):
        return set(), False
    number = _number(node, 1)
    if node.op_type == "Pow":
        return set(), number == 3
    numbers, cubed = set() if number is None else {number}, False
    inner = node.inputs[0].producer() if node.inputs[0] is not None else None
    for operand in node.inputs if number is None else node.inputs[:1]:
        more, deeper = _factors(operand, depth - 1)
        numbers, cubed = numbers | more, cubed or deeper
    if node.op_type == "Mul" and inner is not None and _is_square(inner):
        cubed |= node.inputs[1] in inner.inputs
    return numbers, cubed


def _sigmoid(node: ir.Node) -> _Told:
    scaled = node.inputs[0].producer() if node.inputs[0] is not None else None
    factor = _number(scaled, 1) if scaled is not None and scaled.op_type == "Mul" else None
    if scaled is None or factor is None:
        return  # x * sigmoid(x) is another activation, which is one operator less and no GELU
    x = scaled.inputs[0]
    if any(x in user.inputs and MEANING not in user.metadata_props for user in _users(node, "Mul")):
        what = "matches no GELU rule" if math.isclose(factor, 1.702, rel_tol=1e-5) else "wanted x * sigmoid(1.702 x)"
        yield _rule("gelu", "quick", "sigmoid"), node, f"found x * sigmoid({factor:.6g} x), {what}"


# --- shared


_LOOKS = {"Softmax": _softmax, "Sqrt": _sqrt, "Pow": _sqrt, "Erf": _erf, "Tanh": _tanh, "Sigmoid": _sigmoid}


def _rule(meaning: str, *hints: str) -> str:
    """The rule that comes closest: the first that makes it, one with such a word in its name before others."""
    names = [rule.id() for rule in raising.RULES if rule.meaning == meaning]
    return next((name for name in names if any(hint in name for hint in hints)), names[0] if names else meaning)


def _ahead(node: ir.Node, depth: int = 5) -> Iterator[ir.Node]:
    """A node and those it feeds, a few steps far: where a rule's pattern may end."""
    reached, level = {node}, [node]
    for _ in range(depth):
        level = [user for each in level for value in each.outputs for user, _ in value.uses() if user not in reached]
        if len(reached) + len(level) > 64:
            break
        reached.update(level)
    yield from reached


def _users(node: ir.Node, *kinds: str) -> list[ir.Node]:
    return [user for user, _ in node.outputs[0].uses() if user.op_type in kinds]


def _number(node: ir.Node | None, index: int) -> float | None:
    tensor = fixed(node.inputs[index]) if node is not None and len(node.inputs) > index else None
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None
