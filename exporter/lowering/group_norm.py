"""``GroupNormalization`` (ai.onnx, since opset 21) -> what older opsets have.

Wu and He, "Group Normalization", 2018 (arXiv 1803.08494).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, of_type, producer, rank, weight


class GroupNormPrimitives(Fusion):
    """``GroupNormalization(x, scale, bias)`` -> ``InstanceNormalization(x by group) * scale + bias``."""

    result = ("", "InstanceNormalization")
    tolerance = 4e-6

    def pattern(self, op: Any, x: Any, scale: Any, bias: Any) -> Any:
        return op.GroupNormalization(x, scale, bias, _outputs=["y"])

    def unfused(self, op: Any, x: Any, scale: Any, bias: Any) -> Any:
        y = self.pattern(op, x, scale, bias)
        y.dtype, y.shape = x.dtype, x.shape  # onnx infers none
        return y

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return {"GroupNormalization": {"num_groups": 4, "epsilon": 1e-3}}

    def check(self, op: Any, x: ir.Value, **_: Any) -> None:
        if (rank(x) or 0) < 3:
            raise Refuse(f"input has rank {rank(x)}, wanted (batch, channels, ...)", x)
        of_type(x, "input", ir.DataType.FLOAT)

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, bias: ir.Value, y: ir.Value) -> ir.Value:
        node = producer(y)
        groups = node.attributes["num_groups"].as_int()

        def filled(name: str, number: float) -> ir.Value:
            array = np.full(groups, number, np.float32)
            return weight(op, x, f"{name}_{groups}", f"{name} float32 {groups}", lambda: ir.tensor(array))

        by_group = op.Reshape(x, op.Constant(value=ir.tensor(np.array([0, groups, -1], np.int64))))
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        normal = op.InstanceNormalization(by_group, filled("ones", 1), filled("zeros", 0), epsilon=epsilon)
        inner = op.Constant(value=ir.tensor(np.arange(1, (rank(x) or 3) - 1, dtype=np.int64)))
        spread = [op.Unsqueeze(each, inner) for each in (scale, bias)]
        return op.Add(op.Mul(op.Reshape(normal, op.Shape(x)), spread[0]), spread[1])

    def example(self) -> Example:
        return {
            "x": Arg(("B", 8, "S")),
            "scale": np.linspace(0.5, 1.5, 8, dtype=np.float32),
            "bias": np.linspace(-1, 1, 8, dtype=np.float32),
        }

    near_misses = (
        NearMiss(
            "half precision, whose mean is taken in float",
            "input is FLOAT16, wanted FLOAT",
            {"x": Arg(("B", 8, "S"), "float16"), "scale": np.ones(8, np.float16), "bias": np.ones(8, np.float16)},
        ),
    )
