"""The opset and IR version that are written: the lowest true ones, within what the target loads."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tfx.errors import InputError
from tfx.exporter import targets
from tfx.exporter.targets import TARGETS, get
from tfx.exporter.versions import ir_version, lowest_opset, settle

from .running import evaluate, parse, run

HEAD = '<ir_version: 11, opset_import: ["" : 23, "com.microsoft" : 1]> g (float[B, 4] x) => (float[B, C] y) {{ {} }}'
GRAPHS = {
    "relu": ("y = Relu(x)", 17, ""),
    "gelu": ("y = Gelu(x)", 20, "Gelu"),
    "gelu before relu": ("g = Gelu(x) y = Relu(g)", 20, "Gelu"),
    "group norm": ("y = GroupNormalization<num_groups = 2>(x, w4, w4)", 21, "GroupNormalization"),
    "rms norm": ("y = RMSNormalization(x, w4)", 23, "RMSNormalization"),
    "bool maximum": ("b = Cast<to = 9>(x) m = ReduceMax<keepdims = 1>(b, one) y = Cast<to = 1>(m)", 20, "ReduceMax"),
    "axes as an input": ("y = ReduceMean<keepdims = 1>(x, one)", 17, ""),
    "an even split": ("y, z = Split<axis = 1, num_outputs = 2>(x)", 17, ""),
    "an uneven split": ("c = Concat<axis = 1>(x, x) y, z, t = Split<axis = 1, num_outputs = 3>(c)", 18, "Split"),
}  # fmt: skip


def graph(nodes: str) -> ir.Model:
    constants = {"one": np.array([1]), "w4": np.linspace(0.5, 1.5, 4, dtype=np.float32)}
    return parse(HEAD.format(nodes), [(name, array) for name, array in constants.items() if f" {name})" in nodes
                                      or f" {name}," in nodes])  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_the_lowest_opset_is_the_contents_own(name: str) -> None:
    nodes, opset, because = GRAPHS[name]
    model = graph(nodes)
    found = lowest_opset(model)
    assert found == (opset, because)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("target", TARGETS)
def test_a23_settling_writes_a_file_that_is_valid_and_equal(name: str, target: str) -> None:
    nodes, opset, _ = GRAPHS[name]
    if target == "portable" and opset > 18:
        opset = 23
    before, after = graph(nodes), graph(nodes)
    settle(after, get(target), None if target != "portable" else opset)
    assert after.opset_imports[""] == opset
    assert after.ir_version == {17: 8, 18: 8, 20: 9, 21: 10, 23: 11}[opset]
    onnx.checker.check_model(ir.to_proto(after), full_check=True)
    x = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    wanted = evaluate(before)(x)["y"]
    np.testing.assert_allclose(run(after)(x)["y"], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("opset", range(17, 24))
def test_every_opset_that_the_content_allows_can_be_written(opset: int) -> None:
    model = graph(GRAPHS["relu"][0])
    settle(model, get("portable"), opset)
    assert (model.opset_imports, model.ir_version) == ({"": opset}, ir_version(opset))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a23_an_operator_that_needs_more_is_named_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"^opset 18: operator ReduceMax needs opset 20; ask for --opset 20$"):
        settle(graph(GRAPHS["bool maximum"][0]), get("portable"), 18)


def test_a23_the_targets_caps_hold() -> None:
    low = dataclasses.replace(get("cpu"), max_opset=19)
    with pytest.raises(InputError, match=r"^target cpu: operator Gelu needs opset 20, it loads 19 at most$"):
        settle(graph(GRAPHS["gelu"][0]), low, None)
    with pytest.raises(InputError, match=r"^target cpu: IR version 9 is above its 8$"):
        settle(graph(GRAPHS["gelu"][0]), dataclasses.replace(get("cpu"), max_ir=8), None)


def test_a29_a_domain_that_the_target_does_not_know_is_refused() -> None:
    nodes = "y = com.microsoft.FastGelu(x)"
    settle(graph(nodes), get("cpu"), None)
    with pytest.raises(InputError, match=r"^target portable: found operators of com\.microsoft, wanted only ai\.onnx$"):
        settle(graph(nodes), get("portable"), None)


def test_domains_that_nothing_uses_are_not_declared() -> None:
    model = graph(GRAPHS["relu"][0])
    assert "com.microsoft" in model.opset_imports
    settle(model, get("cpu"), None)
    assert model.opset_imports == {"": 17}


def test_the_reduction_above_17_keeps_its_axes_as_an_input() -> None:
    for opset, inputs in ((17, 1), (18, 2)):
        model = graph(GRAPHS["axes as an input"][0])
        settle(model, get("portable"), opset)
        assert len(model.graph[0].inputs) == inputs


def test_an_ir_version_is_never_below_what_the_opset_needs() -> None:
    assert [ir_version(opset) for opset in range(17, 24)] == [8, 8, 9, 9, 10, 10, 11]
    for opset in range(17, 24):
        needed = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
        assert ir_version(opset) >= needed


def test_targets_are_known_by_name() -> None:
    assert list(TARGETS) == ["cpu", "cuda", "web", "portable"]
    assert targets.get("portable").domains == {""}
    with pytest.raises(InputError, match=r"^target: found 'tpu', wanted one of cpu, cuda, web, portable$"):
        targets.get("tpu")
    for opset in (16, 24):
        with pytest.raises(InputError, match=rf"^opset: found {opset}, wanted 17 to 23$"):
            targets.get("cpu").check_opset(opset)
    targets.get("cpu").check_opset(None)
