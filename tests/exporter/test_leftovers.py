"""What is left in pieces is told with what is different about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfx.errors import CountError
from tfx.exporter.foreign import to_canonical_opset
from tfx.exporter.inspection import check_expected
from tfx.exporter.pipeline import raise_model

from .running import parse

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '


def refusals(text: str, constants: dict[str, Any]) -> list[tuple[str, str]]:
    model = parse(HEAD + text, constants)
    to_canonical_opset(model, "m.onnx")
    return [(refusal.rule, refusal.reason) for refusal in raise_model(model).refusals]


QKV = "(float[B, 2, S, 4] q, float[B, 2, 4, S] k, float[B, 2, S, 4] v) => (float[B, 2, S, 4] y)"


def test_what_stands_between_a_product_and_its_softmax_is_named() -> None:
    body = "{ s = MatMul(q, k) t = Tanh(s) p = Softmax<axis = -1>(t) y = MatMul(p, v) }"
    assert [reason for _, reason in refusals(QKV + body, {}) if "Tanh" in reason]


def test_another_axis_of_the_softmax_is_named() -> None:
    body = "{ s = MatMul(q, k) p = Softmax<axis = 2>(s) y = MatMul(p, v) }"
    assert [reason for _, reason in refusals(QKV + body, {}) if "axis" in reason or "last" in reason]


NORM = "(float[B, S, 8] x) => (float[B, S, 8] y)"


def test_a_norm_over_another_axis_says_which() -> None:
    body = """{ m = ReduceMean<axes = [1]>(x) d = Sub(x, m) s = Mul(d, d) n = ReduceMean<axes = [1]>(s)
    e = Add(n, eps) r = Sqrt(e) q = Div(d, r) y = Mul(q, w) }"""
    found = refusals(NORM + body, {"eps": np.float32(1e-5), "w": np.ones(8, np.float32)})
    assert found and all("[1]" in reason and "last" in reason for _, reason in found)


def test_a_root_of_something_else_is_no_norm() -> None:
    assert (
        refusals(NORM + "{ s = Mul(x, x) m = ReduceSum(s, a) r = Sqrt(m) y = Div(x, r) }", {"a": np.array([-1])}) == []
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{ y = Erf(x) }", "the argument of Erf is not divided by a number, wanted 1.41421"),
        ("{ d = Div(x, c) y = Erf(d) }", "the argument of Erf is divided by 1.5, wanted 1.41421"),
        ("{ d = Div(x, r) y = Erf(d) }", "nothing is added to Erf, wanted 1"),
        ("{ f = Mul(x, c) s = Sigmoid(f) y = Mul(x, s) }", "factor is 1.5, wanted 1.702"),
    ],
)
def test_activations_that_are_no_gelu_say_why(body: str, reason: str) -> None:
    found = refusals(NORM + body, {"c": np.float32(1.5), "r": np.float32(2**0.5)})
    assert [each for _, each in found] == [reason]


def test_plain_activations_are_no_leftovers() -> None:
    assert refusals(NORM + "{ a = Tanh(x) s = Sigmoid(a) y = Mul(a, s) }", {}) == []


def test_expected_counts_that_differ_come_with_what_was_refused() -> None:
    refusal = {"rule": "gelu_erf", "where": "mlp.act", "reason": "divisor is 1, wanted 1.41421"}
    described = {"canonical": {"gelu": 0}, "raisable": {"gelu": 2}, "refusals": [refusal]}
    with pytest.raises(CountError) as caught:
        check_expected(described, {"gelu": 3})
    assert str(caught.value) == (
        "canonical counts differ: gelu: found 0, wanted 3; tfx optimize would raise gelu 2; "
        "refused gelu_erf at mlp.act: divisor is 1, wanted 1.41421"
    )
    check_expected(described, {"gelu": 0})
