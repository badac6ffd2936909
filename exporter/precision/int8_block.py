"""``int8-block``: weights of 8 bits in blocks of 32, nearly float32's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..targets import Target
from . import PrecisionReport
from .blocks import apply_blocks
from .running import Agreement

__all__ = ["AIM", "apply"]

AIM = Agreement(texts=0.9993, vectors=0.998)
"""What calibration must reach: above the 0.999 that is promised, because other texts are a little worse."""


def apply(model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]], *, target: Target) -> PrecisionReport:
    """Keeps the weights of a lowered graph in 8 bit blocks, in place; see :func:`.blocks.apply_blocks`."""
    del target
    return apply_blocks(model, samples, name="int8-block", bits=8, aim=AIM)
