"""``tfx optimize`` on files of every kind: what is kept, what inputs mean, what is refused, and its own output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from tfx.errors import BundleError, InputError, ParityError, SourceError
from tfx.exporter import pair
from tfx.exporter.foreign import input_specs
from tfx.exporter.optimizing import optimize

from .running import Call, assert_close, contents, encoder, parse, run, said

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '
TANH = HEAD + "(float[B, 3] x) => (float[B, 3] y) { y = Tanh(x) }"


def stored(model: onnx.ModelProto | ir.Model | str, path: Path) -> Path:
    model = parse(model) if isinstance(model, str) else model
    path.write_bytes((model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)).SerializeToString())
    return path


def wrapped(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], **more: Any) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, **more)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


FLOATS = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
RESULT = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])


# --- its own output


@pytest.mark.parametrize("target", ["cpu", "cuda", "portable"])
def test_its_own_output_gives_the_same_bytes(tmp_path: Path, target: str) -> None:
    stored(encoder()[1], tmp_path / "0.onnx")
    for number in range(3):
        report = optimize(tmp_path / f"{number}.onnx", tmp_path / f"{number + 1}.onnx", target=target)
        assert report["after"]["canonical"]["attention"] == 2
    one, two, three = ((tmp_path / f"{number}.onnx").read_bytes() for number in (1, 2, 3))
    assert one == two == three


# --- what is kept


def test_what_people_wrote_is_kept(tmp_path: Path) -> None:
    proto = ir.to_proto(parse(TANH))
    proto.producer_name, proto.producer_version, proto.doc_string = "me", "7", "mine"
    proto.domain, proto.model_version = "org.me", 3
    proto.graph.doc_string = "a graph"
    proto.graph.input[0].doc_string = "an input"
    proto.metadata_props.add(key="author", value="I")
    proto.graph.output[0].metadata_props.add(key="unit", value="mm")
    optimize(stored(proto, tmp_path / "in.onnx"), tmp_path / "out.onnx")
    found = onnx.load(tmp_path / "out.onnx")
    for field in ("producer_name", "producer_version", "doc_string", "domain", "model_version"):
        assert getattr(found, field) == getattr(proto, field), field
    assert {entry.key: entry.value for entry in found.metadata_props} == {"author": "I"}
    assert (found.graph.name, found.graph.doc_string) == ("g", "a graph")
    assert found.graph.input[0] == proto.graph.input[0] and found.graph.output[0] == proto.graph.output[0]
    assert found.ir_version >= 10  # that values have metadata


def test_an_initializer_among_the_inputs_can_still_be_set(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.full(3, 2, np.float32), "w")
    listed = helper.make_tensor_value_info("w", TensorProto.FLOAT, [3])
    proto = wrapped([helper.make_node("Mul", ["x", "w"], ["y"])], [FLOATS, listed], [RESULT], initializer=[weight])
    optimize(stored(proto, tmp_path / "in.onnx"), tmp_path / "out.onnx")
    x = np.ones((1, 3), np.float32)
    answer = run(onnx.load(tmp_path / "out.onnx"))
    assert answer({"x": x})["y"].tolist() == [[2, 2, 2]]
    assert answer({"x": x, "w": np.full(3, 5, np.float32)})["y"].tolist() == [[5, 5, 5]]


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_other_floats_stay_equal(tmp_path: Path, kind: str) -> None:
    text = TANH.replace("float[", f"{kind}[").replace("y = Tanh(x)", "t = Tanh(x) y = Softmax<axis = -1>(t)")
    report = optimize(stored(text, tmp_path / "in.onnx"), tmp_path / "out.onnx", target="portable")
    assert report["parity"]["max_abs"] <= 1e-3
    x = np.linspace(-2, 2, 6).reshape(2, 3).astype("float64" if kind == "double" else kind)
    found, wanted = (run(onnx.load(tmp_path / name))({"x": x}) for name in ("out.onnx", "in.onnx"))
    assert_close(found, wanted, atol=0)


def test_an_lstm_stays_the_same_to_the_bit_and_the_command_says_so(tfx: Call, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"w": (1, 16, 3), "r": (1, 16, 4), "b": (1, 32)}
    weights = [(name, rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()]
    text = HEAD + "(float[S, B, 3] x) => (float[S, D, B, 4] y) { y = LSTM<hidden_size = 4>(x, w, r, b) }"
    stored(parse(text, weights), tmp_path / "in.onnx")
    result = tfx("optimize", "in.onnx", "--out", "out.onnx")
    assert result.exit_code == 0, result.stderr
    assert "nothing to raise: no attention, norm or GELU in pieces was found" in result.stdout
    x = {"x": rng.standard_normal((5, 2, 3)).astype(np.float32)}
    assert_close(run(onnx.load(tmp_path / "out.onnx"))(x), run(onnx.load(tmp_path / "in.onnx"))(x), atol=0)


def test_fixed_sizes_and_no_inputs(tmp_path: Path) -> None:
    text = HEAD + "(float[1, 128] x) => (float[1, 128] y) { y = Tanh(x) }"
    report = optimize(stored(text, tmp_path / "fixed.onnx"), tmp_path / "out.onnx")
    assert 1 <= report["parity"]["cases"] <= 2
    proto = wrapped([helper.make_node("Constant", [], ["y"], value_floats=[1.0, 2.0])], [],
                    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])  # fmt: skip
    assert optimize(stored(proto, tmp_path / "none.onnx"), tmp_path / "out.onnx", force=True)["parity"]["passed"]


# --- what inputs mean


def roles(inputs: str, body: str, constants: dict[str, Any]) -> dict[str, tuple[str, int | None]]:
    model = parse(f"{HEAD}({inputs}) => (float[A, C, D] y) {{ {body} }}", constants)
    return {spec.name: (spec.role, spec.limit) for spec in input_specs(model, "m")}


def test_inputs_are_known_by_use_whatever_they_are_called() -> None:
    constants = {"words": np.zeros((30, 4), np.float32), "two": np.zeros((2, 4), np.float32), "one": np.float32(1),
                 "low": np.float32(-1e9), "axes": np.array([2])}  # fmt: skip
    look = "e = Gather(words, a) f = Gather(two, b) h = Add(e, f) "
    attend = "c1 = Cast<to = 1>(c) c2 = Sub(one, c1) c3 = Mul(c2, low) c4 = Unsqueeze(c3, axes) y = Add(h, c4)"
    found = roles("int64[B, S] a, int64[B, S] b, int64[B, S] c", look + attend, constants)
    assert found == {"a": ("token_ids", 30), "b": ("token_type_ids", 2), "c": ("attention_mask", None)}
    ignore = "c3 = Unsqueeze(c, axes) y = Where(c3, low, h)"
    assert roles("int64[B, S] a, int64[B, S] b, bool[B, S] c", look + ignore, constants)["c"][0] == "padding_mask"
    keep = "c3 = Unsqueeze(c, axes) y = Where(c3, h, low)"
    assert roles("int64[B, S] a, int64[B, S] b, bool[B, S] c", look + keep, constants)["c"][0] == "attention_mask"


PICKY = HEAD + "(int64[B] i) => (float[B, 4] y) { j = Sub(i, start) t = Tanh(table) y = Gather(t, j) }"


def test_a_model_that_fails_on_generated_inputs_says_how_to_give_some(tfx: Call, tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    stored(parse(PICKY, {"start": np.array(1000), "table": table}), tmp_path / "in.onnx")
    message = said(tfx("optimize", "in.onnx", "--out", "out.onnx"), code=1)
    assert "in.onnx: does not run on generated inputs, so nothing can be proven" in message
    assert "inputs were taken for: i int64 [batch] as token_ids" in message and "--inputs FILE.npz" in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]
    np.savez(tmp_path / "given.npz", i=np.array([1000, 1002]))
    result = tfx("optimize", "in.onnx", "--out", "out.onnx", "--inputs", "given.npz", "--json")
    assert (result.exit_code, json.loads(result.stdout)["parity"]["cases"]) == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("z=features", "found no input of that name"),
        ("x", "says nothing of x"),
        ("x=tokens", 'found role "tokens", wanted one of'),
        ("x=token_ids", "found role token_ids for float32, wanted integers"),
        ("x=features:0", 'found limit "0"'),
        ("x:int64:batch,3", "found dtype int64, wanted float32"),
        ("x:float32:batch,4", "found axes batch,4, the file has batch,3"),
        ("x:float32:batch,0", 'found axis "0"'),
    ],
)
def test_what_is_said_of_an_input_must_fit(tfx: Call, tmp_path: Path, text: str, message: str) -> None:
    stored(TANH, tmp_path / "in.onnx")
    assert message in said(tfx("optimize", "in.onnx", "--out", "out.onnx", "--input", text))
    assert not (tmp_path / "out.onnx").exists()


def test_given_arrays_must_fit(tmp_path: Path) -> None:
    stored(TANH, tmp_path / "in.onnx")
    for arrays, message in (
        ({"z": np.zeros(3)}, "found arrays z, wanted x"),
        ({"x": np.zeros((2, 3))}, r"x is float64 \[2, 3\], wanted float32 \[batch, 3\]"),
        ({"x": np.array([{}], object)}, "not an .npz of plain arrays"),
    ):
        np.savez(tmp_path / "given.npz", **arrays)  # pyright: ignore[reportArgumentType]
        with pytest.raises(InputError, match=message):
            optimize(tmp_path / "in.onnx", tmp_path / "out.onnx", feeds=tmp_path / "given.npz")


# --- what is refused


def twice() -> onnx.ModelProto:
    return wrapped([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Tanh", ["x"], ["y"])], [FLOATS], [RESULT])


def of_sequences() -> onnx.ModelProto:
    inputs = [helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["N", 3]),
              helper.make_tensor_value_info("i", TensorProto.INT64, [])]  # fmt: skip
    return wrapped([helper.make_node("SequenceAt", ["s", "i"], ["y"])], inputs, [RESULT])


def optional() -> onnx.ModelProto:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", 3]))
    nodes = [helper.make_node("OptionalGetElement", ["o"], ["y"])]
    return wrapped(nodes, [helper.make_value_info("o", kind)], [RESULT])


def newer() -> onnx.ModelProto:
    proto = ir.to_proto(parse(TANH))
    proto.ir_version = 99
    return proto


@pytest.mark.parametrize("command", ["optimize", "inspect"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (twice, "y is made twice, by Relu and by Tanh; wanted one name for each"),
        (of_sequences, "input s is a sequence, wanted a tensor"),
        (optional, "input o is an optional, wanted a tensor"),
        (newer, "IR version 99, wanted at most "),
    ],
)
def test_what_cannot_be_read_is_one_line(tfx: Call, tmp_path: Path, command: str, make: Any, message: str) -> None:
    stored(make(), tmp_path / "in.onnx")
    before = contents(tmp_path)
    assert f"in.onnx: {message}" in said(tfx(command, "in.onnx", *(["--out", "o.onnx"] * (command == "optimize"))))
    assert contents(tmp_path) == before


def test_domains_of_others_are_kept_or_named(tmp_path: Path) -> None:
    ml = parse(
        '<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]> g (float[B, 3] x) => (float[B, 3] y) '
        '{ t = Tanh(x) y = ai.onnx.ml.Normalizer<norm = "L2">(t) }'
    )
    stored(ml, tmp_path / "ml.onnx")
    report = optimize(tmp_path / "ml.onnx", tmp_path / "out.onnx")
    assert report["after"]["ops"] == {"Tanh": 1, "ai.onnx.ml::Normalizer": 1}
    with pytest.raises(InputError, match=r"target portable: found operators of ai\.onnx\.ml"):
        optimize(tmp_path / "ml.onnx", tmp_path / "portable.onnx", target="portable")
    mine = wrapped([helper.make_node("Odd", ["x"], ["y"], domain="mine")], [FLOATS], [RESULT])
    mine.opset_import.append(helper.make_opsetid("mine", 1))
    with pytest.raises(SourceError, match=r"found operators of mine, wanted ones that onnxruntime loads"):
        optimize(stored(mine, tmp_path / "mine.onnx"), tmp_path / "other.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.onnx", "ml.onnx", "out.onnx"]


# --- a pair is replaced whole


def test_a_kill_between_the_two_moves_leaves_the_old_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + "(float[B, 3] x) => (float[B, 9] y) { y = MatMul(x, w) }"
    for name, factor in (("old", 1), ("new", 2)):
        weight = np.arange(27, dtype=np.float32).reshape(3, 9) * factor
        weight = np.tile(weight, (1, 40))
        stored(parse(text.replace("9]", "360]"), {"w": weight}), tmp_path / f"{name}.onnx")
    out, x = tmp_path / "out.onnx", {"x": np.ones((1, 3), np.float32)}
    optimize(tmp_path / "old.onnx", out, max_inline_bytes=10)

    def answer() -> float:
        import onnxruntime

        return float(onnxruntime.InferenceSession(str(out)).run(None, x)[0][0, 1])  # pyright: ignore

    flush, calls = pair._flush, []

    def killed(path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:  # the weights have moved, the model has not
            raise KeyboardInterrupt
        flush(path)

    with monkeypatch.context() as patch:
        patch.setattr(pair, "_flush", killed)
        with pytest.raises(KeyboardInterrupt):
            optimize(tmp_path / "new.onnx", out, force=True, max_inline_bytes=10)
    assert answer() == 1 + 10 + 19
    optimize(tmp_path / "new.onnx", out, force=True, max_inline_bytes=10)
    assert answer() == 2 * (1 + 10 + 19)
    data = [path.name for path in tmp_path.iterdir() if path.name.endswith(".data")]
    assert len(data) == 1  # neither the old weights nor what the killed run left
    with pytest.raises(ParityError):
        monkeypatch.setattr("tfx.exporter.proof.judge", lambda *_: (_never(), False))
        optimize(tmp_path / "old.onnx", out, force=True, max_inline_bytes=10)
    assert answer() == 2 * (1 + 10 + 19)


def _never() -> Any:
    from tfx.runtime.parity import Comparison

    return Comparison(float("nan"), float("nan"), "planted")


def test_the_weights_of_the_source_must_be_whole(tmp_path: Path) -> None:
    text = HEAD + "(float[B, 3] x) => (float[B, 300] y) { y = MatMul(x, w) }"
    stored(parse(text, {"w": np.ones((3, 300), np.float32) * np.arange(300, dtype=np.float32)}), tmp_path / "in.onnx")
    optimize(tmp_path / "in.onnx", tmp_path / "big.onnx", max_inline_bytes=10)
    (tmp_path / "big.onnx.data").write_bytes(b"short")
    with pytest.raises(BundleError, match=r"big\.onnx\.data: found 5 bytes, wanted at least 3600"):
        optimize(tmp_path / "big.onnx", tmp_path / "out.onnx")
