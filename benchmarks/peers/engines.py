"""The engines, and the steps that make what they read.

An engine of the encoder gets arrays and gives ``last_hidden_state``; one of the corpus gets texts and gives vectors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BASELINE", "CORPUS_ENGINES", "ENCODER_ENGINES", "STEPS", "VARIANTS", "Engine", "Step"]


@dataclass(frozen=True)
class Step:
    """A file or folder that is made once, in an environment.

    Attributes:
        script: of this folder.
        environment: as ``environments.NAMES``, None for tfx's own.
        needs: steps that come before.
        options: for the script.
    """

    script: str
    environment: str | None = None
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def key(self) -> str:
        """Return what tells this step from another of the same name."""
        return json.dumps([self.script, self.environment, dict(self.options)], sort_keys=True)


@dataclass(frozen=True)
class Engine:
    """Something that runs the model.

    Attributes:
        script: its far end, in this folder.
        model: the step that makes what it reads, which is also the file's name.
        precision: what it computes in.
        environment: as of a step.
        options: for the script.
        alone: False where each length of its own would have to be compiled first; then no row is run by itself.
    """

    script: str
    model: str
    precision: str
    environment: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = True


VARIANTS: dict[str, dict[str, str]] = {
    "padded-fp32": {"layout": "padded"},
    "ragged-fp32": {"layout": "ragged"},
    "padded-int8": {"layout": "padded", "precision": "int8"},
    "ragged-int8": {"layout": "ragged", "precision": "int8"},
    "padded-int8-dynamic": {"layout": "padded", "precision": "int8-dynamic"},
    "ragged-int8-dynamic": {"layout": "ragged", "precision": "int8-dynamic"},
    "ragged-int8-block": {"layout": "ragged", "precision": "int8-block"},
}
"""tfx: options of ``tfx.export``."""

STEPS: dict[str, Step] = {
    # The encoder: weights, feeds, and what torch answers in fp32.
    "encoder": Step("make_tfx.py"),
    "plain.onnx": Step("make_tfx.py", needs=("encoder",)),
    "optimized.onnx": Step("make_onnxruntime.py", "torch", ("plain.onnx",)),  # the optimizer imports torch
    "int8.onnx": Step("make_onnxruntime.py", "onnxruntime", ("plain.onnx",), {"of": "plain.onnx"}),
    "optimized-int8.onnx": Step("make_onnxruntime.py", "onnxruntime", ("optimized.onnx",), {"of": "optimized.onnx"}),
    "nncf.xml": Step("make_openvino.py", "openvino", ("plain.onnx",)),
    # The corpus: texts, and what sentence-transformers answers in fp32.
    "corpus": Step("make_tfx.py"),
    "sentence": Step("make_sentence.py", "torch", ("corpus",)),
    "sentence-onnx": Step("make_sentence.py", "torch", ("corpus",)),
    "sentence-openvino": Step("make_sentence.py", "torch", ("corpus",)),
    # Both.
    "floor-fp32.onnx": Step("make_tfx.py"),
    "floor-int8.onnx": Step("make_tfx.py"),
    **{f"tfx-{name}": Step("make_tfx.py", options=options) for name, options in VARIANTS.items()},
}

_FLOORS = {f"floor-{kind}": Engine("engine_floor.py", f"floor-{kind}.onnx", kind) for kind in ("fp32", "int8")}

_TFX = {
    f"tfx-{name}": Engine("engine_tfx.py", f"tfx-{name}", options.get("precision", "fp32"))
    for name, options in VARIANTS.items()
}


def _onnxruntime(model: str, precision: str) -> Engine:
    return Engine("engine_onnxruntime.py", model, precision, "onnxruntime")


def _openvino(model: str, precision: str, hint: str | None) -> Engine:
    return Engine("engine_openvino.py", model, precision, "openvino", {"precision": hint})


def _torch(mode: str, precision: str) -> Engine:
    return Engine("engine_torch.py", "encoder", precision, "torch", {"mode": mode}, alone=mode != "compile")


def _sentence(model: str, precision: str, backend: str, file: str | None = None) -> Engine:
    options = {"backend": backend, "file": file, "precision": {"fp32": "f32", "bf16": "bf16"}.get(precision)}
    return Engine("engine_sentence.py", model, precision, "torch", options)


BASELINE = "onnxruntime"

ENCODER_ENGINES: dict[str, Engine] = {
    **_FLOORS,
    **_TFX,
    "onnxruntime": _onnxruntime("plain.onnx", "fp32"),
    "onnxruntime-optimizer": _onnxruntime("optimized.onnx", "fp32"),
    "onnxruntime-int8": _onnxruntime("int8.onnx", "int8"),
    "onnxruntime-optimizer-int8": _onnxruntime("optimized-int8.onnx", "int8"),
    "openvino": _openvino("plain.onnx", "fp32", "f32"),
    "openvino-bf16": _openvino("plain.onnx", "bf16", "bf16"),
    "openvino-int8": _openvino("nncf.xml", "int8", None),
    "torch": _torch("eager", "fp32"),
    "torch-compile": _torch("compile", "fp32"),
    "torch-bf16": _torch("bf16", "bf16"),
}

CORPUS_ENGINES: dict[str, Engine] = {
    **_FLOORS,
    **_TFX,
    "sentence-torch": _sentence("sentence", "fp32", "torch"),
    "sentence-onnx": _sentence("sentence-onnx", "fp32", "onnx", "onnx/model.onnx"),
    "sentence-onnx-O3": _sentence("sentence-onnx", "fp32", "onnx", "onnx/model_O3.onnx"),
    "sentence-int8": _sentence("sentence-onnx", "int8", "onnx", "onnx/model_qint8_avx512_vnni.onnx"),
    "sentence-openvino": _sentence("sentence-openvino", "fp32", "openvino", "openvino/openvino_model.xml"),
    "sentence-openvino-bf16": _sentence("sentence-openvino", "bf16", "openvino", "openvino/openvino_model.xml"),
    "sentence-openvino-int8": _sentence(
        "sentence-openvino", "int8", "openvino", "openvino/openvino_model_qint8_quantized.xml"
    ),
}
