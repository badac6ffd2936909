"""Engine: an ``.onnx`` file in onnxruntime with its own defaults. Request: ``model``, ``threads``."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from worker import Run, feeds_of, serve


def load(request: dict[str, Any]) -> Run:
    """Make the session; every graph optimizer is on."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request["threads"]
    session = onnxruntime.InferenceSession(  # noqa: TID251 - what people run without tfx
        request["model"], options, providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_inputs()]
    return lambda feeds: np.asarray(session.run(["last_hidden_state"], feeds_of(names, feeds))[0])


if __name__ == "__main__":
    serve(load, ("onnxruntime",))
