"""Symbolic shapes of foreign graphs: named where they can be, and never by a guess."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tfx.exporter.layout.views import Axes
from tfx.exporter.shapes import forget_invented, infer_shapes, sizes_from_inputs
from tfx.exporter.tidy import tidy

from .running import run


def shaped(text: str, **constants: np.ndarray) -> ir.Model:
    """A model in ONNX's text form, its inner shapes unknown."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    for name, value in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


def shape_of(model: ir.Model, name: str) -> list[int | str | None]:
    value = next(v for node in model.graph for v in node.outputs if v.name == name)
    assert value.shape is not None, name
    return [size if isinstance(size, int) else size.value for size in value.shape]


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


TORCHSCRIPT = """
heads (float[batch, sequence, 32] x, float[batch, sequence, 32] w) => (float[B, S, D] y)
{
    sizes = Shape(x)
    b = Gather<axis = 0>(sizes, zero)
    s = Gather<axis = 0>(sizes, one)
    b1 = Unsqueeze(b, axes)
    s1 = Unsqueeze(s, axes)
    split = Concat<axis = 0>(b1, s1, four, minus)
    x4 = Reshape(x, split)
    t = Transpose<perm = [0, 2, 1, 3]>(x4)
    p = Mul(t, t)
    back = Transpose<perm = [0, 2, 1, 3]>(p)
    merge = Concat<axis = 0>(b1, s1, minus)
    z = Reshape(back, merge)
    y = Add(z, w)
}
"""


def test_sizes_that_the_graph_computes_keep_their_names() -> None:
    model = shaped(
        TORCHSCRIPT, zero=np.array(0), one=np.array(1), axes=numbers(0), four=numbers(4), minus=numbers(-1)
    )  # fmt: skip
    assert shape_of(model, "t") == ["batch", 4, "sequence", 8]
    assert shape_of(model, "z") == ["batch", "sequence", 32]


EXPAND = """
expand (float[batch, sequence] x, float[1, K] table) => (float[A, B, C] y)
{
    sizes = Shape(x)
    b = Slice(sizes, start, end)
    wanted = Concat<axis = 0>(b, minus, minus)
    ones = ConstantOfShape<value = int64[1] {1}>(three)
    less = Mul(ones, minus)
    keeps = Equal(wanted, less)
    target = Where(keeps, ones, wanted)
    wide = Unsqueeze(table, axes)
    spread = Expand(wide, target)
    y = Neg(spread)
}
"""


def test_torchscripts_expand_is_understood_and_still_right() -> None:
    constants = {"start": numbers(0), "end": numbers(1), "minus": numbers(-1), "three": numbers(3), "axes": numbers(0)}
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{EXPAND}')
    for name, value in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    feeds = {"x": np.zeros((3, 2), np.float32), "table": np.arange(5, dtype=np.float32)[None]}
    wanted = run(proto)(feeds)
    model = ir.from_proto(proto)
    tidy(model)
    infer_shapes(model)
    tidy(model)
    assert shape_of(model, next(n.outputs[0].name or "" for n in model.graph if n.op_type == "Expand"))[0] == "batch"
    assert not [node for node in model.graph if node.op_type == "Where"]
    np.testing.assert_array_equal(run(model)(feeds)["y"], wanted["y"])


@pytest.mark.parametrize("order", ["x, m", "m, x"])
def test_axes_of_different_names_are_not_taken_for_equal(order: str) -> None:
    model = shaped(f"two (float[batch, 4] x, float[other, 4] m) => (float[A, B] y) {{ z = Add({order}) y = Neg(z) }}")
    assert shape_of(model, "z")[0] not in ("batch", "other")
    assert shape_of(model, "z")[1] == 4


def test_a_table_cut_to_the_sequence_takes_its_name() -> None:
    model = shaped(
        """cut (float[batch, sequence, 8] x) => (float[A, B, C] y) {
            sizes = Shape<start = 1, end = 2>(x)
            part = Slice(table, zero, sizes, axis)
            z = Add(part, x)
            y = Neg(z)
        }""",
        table=np.zeros((1, 16, 8), np.float32), zero=numbers(0), axis=numbers(1),
    )  # fmt: skip
    assert shape_of(model, "z") == ["batch", "sequence", 8]


def test_what_is_expanded_from_unknown_stays_unknown() -> None:
    """Expand broadcasts both ways: heads that only the input has are not in the target."""
    model = shaped(
        """spread (float[batch, sequence] x, float[sequence, 4] t, int64[N] order) => (float[A, B, C, D] y) {
            some = Reshape(t, order)
            sizes = Shape(x)
            b = Slice(sizes, zero, one)
            s = Slice(sizes, one, two)
            target = Concat<axis = 0>(b, one, s, s)
            z = Expand(some, target)
            y = Neg(z)
        }""",
        zero=numbers(0), one=numbers(1), two=numbers(2),
    )  # fmt: skip
    values = [v for node in model.graph for v in node.outputs if v.name == "z"]
    assert values[0].shape is None or values[0].shape[1] != 1


def test_sizes_are_read_from_the_inputs() -> None:
    model = shaped(
        """inner (float[batch, sequence, 8] x) => (int64[3] whole, int64 one, int64[2] two, float[A, B, C] y) {
            z = Exp(x)
            y = Neg(z)
            sizes = Shape(z)
            whole = Identity(sizes)
            one_ = Gather<axis = 0>(sizes, last)
            one = Identity(one_)
            two_ = Slice(sizes, start, end)
            two = Identity(two_)
        }""",
        last=np.array(-2), start=numbers(1), end=numbers(3),
    )  # fmt: skip
    sizes_from_inputs(model)
    assert {node.inputs[0].name for node in model.graph if node.op_type == "Shape" and node.inputs[0]} == {"x"}
    found = run(model)({"x": np.zeros((2, 5, 8), np.float32)})
    assert [found[name].tolist() for name in ("whole", "one", "two")] == [[2, 5, 8], 5, [5, 8]]


def numbered(text: str, **constants: np.ndarray) -> ir.Model:
    """A model whose axis TWO is called "2"."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    for name, value in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    for value in (*proto.graph.input, *proto.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param == "TWO":
                axis.dim_param = "2"
    return ir.from_proto(proto)


NUMBERED = """
inner (float[batch, TWO, 4] x, float[axis_2, 2] w) => (int64[1] n, float[batch, TWO, 4] y, float[A, 2] v) {
    z = Exp(x)
    y = Neg(z)
    v = Neg(w)
    sizes = Shape(z)
    n_ = Slice(sizes, one, two)
    n = Identity(n_)
}"""


def test_an_axis_that_is_called_2_is_not_a_size() -> None:
    constants = {"one": numbers(1), "two": numbers(2)}
    feeds = {"x": np.zeros((3, 5, 4), np.float32), "w": np.zeros((7, 2), np.float32)}
    plain = numbered(NUMBERED, **constants)
    sizes_from_inputs(plain)  # as a graph is that nobody has inferred anything in
    assert run(plain)(feeds)["n"].tolist() == [5]
    model = numbered(NUMBERED, **constants)
    infer_shapes(model)
    shape = shape_of(model, "z")
    assert shape[0] == "batch" and shape[2] == 4
    assert isinstance(shape[1], str) and shape[1].isidentifier() and shape[1] != "axis_2"  # that is another axis
    sizes_from_inputs(model)
    assert run(model)(feeds)["n"].tolist() == [5]


def test_what_looks_like_a_number_is_one_in_products_alone() -> None:
    axes = Axes("batch", "2")
    assert axes.atoms(ir.SymbolicDim("2")) == ["position"]
    assert axes.atoms(ir.SymbolicDim("batch*8")) == ["row", 8]
    assert axes.atoms(2) == [2]
    assert Axes("batch", "sequence").atoms(ir.SymbolicDim("2")) is None


def test_sizes_that_inference_made_names_for_are_left_open() -> None:
    model = shaped(
        """kept (float[batch, sequence] x) => (float[A] y) {
            some = NonZero(x)
            turned = Transpose<perm = [1, 0]>(some)
            flat = GatherND(x, turned)
            y = Neg(flat)
        }"""
    )
    assert shape_of(model, "some")[0] == 2
    forget_invented(model)
    assert shape_of(model, "some") == [2, None]
    assert shape_of(model, "turned") == [None, 2]
