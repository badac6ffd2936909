"""Each way of scaling, written into a graph: near float32, a token at a time, and where it is said to be taken."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tfx.errors import InputError
from tfx.exporter.precision import apply_precision
from tfx.exporter.precision.int8 import plan
from tfx.exporter.precision.products import find_products, units
from tfx.exporter.precision.running import observe
from tfx.exporter.precision.schemes import shifted_scales
from tfx.exporter.targets import get

from ..running import Arrays, nodes_of, parse, run

HEAD = """<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
g (float[{x}] x) => (float[{y}] y) {{ {line} }}"""
MS = "com.microsoft"
LINES = {
    "token": "h = Tanh(x) p = MatMul(h, w) y = Add(p, b)",
    "gemm": "h = Tanh(x) y = Gemm <transB = 1> (h, t, b)",
    "shifted": "h = com.microsoft.Gelu(x) p = MatMul(h, w) y = Add(p, b)",
    "shifted, no bias": "h = com.microsoft.Gelu(x) y = MatMul(h, w)",
    "relu": "h = Relu(x) y = MatMul(h, w)",
    "static": "h = LayerNormalization(x, g, c) p = MatMul(h, w) y = com.microsoft.BiasGelu(p, b)",
    "static, shared": "h = LayerNormalization(x, g, c) p = MatMul(h, v) q = Add(p, d) y = Add(q, h)",
}
KINDS = {"token": "token", "gemm": "token", "relu": "shifted"}


def built(name: str, opset: int = 17, outlier: float = 4.0) -> tuple[ir.Model, list[Arrays]]:
    """A model of one product and six samples; one channel of a norm is far larger than the others."""
    random = np.random.default_rng(0)
    gain = random.uniform(0.5, 1.5, 64).astype(np.float32)
    gain[5] = outlier
    shapes = {"w": (64, 80), "v": (64, 64), "t": (80, 64), "b": (80,), "c": (64,), "d": (64,)}
    values = {key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()} | {"g": gain}
    line = LINES[name]
    used = {key: array for key, array in values.items() if f"{key})" in line or f"{key}," in line or f" {key}" in line}
    x, y = ("T, 64", "T, 80") if name == "gemm" else ("B, S, 64", "B, S, N")
    model = parse(HEAD.format(opset=opset, x=x, y=y, line=line), used)
    shape = (9, 64) if name == "gemm" else (1, 9, 64)
    return model, [{"x": random.standard_normal(shape).astype(np.float32) * 2} for _ in range(6)]


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("name", LINES)
def test_near_float32_and_a_token_at_a_time(name: str, opset: int):
    model, samples = built(name, opset)
    exact = run(model)
    (unit,) = units(find_products(model))
    seen, _ = observe(model, unit.inputs, samples)
    assert plan(unit, seen).scheme.kind == KINDS.get(name, name.partition(",")[0])
    apply_precision(model, "int8", samples, target=get("cpu"))
    onnx.checker.check_model(ir.to_proto(model))
    assert len(nodes_of(model, "MatMulIntegerToFloat", MS)) == 1
    quantized = run(model)
    for sample in samples:
        found, wanted = quantized(sample)["y"], exact(sample)["y"]
        assert np.linalg.norm(found - wanted) <= 0.025 * np.linalg.norm(wanted)
        if name == "gemm":
            tokens = [quantized({"x": sample["x"][i : i + 1]})["y"][0] for i in range(9)]
            np.testing.assert_array_equal(found, np.stack(tokens))
        else:
            tokens = [quantized({"x": sample["x"][:, i : i + 1]})["y"][0, 0] for i in range(9)]
            np.testing.assert_array_equal(found[0], np.stack(tokens))


def test_rounding_leaves_no_mean_error():
    model, samples = built("static, shared")
    exact = run(model)
    apply_precision(model, "int8", samples, target=get("cpu"))
    difference = np.concatenate([run(model)(sample)["y"] - exact(sample)["y"] for sample in samples], axis=1)
    spread = difference.std(axis=1) / np.sqrt(difference.shape[1])
    assert (np.abs(difference.mean(axis=1)) <= 4 * spread + 1e-6).all()


def test_smoothing_goes_into_the_norm_where_nothing_else_reads_it():
    model, samples = built("static")
    apply_precision(model, "int8", samples, target=get("cpu"))
    assert nodes_of(model, "Mul") == []
    model, samples = built("static, shared")
    apply_precision(model, "int8", samples, target=get("cpu"))
    assert len(nodes_of(model, "Mul")) == 1


@pytest.mark.parametrize("name", ["token", "shifted", "static"])
def test_tokens_of_zeros_and_of_huge_values_are_finite(name: str):
    model, samples = built(name)
    exact = run(model)
    apply_precision(model, "int8", samples, target=get("cpu"))
    quantized = run(model)
    zeros = {"x": np.zeros((2, 3, 64), np.float32)}
    huge = {"x": np.full((1, 2, 64), 60, np.float32)}
    for feeds in (zeros, huge):
        found, wanted = quantized(feeds)["y"], exact(feeds)["y"]
        assert np.linalg.norm(found - wanted) <= 0.05 * np.linalg.norm(wanted) + 0.05


def test_what_cannot_be_quantised_is_said():
    model = parse(HEAD.format(opset=17, x="B, 64", y="B, 64", line="y = Tanh(x)"))
    samples = [{"x": np.ones((1, 64), np.float32)}]
    for precision in ("int8", "int8-dynamic"):
        with pytest.raises(InputError, match="found no product with constant float32 weights"):
            apply_precision(model, precision, samples, target=get("cpu"))
    with pytest.raises(InputError, match="found no calibration sample"):
        apply_precision(built("token")[0], "int8", [], target=get("cpu"))
    with pytest.raises(InputError, match="precision int8: found target cuda, wanted one of cpu"):
        apply_precision(built("token")[0], "int8", samples, target=get("cuda"))
    with pytest.raises(InputError, match="precision: found 'int7', wanted one of fp32, "):
        apply_precision(built("token")[0], "int7", samples, target=get("cpu"))


PLAIN = """<ir_version: 8, opset_import: ["" : {opset}]>
g ({inputs}) => (float[B, S, 80] y) {{ {line} }}"""
PRECISIONS = ("int8", "int8-dynamic", "int8-block", "int4")
TAKEN = ["one", "zero_0", "zero_128", "flat", "least", "last_axis", "shift", "steps"]
TAKEN += ["rows_of_64", "w_int8", "w_scales"]


def near(model: ir.Model, precision: str, samples: list[Arrays]) -> None:
    """A precision's graph is valid, runs, and answers nearly what the one before does."""
    wanted = [run(model)(sample)["y"] for sample in samples]
    report = apply_precision(model, precision, samples, target=get("cpu"))
    assert report.changed and (precision == "int4" or not report.kept)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for sample, exact in zip(samples, wanted, strict=True):
        found = run(model)(sample)["y"]
        limit = 0.15 if precision == "int4" else 0.03
        assert np.linalg.norm(found - exact) <= limit * np.linalg.norm(exact)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_without_contrib_nodes_gets_their_domain(precision: str):
    line = "h = Relu(x) y = MatMul(h, w)"
    model = parse(PLAIN.format(opset=17, inputs="float[B, S, 64] x", line=line), {"w": drawn(64, 80)})
    assert MS not in model.opset_imports
    near(model, precision, [{"x": drawn(1, 9, 64, seed=i)} for i in range(4)])


@pytest.mark.parametrize("place", ["input", "value", "subgraph"])
@pytest.mark.parametrize("op_type", ["Relu", "Tanh"])
def test_names_of_the_graph_are_left_alone(op_type: str, place: str):
    """Every fixed name that is written is there before, as something else."""
    inputs, feeds = "float[B, S, 64] x", {}
    line = f"h = {op_type}(x) y0 = MatMul(h, w) s = ReduceSum <keepdims = 0> (y0)"
    if place == "input":
        inputs += "".join(f", float[M] {name}" for name in TAKEN)
        line += "".join(f" {name}_s = ReduceSum <keepdims = 0> ({name})" for name in TAKEN)
        line += " t = Sum(" + ", ".join(f"{name}_s" for name in TAKEN) + ") z = Mul(t, n)"
        feeds = {name: drawn(3) for name in TAKEN}
    elif place == "value":
        chain = ["s", *TAKEN]
        line += "".join(f" {b} = Neg({a})" for a, b in zip(chain, TAKEN, strict=False)) + f" z = Mul({TAKEN[-1]}, n)"
    else:
        chain = ["s", *TAKEN]
        body = " ".join(f"{b} = Neg({a})" for a, b in zip(chain, TAKEN, strict=False))
        line += f" z = If (c) <then_branch = a () => (float zt) {{ {body} zt = Mul({TAKEN[-1]}, n) }},"
        line += " else_branch = b () => (float ze) { ze = Mul(s, n) }>"
    line += " y = Add(y0, z)"
    constants = {"w": drawn(64, 80), "n": np.float32(1e-6), "c": np.array(True)}
    model = parse(PLAIN.format(opset=18, inputs=inputs, line=line), constants)
    near(model, "int8", [{"x": drawn(1, 9, 64, seed=i), **feeds} for i in range(4)])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "line",
    [
        "h = Tanh(x) i = MatMul(h, w) j = MatMul(i, w) y = MatMul(j, v)",
        "h = Relu(x) i = MatMul(h, w) r = Relu(i) j = MatMul(r, w) y = MatMul(j, v)",
        "f = Reshape(x, rows) i = Gemm(f, w) j = Gemm <transB = 1> (i, w) k = Gemm(j, v) y = Reshape(k, back)",
        "f = Reshape(x, rows) i = Gemm(f, w) j = Gemm <transB = 1> (f, w) k = Add(i, j) l = Gemm(k, v)"
        " y = Reshape(l, back)",
        "f = Reshape(x, rows) i = Gemm(f, v) j = Gemm <transB = 1> (i, v) k = Gemm(j, v) y = Reshape(k, back)",
    ],
    ids=["a chain", "a chain of relus", "both ways, chained", "both ways, one input", "both ways, not square"],
)
def test_one_matrix_in_several_places(line: str, precision: str):
    constants = {
        "w": drawn(64, 64),
        "v": drawn(64, 80, seed=1),
        "rows": np.array([-1, 64]),
        "back": np.array([1, -1, 80]),
    }
    model = parse(PLAIN.format(opset=18, inputs="float[B, S, 64] x", line=line), constants)
    near(model, precision, [{"x": drawn(1, 9, 64, seed=i)} for i in range(4)])


def test_a_token_of_negative_values_alone_is_near_too():
    """A GELU gives no positive value there: the zero point must not leave 8 bits."""
    model, samples = built("shifted, no bias")
    negative = {"x": np.random.default_rng(1).uniform(-3, -0.3, (1, 6, 64)).astype(np.float32)}
    exact = run(model)(negative)["y"]
    apply_precision(model, "int8", samples, target=get("cpu"))
    found = run(model)(negative)["y"]
    assert np.linalg.norm(found - exact) <= 0.1 * np.linalg.norm(exact)


def test_the_shifted_zero_point_fits_8_bits():
    scales, zero = shifted_scales(np.array([[-0.17, -0.1], [0, 0], [1, 2], [200, 0]], np.float32), 0.5)
    assert zero.ravel().tolist() == [255, 255, 51, 1]
    np.testing.assert_allclose(scales * zero, 0.5)
