"""``tfx optimize`` on files of others: torch's own exports, a model without any attention, its own output."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from torch import Tensor, nn

from tfx.errors import CountError, InputError, ParityError
from tfx.exporter import foreign, optimizing
from tfx.exporter.lowering.gelu import BiasGelu
from tfx.exporter.optimizing import optimize
from tfx.runtime.tensors import MASK_PATTERNS, TensorSpec, make_feeds

from .running import Arrays, assert_close, encoder, parse, run

OPSETS = {"reference": (20,), "bert-sdpa": (18, 23), "bert-eager": (18, 20)}
COUNTS = {
    "reference": {"attention": 2, "layer_norm": 4, "rms_norm": 0, "gelu": 2, "rotary": 0},
    "bert-sdpa": {"attention": 1, "layer_norm": 3, "rms_norm": 0, "gelu": 1, "rotary": 0},
    "bert-eager": {"attention": 1, "layer_norm": 3, "rms_norm": 0, "gelu": 1, "rotary": 0},
}


# The embeddings' norm comes after a sum with one position table for every row; CUDA's kernel wants equal shapes.
BROADCAST = [("skip_layer_norm", "inner.embeddings.LayerNorm")]


def refused(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(refusal["rule"], refusal["where"]) for refusal in report["refusals"]]


class Hidden(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, attention_mask: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inner(input_ids=input_ids, attention_mask=attention_mask)["last_hidden_state"]
        return hidden[:, 0], hidden


def bert(implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=50,
        max_position_embeddings=40, initializer_range=0.3,
    )  # fmt: skip
    config._attn_implementation = implementation
    return transformers.BertModel(config, add_pooling_layer=False)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch's own exporter writes, with its own optimizations, at three opsets."""
    folder = tmp_path_factory.mktemp("exports")
    ids = torch.randint(0, 50, (2, 7))
    axes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},) * 2
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name in COUNTS:
            inner = encoder()[0].module if name == "reference" else bert(name.removeprefix("bert-"))
            program = torch.export.export(Hidden(inner).eval(), (torch.ones_like(ids), ids), dynamic_shapes=axes)
            for opset in OPSETS[name]:
                made = torch.onnx.export(
                    program, dynamo=True, opset_version=opset, verbose=False,
                    input_names=["attention_mask", "input_ids"], output_names=["first", "hidden"],
                )  # fmt: skip
                assert made is not None
                made.save(folder / f"{name}-{opset}.onnx")
    logging.getLogger("torch.onnx").setLevel(logging.NOTSET)
    return folder


def feeds(pattern: str, batch: int = 3, sequence: int = 9) -> Arrays:
    specs = [
        TensorSpec("attention_mask", "int64", ("batch", "sequence"), "attention_mask", 2),
        TensorSpec("input_ids", "int64", ("batch", "sequence"), "token_ids", 50),
    ]
    return make_feeds(specs, batch=batch, sequence=sequence, pattern=pattern, seed=sequence)


def ends(path: Path) -> list[tuple[str, int, tuple[Any, ...]]]:
    graph = ir.load(path).graph
    return [
        (str(v.name), int(v.dtype or 0), tuple(d if isinstance(d, int) else d.value for d in v.shape or ()))
        for v in (*graph.inputs, *graph.outputs)
    ]


@pytest.mark.parametrize(("name", "opset"), [(name, opset) for name in OPSETS for opset in OPSETS[name]])
def test_torchs_exports_give_the_counts_of_a_capture_and_equal_numbers(
    exports: Path, tmp_path: Path, name: str, opset: int
) -> None:
    source, out = exports / f"{name}-{opset}.onnx", tmp_path / "out.onnx"
    before = source.read_bytes()
    answer = run(onnx.load(source))
    wanted = [answer(feeds(pattern)) for pattern in MASK_PATTERNS]
    for target in ("cpu", "cuda", "portable"):
        report = optimize(source, out, target=target, force=True)
        assert report["after"]["canonical"] == COUNTS[name], target
        assert refused(report) == (BROADCAST if target == "cuda" and name != "reference" else [])
        assert report["parity"]["passed"] and report["parity"]["max_abs"] <= 1e-5
        assert ends(out) == ends(source)
        answer = run(onnx.load(out))
        for pattern, expected in zip(MASK_PATTERNS, wanted, strict=True):
            assert_close(answer(feeds(pattern)), expected, atol=1e-5)
    assert source.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]


@pytest.mark.parametrize("target", ["cpu", "cuda", "portable"])
def test_its_own_output_is_left_as_it_is(exports: Path, tmp_path: Path, target: str) -> None:
    one, two = tmp_path / "one.onnx", tmp_path / "two.onnx"
    first = optimize(exports / "bert-eager-20.onnx", one, target=target)
    second = optimize(one, two, target=target)
    assert second["before"]["canonical"] == first["after"]["canonical"] == second["after"]["canonical"]
    assert foreign.operators(ir.load(two)) == foreign.operators(ir.load(one))
    assert refused(second) == refused(first) == (BROADCAST if target == "cuda" else [])
    assert second["parity"]["max_abs"] <= 1e-6


CONVOLUTIONS = """
<ir_version: 8, opset_import: ["" : 17]>
cnn (float[N, 3, H, W] pixels) => (float[N, 4] scores, float[N, 8, H, W] features)
{
    c = Conv<pads = [1, 1, 1, 1]>(pixels, w)
    features = LeakyRelu(c)
    p = GlobalAveragePool(features)
    f = Flatten(p)
    scores = MatMul(f, v)
}
"""


@pytest.fixture
def cnn(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    constants = [
        ("w", rng.standard_normal((8, 3, 3, 3)).astype(np.float32)),
        ("v", rng.standard_normal((8, 4)).astype(np.float32)),
    ]
    ir.save(parse(CONVOLUTIONS, constants), tmp_path / "cnn.onnx")
    return tmp_path / "cnn.onnx"


def test_a_model_with_nothing_to_raise_stays_equal_and_says_so(cnn: Path, tmp_path: Path) -> None:
    report = optimize(cnn, tmp_path / "out.onnx", target="portable", opset=17)
    assert not any(report["before"]["canonical"].values())
    assert not any(report["after"]["canonical"].values())
    assert (report["fired"], report["refusals"]) == ({}, [])
    assert report["after"]["ops"] == report["before"]["ops"]
    pixels = np.random.default_rng(1).standard_normal((2, 3, 5, 7)).astype(np.float32)
    wanted, found = (run(onnx.load(path))({"pixels": pixels}) for path in (cnn, tmp_path / "out.onnx"))
    assert_close(found, wanted, atol=1e-6)
    assert ends(tmp_path / "out.onnx") == ends(cnn)


SCALED = """
<ir_version: 10, opset_import: ["" : 23]>
scaled (float[batch, sequence, 16] x, float[batch, sequence] val_1) => (float[batch, sequence, 16] y, float[N] z)
<float quarter = {0.25}, int64[4] split = {0, 0, 2, 8}, int64[3] merge = {0, 0, 16}>
{
    val_7 = MatMul(x, w)
    q = Mul(val_7, quarter)
    val_3 = Reshape(q, split)
    val_4 = Transpose<perm = [0, 2, 1, 3]>(val_3)
    val_5 = Reshape(x, split)
    val_6 = Transpose<perm = [0, 2, 1, 3]>(val_5)
    val_8 = Transpose<perm = [0, 2, 3, 1]>(val_5)
    val_9 = MatMul(val_4, val_8)
    val_10 = Softmax(val_9)
    val_11 = MatMul(val_10, val_6)
    val_12 = Transpose<perm = [0, 2, 1, 3]>(val_11)
    y = Reshape(val_12, merge)
    some = NonZero(y)
    val_13 = Transpose<perm = [1, 0]>(some)
    val_14 = GatherND(y, val_13)
    z = Neg(val_14)
}
"""


@pytest.mark.parametrize(("target", "opset"), [("cpu", None), ("portable", 17), ("portable", 23)])
def test_its_own_output_is_written_again_byte_for_byte(tmp_path: Path, target: str, opset: int | None) -> None:
    """An input that nothing reads is called as the numbered values are; one axis has no name."""
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    ir.save(parse(SCALED, [("w", weight)]), tmp_path / "0.onnx")
    for one, two in (("0", "1"), ("1", "2")):
        report = optimize(tmp_path / f"{one}.onnx", tmp_path / f"{two}.onnx", target=target, opset=opset)
        assert report["after"]["canonical"]["attention"] == 1
    assert (tmp_path / "2.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()
    graph = ir.load(tmp_path / "1.onnx").graph
    made = [value.name for node in graph for value in node.outputs]
    assert [value.name for value in graph.inputs] == ["x", "val_1"]
    assert not {*made} & {"x", "val_1"} and len({*made}) == len(made)
    sizes = [size for node in graph for value in node.outputs for size in value.shape or ()]
    assert {size.value for size in sizes if isinstance(size, ir.SymbolicDim)} <= {"batch", "sequence", "N", None}
    if opset == 23:
        assert not [node for node in graph if node.op_type == "Mul"]  # it is in the node's scale


# --- what fails, and what it leaves behind


def test_a22_external_data_is_read_and_written_beside_the_file(cnn: Path, tmp_path: Path) -> None:
    report = optimize(cnn, tmp_path / "large.onnx", max_inline_bytes=100)
    assert report["parity"]["passed"]
    assert (tmp_path / "large.onnx.data").stat().st_size >= 8 * 27 * 4
    (tmp_path / "moved").mkdir()
    for name in ("large.onnx", "large.onnx.data"):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    optimize(tmp_path / "moved" / "large.onnx", tmp_path / "whole.onnx")
    assert [v.name for v in ir.load(tmp_path / "whole.onnx").graph.outputs] == ["scores", "features"]
    assert not (tmp_path / "whole.onnx.data").exists()


def test_weights_of_the_input_are_never_overwritten(cnn: Path, tmp_path: Path) -> None:
    optimize(cnn, tmp_path / "a.onnx", max_inline_bytes=100)
    # A file that keeps its weights where those of b.onnx would go.
    proto = (tmp_path / "a.onnx").read_bytes().replace(b"a.onnx.data", b"b.onnx.data")
    (tmp_path / "c.onnx").write_bytes(proto)
    (tmp_path / "a.onnx.data").rename(tmp_path / "b.onnx.data")
    before = (tmp_path / "b.onnx.data").read_bytes()
    for force in (False, True):
        with pytest.raises(InputError, match=r"would replace b\.onnx\.data, which c\.onnx reads"):
            optimize(tmp_path / "c.onnx", tmp_path / "b.onnx", force=force, max_inline_bytes=100)
    assert (tmp_path / "b.onnx.data").read_bytes() == before
    with pytest.raises(InputError, match=r"b\.onnx\.data: exists; --force replaces it"):
        optimize(cnn, tmp_path / "b.onnx")


def plant_tanh_for_erf(monkeypatch: pytest.MonkeyPatch) -> None:
    def rewrite(self: BiasGelu, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> ir.Value:
        return op.FastGelu(x, bias, _domain="com.microsoft")

    monkeypatch.setattr(BiasGelu, "rewrite", rewrite)


def test_a_difference_is_found_and_nothing_is_written(exports: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "old.onnx").write_bytes(b"old")
    plant_tanh_for_erf(monkeypatch)
    for out, force in (("new.onnx", False), ("old.onnx", True)):
        with pytest.raises(ParityError, match="parity failed on"):
            optimize(exports / "bert-sdpa-23.onnx", tmp_path / out, force=force)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old.onnx": b"old"}


def test_wrong_counts_are_found_and_nothing_is_written(exports: Path, tmp_path: Path) -> None:
    with pytest.raises(CountError, match="attention: found 1, wanted 3"):
        optimize(exports / "bert-sdpa-23.onnx", tmp_path / "out.onnx", expect={"attention": 3, "gelu": 1})
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_nothing(cnn: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(optimizing, "save", full)
    with pytest.raises(InputError, match=r"out\.onnx: cannot be written: No space left on device"):
        optimize(cnn, tmp_path / "out.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["cnn.onnx"]
