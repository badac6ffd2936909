"""Quantizes for OpenVINO with NNCF, in its environment: ``python make_openvino.py NAME FOLDER OPTIONS``.

Static int8, NNCF's own settings for Transformers, calibrated on 64 sequences like those that are timed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nncf  # pyright: ignore[reportMissingImports]
import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
from worker import feeds_of
from workloads import feeds

_SEQUENCES = 64


def main() -> None:
    """Make one file."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    config = json.loads((folder / "encoder" / "config.json").read_text(encoding="utf-8"))
    model = openvino.Core().read_model(folder / "plain.onnx")
    names = [each.get_any_name() for each in model.inputs]
    longest = min(128, config["max_len"])
    lengths = np.random.default_rng(1).integers(1, longest + 1, _SEQUENCES)
    samples = [
        feeds_of(names, feeds([int(length)], config["vocab_size"], seed)) for seed, length in enumerate(lengths, 1)
    ]
    made = nncf.quantize(model, nncf.Dataset(samples), subset_size=_SEQUENCES, model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(made, folder / name, compress_to_fp16=False)


if __name__ == "__main__":
    main()
