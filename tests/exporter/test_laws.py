"""The laws of a fusion, proven for every rule of the raise and lower tables in every variant."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import pytest

from tfx.exporter import fusion, lowering, raising, targets
from tfx.exporter.fusion import ORIGIN, Fusion, NearMiss, Refusal
from tfx.exporter.metadata import count

from . import laws

_OPSETS = (17, 18, 20, 23)
RULES: list[type[Fusion]] = list(
    dict.fromkeys(
        [
            *raising.RULES,
            *(
                rule
                for target in targets.TARGETS.values()
                for opset in _OPSETS
                for rule in lowering.rules_for(target, opset)
            ),
        ]
    )
)
CASES = [
    pytest.param(rule, options, id=f"{rule.id()}-{'-'.join(map(str, options.values()))}")
    for rule in RULES
    for options in rule.variants
]
NEAR_MISSES = [pytest.param(rule, miss, id=f"{rule.id()}-{miss.name}") for rule in RULES for miss in rule.near_misses]


def _apply(rule: type[Fusion], model: ir.Model) -> tuple[int, list[Refusal]]:
    refusals: list[tuple[ir.Node, Refusal]] = []
    fired = fusion.apply(rule, model, refusals)
    passes.RemoveUnusedNodesPass()(model)
    return fired, [refusal for _, refusal in refusals]


def test_every_rule_has_near_misses_and_a_formula() -> None:
    for rule in RULES:
        assert "``" in (rule.__doc__ or ""), rule
    assert {rule.id() for rule in RULES if not rule.near_misses} == {
        # Nothing but the operator itself is matched: there is nothing to get nearly right.
        "contrib_bias_gelu", "contrib_erf_gelu", "contrib_fast_gelu", "contrib_gelu", "fast_gelu",
        "gelu_erf_primitives", "gelu_tanh_primitives",
    }  # fmt: skip


@pytest.mark.parametrize("swap", [False, True], ids=["as_written", "operands_swapped"])
@pytest.mark.parametrize(("rule", "options"), CASES)
def test_fires_once_changes_no_number_and_is_idempotent(
    rule: type[Fusion], options: dict[str, Any], swap: bool
) -> None:
    unfused = laws.build(rule(**options), swap=swap)
    laws.check(unfused)
    fused = laws.build(rule(**options), swap=swap)
    for node in fused.graph:
        node.metadata_props[ORIGIN] = "encoder.layer.3"
    names = [[v.name for v in side] for side in (fused.graph.inputs, fused.graph.outputs)]

    fired, refusals = _apply(rule, fused)

    assert (fired, refusals) == (1, [])
    laws.check(fused)
    assert [[v.name for v in side] for side in (fused.graph.inputs, fused.graph.outputs)] == names
    kept = {n.name for n in unfused.graph} & {n.name for n in fused.graph}
    assert rule.keeps_inner or all(str(name).startswith("before_") for name in kept)
    made = [n for n in fused.graph if (n.domain, n.op_type) == rule.result and n.name not in kept]
    assert len(made) == 1
    assert made[0].metadata_props[ORIGIN] == "encoder.layer.3"
    if rule.meaning:
        assert count(fused)[rule.meaning] == 1
    before, after = laws.runner(unfused), laws.runner(fused)
    for seed, (batch, sequence) in enumerate(laws.SHAPES):
        feeds = laws.feeds(unfused, batch, sequence, seed)
        for one, other in zip(before(feeds), after(feeds), strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(other, one, rtol=0, atol=rule.tolerance)

    assert _apply(rule, fused) == (0, [])


@pytest.mark.parametrize("rule", [rule for rule in RULES if "epsilon" in str(rule().open_attributes())])
def test_an_epsilon_that_is_not_written_is_the_operators_own(rule: type[Fusion]) -> None:
    for options in rule.variants:
        unfused, fused = (laws.build(rule(**options), without=("epsilon",)) for _ in range(2))
        assert _apply(rule, fused) == (1, [])
        feeds = laws.feeds(unfused, 3, 7)
        for one, other in zip(laws.runner(unfused)(feeds), laws.runner(fused)(feeds), strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=rule.tolerance)


@pytest.mark.parametrize(("rule", "miss"), NEAR_MISSES)
def test_refuses_near_misses_with_the_reason(rule: type[Fusion], miss: NearMiss) -> None:
    options = {**(rule.variants[0] if miss.variant else {}), **miss.variant}
    model = laws.build(rule(**options), replace=miss.replace, writer=miss.build)
    before = laws.operators(model)

    fired, refusals = _apply(rule, model)

    assert fired == 0
    assert laws.operators(model) == before
    if miss.reason is None:
        assert refusals == []
    else:
        assert refusals
        assert all(refusal.where for refusal in refusals)
        assert any(re.search(miss.reason, refusal.reason) for refusal in refusals), refusals


@pytest.mark.parametrize(("rule", "options"), CASES)
def test_inner_values_that_are_needed_elsewhere_survive(rule: type[Fusion], options: dict[str, Any]) -> None:
    nodes = len(list(laws.build(rule(**options)).graph))
    for index in range(nodes - 1):
        unfused, fused = (laws.build(rule(**options)) for _ in range(2))
        for model in (unfused, fused):
            inner = next(v for i, n in enumerate(model.graph) for v in n.outputs if i == index)
            if inner.dtype is None or inner.is_graph_output():
                break
            model.graph.outputs.append(inner)
        else:
            fired, refusals = _apply(rule, fused)
            if not fired:
                assert laws.operators(fused) == laws.operators(unfused)
                assert [r.reason for r in refusals if "inner value" in r.reason]
            feeds = laws.feeds(unfused, 3, 7, seed=2)
            before, after = laws.runner(unfused), laws.runner(fused)
            for one, other in zip(before(feeds), after(feeds), strict=True):
                np.testing.assert_allclose(other, one, rtol=0, atol=rule.tolerance)
