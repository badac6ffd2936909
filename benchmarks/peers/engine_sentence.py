"""Engine: sentence-transformers, texts to vectors.

Request: ``model`` (a folder), ``backend`` (``torch``, ``onnx``, ``openvino``), ``file`` (inside the folder, None for
the backend's own), ``precision`` (of openvino: ``f32``, ``bf16``), ``threads``.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from worker import Run, serve


def load(request: dict[str, Any]) -> Run:
    """Open the folder. Texts go 32 at a time, sorted by length, which is what ``encode`` does by itself."""
    threads = request["threads"]
    torch.set_num_threads(threads)
    options: dict[str, Any] = {}
    if request["backend"] == "onnx":
        import onnxruntime

        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = threads
        options = {"provider": "CPUExecutionProvider", "session_options": session}
    elif request["backend"] == "openvino":
        settings = {"INFERENCE_NUM_THREADS": str(threads)}
        if request["precision"] is not None:  # else OpenVINO's own choice: bf16 beside int8 where the CPU has it
            settings["INFERENCE_PRECISION_HINT"] = request["precision"]
        options = {"ov_config": settings}
    if request["file"] is not None:
        options["file_name"] = request["file"]
    model = SentenceTransformer(request["model"], backend=request["backend"], device="cpu", model_kwargs=options)
    return lambda texts: model.encode(texts, batch_size=32, show_progress_bar=False, convert_to_numpy=True)


if __name__ == "__main__":
    serve(load, ("sentence-transformers", "transformers", "torch", "onnxruntime", "optimum-onnx", "openvino"))
