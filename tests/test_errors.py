from __future__ import annotations

import inspect

import pytest

from tfx import errors
from tfx.errors import DependencyError, TfxError

TREE = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TfxError)]


def drawn() -> dict[str, tuple[str, int]]:
    """Name -> (parent, exit code), read from the tree in the module's docstring."""
    lines = [line for line in (errors.__doc__ or "").splitlines() if "Error  " in line]
    stack: list[tuple[int, str]] = []
    found: dict[str, tuple[str, int]] = {}
    for line in lines:
        name, code = line.replace("│", " ").replace("├──", "   ").replace("└──", "   ").split()[:2]
        depth = line.index(name)
        while stack and stack[-1][0] >= depth:
            stack.pop()
        found[name] = (stack[-1][1] if stack else "Exception", int(code))
        stack.append((depth, name))
    return found


def test_the_drawn_tree_is_the_real_one():
    real = {cls.__name__: (cls.__bases__[0].__name__, cls.exit_code) for cls in TREE}
    assert drawn() == real
    assert sorted(real) == errors.__all__


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("torch", 'torch is not installed; install it with: pip install "tfx-onnx[export]"'),
        ("onnx_ir.passes", 'onnx_ir is not installed; install it with: pip install "tfx-onnx[export]"'),
        ("onnxruntime", 'onnxruntime is not installed; install it with: pip install "tfx-onnx"'),
        ("transformers", 'transformers is not installed; install it with: pip install "tfx-onnx[hf]"'),
    ],
)
def test_a_missing_package_says_the_pip_line(name: str, line: str):
    error = DependencyError.from_import(ModuleNotFoundError("No module", name=name))
    assert str(error) == line
    assert error is not None and error.exit_code == 3


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module", name="torchvision"),
        ModuleNotFoundError("No module"),
        ImportError("cannot import name 'x' from 'torch'", name="torch"),
    ],
)
def test_another_failed_import_is_not_called_a_missing_package(error: ImportError):
    assert DependencyError.from_import(error) is None
