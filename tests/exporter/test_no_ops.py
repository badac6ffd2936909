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
CONSTANTS = {"axis": [2], "last": [-1], "first": [0], "flat": [-1], "rows": [0, 0, 4], "swap": [0, -1, 2]}

# nodes, operators afterwards
DROPPED = {
    "a cast to the same type": ("c = Cast<to = 1>(x) y = Relu(c)", ["Relu"]),
    "a reshape to the same shape": ("r = Reshape(x, rows) y = Relu(r)", ["Relu"]),
    "there and back": (
        "s = Shape(x) r = Reshape(x, flat) b = Reshape(r, s) y = Relu(b)", ["Reshape", "Shape", "Relu"],
    ),
    "unsqueezed and squeezed": ("u = Unsqueeze(x, axis) b = Squeeze(u, axis) y = Relu(b)", ["Unsqueeze", "Relu"]),
    "expanded to its own shape": ("s = Shape(x) e = Expand(x, s) y = Relu(e)", ["Relu", "Shape"]),
    "the last axis brought back": (
        "m = ReduceMean<keepdims = 0>(x, axis) u = Unsqueeze(m, axis) y = Sub(x, u)",
        ["Constant", "ReduceMean", "ReduceMean", "Sub"],
    ),
}  # fmt: skip
KEPT = {
    "a cast to another type": "c = Cast<to = 10>(x) y = Cast<to = 1>(c)",
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
    assert {"Cast", "Reshape", "Unsqueeze"} & {n.op_type for n in before.graph} <= {n.op_type for n in after.graph}
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
