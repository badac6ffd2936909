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
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern as ops
from onnxscript.rewriter._basics import MatchContext, MatchResult
from onnxscript.rewriter._pattern_ir import GraphPattern, NodeOutputPattern, NodePattern, _to_graph_pattern

from .guards import Refuse, fixed

ORIGIN = "tfx.origin"
"""Node metadata: path of the torch module a node came from, e.g. ``encoder.layer.0.attention``."""

MEANING = "tfx.meaning"
"""Node metadata: what a lowered node stands for: ``attention``, ``layer_norm``, ``gelu`` ..."""


NEEDED_ELSEWHERE = "an inner value is a graph output or feeds another node"
"""The reason when a whole pattern matches but its inside cannot be removed."""

COMMUTATIVE = frozenset({"Add", "Mul"})


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
        one_pattern: The first variant's pattern holds every variant: they differ in what ``check`` reads behind it.
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
    one_pattern: ClassVar[bool] = False
    keeps_inner: ClassVar[bool] = False

    flipped: frozenset[int] = frozenset()

    def either(self, operator: Callable[[Any, Any], Any], place: int, a: Any, b: Any) -> Any:
        """``operator(a, b)``, or ``operator(b, a)`` in the orders that flip this place."""
        return operator(b, a) if place in self.flipped else operator(a, b)

    @classmethod
    def orders(cls, options: Mapping[str, Any]) -> list[Fusion]:
        """One rule per operand order of a variant; none where an earlier variant's pattern holds this one too."""
        rules: list[Fusion] = []
        if cls.one_pattern and options != cls.variants[0]:
            return rules
        for bits in range(1 << cls.places):
            rule = cls(**options)
            rule.flipped = frozenset(place for place in range(cls.places) if bits >> place & 1)
            rules.append(rule)
        return rules

    @classmethod
    def id(cls) -> str:
        """The rule's name in reports: ``GeluErf`` -> ``gelu_erf``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def unfused(self, op: Any, *arguments: Any) -> Any:
        """Writes the graph that the rule replaces, from the arguments of ``pattern``.

        A rule whose formula has more spellings than a pattern can hold matches an anchor and reads the rest of
        the graph in ``check``; it writes the whole here.
        """
        return self.pattern(op, *arguments)

    def example(self) -> Example:
        """Arguments of ``unfused`` that make a valid graph, by name."""
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
    fired, present = 0, _operators(model)
    # Variant by variant: a demanding one must see the whole graph before a lesser one takes its inside.
    for options in fusion.variants:
        patterns = [(rule, _pattern(rule, options)) for rule in fusion.orders(options)]
        rules = [_rule(rule, pattern, found) for rule, pattern in patterns if pattern.operators <= present]
        times = ops.RewriteRuleSet(rules).apply_to_model(model) if rules else 0
        if times:
            fired, present = fired + times, _operators(model)
    refusals.extend(each for each in found if each[0].graph is not None)
    return fired


def _operators(model: ir.Model) -> set[ir.OperatorIdentifier]:
    graphs = (model.graph, *model.functions.values())
    return {node.op_identifier() for graph in graphs for node in ir.traversal.RecursiveGraphIterator(graph)}


def constants_second(model: ir.Model) -> None:
    """Writes the constant operand of commutative operators second, in place."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type in COMMUTATIVE and not node.domain and len(node.inputs) == 2:
            first, second = node.inputs
            if fixed(first) is not None and fixed(second) is None:
                node.replace_input_with(0, second)
                node.replace_input_with(1, first)


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """A compiled pattern; matching does not change it, so all models share it.

    Attributes:
        graph: What the matcher takes.
        operators: A graph without all of these cannot hold it.
        root: The operator it ends at; ``None`` for a pattern of several ends.
    """

    graph: GraphPattern
    operators: frozenset[ir.OperatorIdentifier]
    root: ir.OperatorIdentifier | None


_compiled: dict[tuple[Any, ...], _Pattern] = {}
_compiling = threading.Lock()


def _pattern(rule: Fusion, options: Mapping[str, Any]) -> _Pattern:
    key = (type(rule), tuple(options.items()), rule.flipped)
    with _compiling:  # onnxscript builds patterns with a global
        if key not in _compiled:
            graph = _to_graph_pattern(rule.pattern)
            operators = filter(None, (node.op_identifier() for node in _surely(graph)))
            root = graph.output_node.op_identifier() if graph.has_single_output_node else None
            _compiled[key] = _Pattern(graph, frozenset(operators), root)
        return _compiled[key]


def _surely(graph: GraphPattern) -> set[NodePattern]:
    """The nodes that every match has: behind a choice of patterns none is sure."""
    sure: set[NodePattern] = set()
    ahead = list(graph.output_nodes)
    while ahead:
        node = ahead.pop()
        if node not in sure:
            sure.add(node)
            ahead += [value.producer() for value in node.inputs if isinstance(value, NodeOutputPattern)]
    return sure


class _Rule(ops.RewriteRule):
    """Looks at nodes of the pattern's last operator only."""

    root: ir.OperatorIdentifier | None = None

    def try_rewrite(self, model: ir.Model, graph_or_function: Any, node: ir.Node, **options: Any) -> Any:
        if self.root is not None and node.op_identifier() != self.root:
            return None
        return super().try_rewrite(model, graph_or_function, node, **options)


def _rule(rule: Fusion, pattern: _Pattern, refusals: list[tuple[ir.Node, Refusal]]) -> ops.RewriteRule:
    """One model's rule: its matcher holds state, and its refusals are this model's own."""

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
    made = _Rule(
        pattern.graph,
        rewrite,
        check,
        matcher=Matcher,
        name=rule.id(),
        remove_nodes=not rule.keeps_inner,
    )
    made.root = pattern.root
    return made


def _share_signature(function: Callable[..., Any], of: Callable[..., Any]) -> None:
    function.__signature__ = inspect.signature(of)  # pyright: ignore[reportFunctionMemberAccess]
