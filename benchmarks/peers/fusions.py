"""Runs in an environment of its own: other tools' fusions on a file, and what their results answer.

``python fusions.py JOBS.json`` takes a list of jobs: ``tool``, ``model`` (an ``.onnx`` file), ``kind`` (onnxruntime's
model type), ``inputs`` (an ``.npz`` of ``case/input``), ``out`` (a path without suffix). Each job leaves ``out``.json
with ``fused`` or ``error``, and ``out``.npz with the outputs by case. A job that kills the process leaves nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

FUSED = {
    "Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention", "PackedMultiHeadAttention",
    "DecoderMaskedMultiHeadAttention", "SparseAttention",
}  # fmt: skip


def _onnxruntime(job: dict[str, Any], path: Path) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    made: Any = optimize_model(job["model"], model_type=job["kind"], num_heads=0, hidden_size=0, opt_level=0)
    made.save_model_to_file(str(path))


def _onnxscript(job: dict[str, Any], path: Path) -> None:
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    returned: Any = optimize_for_ort(ir.load(job["model"]))
    ir.save(returned[0] if isinstance(returned, tuple) else returned, path)


TOOLS = {"onnxruntime": _onnxruntime, "onnxscript": _onnxscript}


def _cases(path: str) -> dict[str, dict[str, np.ndarray]]:
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path, allow_pickle=False) as arrays:  # noqa: TID251 - of our own
        for key in arrays.files:
            case, _, name = key.rpartition("/")
            cases.setdefault(case, {})[name] = arrays[key]
    return cases


def _run(job: dict[str, Any]) -> dict[str, Any]:
    path = Path(job["out"] + ".onnx")
    TOOLS[job["tool"]](job, path)
    model = onnx.load(path)  # noqa: TID251 - small files, and none of tfx here
    fused = sum(node.op_type in FUSED and node.domain in ("", "ai.onnx", "com.microsoft") for node in model.graph.node)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    answers: dict[str, np.ndarray] = {}
    errors: dict[str, str] = {}
    try:
        session = onnxruntime.InferenceSession(  # noqa: TID251 - what the tools' users run
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base class
        return {"fused": fused, "errors": {"load": str(error)[:300]}}
    for case, inputs in _cases(job["inputs"]).items():
        try:
            answers[case] = np.asarray(session.run(["last_hidden_state"], inputs)[0])
        except Exception as error:  # noqa: BLE001
            errors[case] = str(error)[:300]
    np.savez(job["out"] + ".npz", **answers)  # pyright: ignore[reportArgumentType]
    return {"fused": fused, "errors": errors}


def main() -> None:
    """Runs the jobs one after the other."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            found = _run(job)
        except Exception as error:  # noqa: BLE001 - tools raise what they like
            found = {"fused": 0, "errors": {"tool": f"{type(error).__name__}: {str(error)[:300]}"}}
        Path(job["out"] + ".json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
