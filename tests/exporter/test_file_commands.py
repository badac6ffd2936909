"""``tfx inspect`` and ``tfx optimize`` as they are typed: JSON, words, exit codes, one line per error."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from .running import Call, contents, encoder, parse, said

COUNTS = {"attention": 2, "layer_norm": 4, "rms_norm": 0, "gelu": 2, "rotary": 0}


# --- inspect


def test_inspect_json_has_the_stated_keys(tfx: Call, here: Path) -> None:
    result = tfx("inspect", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert set(found) >= {
        "nodes", "ops", "domains", "opset", "ir_version", "inputs", "outputs", "canonical", "refusals",
    }  # fmt: skip
    assert found["canonical"] == COUNTS
    assert found["refusals"] == []
    assert (found["opset"], found["ir_version"]) == (17, 8)
    assert found["domains"] == {"ai.onnx": 17, "com.microsoft": 1}
    assert found["nodes"] == sum(found["ops"].values())
    assert found["ops"]["com.microsoft::MultiHeadAttention"] == 2 * 2  # rows of equal length, and row by row
    assert found["inputs"][0] == {"name": "input_ids", "dtype": "int64", "shape": ["batch", "sequence"]}
    assert found["outputs"] == [{"name": "last_hidden_state", "dtype": "float32", "shape": ["batch", "sequence", 16]}]
    assert found["bundle"]["target"] == "cpu"
    assert found["bytes"] == sum(path.stat().st_size for path in (here / "tfx-model").iterdir()) - len(
        (here / "tfx-model" / "tfx.json").read_bytes()
    )


def test_inspect_counts_what_a_file_means_after_any_lowering(tfx: Call, tmp_path: Path) -> None:
    captured = encoder()[1]
    ir.save(captured, tmp_path / "captured.onnx")
    found = json.loads(tfx("inspect", "captured.onnx", "--json").stdout)
    assert (found["canonical"]["attention"], found["raisable"]) == (0, COUNTS)
    for target, opset in (("portable", 17), ("portable", 23), ("cuda", 18)):
        assert tfx("optimize", "captured.onnx", "--out", "o.onnx", "--target", target, "--opset", opset, "--force"
                   ).exit_code == 0  # fmt: skip
        assert json.loads(tfx("inspect", "o.onnx", "--json").stdout)["canonical"] == COUNTS, target


def test_inspect_in_words(tfx: Call, here: Path) -> None:
    result = tfx("inspect")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tfx-model: ") and "IR 8" in lines[0]
    assert "domains   ai.onnx 17, com.microsoft 1" in lines
    assert "canonical attention 2, layer_norm 4, gelu 2" in lines
    assert "input     attention_mask: int64 (batch, sequence)" in lines
    assert "output    last_hidden_state: float32 (batch, sequence, 16)" in lines
    assert any(line.startswith("operators ") for line in lines)


def test_inspect_can_expect(tfx: Call, here: Path) -> None:
    assert tfx("inspect", "--expect", "attention=2,gelu=2,layer_norm=4").exit_code == 0
    result = tfx("inspect", "--expect", "rotary=1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["canonical"] == COUNTS
    assert result.stderr == "error: canonical counts differ: rotary: found 0, wanted 1\n"


def test_inspect_tells_what_was_refused(tfx: Call, tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[B, 16] x) => (float[B, 16] y)
    <float root = {1.5}, float half = {0.5}, float one = {1.0}>
    { d = Div(x, root) e = Erf(d) s = Add(e, one) m = Mul(x, s) y = Mul(m, half) }
    """
    ir.save(parse(text), tmp_path / "g.onnx")
    result = tfx("inspect", "g.onnx", "--json")
    (refusal,) = json.loads(result.stdout)["refusals"]
    assert (refusal["rule"], refusal["reason"]) == ("gelu_erf", "divisor is 1.5, wanted 1.41421")
    assert "refused   gelu_erf at " in tfx("inspect", "g.onnx").stdout


# --- optimize


def test_optimize_json_and_words(tfx: Call, tmp_path: Path) -> None:
    ir.save(encoder()[1], tmp_path / "in.onnx")
    result = tfx("optimize", "in.onnx", "--out", "out.onnx", "--json", "--expect", "attention=2")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert list(found) == ["out", "before", "after", "fired", "refusals", "parity"]
    assert found["after"]["canonical"] == COUNTS
    assert found["after"]["nodes"] < found["before"]["nodes"]
    assert found["fired"]["packed_attention"] == 2
    assert found["parity"]["passed"]
    result = tfx("optimize", "in.onnx", "--out", "out.onnx", "--force")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "before" in result.stdout and "after" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("out.onnx: equal to in.onnx on 12 outputs, max abs ")


def test_optimize_says_that_the_layout_changed(tfx: Call, tmp_path: Path) -> None:
    ir.save(encoder()[1], tmp_path / "in.onnx")
    result = tfx("optimize", "in.onnx", "--out", "ragged.onnx", "--layout", "ragged")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\nlayout    ragged now, padded before: " in result.stdout
    found = json.loads(tfx("optimize", "ragged.onnx", "--out", "again.onnx", "--json").stdout)
    assert (found["before"]["layout"], found["after"]["layout"]) == ("ragged", "ragged")
    assert "layout" not in tfx("optimize", "in.onnx", "--out", "out.onnx").stdout


def test_optimize_says_when_there_was_nothing_to_raise(tfx: Call, tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[B, 3] x) => (float[B, 3] y) { y = Tanh(x) }'
    ir.save(parse(text), tmp_path / "in.onnx")
    found = json.loads(tfx("optimize", "in.onnx", "--out", "out.onnx", "--json").stdout)
    assert (found["fired"], found["refusals"]) == ({}, [])
    assert not any(found["after"]["canonical"].values())


EXTERNAL = onnx.TensorProto(name="w", dims=[4], data_type=onnx.TensorProto.FLOAT)
EXTERNAL.data_location = onnx.TensorProto.EXTERNAL


def with_external_data(location: str) -> bytes:
    """A model whose weight is said to be in another file."""
    weight = onnx.TensorProto()
    weight.CopyFrom(EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    model = parse('<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { y = Tanh(x) }')
    proto = ir.to_proto(model)
    proto.graph.initializer.append(weight)
    return proto.SerializeToString()


@pytest.mark.parametrize("command", ["optimize", "inspect"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.onnx", None, "missing.onnx: found nothing, wanted "),
        ("empty.onnx", b"", "empty.onnx: not an ONNX file"),
        ("text.onnx", b"this is no model at all, not even a protobuf message", "text.onnx: not an ONNX file"),
        ("image.onnx", b"\x89PNG\r\n\x1a\n" + bytes(100), "image.onnx: not an ONNX file"),
        ("truncated.onnx", "half", "truncated.onnx: not an ONNX file"),
        ("absolute.onnx", with_external_data("/etc/passwd"), 'absolute.onnx: external data "/etc/passwd" leaves'),
        ("above.onnx", with_external_data("../secret"), 'above.onnx: external data "../secret" leaves the folder'),
        ("lost.onnx", with_external_data("w.bin"), "w.bin: found nothing, wanted the external data of lost.onnx, 16"),
        ("newer.onnx", "newer", "newer.onnx: ai.onnx opset 99, wanted at most "),
    ],
)
def test_a_file_that_is_no_model_is_one_line(
    tfx: Call, tmp_path: Path, command: str, name: str, content: bytes | str | None, message: str
) -> None:
    whole = ir.to_proto(encoder()[1])
    if content == "half":
        content = whole.SerializeToString()
        content = content[: len(content) // 2]
    elif content == "newer":
        whole.opset_import[0].version = 99
        content = whole.SerializeToString()
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    before = contents(tmp_path)
    found = said(tfx(command, name, *(["--out", "out.onnx"] if command == "optimize" else [])))
    assert found.removeprefix(f"{tmp_path}/").startswith(message), found
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in.onnx"], "Missing option '--out'"),
        (["--out", "out.onnx"], "Missing argument 'IN.onnx'"),
        (["folder", "--out", "out.onnx"], "folder: found a folder, wanted an .onnx file"),
        (["in.onnx", "--out", "no/out.onnx"], "no/out.onnx: the folder no does not exist"),
        (["in.onnx", "--out", "in.onnx/out.onnx"], "in.onnx/out.onnx: in.onnx is not a folder"),
        (["in.onnx", "--out", "folder"], "folder: found a folder, wanted a file name"),
        (["in.onnx", "--out", "in.onnx"], "in.onnx: is the input itself, wanted another file"),
        (["in.onnx", "--out", "folder/../in.onnx", "--force"], "folder/../in.onnx: is the input itself"),
        (["in.onnx", "--out", "other.onnx"], "other.onnx: exists; --force replaces it"),
        (["in.onnx", "--out", "out.onnx", "--target", "tpu"], "Invalid value for '--target'"),
        (["in.onnx", "--out", "out.onnx", "--opset", "16"], "opset: found 16, wanted 17 to 23"),
        (["in.onnx", "--out", "out.onnx", "--opset", "99"], "opset: found 99, wanted 17 to 23"),
    ],
)  # fmt: skip
def test_bad_input_to_optimize_is_one_line_and_writes_nothing(
    tfx: Call, tmp_path: Path, arguments: list[str], message: str
) -> None:
    ir.save(parse('<ir_version: 8, opset_import: ["" : 17]> g (float[B] x) => (float[B] y) { y = Tanh(x) }'),
            tmp_path / "in.onnx")  # fmt: skip
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.onnx").write_text("other")
    before = contents(tmp_path)
    assert said(tfx("optimize", *arguments)).startswith(message)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("manifest", "message"),
    [(None, "not a bundle: it has no tfx.json"), ('{"format": 99}', "format"), ("{", "tfx.json")],
)
def test_inspect_of_what_is_no_bundle_is_one_line(tfx: Call, here: Path, manifest: str | None, message: str) -> None:
    (here / "tfx-model" / "tfx.json").unlink()
    if manifest is not None:
        (here / "tfx-model" / "tfx.json").write_text(manifest)
    assert message in said(tfx("inspect"))


def test_help_of_every_command_shows_an_example(tfx: Call) -> None:
    for command in ("export", "optimize", "inspect"):
        text = tfx(command, "--help").stdout
        assert f"  tfx {command}" in text.partition("Example:")[2]
