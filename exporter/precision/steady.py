"""Sums over positions that do not depend on how many rows there are.

onnxruntime's ReduceSum over the middle axis of (batch, sequence, d) adds in another order when the batch is 1 (seen in
1.31), so a mean over tokens moves by some 1e-7 in company. A product with ones adds in one order. There are two rows of
ones: with a single one it takes a kernel that adds four positions at a time, and then padding has a say.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..guards import fixed
from .writing import Writer

__all__ = ["steady_sums"]


def steady_sums(model: ir.Model, writer: Writer) -> int:
    """Writes float32 sums over axis 1 of three as products, in place, and returns how many.

    Args:
        model: Lowered.
        writer: Of the same model.
    """
    found = [node for node in model.graph if _sums_positions(node)]
    for node in found:
        x = node.inputs[0]
        two = writer.constant(np.array([2], np.int64), "two")
        length = writer.op(node, "Shape", [x], start=1, end=2)
        shape = writer.op(node, "Concat", [two, length], axis=0)
        ones = writer.op(node, "ConstantOfShape", [shape], value=ir.tensor(np.array([1], np.float32)))
        y = writer.op(node, "MatMul", [ones, x])  # (2, sequence) x (batch, sequence, d) -> (batch, 2, d)
        kept = node.attributes.get_int("keepdims", 1) == 1
        first = writer.constant(np.array([0] if kept else 0, np.int64), "first_kept" if kept else "first")
        y = writer.op(node, "Gather", [y, first], axis=1)
        writer.replace(node, y)
    return len(found)


def _sums_positions(node: ir.Node) -> bool:
    if node.op_type != "ReduceSum" or node.domain or len(node.inputs) < 2:
        return False
    x, axes = node.inputs[0], fixed(node.inputs[1])
    if x is None or x.shape is None or len(x.shape) != 3 or axes is None:
        return False
    if ir.DataType.FLOAT not in (x.dtype, node.outputs[0].dtype):
        return False
    return axes.numpy().tolist() in ([1], [-2])
