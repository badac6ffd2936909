"""Canonical ``LayerNormalization`` after a residual addition -> one kernel for both (CUDA)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, of_type, producer, rank, same_axis
from .attention import CONTRIB


class SkipLayerNorm(Fusion):
    """``LayerNormalization(a + b)`` -> ``com.microsoft.SkipLayerNormalization(a, b)``.

    ``summed``: the sum is needed again (pre-norm residual, or a graph output); the kernel gives it as its
    fourth output.
    """

    meaning = "layer_norm"
    result = (CONTRIB, "SkipLayerNormalization")
    tolerance = 4e-6
    variants = tuple(
        {"summed": summed, "biased": biased} for summed, biased in itertools.product((False, True), repeat=2)
    )

    def __init__(self, summed: bool = False, biased: bool = True) -> None:
        super().__init__()
        self._summed = summed
        self._biased = biased

    def pattern(self, op: Any, a: Any, b: Any, scale: Any, bias: Any) -> Any:
        total = op.Add(a, b, _outputs=["total"])
        y = op.LayerNormalization(total, scale, *([bias] if self._biased else []), _outputs=["y"])
        return [y, total] if self._summed else y

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return {"LayerNormalization": {"axis": -1, "epsilon": 1e-12}}

    def check(self, op: Any, a: ir.Value, b: ir.Value, y: ir.Value, total: ir.Value, **bindings: Any) -> None:
        again = total.is_graph_output() or len(total.uses()) > 1
        if again != self._summed:
            raise Refuse()  # The other variant's.
        node = producer(y)
        of_type(total, "the sum", ir.DataType.FLOAT, ir.DataType.FLOAT16)
        if rank(total) != 3:
            raise Refuse(f"the sum has rank {rank(total)}, wanted (batch, sequence, d)", total)
        if node.attributes.get_int("axis", -1) not in (-1, 2):
            raise Refuse(f"the norm runs from axis {node.attributes.get_int('axis', -1)}, wanted the last", y)
        for name in ("scale", "bias") if self._biased else ("scale",):
            vector: ir.Value = bindings[name]
            if rank(vector) != 1:
                raise Refuse(f"{name} has rank {rank(vector)}, wanted a vector", vector)
            if vector.producer() is not None:  # It could be computed from the sum that it would help to compute.
                raise Refuse(f"{name} is computed, wanted a weight", vector)
        for side in (a, b):
            same = side.shape is not None and total.shape is not None and rank(side) == 3
            if not same or not all(same_axis(x, t) for x, t in zip(side.shape or (), total.shape or (), strict=False)):
                raise Refuse(f"one side of the sum is {side.shape}, wanted {total.shape} as the other", side)

    def rewrite(
        self,
        op: Any,
        a: ir.Value,
        b: ir.Value,
        scale: ir.Value,
        y: ir.Value,
        bias: ir.Value | None = None,
        **_: Any,
    ) -> Any:
        node = producer(y)
        out = op.SkipLayerNormalization(
            a,
            b,
            scale,
            *([bias] if self._biased else []),
            epsilon=node.attributes.get_float("epsilon", 1e-5),
            _domain=CONTRIB,
            _outputs=4 if self._summed else 1,
        )
        return [out[0], out[3]] if self._summed else out

    def example(self) -> Example:
        return {
            "a": Arg(("B", "S", 16)),
            "b": Arg(("B", "S", 16)),
            "scale": np.linspace(0.5, 1.5, 16, dtype=np.float32),
            "bias": np.linspace(-1, 1, 16, dtype=np.float32),
        }

    near_misses = (
        NearMiss("positions that broadcast over the batch", "one side of the sum", {"b": Arg((1, "S", 16))}),
        NearMiss("a scale per token", "scale has rank 3", {"scale": np.ones((1, 1, 16), np.float32)}),
        NearMiss(
            "a bias made of the sum",
            "bias is computed",
            build=lambda op, a, b, scale, bias: op.LayerNormalization(
                (total := op.Add(a, b)), scale, op.Squeeze(op.ReduceMax(total, op.Constant(value_ints=[0, 1])))
            ),
        ),
        NearMiss("no batch axis", "one side of the sum", {"b": Arg(("S", 16))}),
        NearMiss(
            "a norm over two axes",
            "the norm runs from axis 1",
            {"scale": np.ones((7, 16), np.float32), "bias": np.ones((7, 16), np.float32)},
            build=lambda op, a, b, scale, bias: op.LayerNormalization(op.Add(a, b), scale, bias, axis=1),
        ),
    )
