"""The zoo lies beside the package, as benchmarks/."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import tfx


@pytest.fixture(scope="session")
def benchmarks():
    """``import zoo`` and the others work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(tfx.__file__).parent / "benchmarks")
        yield


@pytest.fixture(scope="session")
def zoo(benchmarks):
    return importlib.import_module("zoo")
