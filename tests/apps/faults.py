"""The self-check in every language, by one function each, and what is planted to be found by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from .programs import Program

GOLDEN, MODEL = "golden.safetensors", "model.onnx"

Check = Callable[[Path], tuple[int, dict[str, Any]]]


def check_by(lang: str, request: pytest.FixtureRequest) -> Check:
    """Return the function of a bundle's folder to the exit code of a language's self-check, and its report."""
    if lang == "python":
        from tfx.runtime.self_check import self_check

        def by_python(bundle: Path) -> tuple[int, dict[str, Any]]:
            found = self_check(bundle)
            return int(not found.passed), found.to_json()

        return by_python
    program: Program = request.getfixturevalue("built")(lang)
    if lang != "web":
        return program.self_check
    request.getfixturevalue("chromium")
    from tfx.runtime.app_browser import report_of_page

    def by_page(bundle: Path) -> tuple[int, dict[str, Any]]:
        report = report_of_page(program.folder, bundle)
        return report.pop("exit_code"), report

    return by_page


def change_golden(folder: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Change one tensor of a bundle's golden in place."""
    path = folder / GOLDEN
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key).copy() for key in file.keys()}  # noqa: SIM118 - the file is no mapping
    change(tensors[name])
    save_file(tensors, path, metadata=metadata)


def change_recorded(folder: Path, change: Callable[[dict[str, np.ndarray], list[dict[str, Any]]], None]) -> None:
    """Change all tensors, by name, and the list of cases of a bundle's golden."""
    path = folder / GOLDEN
    with safe_open(path, framework="numpy") as file:
        entries = json.loads(file.metadata()["cases"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the file is no mapping
    change(tensors, entries)
    save_file(tensors, path, metadata={"cases": json.dumps(entries)})


def cases(folder: Path) -> list[dict[str, Any]]:
    """Return the list of a bundle's recorded cases."""
    with safe_open(folder / GOLDEN, framework="numpy") as file:
        return json.loads(file.metadata()["cases"])


def change_weights(folder: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change the largest float32 weight of a bundle, where its bytes lie: in the model or beside it."""
    import onnx

    model = onnx.load(folder / MODEL)
    floats = [each for each in model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    before = max((onnx.numpy_helper.to_array(each) for each in floats), key=lambda values: values.size)
    after = before.copy()
    change(after)
    for file in sorted(folder.glob(f"{MODEL}*")):
        content = file.read_bytes()
        if content.count(before.tobytes()) == 1:
            file.write_bytes(content.replace(before.tobytes(), after.tobytes()))
            return
    raise AssertionError(f"{folder}: the weight is in no file, or not once")


def silence_graph(folder: Path) -> None:
    """Make a bundle's norms multiply by 0 in place of 1, so that all that it gives is 0."""
    import onnx

    model = onnx.load(folder / MODEL)
    changed = 0
    for each in model.graph.initializer:
        values = onnx.numpy_helper.to_array(each)
        if values.ndim == 1 and values.dtype == np.float32 and (values == 1).all():
            each.CopyFrom(onnx.numpy_helper.from_array(np.zeros_like(values), each.name))
            changed += 1
    assert changed > 0
    onnx.save(model, folder / MODEL)
