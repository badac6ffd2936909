"""Tiny checkpoint folders, as transformers and sentence-transformers save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 60,
    "initializer_range": 0.3,
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(chr(ord("a") + i) for i in range(26))]


def save(folder: Path, kind: str = "Bert", **options: Any) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options))
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, lower: bool = True) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase() if lower else normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def sentence_modules(folder: Path, *kinds: str, pooling: Any = None) -> Path:
    """Write modules.json and its folders as sentence-transformers does."""
    listing = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, kind in enumerate(kinds, 1):
        path = f"{i}_{kind}"
        listing.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if kind == "Pooling":
            write(
                folder / path / "config.json",
                pooling or {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
            )
        if kind == "Dense":
            settings = {"in_features": 32, "out_features": 8, "bias": True}
            write(folder / path / "config.json", settings | {"activation_function": "torch.nn.modules.activation.Tanh"})
            torch.manual_seed(1)
            save_file(nn.Linear(32, 8).state_dict(prefix="linear."), folder / path / "model.safetensors")
    write(folder / "modules.json", listing)
    return folder


def given(batch: int = 2, length: int = 5) -> dict[str, torch.Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length) % 60
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": ids % 2}
