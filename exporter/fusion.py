"""What a rule is: a pattern, a guard, a replacement, and the proof it carries.

A :class:`Fusion` is an ``onnxscript`` rewrite rule whose ``pattern`` method serves twice: the matcher
compiles it, and :class:`GraphWriter` runs it to make the unfused graph. One parametrised test
(``tests/exporter/test_laws.py``) proves every rule in the tables of :mod:`.raising` and
:mod:`.lowering` from nothing but the rule itself: it fires once on its own pattern in every variant,
changes no number, is idempotent, refuses its near misses with a reason, and refuses when an inner value
is needed elsewhere.

Operand order: :func:`apply` first writes the constant operand of every commutative operator second, so a
pattern names it second and that is enough. Where both operands are computed, ``pattern`` goes through
:meth:`Fusion.either`, and every order of those places is tried.

Constants are bound to pattern variables and compared in ``check`` instead of being written into the
pattern: the matcher compares constants with an absolute tolerance of 1e-8, which takes an epsilon of
1e-12 for zero, and it wants them 0-d.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern as ops
from onnxscript.rewriter._basics import MatchContext, MatchFailureError, MatchResult

ORIGIN = "tfx.origin"
"""Node metadata: path of the torch module a node came from, e.g. ``encoder.layer.0.attention``."""

MEANING = "tfx.meaning"
"""Node metadata: what a lowered node stands for: ``attention``, ``layer_norm``, ``gelu`` ..."""


NEEDED_ELSEWHERE = "an inner value is a graph output or feeds another node"
"""The reason when a whole pattern matches but its inside cannot be removed."""

COMMUTATIVE = frozenset({"Add", "Mul"})


def absorbing(kind: np.dtype[Any]) -> np.ndarray:
    """A finite additive mask value that absorbs any score, in the given float type.

    Not the lowest float: onnxruntime's ai.onnx Attention takes that one for -inf and zeros rows which
    hold nothing else, where a sum of finite numbers gives an average.
    """
    return np.array(max(-1e30, float(np.finfo(kind).min) / 2), kind)


Refuse = MatchFailureError
"""Raised by a guard: ``Refuse("epsilon is 2, wanted less than 1", value)``.

With an empty reason it says that there is nothing to do here, which is not worth a report.
"""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A subgraph that looked like a rule's pattern and was left alone.

    Attributes:
        rule: Name of the fusion.
        where: Name of the node the pattern ended at.
        reason: The guard that refused, with the value found and the one wanted.
        origin: Path of the torch module the node came from, empty when unknown.
    """

    rule: str
    where: str
    reason: str
    origin: str = ""

    def to_json(self) -> dict[str, str]:
        """The manifest's form: the module path where it is known, else the node."""
        return {"rule": self.rule, "where": self.origin or self.where, "reason": self.reason}


@dataclasses.dataclass(frozen=True)
class Arg:
    """A graph input of a rule's example.

    Attributes:
        shape: Ints or the symbolic axes ``"B"`` (batch) and ``"S"`` (sequence).
        dtype: Numpy name of the element type.
        scale: Standard deviation of the floats that are drawn.
    """

    shape: tuple[int | str, ...]
    dtype: str = "float32"
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Derived:
    """An argument of a rule's example that the graph computes before the pattern begins.

    Attributes:
        write: ``write(op, arguments)`` returns the value; ``arguments`` holds those that come before it.
    """

    write: Callable[[Any, Mapping[str, Any]], Any]


Example = dict[str, Arg | np.ndarray | Derived]


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A subgraph close to a rule's pattern that the rule must leave alone.

    Attributes:
        name: What is different.
        reason: Regular expression that the refusal's reason matches; ``None`` when the pattern does
            not match at all, so that no guard speaks.
        replace: Arguments that differ from the rule's own example.
        variant: Constructor options of the rule.
        build: Writes a different graph: ``build(op, **arguments)``; the rule's pattern when ``None``.
    """

    name: str
    reason: str | None
    replace: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    build: Callable[..., Any] | None = None


class Fusion(ops.RewriteRuleClassBase):
    """One raise or lower rule. Subclasses state the formula in their docstring.

    Attributes:
        variants: Constructor options, the most demanding first; each makes one pattern.
        places: How many places of ``pattern`` go through :meth:`either`, numbered from 0.
        near_misses: Subgraphs that must be refused.
        tolerance: Largest absolute difference between the fused and unfused graph (fp32).
        meaning: What the replacement stands for.
        marks: Whether the last node's metadata says so, because its operator does not.
        result: ``(domain, op_type)`` of the node that the rule is there to make.
        example_opset: ai.onnx opset of the example graph.
        keeps_inner: The replacement leaves inner values that are needed elsewhere in the graph (they are
            cheap and shared); otherwise such a match is refused.
    """

    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    places: ClassVar[int] = 0
    near_misses: ClassVar[Sequence[NearMiss]] = ()
    tolerance: ClassVar[float] = 1e-6
    meaning: ClassVar[str | None] = None
    marks: ClassVar[bool] = False
    result: ClassVar[tuple[str, str]]
    example_opset: ClassVar[int] = 23
    keeps_inner: ClassVar[bool] = False

    flipped: frozenset[int] = frozenset()

    def either(self, operator: Callable[[Any, Any], Any], place: int, a: Any, b: Any) -> Any:
        """``operator(a, b)``, or ``operator(b, a)`` in the orders that flip this place."""
        return operator(b, a) if place in self.flipped else operator(a, b)

    @classmethod
    def orders(cls, options: Mapping[str, Any]) -> list[Fusion]:
        """One rule per operand order of a variant."""
        rules: list[Fusion] = []
        for bits in range(1 << cls.places):
            rule = cls(**options)
            rule.flipped = frozenset(place for place in range(cls.places) if bits >> place & 1)
            rules.append(rule)
        return rules

    @classmethod
    def id(cls) -> str:
        """The rule's name in reports: ``GeluErf`` -> ``gelu_erf``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def example(self) -> Example:
        """Arguments of ``pattern`` that make a valid graph, by name."""
        raise NotImplementedError

    def open_attributes(self) -> Mapping[str, Mapping[str, Any]]:
        """Attributes that ``pattern`` leaves open and the example graph needs, by operator."""
        return {}

    def matches(self, context: MatchContext, bindings: Mapping[str, Any]) -> MatchResult:
        """Runs ``check``; a raised :data:`Refuse` becomes a failed match with its reason."""
        result = MatchResult()
        try:
            self.check(context, **bindings)
        except Refuse as refusal:
            result.fail(refusal.reason, list(refusal.failure_sources))
        return result


class GraphWriter:
    """Runs a rule's ``pattern`` to write the nodes it describes.

    Args:
        attributes: Attributes to add, by operator, where the pattern does not set them.
        swap: Writes the operands of every commutative operator the other way round.
    """

    def __init__(self, attributes: Mapping[str, Mapping[str, Any]] | None = None, *, swap: bool = False) -> None:
        self.nodes: list[ir.Node] = []
        self._attributes = attributes or {}
        self._swap = swap

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        def write(*inputs: Any, _domain: str = "", _outputs: Any = 1, **attributes: Any) -> Any:
            attributes = {k: v for k, v in attributes.items() if not k.startswith("_")}
            attributes = {**self._attributes.get(op_type, {}), **attributes}
            if self._swap and op_type in COMMUTATIVE:
                inputs = tuple(reversed(inputs))
            count = _outputs if isinstance(_outputs, int) else len(_outputs)
            node = ir.node(op_type, inputs, attributes, domain=_domain, num_outputs=count)
            node.name = f"{op_type.lower()}_{len(self.nodes)}"
            self.nodes.append(node)
            return node.outputs[0] if count == 1 else node.outputs

        return write


def origin(node: ir.Node | None) -> str:
    """The torch module path in a node's metadata, or an empty string."""
    return node.metadata_props.get(ORIGIN, "") if node is not None else ""


def apply(fusion: type[Fusion], model: ir.Model, refusals: list[tuple[ir.Node, Refusal]]) -> int:
    """Applies every variant of a rule once, in place.

    Args:
        fusion: The rule.
        model: Changed in place.
        refusals: Receives the node and the reason of each pattern that matched and was refused, unless
            another variant of the rule took the node after all.

    Returns:
        How often the rule fired.
    """
    found: list[tuple[ir.Node, Refusal]] = []
    constants_second(model)
    fired = 0
    # Variant by variant: a demanding one must see the whole graph before a lesser one takes its inside.
    for options in fusion.variants:
        rules = [_compile(rule, found) for rule in fusion.orders(options)]
        fired += ops.RewriteRuleSet(rules).apply_to_model(model)
    refusals.extend(each for each in found if each[0].graph is not None)
    return fired


def constants_second(model: ir.Model) -> None:
    """Writes the constant operand of commutative operators second, in place."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type in COMMUTATIVE and not node.domain and len(node.inputs) == 2:
            first, second = node.inputs
            if fixed(first) is not None and fixed(second) is None:
                node.replace_input_with(0, second)
                node.replace_input_with(1, first)


def fixed(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a constant; ``None`` for what is computed, and for initializers that a caller may override."""
    if value is None or value.is_graph_input():
        return None
    return ir.convenience.get_const_tensor(value)


def _compile(rule: Fusion, refusals: list[tuple[ir.Node, Refusal]]) -> ops.RewriteRule:
    def refuse(node: ir.Node, reason: str) -> None:
        refusals.append((node, Refusal(rule.id(), node.name or "", reason, origin(node))))

    class Matcher(ops.SimplePatternMatcher):
        """Reports a whole match that fails only because an inner value is needed elsewhere."""

        def match(self, model: Any, graph: Any, node: ir.Node, **options: Any) -> MatchResult:
            result = super().match(model, graph, node, **options)
            if not result and result.reason.startswith("Matched nodes have other uses"):
                refuse(node, NEEDED_ELSEWHERE)
            return result

    def check(context: MatchContext, **bindings: Any) -> MatchResult:
        result = rule.matches(context, bindings)
        if not result and result.reason:
            refuse(context.root, result.reason)
        return result

    def rewrite(op: Any, **bindings: Any) -> Any:
        outputs = rule.rewrite(op, **bindings)
        last = outputs[0] if isinstance(outputs, Sequence) else outputs
        if rule.marks and rule.meaning:
            last.producer().metadata_props[MEANING] = rule.meaning
        return outputs

    _share_signature(check, rule.check)
    return ops.RewriteRule(
        rule.pattern,
        rewrite,
        check,
        matcher=Matcher,
        name=rule.id(),
        remove_nodes=not rule.keeps_inner,
    )


def _share_signature(function: Callable[..., Any], of: Callable[..., Any]) -> None:
    function.__signature__ = inspect.signature(of)  # pyright: ignore[reportFunctionMemberAccess]


def producer(value: ir.Value) -> ir.Node:
    """The node that computes a value which a pattern has matched as computed."""
    node = value.producer()
    assert node is not None
    return node


# Guards: each returns what a rule needs or raises Refuse with what was found and what was wanted.


def scalar(value: ir.Value | None, what: str, beside: ir.Value | None = None) -> float:
    """The number in a constant of one element (0-d, 1-d, half, ...).

    Args:
        value: The constant.
        what: Its name in a refusal.
        beside: What it meets in the graph: a number of higher rank than that would add axes to the result.
    """
    array = constant(value, what)
    if array.size != 1 or array.ndim > max(rank(beside) or 1, 1):
        raise Refuse(f"{what} has shape {list(array.shape)}, wanted one number", *_source(value))
    return float(array.reshape(()))


def expect(value: ir.Value | None, wanted: float, what: str, beside: ir.Value | None = None) -> None:
    """Refuses unless a constant equals ``wanted``, as far as its type and six decimals can say."""
    found = scalar(value, what, beside)
    slack = 1e-3 if constant(value, what).dtype.itemsize == 2 else 1e-5
    if not abs(found - wanted) <= slack * abs(wanted):
        raise Refuse(f"{what} is {found:.6g}, wanted {wanted:.6g}", *_source(value))


def positive(value: ir.Value | None, what: str, beside: ir.Value | None = None) -> float:
    """A positive, finite number."""
    found = scalar(value, what, beside)
    if not (math.isfinite(found) and found > 0):
        raise Refuse(f"{what} is {found:g}, wanted a positive number", *_source(value))
    return found


def constant(value: ir.Value | None, what: str) -> np.ndarray:
    """The array of a constant."""
    tensor = fixed(value)
    if tensor is None:
        raise Refuse(f"{what} is not a constant", *_source(value))
    return tensor.numpy()


def of_type(value: ir.Value | None, what: str, *allowed: ir.DataType) -> None:
    """Refuses a value of another element type than the kernels or the arithmetic of a rule are made for."""
    found = None if value is None else value.dtype
    if found not in allowed:
        names = " or ".join(kind.name for kind in allowed)
        raise Refuse(f"{what} is {found.name if found else 'of unknown type'}, wanted {names}", *_source(value))


def rank(value: ir.Value | None) -> int | None:
    """The rank of a value, ``None`` when unknown."""
    return len(value.shape) if value is not None and value.shape is not None else None


def static(value: ir.Value, axis: int, what: str) -> int:
    """The size of an axis that must be known."""
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise Refuse(f"{what} has axis {axis} of unknown size, wanted a fixed one", value)
    return size


def axis_of(value: ir.Value, axis: int) -> Any:
    """The size or symbol of an axis, ``None`` when the shape is unknown."""
    return value.shape[axis] if value.shape is not None else None


def same_axis(a: Any, b: Any) -> bool:
    """Whether two axes are provably of equal size: equal ints, or the same named symbol."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    return a is not None and b is not None and a.value is not None and a.value == b.value


def transpose(op: Any, x: ir.Value, perm: Sequence[int]) -> ir.Value:
    """A Transpose whose type and shape are known to the rules that come after."""
    y = op.Transpose(x, perm=list(perm))
    y.dtype = x.dtype
    if x.shape is not None:
        y.shape = ir.Shape([x.shape[axis] for axis in perm])
    return y


def weight(op: Any, beside: ir.Value, name: str, content: str, make: Callable[[], ir.TensorProtocol]) -> ir.Value:
    """An initializer of our own making: the one that is there already for the same content, else a new one.

    Args:
        op: The rewriter's builder.
        beside: A value of the graph that it goes into.
        name: What to call it; another initializer of that name gets a number behind it.
        content: Says all that it is made of.
        make: Makes the tensor.
    """
    graph = beside.graph
    there = graph.initializers if isinstance(graph, ir.Graph) else {}
    free, number = name, 1
    while free in there:
        if there[free].meta.get(_CONTENT) == content:
            return there[free]
        free, number = f"{name}_{number}", number + 1
    made = op.initializer(make(), name=free)
    made.meta[_CONTENT] = content
    return made


_CONTENT = "tfx.content"


def last_axis_only(node: ir.Node, of: ir.Value, what: str) -> None:
    """Refuses unless a ReduceMean or ReduceSum reduces the last axis alone and keeps it."""
    axes = node.attributes.get_ints("axes") if "axes" in node.attributes else None
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = constant(node.inputs[1], f"{what} axes").tolist()
    size = rank(of)
    last = [-1] if size is None else [-1, size - 1]
    if axes is None or len(axes) != 1 or axes[0] not in last:
        raise Refuse(f"{what} reduces axes {axes}, wanted the last alone", *_source(of))
    if node.attributes.get_int("keepdims", 1) != 1:
        raise Refuse(f"{what} drops the axis, wanted keepdims=1", *_source(of))


def _source(value: ir.Value | None) -> tuple[ir.Value, ...]:
    return () if value is None else (value,)
