"""Engine: a bundle. Request: ``model`` (its folder), ``threads``."""

from __future__ import annotations

from typing import Any

import numpy as np
from worker import Run, serve

from tfx import Session


def load(request: dict[str, Any]) -> Run:
    """Open the bundle; arrays run once, texts go through its tokenizer."""
    session = Session(request["model"], threads=request["threads"])

    def run(feeds: Any) -> np.ndarray:
        if isinstance(feeds, list):
            return np.stack(list(session.run_many(feeds)))
        return session.run(feeds, ["last_hidden_state"])["last_hidden_state"]

    return run


if __name__ == "__main__":
    serve(load, ("tfx-onnx", "onnxruntime-gpu", "onnxruntime"))
