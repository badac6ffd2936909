"""What the tests of several benchmarks need."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import tfx

ROOT = Path(tfx.__file__).parent


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The tiny bundle of the runtime's tests."""
    spec = importlib.util.spec_from_file_location("tiny_bundle", ROOT / "tests" / "runtime" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make(tmp_path_factory.mktemp("bundle"))
