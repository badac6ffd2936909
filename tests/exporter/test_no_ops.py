"""What does nothing goes, what does something stays, and no number changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tfx.exporter.no_ops import drop_no_ops
from tfx.exporter.tidy import tidy

from .running import parse, run

HEAD = '<ir_version: 10, opset_import: ["" : 20]> g ({}) => (float[B, S, 4] y) {{ {} }}'
X = "float[B, S, 4] x"
CONSTANTS = {"axis": [2], "last": [-1], "first": [0], "flat": [-1], "rows": [0, 0, 4], "swap": [0, -1, 2],
             "three": [3, -1, 4]}  # fmt: skip

# nodes, operators afterwards
DROPPED = {
    "a cast to the same type": ("c = Cast<to = 1>(x) y = Relu(c)", ["Relu"]),
    "a reshape to the same shape": ("r = Reshape(x, rows) y = Relu(r)", ["Relu"]),
    "there and back": (
        "s = Shape(x) r = Reshape(x, flat) b = Reshape(r, s) y = Relu(b)", ["Reshape", "Shape", "Relu"],
    ),
    "unsqueezed and squeezed": ("u = Unsqueeze(x, axis) b = Squeeze(u, axis) y = Relu(b)", ["Unsqueeze", "Relu"]),
    "a cast to a wider type and back": ("d = Cast<to = 11>(x) c = Cast<to = 1>(d) y = Relu(c)", ["Relu"]),
    "a cast by way of a wider type": (
        "d = Cast<to = 11>(x) c = Cast<to = 6>(d) y = Cast<to = 1>(c)", ["Cast", "Cast"],
    ),
    "a reshape of a reshape": ("r = Reshape(x, flat) y = Reshape(r, three)", ["Reshape"]),
    "expanded to its own shape": ("s = Shape(x) e = Expand(x, s) y = Relu(e)", ["Relu", "Shape"]),
    "the last axis brought back": (
        "m = ReduceMean<keepdims = 0>(x, axis) u = Unsqueeze(m, axis) y = Sub(x, u)",
        ["Constant", "ReduceMean", "ReduceMean", "Sub"],
    ),
}  # fmt: skip
KEPT = {
    "a cast to another type": "c = Cast<to = 10>(x) y = Cast<to = 1>(c)",
    "a cast to a narrower type on the way": "d = Cast<to = 6>(x) y = Cast<to = 1>(d)",
    "a cast by way of a type of other numbers": "d = Cast<to = 10>(x) c = Cast<to = 11>(d) y = Cast<to = 1>(c)",
    "a reshape that keeps axes of the one before": "r = Reshape(x, three) y = Reshape(r, rows)",
    "an axis brought back elsewhere": "m = ReduceMean<keepdims = 0>(x, last) u = Unsqueeze(m, first) "
    "t = Transpose<perm = [1, 2, 0]>(u) v = Transpose<perm = [2, 0, 1]>(t) w = Squeeze(v, first) "
    "z = Unsqueeze(w, axis) y = Add(x, z)",
    "the first axis": "m = ReduceMean<keepdims = 0>(x, first) u = Unsqueeze(m, first) y = Sub(x, u)",
    "heads split and merged by a transpose": "r = Reshape(x, swap) t = Transpose<perm = [0, 2, 1]>(r) "
    "s = Shape(x) y = Reshape(t, s)",
}


def graph(nodes: str, inputs: str = X) -> ir.Model:
    used = [(name, np.array(value)) for name, value in CONSTANTS.items() if f" {name})" in nodes]
    return parse(HEAD.format(inputs, nodes), used)


def answers(model: ir.Model) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    return run(model)({"x": x})["y"]


@pytest.mark.parametrize("name", DROPPED)
def test_what_does_nothing_is_dropped(name: str) -> None:
    nodes, operators = DROPPED[name]
    before, after = graph(nodes), graph(nodes)
    if name == "there and back":
        # Shape inference cannot know it: the exporter says so.
        next(n for n in after.graph if n.outputs[0].name == "b").outputs[0].shape = after.graph.inputs[0].shape
    drop_no_ops(after)
    assert sorted(node.op_type for node in after.graph) == sorted(operators)
    np.testing.assert_array_equal(answers(after), answers(before))
    onnx.checker.check_model(ir.to_proto(after))


@pytest.mark.parametrize("name", KEPT)
def test_what_does_something_stays(name: str) -> None:
    before, after = graph(KEPT[name]), graph(KEPT[name])
    drop_no_ops(after)
    for operator in ("Cast", "Reshape", "Unsqueeze"):
        left = [node.op_type for node in after.graph].count(operator)
        wider = 1 if operator == "Cast" and "other numbers" in name else 0
        assert left == [node.op_type for node in before.graph].count(operator) - wider
    np.testing.assert_array_equal(answers(after), answers(before))


def test_unknown_axes_are_never_taken_for_equal() -> None:
    model = graph("r = Reshape(x, flat) s = Shape(x) b = Reshape(r, s) y = Relu(b)")
    for node in model.graph:
        if node.op_type == "Reshape":
            node.outputs[0].shape = ir.Shape([None] * 3)
    drop_no_ops(model)
    assert [node.op_type for node in model.graph].count("Reshape") == 2


def test_a_dropped_node_that_gave_an_output_leaves_the_outputs_name() -> None:
    for nodes in ("y = Cast<to = 1>(x)", "r = Relu(x) y = Cast<to = 1>(r)"):
        model = graph(nodes)
        expected = answers(graph(nodes))
        tidy(model)
        assert [value.name for value in model.graph.outputs] == ["y"]
        assert [value.name for value in model.graph.inputs] == ["x"]
        np.testing.assert_array_equal(answers(model), expected)


def test_equal_reductions_become_one() -> None:
    """Written over axis -1 here and axis 2 there, as torch.onnx does for a mean beside a variance."""
    model = graph("m = ReduceMean<keepdims = 1>(x, last) n = ReduceMean<keepdims = 1>(x, axis) s = Add(m, n) "
                  "y = Sub(x, s)")  # fmt: skip
    expected = answers(graph("m = ReduceMean<keepdims = 1>(x, last) n = ReduceMean<keepdims = 1>(x, axis) "
                             "s = Add(m, n) y = Sub(x, s)"))  # fmt: skip
    tidy(model)
    assert [node.op_type for node in model.graph] == ["ReduceMean", "Add", "Sub"]
    np.testing.assert_array_equal(answers(model), expected)


def test_two_outputs_that_become_one_value_stay_two() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[B] x) => (float[B] a, float[B] b) { r = Relu(x) a = Cast<to = 1>(r) q = Relu(x) b = Identity(q) }"""
    model = parse(text)
    tidy(model)
    assert [value.name for value in model.graph.outputs] == ["a", "b"]
    x: Any = {"x": np.array([-1.0, 2.0], np.float32)}
    found = run(model)(x)
    np.testing.assert_array_equal(found["a"], [0, 2])
    np.testing.assert_array_equal(found["b"], [0, 2])


def test_dropout_and_identity_of_inference_vanish() -> None:
    model = graph(
        "no = Constant<value = bool no {0}>() half = Constant<value_float = 0.5>() a = Dropout(x, half, no) "
        "b = Identity(a) c = Dropout<seed = 3>(b) d = Dropout(c, half) y = Relu(d)"
    )
    tidy(model)
    assert [node.op_type for node in model.graph] == ["Relu"]


def test_dropout_of_training_stays() -> None:
    model = graph("yes = Constant<value = bool yes {1}>() half = Constant<value_float = 0.5>() "
                  "a = Dropout(x, half, yes) y = Relu(a)")  # fmt: skip
    tidy(model)
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == ["Dropout", "Relu"]


TABLE = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)  # more than a small constant
SCALE = np.linspace(0.5, 1.5, 32, dtype=np.float32)
TABLES = """<ir_version: 10, opset_import: ["" : 23]> g (float[B, S, 32] x) => (float[B, S, 64] y) {{ {} }}"""


def tables(nodes: str) -> ir.Model:
    return parse(TABLES.format(nodes), [("table", TABLE), ("scale", SCALE)])


def test_a_norm_of_a_table_is_computed_and_what_follows_from_it() -> None:
    """DeBERTa-v3 normalises its position table in every call."""
    nodes = """n, m, i = LayerNormalization<axis = -1, epsilon = 0.001>(table, scale)
        axis = Constant<value_ints = [0]>() u = Unsqueeze(n, axis)
        t = Transpose<perm = [0, 2, 1]>(u) y = MatMul(x, t)"""
    before, after = tables(nodes), tables(nodes)
    tidy(after)
    assert [node.op_type for node in after.graph] == ["MatMul"]
    assert sum(v.const_value.size for v in after.graph.initializers.values() if v.const_value) == TABLE.size
    x = {"x": np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)}
    np.testing.assert_allclose(run(after)(x)["y"], run(before)(x)["y"], rtol=0, atol=5e-6)
    onnx.checker.check_model(ir.to_proto(after))


def test_a_table_that_is_used_as_it_is_too_stays_one() -> None:
    model = tables(
        """n = LayerNormalization<axis = -1>(table, scale) s = Add(n, table) t = Transpose<perm = [1, 0]>(s)
        y = MatMul(x, t)"""
    )
    tidy(model)
    assert [node.op_type for node in model.graph] == ["LayerNormalization", "Add", "Transpose", "MatMul"]
    assert {*model.graph.initializers} == {"table", "scale"}
