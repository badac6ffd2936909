"""Engine: nothing but the matrix products of an encoder's weights, on attended tokens only; what nobody can beat.

Request: ``model`` (an ``.onnx`` file made by ``make_tfx.floor``), ``threads``. The products of all layers run one after
the other, each with weights of its own, into memory that is there already. Texts count as the tokens of ``tokens.json``
beside the model, in calls of at most 2048.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from worker import Run, serve

_MOST = 2048


def load(request: dict[str, Any]) -> Run:
    """Make the session; its answer is empty."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request["threads"]
    session = onnxruntime.InferenceSession(  # noqa: TID251 - the kernels alone
        request["model"], options, providers=["CPUExecutionProvider"]
    )
    rng = np.random.default_rng(0)
    types = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int32)": np.int32}
    bound: dict[int, Any] = {}

    def bind(tokens: int) -> Any:
        if tokens not in bound:
            binding = session.io_binding()
            for each in session.get_inputs():
                values = rng.integers(0, 255, (tokens, each.shape[1]))
                array = values.astype(types[each.type]) / (1 if each.type == "tensor(uint8)" else 255)
                binding.bind_ortvalue_input(
                    each.name, onnxruntime.OrtValue.ortvalue_from_numpy(array.astype(types[each.type]))
                )
            shared: dict[int, Any] = {}  # outputs of one width share their memory: they are never read
            for each in session.get_outputs():
                width = each.shape[1]
                if width not in shared:
                    shared[width] = onnxruntime.OrtValue.ortvalue_from_numpy(
                        np.zeros((tokens, width), types[each.type])
                    )
                binding.bind_ortvalue_output(each.name, shared[width])
            bound[tokens] = binding
        return bound[tokens]

    def run(feeds: Any) -> np.ndarray:
        if isinstance(feeds, list):
            left = json.loads(Path(request["model"]).with_name("tokens.json").read_text(encoding="utf-8"))
        else:
            left = int(feeds["attention_mask"].sum())
        while left:
            tokens = min(left, _MOST)
            session.run_with_iobinding(bind(tokens))
            left -= tokens
        return np.zeros(0, np.float32)

    return run


if __name__ == "__main__":
    serve(load, ("onnxruntime-gpu", "onnxruntime"))
