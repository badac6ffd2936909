"""A file of anybody's becomes a model that the pipeline takes, or one clear error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from tfx.errors import BundleError, InputError, SourceError
from tfx.exporter.foreign import input_specs, load, operators, to_canonical_opset
from tfx.exporter.fusion import MEANING, ORIGIN
from tfx.exporter.inspection import inspect
from tfx.exporter.pipeline import raise_model
from tfx.exporter.save import save

from .running import assert_close, encoder, parse, run

SIMPLE = '<ir_version: 8, opset_import: ["" : 17]> g (float[B, 3] x) => (float[B, 3] y) { y = Tanh(x) }'


def stored(tmp_path: Path, proto: onnx.ModelProto | ir.Model) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes((proto if isinstance(proto, onnx.ModelProto) else ir.to_proto(proto)).SerializeToString())
    return path


# --- load


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_damaged_files_are_refused_or_read_but_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(ir.to_proto(parse(SIMPLE)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        inspect(path)
    except InputError as error:
        assert "model.onnx" in str(error) and "\n" not in str(error)


def test_a_model_without_outputs_is_refused(tmp_path: Path) -> None:
    proto = ir.to_proto(parse(SIMPLE))
    del proto.graph.output[:]
    with pytest.raises(SourceError, match="it has no outputs"):
        load(stored(tmp_path, proto))


def test_a_newer_opset_is_refused_with_the_remedy(tmp_path: Path) -> None:
    proto = ir.to_proto(parse(SIMPLE))
    proto.opset_import[0].version = 999
    with pytest.raises(SourceError, match=r"model\.onnx: ai\.onnx opset 999, wanted at most \d+; install a newer onnx"):
        load(stored(tmp_path, proto))


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    content = ir.to_proto(parse(SIMPLE)).SerializeToString().replace(b"Tanh", b"Ta\xff\xfe")
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.onnx: damaged: found b'Ta.* as a name, wanted text"):
        load(tmp_path / "model.onnx")


def test_a_wrong_shape_in_the_file_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    text = SIMPLE.replace("y = Tanh(x)", "a = Relu(x) b = Sigmoid(a) y = Tanh(b)")
    proto = onnx.parser.parse_model(text)
    proto.graph.value_info.append(helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [7, 7]))
    model = ir.from_proto(proto)
    to_canonical_opset(model, "model.onnx")
    assert str(model.graph[1].outputs[0].shape) in ("[B,3]", "[7,7]")
    assert not caplog.records


def test_a22_external_data_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    model = parse(SIMPLE)
    model.graph.register_initializer(ir.val("w", const_value=ir.tensor(np.zeros(1000, np.float32), name="w")))
    save(model, tmp_path / "model.onnx", max_inline_bytes=0)
    assert load(tmp_path / "model.onnx").graph.initializers["w"].const_value is not None
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(BundleError, match=r"model\.onnx\.data: found 100 bytes, wanted at least 4000"):
        load(tmp_path / "model.onnx")
    data.unlink()
    with pytest.raises(BundleError, match=r"model\.onnx\.data: found nothing"):
        load(tmp_path / "model.onnx")


# --- to the canonical opset


def test_functions_are_inlined() -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 23, "mine" : 1]>
    g (float[B, 3] x) => (float[B, 3] y) { y = mine.twice(x) }
    <domain: "mine", opset_import: ["" : 23]> twice (a) => (b) { b = Add(a, a) }
    """)
    imported = ir.from_proto(model)
    to_canonical_opset(imported, "model.onnx")
    assert operators(imported) == {"Add": 1}
    x = {"x": np.ones((2, 3), np.float32)}
    assert_close(run(imported)(x), run(model)(x), atol=0)


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 20, 22, 23])
def test_older_opsets_are_converted_and_stay_equal(opset: int) -> None:
    mean = "ReduceMean<axes = [-1]>(x)" if opset < 18 else "ReduceMean(x, last)"
    text = f"""<ir_version: 7, opset_import: ["" : {opset}]>
    g (float[B, S, 4] x) => (float[B, S, 4] y) {"<int64[1] last = {-1}>" if opset >= 18 else ""}
    {{ m = {mean} d = Sub(x, m) y = Softmax<axis = -1>(d) }}"""
    before = ir.to_proto(parse(text))
    model = ir.from_proto(before)
    to_canonical_opset(model, "model.onnx")
    assert model.opset_imports[""] == 23
    x = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}
    assert_close(run(model)(x), run(before)(x), atol=1e-6)


def test_what_cannot_be_converted_is_refused_with_the_reason(caplog: pytest.LogCaptureFixture, capfd) -> None:
    text = SIMPLE.replace("17", "6").replace("Tanh(x)", "Upsample<height_scale = 1.0, width_scale = 1.0>(x)")
    model = ir.from_proto(onnx.parser.parse_model(text))
    with pytest.raises(SourceError, match=r"^mine\.onnx: opset 6 cannot be converted to 23: .") as caught:
        to_canonical_opset(model, "mine.onnx")
    assert "\n" not in str(caught.value)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_a_newer_opset_than_the_canonical_one_is_refused() -> None:
    model = parse(SIMPLE.replace("17", "24").replace("ir_version: 8", "ir_version: 11"))
    with pytest.raises(SourceError, match=r"^mine\.onnx: opset 24, wanted one that converts to 23$"):
        to_canonical_opset(model, "mine.onnx")


def test_what_nodes_remember_survives_the_conversion() -> None:
    model = parse(SIMPLE)
    (node,) = model.graph
    node.name = "n"
    node.metadata_props.update({ORIGIN: "layers.0", MEANING: "gelu"})
    to_canonical_opset(model, "mine.onnx")
    assert dict(model.graph[0].metadata_props) == {ORIGIN: "layers.0", MEANING: "gelu"}


# --- inputs


def specs(inputs: str, nodes: str = "y = Relu(x)") -> list[tuple]:
    model = parse(f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[B, D] y) {{ {nodes} }}')
    return [(spec.name, spec.dtype, spec.shape, spec.role, spec.limit) for spec in input_specs(model, "m.onnx")]


def test_roles_limits_and_axes_of_inputs() -> None:
    model = ir.from_proto(ir.to_proto(encoder()[1]))
    found = {spec.name: spec for spec in input_specs(model, "m.onnx")}
    assert [(s.role, s.limit, s.shape) for s in found.values()] == [
        ("token_ids", 50, ("batch", "sequence")),
        ("attention_mask", None, ("batch", "sequence")),
    ]


def test_the_first_axis_is_the_batch_whatever_it_is_called() -> None:
    assert specs("float[N, 4] x") == [("x", "float32", ("batch", 4), "features", None)]
    assert specs("float[batch_size, length] x, int64[rows, length] attention_mask")[1][2] == ("batch", "length")
    assert specs("float[3, 4] x")[0][2] == (3, 4)
    # A name that also stands elsewhere means something else.
    assert [spec[2] for spec in specs("float[S, B] x, int64[B, S] m")] == [("S", "B"), ("B", "S")]


def test_initializers_among_the_inputs_are_no_inputs() -> None:
    proto = ir.to_proto(parse(SIMPLE))
    proto.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [3]))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "w"))
    assert [spec.name for spec in input_specs(ir.from_proto(proto), "m.onnx")] == ["x"]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None), "input x has no known type and rank"),
        (helper.make_tensor_value_info("x", onnx.TensorProto.STRING, [3]), "input x is STRING, wanted one of bool"),
        (helper.make_tensor_value_info("x", onnx.TensorProto.BFLOAT16, [3]), "input x is BFLOAT16, wanted one of"),
    ],
)
def test_inputs_that_no_array_can_be_made_for_are_refused(declared: onnx.ValueInfoProto, message: str) -> None:
    proto = ir.to_proto(parse(SIMPLE))
    proto.graph.input[0].CopyFrom(declared)
    with pytest.raises(SourceError, match=f"m.onnx: {message}"):
        input_specs(ir.from_proto(proto), "m.onnx")


def test_operators_are_counted_with_their_domain_most_frequent_first() -> None:
    model = parse("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[B, 3] x) => (float[B, 3] y) { a = Relu(x) b = com.microsoft.FastGelu(a) c = Tanh(b) y = Relu(c) }""")
    assert list(operators(model).items()) == [("Relu", 2), ("Tanh", 1), ("com.microsoft::FastGelu", 1)]


def test_a_graph_inside_a_graph_is_seen() -> None:
    """GELU in a branch of an If is raised as it is outside."""
    pieces = "d = Div(x, root) e = Erf(d) s = Add(e, one) m = Mul(x, s) {} = Mul(m, half)"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
    g (float[B, 3] x, bool c) => (float[B, 3] y)
    <float root = {{1.4142135}}, float half = {{0.5}}, float one = {{1.0}}>
    {{ y = If(c) <then_branch = t () => (float[B, 3] p) {{ {pieces.format("p")} }},
                  else_branch = f () => (float[B, 3] q) {{ q = Relu(x) }}> }}""")
    imported = ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))
    assert operators(imported)["Erf"] == 1
    report = raise_model(imported)
    x = {"x": np.linspace(-3, 3, 6, dtype=np.float32).reshape(2, 3), "c": np.array(True)}
    assert_close(run(imported)(x), run(model)(x), atol=1e-6)
    assert report.counts["gelu"] == 1
