"""Makes what sentence-transformers reads, in its environment: ``python make_sentence.py NAME FOLDER OPTIONS``.

``sentence`` copies the checkpoint and records what it answers; the others hold its exports beside it, made by
sentence-transformers' own functions.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
from sentence_transformers import SentenceTransformer

_SAMPLES = 100


def main() -> None:
    """Make one folder."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    corpus, out = folder / "corpus", folder / name
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(corpus / "checkpoint", out)
    if name == "sentence":
        texts = json.loads((corpus / "texts.json").read_text(encoding="utf-8"))
        model = SentenceTransformer(str(out), device="cpu")
        np.save(out / "want.npy", model.encode(texts, batch_size=32, show_progress_bar=False))
    elif name == "sentence-onnx":
        model = SentenceTransformer(str(out), backend="onnx", device="cpu", model_kwargs={"export": True})
        model.save_pretrained(str(out))
        sentence_transformers.export_optimized_onnx_model(model, "O3", str(out))
        sentence_transformers.export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(out))
    else:
        from optimum.intel import OVQuantizationConfig  # pyright: ignore[reportMissingImports]

        model = SentenceTransformer(str(out), backend="openvino", device="cpu", model_kwargs={"export": True})
        model.save_pretrained(str(out))
        # Texts of its own in place of a data set that would have to be downloaded; static, as by default.
        texts = json.loads((corpus / "calibration.json").read_text(encoding="utf-8"))[:_SAMPLES]
        _quantize(model, texts, out, OVQuantizationConfig(num_samples=len(texts)))


def _quantize(model: SentenceTransformer, texts: list[str], out: Path, config: object) -> None:
    """As ``export_static_quantized_openvino_model``, which can only take its texts from a hub."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from optimum.intel import OVConfig, OVQuantizer  # pyright: ignore[reportMissingImports]

    body: Any = model[0]
    quantizer = OVQuantizer(body.auto_model)

    def tokens(batch: dict[str, list[str]]) -> object:
        return body.tokenizer(batch["text"], padding="max_length", max_length=128, truncation=True)

    data = Dataset.from_dict({"text": texts}).map(tokens, batched=True, remove_columns=["text"])
    with tempfile.TemporaryDirectory(dir=out) as made:
        quantizer.quantize(
            calibration_dataset=data, ov_config=OVConfig(quantization_config=config), save_directory=made
        )
        for end in (".xml", ".bin"):
            (file,) = Path(made).rglob(f"openvino_model{end}")
            file.replace(out / "openvino" / f"openvino_model_qint8_quantized{end}")


if __name__ == "__main__":
    main()
