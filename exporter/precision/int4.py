"""``int4``: weights of 4 bits in blocks of 32, for the smallest file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..targets import Target
from . import PrecisionReport
from .blocks import apply_blocks
from .running import Agreement

__all__ = ["AIM", "apply"]

AIM = Agreement(texts=0.99, vectors=0.97)
"""What calibration must reach."""


def apply(model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]], *, target: Target) -> PrecisionReport:
    """Keeps the weights of a lowered graph in 4 bit blocks, in place; see :func:`.blocks.apply_blocks`."""
    del target
    return apply_blocks(model, samples, name="int4", bits=4, aim=AIM)
