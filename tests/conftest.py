"""Settings and fixtures that every test folder shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

# One fixed sequence of examples, without a clock: a slow machine must not fail a right answer.
settings.register_profile("tfx", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("tfx")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def seeded() -> None:
    """Fix torch's generator, for tests that build modules with random weights."""
    import torch

    torch.manual_seed(0)
