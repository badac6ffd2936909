from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tfx.errors import SourceError
from tfx.exporter.checkpoint import checkpoint

from .checkpoints import given, save, write

# --- folders that cannot be used


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        checkpoint(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_and_empty_folders(tmp_path, copy):
    assert "no such folder" in refused(tmp_path / "absent")
    assert "is a file" in refused(copy / "config.json")
    (tmp_path / "empty").mkdir()
    assert "empty folder, wanted config.json and model.safetensors" in refused(tmp_path / "empty")
    (copy / "model.safetensors").unlink()
    assert "no weights, wanted model.safetensors" in refused(copy)
    (copy / "config.json").unlink()
    assert "no config.json" in refused(copy)


@pytest.mark.parametrize("size", [0, 5, 100, -100])
def test_truncated_weights(copy, size):
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:size])
    message = refused(copy)
    assert "model.safetensors: not a whole safetensors file" in message
    assert f"({len(whole[:size])} bytes)" in message


def test_damaged_configuration(copy):
    config = json.loads((copy / "config.json").read_text())
    write(copy / "config.json", config | {"model_type": "no_such_type", "architectures": ["NoSuchModel"]})
    assert "no_such_type" in refused(copy)
    write(copy / "config.json", {"hidden_size": 32})
    assert "model_type" in refused(copy)
    write(copy / "config.json", config | {"hidden_size": 48})
    refused(copy)
    (copy / "config.json").write_text("{")
    assert "config.json" in refused(copy)
    write(copy / "modules.json", {"a": 1})
    assert "modules.json: wanted a list of modules" in refused(copy)
    write(copy / "modules.json", [{"type": "x.Transformer", "path": "../elsewhere"}])
    assert "found path '../elsewhere', wanted one inside the folder" in refused(copy)


def test_weights_that_transformers_would_make_up(copy):
    weights = load_file(copy / "model.safetensors")
    pooler = [name for name in weights if "pooler" in name]
    assert pooler
    without = {name: tensor for name, tensor in weights.items() if name not in pooler}
    save_file(without, copy / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        checkpoint(copy).call(given())  # nothing that is exported reads the pooler
    for name in ("encoder.layer.1.output.dense.weight", "embeddings.LayerNorm.bias"):
        save_file(
            {n: t for n, t in without.items() if n != name}, copy / "model.safetensors", metadata={"format": "pt"}
        )
        message = refused(copy)
        assert f"weights without a value in the files: {name}" in message
        assert "pooler" not in message
    save_file({"unrelated": torch.zeros(1)}, copy / "model.safetensors", metadata={"format": "pt"})
    assert "and 34 more" in refused(copy)


def test_pickled_weights_need_the_flag_and_hold_tensors_only(copy, bert):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(weights, copy / "pytorch_model.bin")
    message = refused(copy)
    assert "only pickle weights (pytorch_model.bin)" in message
    assert "--allow-pickle" in message
    with torch.no_grad():
        wanted, found = (checkpoint(p, allow_pickle=True).call(given())["last_hidden_state"] for p in (bert, copy))
    assert torch.equal(wanted, found)
    torch.save(weights | {"run": Planted()}, copy / "pytorch_model.bin")
    refused(copy, allow_pickle=True)
    assert not Planted.ran


class Planted:
    ran = False

    def __reduce__(self):
        return (setattr, (Planted, "ran", True))


def test_other_kinds_of_models_are_refused_by_name(tmp_path):
    save(tmp_path / "t5", "T5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    assert "t5 is an encoder-decoder, wanted an encoder" in refused(tmp_path / "t5")
    save(tmp_path / "vit", "ViT", image_size=8, patch_size=4)
    assert "ViTModel takes no input_ids, wanted a text encoder" in refused(tmp_path / "vit")
