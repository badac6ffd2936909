"""From a source to a bundle: what is in it, what it promises, and what a failure leaves behind."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tfx.errors import BundleError, CountError, InputError, ParityError
from tfx.exporter import foreign
from tfx.exporter.export import export
from tfx.exporter.lowering.gelu import BiasGelu
from tfx.exporter.metadata import count
from tfx.exporter.pipeline import Report, lower_model, raise_model
from tfx.exporter.save import save
from tfx.exporter.sources import reference
from tfx.exporter.targets import DATA_SUFFIX, TARGETS, get
from tfx.exporter.versions import nodes
from tfx.models.config import EncoderConfig
from tfx.runtime.bundle import Bundle
from tfx.runtime.parity import verify_bundle
from tfx.runtime.tensors import default_cases

from .running import MASK, TINY, contents, encoder, source_of, torch_answers

road = importlib.import_module("tfx.exporter.export")
COUNTS = {"attention": 2, "layer_norm": 4, "rms_norm": 0, "gelu": 2, "rotary": 0}


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The road from a graph that is already captured."""
    monkeypatch.setattr(road, "capture", lambda source: encoder(pooling="mean")[1].clone())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(encoder(pooling="mean")[0], tmp_path_factory.mktemp("export") / "tiny")


def made(out: Path, **options: Any) -> Bundle:
    return export(encoder(pooling="mean")[0], out, **options)


# --- what is in the bundle


def test_a_bundle_holds_model_manifest_and_golden(bundle: Bundle) -> None:
    assert sorted(contents(bundle.path)) == ["golden.safetensors", "model.onnx", "tfx.json"]
    assert [path.name for path in bundle.path.parent.iterdir()] == ["tiny"]
    manifest = json.loads((bundle.path / "tfx.json").read_text())
    assert manifest["format"] == 1
    assert manifest["source"]["kind"] == "reference" and len(manifest["source"]["sha256"]) == 64
    assert [(spec["name"], spec["dtype"], spec["shape"], spec["limit"]) for spec in manifest["inputs"]] == [
        ("input_ids", "int64", ["batch", "sequence"], 50),
        ("attention_mask", "int64", ["batch", "sequence"], 2),
    ]
    assert [(spec["name"], spec["dtype"], spec["shape"]) for spec in manifest["outputs"]] == [
        ("last_hidden_state", "float32", ["batch", "sequence", 16]),
        ("sentence_embedding", "float32", ["batch", 16]),
    ]
    assert (manifest["max_length"], manifest["pad_id"]) == (40, 0)
    assert manifest["pooling"] == {"mode": "mean", "normalize": False, "output": "sentence_embedding"}
    assert (manifest["target"], manifest["precision"], manifest["layout"]) == ("cpu", "fp32", "ragged")
    assert manifest["counts"] == COUNTS
    assert manifest["refusals"] == []
    assert manifest["tolerance"] == {"max_abs": 1e-4, "min_cosine": 0.99999}
    assert set(manifest["versions"]) >= {"tfx-onnx", "torch", "onnx", "onnx-ir", "onnxscript"}
    assert set(manifest["files"]) == {"model.onnx", "golden.safetensors"}


def test_parity_is_recorded_and_holds_again(bundle: Bundle) -> None:
    parity = bundle.manifest.parity
    assert parity is not None
    assert parity["passed"] and parity["provider"] == "cpu"
    assert 0 < parity["max_abs"] <= 2e-5
    assert parity["cases"] == len(default_cases(bundle.manifest.inputs, 40))
    again = verify_bundle(bundle)
    assert again.passed and again.max_abs <= 2e-5


def test_the_golden_is_what_torch_answers_at_every_shape_and_mask(bundle: Bundle) -> None:
    source, _ = encoder(pooling="mean")
    golden = bundle.golden()
    assert [case.id for case in golden] == [case.id for case in default_cases(source.inputs, 40)]
    for case in golden:
        for name, wanted in torch_answers(source, case.inputs).items():
            np.testing.assert_allclose(case.outputs[name], wanted, rtol=0, atol=1e-6)


def test_the_manifest_says_what_the_graph_is(bundle: Bundle) -> None:
    model = foreign.load(bundle.model_path)
    assert bundle.manifest.model == {
        "file": "model.onnx", "opset": 17, "ir_version": 8, "domains": ["", "com.microsoft"],
    }  # fmt: skip
    assert (model.opset_imports, model.ir_version) == ({"": 17, "com.microsoft": 1}, 8)
    assert {node.domain for node in model.graph} == set(bundle.manifest.model["domains"])
    assert count(model) == COUNTS


def test_the_file_tells_nothing_about_this_machine(bundle: Bundle) -> None:
    text = bundle.model_path.read_bytes() + (bundle.path / "tfx.json").read_bytes()
    here = [str(Path.cwd()), str(Path(__file__).parent), str(bundle.path.parent), str(Path.home()), "site-packages"]
    for trace in (*here, ".py", 'File "', "pkg.torch", "stack_trace", "Traceback"):
        assert trace.encode() not in text, trace
    model = ir.load(bundle.model_path)
    assert not any(node.metadata_props or node.doc_string for node in model.graph)


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize(
    ("target", "opset", "written", "ir_version"),
    [
        ("cpu", None, 17, 8), ("cpu", 20, 20, 9), ("cuda", None, 17, 8), ("web", None, 17, 8),
        ("portable", None, 18, 8), ("portable", 17, 17, 8), ("portable", 21, 21, 10), ("portable", 23, 23, 11),
    ],
)  # fmt: skip
def test_a23_a29_opset_ir_and_domains_are_the_lowest_and_in_the_manifest(
    tmp_path: Path, target: str, opset: int | None, written: int, ir_version: int
) -> None:
    bundle = made(tmp_path / "out", target=target, opset=opset)
    found = bundle.manifest.model
    assert (found["opset"], found["ir_version"]) == (written, ir_version)
    assert found["domains"] == ([""] if target == "portable" else ["", "com.microsoft"])
    model = ir.load(bundle.model_path)
    assert (model.opset_imports[""], model.ir_version) == (written, ir_version)
    assert (b"com.microsoft" in bundle.model_path.read_bytes()) == (target != "portable")
    # Nodes have metadata since IR 10; before, the model remembers for them.
    loaded = foreign.load(bundle.model_path)
    assert count(loaded) == COUNTS
    assert ("tfx.meanings" in model.metadata_props) == (ir_version < 10)
    assert sum(node.metadata_props.get("tfx.origin") == "layers.1.attention" for node in nodes(loaded)) >= 1


@pytest.mark.usefixtures("captured_once")
def test_a22_large_weights_go_beside_the_model_and_move_with_it(tmp_path: Path, monkeypatch) -> None:
    bundle = made(tmp_path / "out", max_inline_bytes=1000)
    assert sorted(contents(bundle.path)) == ["golden.safetensors", "model.onnx", "model.onnx.data", "tfx.json"]
    assert set(bundle.manifest.files) == {"golden.safetensors", "model.onnx", "model.onnx.data"}
    assert bundle.model_path.stat().st_size < (bundle.path / "model.onnx.data").stat().st_size
    assert str(tmp_path).encode() not in bundle.model_path.read_bytes()
    moved = tmp_path / "elsewhere"
    shutil.move(bundle.path, moved)
    monkeypatch.chdir("/")
    assert verify_bundle(Bundle.open(moved)).max_abs <= 2e-5
    (moved / "model.onnx.data").unlink()
    with pytest.raises(BundleError, match=r"model\.onnx\.data: found nothing"):
        Bundle.open(moved)


class Shared(nn.Module):
    """One layer applied six times, and an output that is the embedding's own transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 128)
        self.layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, activation="gelu")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for _ in range(6):
            x = self.layer(x, src_key_padding_mask=attention_mask == 0)
        return F.linear(x, self.embedding.weight)


def test_a20_a_shared_weight_is_stored_once(tmp_path: Path, monkeypatch) -> None:
    torch.manual_seed(0)
    module = Shared()
    source = source_of(module, "input_ids:int64:batch,sequence", MASK, max_length=16)
    canonical = road.capture(source)
    monkeypatch.setattr(road, "capture", lambda source: canonical.clone())
    path = export(source, tmp_path / "out").model_path
    raise_model(canonical)
    assert count(canonical)["attention"] == 6
    sizes = {"cpu": path.stat().st_size}
    for target in ("cuda", "portable"):
        model = canonical.clone()
        lower_model(model, get(target), Report())
        save(model, path)
        sizes[target] = path.stat().st_size
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    assert max(sizes.values()) <= 1.05 * parameters, sizes


@pytest.mark.usefixtures("captured_once")
def test_for_the_web_weights_stay_in_one_file_as_long_as_one_can_hold_them(tmp_path: Path, monkeypatch) -> None:
    web = get("web")
    assert get("cpu").inline_bytes < 1.9e9 < web.inline_bytes < 2**31 - (64 << 20)
    bundle = made(tmp_path / "one", target="web")
    assert bundle.manifest.target == "web" and bundle.manifest.layout == "ragged"
    assert DATA_SUFFIX not in "".join(bundle.manifest.files)
    monkeypatch.setitem(TARGETS, "web", dataclasses.replace(web, inline_bytes=1000))
    bundle = made(tmp_path / "two", target="web")
    assert bundle.manifest.files[bundle.model_path.name + DATA_SUFFIX]["bytes"] > 1000
    assert verify_bundle(bundle).passed


# --- what is refused, and what a failure leaves behind


class Causal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]


def test_a23_an_operator_above_the_opset_is_named(tmp_path: Path) -> None:
    source = source_of(Causal(), "x:float32:batch,sequence,8")
    with pytest.raises(InputError, match=r"^opset 18: operator Attention needs opset 23; ask for --opset 23$"):
        export(source, tmp_path / "out", target="portable", opset=18)
    assert not list(tmp_path.iterdir())
    assert export(source, tmp_path / "out", target="portable", opset=23).manifest.counts["attention"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tpu"}, "target: found 'tpu', wanted one of cpu, cuda, web, portable"),
        ({"opset": 16}, "opset: found 16, wanted 17 to 23"),
        ({"opset": 24, "target": "portable"}, "opset: found 24, wanted 17 to 23"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(tmp_path: Path, options: dict, message: str) -> None:
    def load() -> Any:
        raise AssertionError

    with pytest.raises(InputError) as caught:
        export(load, tmp_path / "out", **options)
    assert str(caught.value).startswith(message)
    assert not list(tmp_path.iterdir())


def test_an_existing_destination_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    def load() -> Any:
        raise AssertionError

    (tmp_path / "out").mkdir()
    for out, what in ((tmp_path / "out", "exists"), (tmp_path / "no" / "out", "does not exist")):
        with pytest.raises(BundleError, match=what):
            export(load, out)


@pytest.mark.usefixtures("captured_once")
def test_force_replaces_a_bundle_and_nothing_else(tmp_path: Path, bundle: Bundle) -> None:
    out = Path(shutil.copytree(bundle.path, tmp_path / "out"))
    made(out, target="portable", force=True)
    assert Bundle.open(out).manifest.target == "portable"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match="not a bundle"):
        made(mine, force=True)
    assert contents(mine) == {"notes.txt": b"mine"}


def _wrong_counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"expect": {"attention": 3}}


def _wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def rewrite(self: BiasGelu, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> ir.Value:
        return op.FastGelu(x, bias, _domain="com.microsoft")  # the tanh approximation, 4.7e-4 away

    monkeypatch.setattr(BiasGelu, "rewrite", rewrite)
    return {}


def _raises(where: str, error: BaseException) -> Callable[[pytest.MonkeyPatch], dict[str, Any]]:
    def fail(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        def raising(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(road, where, raising)
        return {}

    return fail


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize(
    ("plant", "error", "message"),
    [
        (_wrong_counts, CountError, "canonical counts differ: attention: found 2, wanted 3"),
        (_wrong_numbers, ParityError, r"parity failed on \d+ of \d+ outputs: max abs .* \(allowed 0.0001\)"),
        (_raises("save_golden", OSError(errno.ENOSPC, "No space left on device")), BundleError, "No space left"),
        (_raises("_verify", RuntimeError("boom")), RuntimeError, "boom"),
        (_raises("save", KeyboardInterrupt()), KeyboardInterrupt, None),
    ],
    ids=["counts", "parity", "disk full", "verify", "interrupt"],
)
def test_a_failure_leaves_nothing_behind_and_the_older_bundle_as_it_was(
    tmp_path: Path, bundle: Bundle, monkeypatch, plant, error: type[BaseException], message: str | None
) -> None:
    shutil.copytree(bundle.path, tmp_path / "old")
    before = contents(tmp_path)
    options = plant(monkeypatch)
    for out, force in (("new", False), ("old", True)):
        with pytest.raises(error, match=message):
            made(tmp_path / out, force=force, **options)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    Bundle.open(tmp_path / "old")


@pytest.mark.usefixtures("captured_once")
def test_the_check_can_be_left_out_but_is_then_not_claimed(tmp_path: Path, monkeypatch) -> None:
    _wrong_numbers(monkeypatch)
    bundle = made(tmp_path / "out", check=False)
    assert bundle.manifest.parity is None
    assert not verify_bundle(bundle).passed


def test_the_seed_decides_the_weights_and_nothing_else_does(tmp_path: Path, bundle: Bundle) -> None:
    """The same call gives the same bytes, whatever torch's generator is at."""
    config = EncoderConfig(**TINY, pooling="mean")
    torch.manual_seed(123)
    again = export(lambda: reference(config, seed=0), tmp_path / "again")
    assert again.model_path.read_bytes() == bundle.model_path.read_bytes()
    assert again.manifest.source == bundle.manifest.source
    other = reference(config, seed=1)
    assert other.sha256 != bundle.manifest.source["sha256"]
    case = bundle.golden()[0]
    gap = torch_answers(other, case.inputs)["sentence_embedding"] - case.outputs["sentence_embedding"]
    assert np.abs(gap).max() > 0.1


def test_a_sources_files_and_limits_come_along(tmp_path: Path, monkeypatch) -> None:
    note = tmp_path / "tokenizer_config.json"
    note.write_text("{}")
    source, captured = encoder()
    monkeypatch.setattr(road, "capture", lambda source: captured.clone())
    source = dataclasses.replace(source, files=(note,), max_length=9, pad_id=3, expected=None)
    bundle = export(source, tmp_path / "out", expect={"gelu": 2})
    assert (bundle.path / "tokenizer_config.json").read_text() == "{}"
    assert (bundle.manifest.max_length, bundle.manifest.pad_id) == (9, 3)
    assert max(case.sequence for case in bundle.golden()) == 9
