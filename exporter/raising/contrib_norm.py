"""onnxruntime's operators of a residual addition and a norm -> the addition and the canonical norm."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, producer, rank
from .contrib import CONTRIB, like


class ContribSkipLayerNorm(Fusion):
    """``com.microsoft.SkipLayerNormalization(a, b, scale, beta, bias)`` -> ``LayerNormalization(a + b + bias, scale, beta)``.

    ``summed``: the sum, the operator's fourth output, is needed too.
    """  # noqa: E501

    meaning = "layer_norm"
    result = ("", "LayerNormalization")
    tolerance = 4e-6
    variants = tuple(
        {"summed": summed, "biased": biased} for summed, biased in itertools.product((False, True), repeat=2)
    )

    def __init__(self, summed: bool = False, biased: bool = False) -> None:
        super().__init__()
        self._summed = summed
        self._biased = biased

    def pattern(self, op: Any, a: Any, b: Any, scale: Any, beta: Any, bias: Any) -> Any:
        inputs = [a, b, scale, beta, *([bias] if self._biased else [])]
        names = ["y", "mean", "deviation", "total"] if self._summed else ["y"]
        found = op.SkipLayerNormalization(*inputs, _domain=CONTRIB, _outputs=names)
        return [found[0], found[3]] if self._summed else found

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return {"SkipLayerNormalization": {"epsilon": 1e-12}}

    def check(self, op: Any, a: ir.Value, b: ir.Value, y: ir.Value, **_: Any) -> None:
        node = producer(y)
        if len(node.outputs) > 1 and not self._summed:
            raise Refuse()  # The other variant's.
        for value in node.outputs[1:3]:
            if value.uses() or value.is_graph_output():
                raise Refuse(f"the mean or deviation {value.name} is used", value)
        if rank(a) is None or rank(a) != rank(b):
            raise Refuse(f"the sides of the sum have ranks {rank(a)} and {rank(b)}, wanted equal ones", y)

    def rewrite(
        self,
        op: Any,
        a: ir.Value,
        b: ir.Value,
        scale: ir.Value,
        beta: ir.Value,
        y: ir.Value,
        bias: ir.Value | None = None,
        **_: Any,
    ) -> Any:
        axes = a.shape or ()
        total = like(op.Add(a, b), a, *axes)
        if bias is not None:
            total = like(op.Add(total, bias), a, *axes)
        # The operator's epsilon is 1e-12 where it is not written, the norm's 1e-5.
        epsilon = producer(y).attributes.get_float("epsilon", 1e-12)
        out = like(op.LayerNormalization(total, scale, beta, axis=-1, epsilon=epsilon), a, *axes)
        return [out, total] if self._summed else out

    def example(self) -> Example:
        return {
            "a": Arg(("B", "S", 16)),
            "b": Arg(("B", "S", 16)),
            "scale": np.linspace(0.5, 1.5, 16, dtype=np.float32),
            "beta": np.linspace(-1, 1, 16, dtype=np.float32),
            "bias": np.linspace(2, 3, 16, dtype=np.float32),
        }

    near_misses = (NearMiss("one skip for all rows", "the sides of the sum have ranks 3 and 2", {"b": Arg(("S", 16))}),)
