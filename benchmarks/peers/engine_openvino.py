"""Engine: a model in OpenVINO. Request: ``model`` (a file), ``precision`` (``f32``, ``bf16``), ``threads``."""

from __future__ import annotations

from typing import Any

import openvino  # pyright: ignore[reportMissingImports]
from worker import Run, feeds_of, serve


def load(request: dict[str, Any]) -> Run:
    """Compile the model for one request at a time."""
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(request["threads"]),
    }
    if request["precision"] is not None:  # else OpenVINO's own choice: bf16 beside int8 where the CPU has it
        settings["INFERENCE_PRECISION_HINT"] = request["precision"]
    compiled = openvino.Core().compile_model(request["model"], "CPU", settings)
    names = [each.get_any_name() for each in compiled.inputs]
    output = compiled.output("last_hidden_state")
    return lambda feeds: compiled(feeds_of(names, feeds))[output]


if __name__ == "__main__":
    serve(load, ("openvino", "nncf"))
