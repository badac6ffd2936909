"""Layer normalisation written in pieces -> one ``LayerNormalization`` (ai.onnx, since opset 17).

Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv 1607.06450).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, NearMiss
from .norms import NormPieces, fits, parameter, spellings


def _number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def _two_pass(op: Any, x: Any, axes: Any, axes2: Any, two: Any, epsilon: Any, **_: Any) -> Any:
    mean = op.ReduceMean(x, axes)
    variance = op.Sub(op.ReduceMean(op.Mul(x, x), axes2), op.Pow(mean, two))
    return op.Div(op.Sub(x, mean), op.Sqrt(op.Add(variance, epsilon)))


def _outside(op: Any, x: Any, axes: Any, axes2: Any, two: Any, epsilon: Any, **_: Any) -> Any:
    deviation = op.Sub(x, op.ReduceMean(x, axes))
    return op.Div(deviation, op.Add(op.Sqrt(op.ReduceMean(op.Pow(deviation, two), axes2)), epsilon))


def _over_two_axes(op: Any, x: Any, axes: Any, axes2: Any, two: Any, epsilon: Any, scale: Any, **_: Any) -> Any:
    deviation = op.Sub(x, op.ReduceMean(x, axes2))
    early = op.Mul(deviation, scale)
    return op.Div(early, op.Sqrt(op.Add(op.ReduceMean(op.Pow(deviation, two), axes2), epsilon)))


class LayerNormPieces(NormPieces):
    """``(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * scale + bias`` over the last axes.

    The square is ``pow(d, 2)`` or ``d * d``; the quotient a division by ``sqrt(v)`` or ``pow(v, 0.5)``, or a product
    with ``reciprocal(sqrt(v))``, ``1 / sqrt(v)`` or ``pow(v, -0.5)``. The scale stands anywhere in the product; scale
    and bias may be missing. The difference may be computed twice. The epsilon is read from the graph and kept.
    """

    meaning = "layer_norm"
    result = ("", "LayerNormalization")
    # The fused kernel may sum in another order; values of size 1 then differ in the last bits.
    tolerance = 4e-6
    centred = True
    variants = spellings("both", "scale", "none")

    def unfused(
        self,
        op: Any,
        x: Any,
        axes: Any,
        axes2: Any,
        two: Any,
        epsilon: Any,
        one: Any,
        half: Any,
        scale: Any,
        bias: Any,
    ) -> Any:
        deviation = op.Sub(x, op.ReduceMean(x, axes))
        y = self.write(op, deviation, axes2, two, epsilon, one, half, scale)
        return op.Add(y, bias) if self._affine == "both" else y

    def rewrite(self, op: Any, y: ir.Value, **_: Any) -> ir.Value:
        norm, scale, bias = self.read(y)
        sizes = fits(None, norm, "input")
        inputs = [norm.x, parameter(op, scale, sizes, norm.x)]
        if bias is not None:
            inputs.append(parameter(op, bias, sizes, norm.x))
        return op.LayerNormalization(*inputs, axis=-norm.axes, epsilon=norm.epsilon)

    def example(self) -> Example:
        width = 16
        return {
            "x": Arg(("B", "S", width)),
            "axes": np.array([-1]),
            "axes2": np.array([-1]),
            "two": _number(2),
            "epsilon": _number(1e-12),
            "one": _number(1),
            "half": _number(0.5),
            "scale": np.linspace(0.5, 1.5, width, dtype=np.float32),
            "bias": np.linspace(-1, 1, width, dtype=np.float32),
        }

    near_misses = (
        NearMiss("mean over the tokens", "mean reduces axes", {"axes": np.array([1])}),
        NearMiss("variance over two axes", "mean and variance reduce different axes", {"axes2": np.array([1, 2])}),
        NearMiss("variance over the first axes", "variance reduces axes", {"axes2": np.array([0, 1])}),
        NearMiss("a fourth power", "exponent is 4", {"two": _number(4)}),
        NearMiss("an epsilon per channel", "epsilon has shape", {"epsilon": np.full(16, 1e-5, np.float32)}),
        NearMiss("a huge epsilon", "epsilon is 2", {"epsilon": _number(2)}),
        NearMiss("epsilon outside the root (annotated transformer)", None, build=_outside),
        NearMiss("the variance in two passes", r"the variance is mean\(x\^2\)", build=_two_pass),
        NearMiss(
            "over two axes with a scale for one",
            "scale has shape",
            {"x": Arg(("B", 7, 16)), "axes2": np.array([-2, -1])},
            build=_over_two_axes,
        ),
    )
