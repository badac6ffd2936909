"""A bundle's source is made again from its manifest, or from what --source says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tfx.errors import BundleError, InputError, SourceError
from tfx.exporter.checkpoint import checkpoint
from tfx.exporter.rebuild import rebuild
from tfx.exporter.sources import Source, module, reference
from tfx.models.config import EncoderConfig
from tfx.runtime.manifest import Manifest
from tfx.runtime.tensors import TensorSpec

FACTORY = """
import torch
def make():
    torch.manual_seed({seed})
    table = torch.nn.Embedding(50, 8)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table
        def forward(self, input_ids):
            return {{"hidden": self.table(input_ids), "twice": 2 * self.table(input_ids)}}
    return Model()
"""


def manifest(source: Source, said: dict[str, Any] | None = None) -> Manifest:
    """A manifest as export writes it, read back from its JSON; ``said`` replaces what it says about the source."""
    truth = {"kind": source.kind, "name": source.name, "sha256": source.sha256, "notes": dict(source.notes)}
    made = Manifest(
        source=truth if said is None else said,
        inputs=source.inputs,
        outputs=tuple(
            TensorSpec(name, "float32", ("batch", "sequence", 8), "output")
            for name in source.output_names or ("hidden", "twice")
        ),
        max_length=source.max_length,
        pad_id=source.pad_id,
        target="cpu",
        precision="fp32",
        layout="padded",
        model={"file": "model.onnx", "opset": 17, "ir_version": 8, "domains": [""]},
        counts=dict.fromkeys(("attention", "layer_norm", "rms_norm", "gelu", "rotary"), 0),
        tolerance={"max_abs": 1e-4, "min_cosine": 0.99999},
        pooling=source.pooling,
    )
    return Manifest.from_json(made.to_json())


def same_weights(left: Source, right: Source) -> bool:
    theirs = right.module.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in left.module.state_dict().items())


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    folder = tmp_path_factory.mktemp("checkpoint") / "bert"
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Write a module of that name whose factory draws its weights from a seed."""

    def write(name: str, seed: int) -> str:
        (tmp_path / f"{name}.py").write_text(FACTORY.format(seed=seed))
        return f"{name}:make"

    monkeypatch.chdir(tmp_path)
    return write


def test_the_reference_encoder_needs_nothing_but_the_manifest():
    config = EncoderConfig(d_model=16, heads=2, layers=1, d_ff=32, vocab_size=40, pooling="mean", normalize=True)
    made = reference(config, seed=5)
    again = rebuild(manifest(made))
    assert same_weights(made, again)
    assert (again.inputs, again.output_names, again.pooling) == (made.inputs, made.output_names, made.pooling)
    assert not same_weights(made, reference(config, seed=6))


def test_a_source_that_is_not_needed_is_refused():
    made = reference(EncoderConfig(d_model=16, heads=2, layers=1, d_ff=32, vocab_size=40))
    with pytest.raises(InputError, match="source: found x, but encoder-d16-h2-l1 is made again from the bundle itself"):
        rebuild(manifest(made), "x")


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        (None, "source.notes: no config and seed"),
        ({"config": {"d_model": 8}}, "source.notes: no config and seed"),
        ({"config": {"d_modle": 8}, "seed": 0}, "source.notes: d_modle: unknown option"),
        ({"config": {"d_model": 7}, "seed": 0}, "source.notes: heads: found 12"),
        ({"config": {}, "seed": "x"}, "source.notes: seed: found x"),
    ],
)
def test_a_manifest_that_does_not_say_enough(notes, message):
    made = reference(EncoderConfig(d_model=16, heads=2, layers=1, d_ff=32, vocab_size=40))
    said = {"kind": "reference", "name": "encoder", "sha256": made.sha256, "notes": notes}
    with pytest.raises(BundleError, match=rf"tfx\.json: {message}"):
        rebuild(manifest(made, said))


def test_other_weights_than_the_bundles_are_refused():
    made = reference(EncoderConfig(d_model=16, heads=2, layers=1, d_ff=32, vocab_size=40), seed=1)
    said = {"kind": "reference", "name": "encoder", "sha256": made.sha256, "notes": {**made.notes, "seed": 2}}
    with pytest.raises(SourceError, match="encoder: has other weights than the bundle was made of"):
        rebuild(manifest(made, said))


def test_a_checkpoint_comes_from_its_folder(bert):
    made = checkpoint(bert, pooling="mean", normalize=True)
    again = rebuild(manifest(made), str(bert))
    assert same_weights(made, again)
    assert (again.output_names, again.pooling) == (made.output_names, made.pooling)
    plain = checkpoint(bert, pooling="none")
    assert rebuild(manifest(plain), str(bert)).output_names == ("last_hidden_state",)


def test_a_checkpoint_without_its_folder_says_what_is_wanted(bert):
    with pytest.raises(InputError, match=r"bert: the bundle holds no torch module .* wanted .*--source DIR"):
        rebuild(manifest(checkpoint(bert)))


def test_another_checkpoint_is_refused(bert, tmp_path):
    torch.manual_seed(1)
    other = Path(shutil.copytree(bert, tmp_path / "other"))
    transformers.BertModel(transformers.BertConfig.from_pretrained(bert)).save_pretrained(other)
    with pytest.raises(SourceError, match=r"other: has other weights than the bundle was made of"):
        rebuild(manifest(checkpoint(bert)), str(other))


def test_a_module_comes_from_its_factory(factory):
    target = factory("mine", seed=3)
    for outputs in (["hidden", "twice"], ["twice"]):
        made = module(target, ["input_ids:int64:batch,sequence"], outputs)
        again = rebuild(manifest(made), target)
        assert same_weights(made, again)
        assert again.output_names == tuple(outputs)
    with pytest.raises(InputError, match=r"mine:make: .* wanted its factory \(--source pkg\.mod:factory\)"):
        rebuild(manifest(made))
    with pytest.raises(SourceError, match="yours:make: has other weights"):
        rebuild(manifest(made), factory("yours", seed=4))


def test_a_kind_without_a_module(factory):
    made = reference(EncoderConfig(d_model=16, heads=2, layers=1, d_ff=32, vocab_size=40))
    said = {"kind": "onnx", "name": "x", "sha256": None}
    with pytest.raises(InputError, match="a bundle of kind onnx has no torch module to compare with"):
        rebuild(manifest(made, said), "y")
