"""Layer normalisation written in pieces -> one ``LayerNormalization`` (ai.onnx, since opset 17).

Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv 1607.06450).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, constant, expect, last_axis_only, producer, rank, scalar, static, weight


class LayerNormPieces(Fusion):
    """``(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * scale + bias`` over the last axis.

    The square is ``pow(d, 2)`` or ``d * d``, the quotient a division or a product with the reciprocal;
    scale and bias may be missing, and the scale may come before the quotient (``early``). The epsilon is read
    from the graph and kept.
    """

    meaning = "layer_norm"
    result = ("", "LayerNormalization")
    # The fused kernel may sum in another order; values of size 1 then differ in the last bits.
    tolerance = 4e-6
    places = 1
    variants = tuple(
        {"affine": affine, "square": square, "quotient": quotient}
        for affine, square, quotient in itertools.product(
            ("both", "early", "scale", "early_scale", "none"), ("pow", "mul"), ("div", "reciprocal")
        )
    )

    def __init__(self, affine: str = "both", square: str = "pow", quotient: str = "div") -> None:
        super().__init__()
        self._affine = affine
        self._square = square
        self._quotient = quotient
        self._biased = affine in ("both", "early")

    def pattern(self, op: Any, x: Any, axes: Any, axes2: Any, two: Any, epsilon: Any, scale: Any, bias: Any) -> Any:
        deviation = op.Sub(x, op.ReduceMean(x, axes, _outputs=["mean"]))
        squared = op.Pow(deviation, two) if self._square == "pow" else op.Mul(deviation, deviation)
        variance = op.ReduceMean(squared, axes2, _outputs=["variance"])
        root = op.Sqrt(op.Add(variance, epsilon))
        early = self._affine.startswith("early")
        y = op.Mul(deviation, scale) if early else deviation
        y = op.Div(y, root) if self._quotient == "div" else self.either(op.Mul, 0, y, op.Reciprocal(root))
        if self._affine in ("both", "scale"):
            y = op.Mul(y, scale)
        return op.Add(y, bias) if self._biased else y

    def check(
        self,
        op: Any,
        x: ir.Value,
        two: ir.Value | None,
        epsilon: ir.Value,
        scale: ir.Value | None,
        bias: ir.Value | None,
        mean: ir.Value,
        variance: ir.Value,
        **_: Any,
    ) -> None:
        for value, what in ((mean, "mean"), (variance, "variance")):
            node = producer(value)
            last_axis_only(node, x, what)
        if self._square == "pow":
            expect(two, 2.0, "exponent", x)
        if not 0 <= scalar(epsilon, "epsilon", x) < 1:
            raise Refuse(f"epsilon is {scalar(epsilon, 'epsilon')}, wanted 0 <= epsilon < 1", epsilon)
        width = static(x, -1, "input")
        if self._affine != "none":
            _weight(scale, x, width, "scale")
        if self._biased:
            _weight(bias, x, width, "bias")

    def rewrite(
        self,
        op: Any,
        x: ir.Value,
        epsilon: ir.Value,
        scale: ir.Value | None,
        bias: ir.Value | None,
        **_: Any,
    ) -> ir.Value:
        width = static(x, -1, "input")
        inputs = [x, _vector(op, scale if self._affine != "none" else None, width, x)]
        if self._biased:
            inputs.append(_vector(op, bias, width, x))
        return op.LayerNormalization(*inputs, axis=-1, epsilon=scalar(epsilon, "epsilon", x))

    def example(self) -> Example:
        width = 16
        return {
            "x": Arg(("B", "S", width)),
            "axes": np.array([-1]),
            "axes2": np.array([-1]),
            "two": np.array(2, np.float32),
            "epsilon": np.array(1e-12, np.float32),
            "scale": np.linspace(0.5, 1.5, width, dtype=np.float32),
            "bias": np.linspace(-1, 1, width, dtype=np.float32),
        }

    near_misses = (
        NearMiss("mean over the tokens", "mean reduces axes", {"axes": np.array([1])}),
        NearMiss("variance over two axes", "variance reduces axes", {"axes2": np.array([1, 2])}),
        NearMiss("a fourth power", "exponent is 4", {"two": np.array(4, np.float32)}),
        NearMiss("an epsilon per channel", "epsilon has shape", {"epsilon": np.full(16, 1e-5, np.float32)}),
        NearMiss("a huge epsilon", "epsilon is 2", {"epsilon": np.array(2, np.float32)}),
        NearMiss(
            "epsilon outside the root (annotated transformer)",
            None,
            build=lambda op, x, axes, axes2, two, epsilon, scale, bias: op.Div(
                op.Sub(x, op.ReduceMean(x, axes)),
                op.Add(
                    op.Sqrt(op.ReduceMean(op.Pow(op.Sub(x, op.ReduceMean(x, axes)), two), axes2)),
                    epsilon,
                ),
            ),
        ),
    )


def _weight(value: ir.Value | None, x: ir.Value, width: int, what: str) -> np.ndarray:
    """A scale or bias per channel: shape (width) or (1, ..., 1, width)."""
    array = constant(value, what)
    if array.size != width or array.shape[-1:] != (width,) or array.ndim > (rank(x) or 1):
        raise Refuse(f"{what} has shape {list(array.shape)}, wanted [{width}]", *([value] if value else []))
    return array


def _vector(op: Any, value: ir.Value | None, width: int, like: ir.Value) -> ir.Value:
    """The weight as a vector; ones where the model has none (the operator wants a scale)."""
    if value is None:
        kind = (like.dtype or ir.DataType.FLOAT).numpy()
        return weight(op, like, f"ones_{width}", f"ones {kind} {width}", lambda: ir.tensor(np.ones(width, kind)))
    if value.shape is not None and len(value.shape) == 1:
        return value
    flat = constant(value, "weight").reshape(-1)
    return weight(op, like, f"{value.name}_vector", f"vector {value.name}", lambda: ir.tensor(flat))
