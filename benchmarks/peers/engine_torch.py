"""Engine: the reference encoder in torch. Request: ``model`` (a folder), ``mode``, ``threads``.

``mode`` is ``eager``, ``compile`` (torch.compile, shapes static) or ``bf16`` (eager under autocast). The folder holds
``config.json`` and ``state.safetensors``.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from worker import Run, serve

from tfx.models.config import EncoderConfig
from tfx.models.encoder import Encoder


def load(request: dict[str, Any]) -> Run:
    """Make the module."""
    torch.set_num_threads(request["threads"])
    folder = Path(request["model"])
    module = Encoder(EncoderConfig.from_json(json.loads((folder / "config.json").read_text(encoding="utf-8")))).eval()
    module.load_state_dict(load_file(folder / "state.safetensors"))
    call: Any = torch.compile(module, dynamic=False) if request["mode"] == "compile" else module
    bf16 = request["mode"] == "bf16"

    def run(feeds: dict[str, np.ndarray]) -> np.ndarray:
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        scope = torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
        with torch.inference_mode(), scope:
            return call(**tensors)["last_hidden_state"].float().numpy()

    return run


if __name__ == "__main__":
    serve(load, ("torch",))
