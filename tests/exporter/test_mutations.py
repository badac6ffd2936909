"""A rule with a mistake in it does not pass the laws: numbers, comparisons, permutations and operands are changed one
at a time in the source of its ``check`` and ``rewrite``, and some law must fail.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tfx.exporter.fusion import Fusion

from . import test_laws

MODULES = sorted({rule.__module__ for rule in test_laws.RULES})

EQUIVALENT = {
    "attention_scale: self._side == 'q'": "Q and K have the same rank, all that the scale's shape is compared with",
    "skip_layer_norm: op.SkipLayerNormalization(a, b": "the kernel adds the two",
}
"""Changes that no graph can show, by how they begin."""

UNSEEN = {
    "attention_pieces: values.factor != 1": "no variant multiplies V by a number",
    "packed_attention: widths[2] != widths[0]": "no variant has values of another width than queries",
    "rms_norm_primitives: node.attributes.get_int('axis', -1) >= 0": "no variant counts the axis from the front",
    "rms_norm_primitives: x.dtype in _HALVES": "no variant has half floats",
}
"""Changes that the laws do not see, because no example has what they spoil."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one rule.

    Attributes:
        rule: The class.
        number: Which of the rule's mutable places.
        name: What is changed, in words.
    """

    rule: type[Fusion]
    number: int
    name: str


class Mutator(ast.NodeTransformer):
    """Changes the place of a given number; without one, only lists the places."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.places: list[str] = []

    def _here(self, node: ast.expr, changed: ast.expr) -> ast.expr:
        self.places.append(f"{ast.unparse(node)} -> {ast.unparse(changed)}")
        return ast.copy_location(changed, node) if len(self.places) - 1 == self.number else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if type(node.value) is float:
            return self._here(node, ast.Constant(node.value * 1.5 + 0.25))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        opposite: dict[type[ast.cmpop], ast.cmpop] = {
            ast.Eq: ast.NotEq(), ast.NotEq: ast.Eq(), ast.Lt: ast.GtE(), ast.GtE: ast.Lt(), ast.Gt: ast.LtE(),
            ast.LtE: ast.Gt(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
        }  # fmt: skip
        changed = opposite.get(type(node.ops[0]))
        if changed is None:
            return node
        return self._here(node, ast.Compare(node.left, [changed, *node.ops[1:]], node.comparators))

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        values = [each.value for each in node.elts if isinstance(each, ast.Constant)]
        if len(values) == len(node.elts) > 1 and sorted(map(str, values)) == list(map(str, range(len(values)))):
            return self._here(node, ast.Tuple([node.elts[-1], *node.elts[:-1]], node.ctx))
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        function = node.func
        written = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        if written and function.value.id == "op" and function.attr not in ("Add", "Mul", "And") and len(node.args) > 1:  # pyright: ignore[reportAttributeAccessIssue]
            first, second, *rest = node.args
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                return self._here(node, ast.Call(function, [second, first, *rest], node.keywords))
        return node


def source(rule: type[Fusion]) -> tuple[ast.Module, ast.ClassDef]:
    """The module of a rule, and the class in it."""
    tree = ast.parse(inspect.getsource(sys.modules[rule.__module__]))
    found = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == rule.__name__)
    return tree, found


def mutate(rule: type[Fusion], number: int | None) -> tuple[Mutator, ast.Module]:
    """Goes through ``check`` and ``rewrite``: the pattern itself says what the unfused graph is."""
    tree, body = source(rule)
    mutator = Mutator(number)
    for index, method in enumerate(body.body):
        if isinstance(method, ast.FunctionDef) and method.name in ("check", "rewrite"):
            body.body[index] = mutator.visit(method)
    return mutator, ast.fix_missing_locations(tree)


def mutants(rule: type[Fusion]) -> Iterator[Mutant]:
    """Every mutant of a rule that the laws can see."""
    for number, place in enumerate(mutate(rule, None)[0].places):
        name = f"{rule.id()}: {place}"
        if not name.startswith((*EQUIVALENT, *UNSEEN)):
            yield Mutant(rule, number, name)


def make(mutant: Mutant) -> type[Fusion]:
    """The rule with the mistake, out of a module of its own."""
    _, tree = mutate(mutant.rule, mutant.number)
    original = sys.modules[mutant.rule.__module__]
    module = ModuleType(original.__name__)
    module.__dict__.update(__package__=original.__package__, __file__=original.__file__)
    exec(compile(tree, original.__file__ or "", "exec"), module.__dict__)
    return module.__dict__[mutant.rule.__name__]


def survives(rule: type[Fusion]) -> bool:
    """Whether every law holds."""
    try:
        for options in rule.variants:
            test_laws.test_fires_once_changes_no_number_and_is_idempotent(rule, dict(options), swap=False)
        if "epsilon" in str(rule().open_attributes()):
            test_laws.test_an_epsilon_that_is_not_written_is_the_operators_own(rule)
        for miss in rule.near_misses:
            test_laws.test_refuses_near_misses_with_the_reason(rule, miss)
    except Exception:  # noqa: BLE001 - a law that fails may do so in any way
        return False
    return True


MUTANTS = [pytest.param(mutant, id=mutant.name) for rule in test_laws.RULES for mutant in mutants(rule)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_in_a_rule_breaks_a_law(mutant: Mutant) -> None:
    assert not survives(make(mutant))


def test_what_is_left_out_is_still_there() -> None:
    names = [f"{rule.id()}: {place}" for rule in test_laws.RULES for place in mutate(rule, None)[0].places]
    for left_out in (*EQUIVALENT, *UNSEEN):
        assert any(name.startswith(left_out) for name in names), left_out


@pytest.mark.parametrize("module", MODULES)
def test_the_same_source_again_passes(module: str) -> None:
    """Else a mutant could fail for how it is made."""
    rules: list[Any] = [rule for rule in test_laws.RULES if rule.__module__ == module]
    assert importlib.import_module(module)
    for rule in rules[:1]:
        assert survives(make(Mutant(rule, -1, "nothing")))


def test_constants_of_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that rules take from their module."""
    for rule in test_laws.RULES:
        module = sys.modules[rule.__module__]
        for name in ("SQRT_HALF", "SQRT_2_OVER_PI", "CUBIC"):
            if name in vars(module) and name in inspect.getsource(rule.check) + inspect.getsource(rule.rewrite):
                with monkeypatch.context() as patch:
                    made = rule.example(rule())
                    patch.setattr(module, name, vars(module)[name] * 1.01)
                    patch.setattr(rule, "example", lambda self, made=made: made)
                    with pytest.raises(AssertionError):
                        test_laws.test_fires_once_changes_no_number_and_is_idempotent(
                            rule, dict(rule.variants[0]), swap=False
                        )
