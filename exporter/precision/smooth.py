"""Puts the smoothing of channels where it costs nothing: into the norm before the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ..guards import fixed
from .products import Product

if TYPE_CHECKING:
    from .writing import Writer

__all__ = ["NORMS", "fold", "normed_by"]

NORMS = {
    ("", "LayerNormalization"): 2,
    ("", "RMSNormalization"): 1,
    ("", "SimplifiedLayerNormalization"): 1,
    ("com.microsoft", "SkipLayerNormalization"): 2,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): 1,
}
"""Norms, by (domain, operator), and how many vectors scale and shift their result."""


def normed_by(x: ir.Value) -> ir.Node | None:
    """The norm whose result a value is. The sum that a norm with a skip gives, too, is none: it has no bound."""
    node = x.producer()
    return node if node is not None and (node.domain, node.op_type) in NORMS and x is node.outputs[0] else None


def fold(writer: Writer, x: ir.Value, products: Sequence[Product], smooth: np.ndarray | None) -> bool:
    """Divides what a norm gives by a vector, if nothing but the products reads it.

    Args:
        writer: Of the graph.
        x: What enters the products.
        products: Those that are smoothed.
        smooth: The vector, (K,).

    Returns:
        Whether it has been done.
    """
    node = normed_by(x)
    if smooth is None or node is None or x.is_graph_output():
        return False
    readers = {product.node for product in products if product.x is x}
    if any(user not in readers for user, _ in x.uses()):
        return False
    first = 2 if node.op_type.startswith("Skip") else 1
    for index in range(first, first + NORMS[node.domain, node.op_type]):
        value = node.inputs[index] if index < len(node.inputs) else None
        tensor = fixed(value)
        if value is None:
            continue
        if tensor is None or tensor.size != smooth.size:
            return False
    for index in range(first, first + NORMS[node.domain, node.op_type]):
        value = node.inputs[index] if index < len(node.inputs) else None
        tensor = fixed(value)
        if value is not None and tensor is not None:
            array = (tensor.numpy() / smooth).astype(np.float32)
            node.replace_input_with(index, writer.constant(array, f"{value.name}_smoothed"))
    return True
