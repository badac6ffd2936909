"""Half precision: what becomes a half, what stays, and that nothing overflows on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from tfx.exporter import pipeline, targets
from tfx.exporter.precision import PrecisionReport, fp16
from tfx.runtime.parity import compare

from ..running import encoder, evaluate, masks, nodes_of, parse, run, torch_answers

LOWEST = float(np.finfo(np.float32).min)
HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
Feeds = dict[str, np.ndarray]


def _halved(model: ir.Model, samples: list[Feeds]) -> tuple[ir.Model, PrecisionReport]:
    copy = model.clone()
    report = fp16.apply(copy, samples, target=targets.get("cuda"))
    onnx.checker.check_model(ir.to_proto(copy), full_check=True)
    assert [v.dtype for v in copy.graph.outputs] == [v.dtype for v in model.graph.outputs]
    assert [v.name for v in copy.graph.outputs] == [v.name for v in model.graph.outputs]
    return copy, report


def _graph(inputs: str, output: str, body: str, constants: Mapping[str, Any], opset: int = 18) -> ir.Model:
    return parse(
        f'<ir_version: 9, opset_import: ["" : {opset}, "com.microsoft" : 1]> g ({inputs}) => ({output}) {{ {body} }}',
        constants,
    )


def _drawn(*shape: int, seed: int = 0, size: float = 1.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("target", ["cuda", "portable"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_an_encoder_has_half_the_bytes_and_the_same_vectors(target: str, norm: str):
    source, captured = encoder(d_model=64, d_ff=128, heads=4, norm=norm)
    model = captured.clone()
    pipeline.optimize(model, targets.get(target))
    rng = np.random.default_rng(0)
    samples: list[Feeds] = [
        {"input_ids": rng.integers(1, 50, (1, n)), "attention_mask": np.ones((1, n), np.int64)} for n in (3, 20)
    ]
    half, report = _halved(model, samples)
    sizes = [sum(v.const_value.nbytes for v in m.graph.initializers.values() if v.const_value) for m in (half, model)]
    assert sizes[0] <= 0.525 * sizes[1]
    assert {node.inputs[0].dtype for node in nodes_of(half, "MatMul") if node.inputs[0]} == {HALF}
    assert report.changed == 12
    assert report.worst_cosine is not None
    assert 0.9999 < report.worst_cosine < 1
    assert all("Softmax" in each["reason"] for each in report.kept)
    feeds = {
        "input_ids": rng.integers(1, 50, (4, 7)),
        "attention_mask": masks("1111111", "1111000", "0001111", "1010110"),
    }
    wanted = torch_answers(source, feeds)["last_hidden_state"]
    for answer in (run(half), run(half, optimized=True)):
        found = answer(feeds)["last_hidden_state"]
        assert found.dtype == np.float32
        assert compare(found, wanted, feeds["attention_mask"]).min_cosine > 0.9999


MASKS = {
    "fill with -1e9": "keep = Cast <to = 9> (mask) bias = Where (keep, zero, deep)",
    "fill with the lowest float": "keep = Cast <to = 9> (mask) bias = Where (keep, zero, lowest)",
    "fill with -inf": "keep = Cast <to = 9> (mask) bias = Where (keep, zero, never)",
    "(1 - mask) * lowest": "m = Cast <to = 1> (mask) n = Sub (one, m) bias = Mul (n, lowest)",
    "two masks": "m = Cast <to = 1> (mask) n = Sub (one, m) p = Mul (n, deep) bias = Add (p, p)",
}
_FILLS = {"zero": 0.0, "one": 1.0, "deep": -1e9, "lowest": LOWEST, "never": -np.inf}
_WRITTEN = (
    "k = Transpose <perm = [0, 2, 1]> (h) s = MatMul (h, k) t = Add (s, bias) weights = Softmax (t) "
    "y = MatMul (weights, h)"
)
_SPREAD = (
    "f = Unsqueeze (bias, a1) u = Shape <start = 1> (mask) o = Concat <axis = 0> (a0, a0, u, u) wide = Expand (f, o)"
)
_FUSED = "y = com.microsoft.MultiHeadAttention <num_heads = 2> (h, h, h, , , wide)"


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("fused", [False, True], ids=["written out", "kernel"])
def test_masks_stay_finite_and_hide_what_they_hide(form: str, fused: bool):
    constants = {
        "w": _drawn(32, 32, size=0.2),
        "a0": np.array([1]),
        "a1": np.array([1, 2]),
        **{k: np.float32(v) for k, v in _FILLS.items()},
    }
    body = f"h = MatMul (x, w) {MASKS[form]} {_SPREAD} {_FUSED}"
    if not fused:
        body = f"h = MatMul (x, w) {MASKS[form].replace('bias', 'flat')} bias = Unsqueeze (flat, a0) {_WRITTEN}"
    model = _graph("float[B,S,32] x, int64[B,S] mask", "float[B,S,32] y", body, constants)
    sample: Feeds = {"x": _drawn(1, 6, 32, size=0.3), "mask": np.ones((1, 6), np.int64)}
    half, report = _halved(model, [sample])
    feeds: Feeds = {"x": _drawn(3, 6, 32, seed=1, size=0.3), "mask": masks("111100", "001111", "101011")}
    wanted = run(model)(feeds)["y"]
    changed = {**feeds, "x": np.where(feeds["mask"][..., None] == 0, 9, feeds["x"]).astype(np.float32)}
    for answer in (run(half), *([] if fused else [evaluate(half)])):  # The second rounds every step.
        found, other = answer(feeds)["y"], answer(changed)["y"]
        seen = feeds["mask"] != 0
        np.testing.assert_allclose(found[seen], wanted[seen], rtol=0, atol=0.03)
        np.testing.assert_array_equal(found[seen], other[seen])
        assert np.isfinite(answer({**feeds, "mask": masks("111111", "000000", "111111")})["y"][[0, 2]]).all()
        if "inf" not in form:
            assert np.isfinite(answer({**feeds, "mask": feeds["mask"] * 0})["y"]).all()
    clamped = report.notes.get("clamped", [])
    assert [each["now"] for each in clamped] == ([-32752.0] if fused else []), "reported where it happens"


def test_an_additive_mask_of_the_callers_is_clamped_where_it_comes_in():
    model = _graph(
        "float[B,S,32] x, float[B,S] mask", "float[B,S,32] y",
        f"h = MatMul (x, w) {_SPREAD.replace('bias', 'mask')} {_FUSED}",
        {"w": _drawn(32, 32), "a0": np.array([1]), "a1": np.array([1, 2])},
    )  # fmt: skip
    for shown in (0.0, LOWEST):
        sample: Feeds = {"x": _drawn(1, 4, 32), "mask": np.array([[0, 0, 0, shown]], np.float32)}
        half, report = _halved(model, [sample])
        assert {
            node.inputs[0].dtype for node in nodes_of(half, "MultiHeadAttention", "com.microsoft") if node.inputs[0]
        } == {HALF}
        feeds: Feeds = {
            "x": _drawn(2, 4, 32, seed=1),
            "mask": np.where(masks("0011", "0000"), LOWEST, 0).astype(np.float32),
        }
        np.testing.assert_allclose(run(half)(feeds)["y"], run(model)(feeds)["y"], rtol=0, atol=0.05)
        assert bool(report.notes) == (shown == LOWEST)


NORMS = {
    "decomposed": "m = ReduceMean (h, last) c = Sub (h, m) s = Mul (c, c) v = ReduceMean (s, last) "
    "e = Add (v, eps) r = Sqrt (e) n = Div (c, r) g = Mul (n, gamma) y = Add (g, beta)",
    "with a power": "m = ReduceMean (h, last) c = Sub (h, m) s = Pow (c, two) v = ReduceMean (s, last) "
    "e = Add (v, eps) r = Sqrt (e) n = Div (c, r) g = Mul (n, gamma) y = Add (g, beta)",
    "the operator": "y = LayerNormalization <axis = -1, epsilon = 1e-12> (h, gamma, beta)",
    "with the residual": "y = com.microsoft.SkipLayerNormalization <epsilon = 1e-12> (h, zeros, gamma, beta)",
}  # fmt: skip


@pytest.mark.parametrize("form", NORMS)
def test_norms_of_large_values_square_in_fp32(form: str):
    zeros = "shape = Shape (h) zeros = Expand (nought, shape)"
    constants = {
        "w": np.eye(64, dtype=np.float32), "last": np.array([-1]), "eps": np.float32(1e-12), "two": np.float32(2),
        "gamma": _drawn(64, seed=2), "beta": _drawn(64, seed=3), "nought": np.float32(0),
    }  # fmt: skip
    model = _graph(
        "float[B,S,64] x",
        "float[B,S,64] y",
        f"h = MatMul (x, w) {zeros if 'Skip' in NORMS[form] else ''} {NORMS[form]}",
        constants,
    )
    x = _drawn(2, 5, 64)
    x[..., 7], x[1, ..., 9] = 400, -400
    half, report = _halved(model, [{"x": x}])
    for answer in (run(half), *([] if "Skip" in NORMS[form] else [evaluate(half)])):
        np.testing.assert_allclose(answer({"x": x})["y"], run(model)({"x": x})["y"], rtol=0, atol=1e-2)
    assert report.kept
    small, report = _halved(model, [{"x": x / 100}])
    kept = {each["reason"] for each in report.kept}
    assert bool(kept) == (form in ("decomposed", "with a power")), "norms in one operator sum in fp32 by themselves"
    np.testing.assert_allclose(run(small)({"x": x / 100})["y"], run(model)({"x": x / 100})["y"], rtol=0, atol=1e-2)


def test_float_islands_of_a_half_source_stay():
    model = _graph(
        "float16[B,S,8] x", "float16[B,S,8] y",
        "h = MatMul (x, w) f = Cast <to = 1> (h) d = Mul (f, big) p = Softmax (d) b = Cast <to = 10> (p) "
        "y = MatMul (b, w)",
        {"w": _drawn(8, 8).astype(np.float16), "big": np.float32(1e3)},
    )  # fmt: skip
    feeds: Feeds = {"x": _drawn(2, 3, 8).astype(np.float16)}
    half, _ = _halved(model, [feeds])
    assert [n.op_type for n in half.graph] == [n.op_type for n in model.graph]
    assert [v.dtype for n in half.graph for v in n.outputs] == [HALF, FLOAT, FLOAT, FLOAT, HALF, HALF]
    np.testing.assert_array_equal(run(half)(feeds)["y"], run(model)(feeds)["y"])


def test_a_float_model_with_casts_of_its_own_loads():
    model = _graph(
        "float[B,S,8] x", "float[B,S,8] y",
        "h = MatMul (x, w) d = Cast <to = 10> (h) u = Cast <to = 1> (d) e = Cast <to = 11> (u) f = Cast <to = 1> (e) "
        "y = MatMul (f, w)",
        {"w": _drawn(8, 8)},
    )  # fmt: skip
    feeds: Feeds = {"x": _drawn(2, 3, 8)}
    half, _ = _halved(model, [feeds])
    np.testing.assert_allclose(run(half)(feeds)["y"], run(model)(feeds)["y"], rtol=0, atol=0.05)


def test_what_overflows_on_the_samples_stays_and_its_weights_too():
    model = _graph(
        "float[B,S,64] x", "float[B,S,64] y",
        "h = MatMul (x, up) g = Relu (h) r = Add (g, x) d = MatMul (r, down) z = Add (d, x) y = MatMul (z, w)",
        {"up": _drawn(64, 64, size=3e4), "down": _drawn(64, 64, seed=1, size=1e-6), "w": _drawn(64, 64, seed=2)},
    )  # fmt: skip
    feeds: Feeds = {"x": _drawn(2, 3, 64)}
    half, report = _halved(model, [feeds])
    assert {each["reason"].split(" ")[0] for each in report.kept} == {"reaches", "reads"}
    kinds = {v.name: v.dtype for v in half.graph.initializers.values() if v.shape}
    assert kinds == {"up": FLOAT, "down": FLOAT, "w_half": HALF}
    wanted = run(model)(feeds)["y"]
    assert compare(evaluate(half)(feeds)["y"], wanted).min_cosine > 0.9999


def test_attention_whose_scores_may_overflow_stays():
    for size, kind in ((1.0, HALF), (300.0, FLOAT)):
        model = _graph(
            "float[B,S,32] x", "float[B,S,32] y",
            "h = MatMul (x, w) y = com.microsoft.MultiHeadAttention <num_heads = 2> (h, h, h)",
            {"w": np.eye(32, dtype=np.float32)},
        )  # fmt: skip
        half, report = _halved(model, [{"x": _drawn(1, 4, 32, size=size)}])
        (node,) = nodes_of(half, "MultiHeadAttention", "com.microsoft")
        assert node.inputs[0] is not None
        assert node.inputs[0].dtype == kind
        assert [each["reason"][:16] for each in report.kept] == (["scores may reach"] if kind == FLOAT else [])


def test_shared_weights_are_stored_once_also_when_one_reader_stays():
    model = _graph(
        "int64[B,S] ids", "float[B,S,64] y, float[B,S,64] z",
        "e = Gather (table, ids) h = MatMul (e, table) f = MatMul (h, table) y = Softmax (f) g = Mul (h, large) "
        "z = MatMul (g, table)",
        {"table": _drawn(64, 64), "large": np.float32(1e4)},
    )  # fmt: skip
    feeds: Feeds = {"ids": np.arange(6).reshape(2, 3)}
    half, report = _halved(model, [feeds])
    assert report.kept
    assert sum(v.const_value.nbytes for v in half.graph.initializers.values() if v.const_value) <= 1.05 * 64 * 64 * 2
    assert compare(run(half)(feeds)["z"], run(model)(feeds)["z"]).min_cosine > 0.9999


def test_small_constants_do_not_vanish():
    model = _graph(
        "float[B,64] x", "float[B,64] y",
        "h = MatMul (x, w) a = Abs (h) e = Add (a, eps) y = Div (h, e)",
        {"w": np.eye(64, dtype=np.float32), "eps": np.float32(1e-9)},
    )  # fmt: skip
    feeds: Feeds = {"x": np.zeros((2, 64), np.float32)}
    half, report = _halved(model, [{"x": _drawn(2, 64)}])
    np.testing.assert_array_equal(evaluate(half)(feeds)["y"], feeds["x"])
    assert "a constant of 1e-09" in {each["reason"] for each in report.kept}


def test_bodies_stay_and_read_what_became_half_in_fp32():
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["again"]),
            helper.make_node("MatMul", ["state", "h"], ["next"]),
            helper.make_node("MatMul", ["next", "w"], ["row"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [4, 4]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [4, 4]),
            helper.make_tensor_value_info("row", TensorProto.FLOAT, [4, 4]),
        ],
    )
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Loop", ["times", "go", "h"], ["last", "rows"], body=body),
            helper.make_node("MatMul", ["last", "w"], ["y"]),
        ],
        "looped",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4]),
            helper.make_tensor_value_info("rows", TensorProto.FLOAT, [3, 4, 4]),
        ],
        [
            onnx.numpy_helper.from_array(_drawn(4, 4, size=0.4), "w"),
            onnx.numpy_helper.from_array(np.array(3), "times"),
            onnx.numpy_helper.from_array(np.array(True), "go"),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    feeds: Feeds = {"x": _drawn(4, 4, seed=1)}
    half, report = _halved(model, [feeds])
    assert report.changed == 2
    assert [each["reason"] for each in report.kept] == ["has a body of its own"]
    for name, values in run(model)(feeds).items():
        np.testing.assert_allclose(run(half)(feeds)[name], values, rtol=0, atol=1e-2)


def test_a_choice_reads_what_no_input_shows():
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(op_type, ["h", "w"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4])],
        )
        for name, op_type in (("then", "MatMul"), ("else", "Add"))
    }
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("If", ["which"], ["chosen"], **cast("dict[str, Any]", branches)),
            helper.make_node("Mul", ["chosen", "chosen"], ["squares"]),
            helper.make_node("MatMul", ["squares", "w"], ["y"]),
        ],
        "choosing",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4]),
            helper.make_tensor_value_info("which", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
        [onnx.numpy_helper.from_array(_drawn(4, 4, size=0.4), "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    feeds: Feeds = {"x": _drawn(4, 4, seed=1), "which": np.array(True)}
    half, report = _halved(model, [feeds])
    assert [each["reason"] for each in report.kept] == ["has a body of its own"]
    assert {v.dtype for v in nodes_of(half, "Mul")[0].inputs if v} == {HALF}, "what it gives is no mask"
    np.testing.assert_allclose(run(half)(feeds)["y"], run(model)(feeds)["y"], rtol=0, atol=1e-2)
