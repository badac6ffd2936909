"""RMS normalisation written in pieces -> one ``RMSNormalization`` (ai.onnx, since opset 23).

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, NearMiss
from .norms import NormPieces, fits, parameter, spellings


def _number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


class RmsNormPieces(NormPieces):
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axes.

    Square, quotient and scale are written as in layer norm. A scale of ``1 + w`` is one once it is folded to a
    constant; what is no constant stays a product behind the norm. Casts around the pieces stay where they are.
    """

    meaning = "rms_norm"
    result = ("", "RMSNormalization")
    tolerance = 4e-6
    centred = False
    variants = spellings("scale", "none")

    def unfused(self, op: Any, x: Any, axes: Any, two: Any, epsilon: Any, one: Any, half: Any, scale: Any) -> Any:
        return self.write(op, x, axes, two, epsilon, one, half, scale)

    def rewrite(self, op: Any, y: ir.Value, **_: Any) -> ir.Value:
        norm, scale, _bias = self.read(y)
        scale = parameter(op, scale, fits(None, norm, "input"), norm.x)
        return op.RMSNormalization(norm.x, scale, axis=-norm.axes, epsilon=norm.epsilon)

    def example(self) -> Example:
        width = 16
        return {
            "x": Arg(("B", "S", width)),
            "axes": np.array([-1]),
            "two": _number(2),
            "epsilon": _number(1e-6),
            "one": _number(1),
            "half": _number(0.5),
            "scale": np.linspace(0.5, 1.5, width, dtype=np.float32),
        }

    near_misses = (
        NearMiss("over the tokens", "mean of squares reduces axes", {"axes": np.array([1])}),
        NearMiss("a third power", "exponent is 3", {"two": _number(3)}),
        NearMiss("an epsilon per channel", "epsilon has shape", {"epsilon": np.full(16, 1e-5, np.float32)}),
        NearMiss("a huge epsilon", "epsilon is 2", {"epsilon": _number(2)}),
        NearMiss(
            "a scale of another rank inside",
            "scale has shape",
            {"scale": np.ones((7, 16), np.float32), "x": Arg(("B", 7, 16))},
            {"spelling": "early_div"},
        ),
        NearMiss(
            "epsilon outside the root",
            None,
            build=lambda op, x, axes, two, epsilon, **_: op.Div(
                x, op.Add(op.Sqrt(op.ReduceMean(op.Pow(x, two), axes)), epsilon)
            ),
        ),
        NearMiss(
            "another value over the root",
            None,
            build=lambda op, x, axes, two, epsilon, scale, **_: op.Div(
                op.Add(x, scale), op.Sqrt(op.Add(op.ReduceMean(op.Pow(x, two), axes), epsilon))
            ),
        ),
    )
