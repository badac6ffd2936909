"""The products and tables of a lowered graph whose weights can be kept in fewer bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from ..guards import fixed

__all__ = ["Product", "Table", "Unit", "find_products", "find_tables", "opset_of", "units"]

_LEAST_WEIGHTS = 4096
"""Smaller matrices are left alone: they save nothing, and what surrounds the product costs more than it."""

_MOVES = {
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators that give numbers they were given."""


@dataclasses.dataclass(frozen=True)
class Product:
    """``x @ weight (+ bias)`` with constant weights.

    Attributes:
        node: The MatMul or Gemm.
        weight: The constant right side as it stands in the graph.
        transposed: Whether the constant is (N, K), as a Gemm may have it.
        bias: What a Gemm adds, ``None`` for a MatMul.
    """

    node: ir.Node
    weight: ir.Value
    transposed: bool = False
    bias: ir.Value | None = None

    def matrix(self) -> np.ndarray:
        """The weights as (K, N)."""
        tensor = fixed(self.weight)
        assert tensor is not None
        array = tensor.numpy()
        return array.T if self.transposed else array

    @property
    def key(self) -> tuple[ir.Value, bool]:
        """What matrix it is: a constant that is also used the other way round is another one there."""
        return self.weight, self.transposed

    @property
    def x(self) -> ir.Value:
        """The left side as it is now, (..., K) float32: what made it may have been replaced."""
        x = self.node.inputs[0]
        assert x is not None
        return x

    @property
    def y(self) -> ir.Value:
        """The result, (..., N)."""
        return self.node.outputs[0]


@dataclasses.dataclass
class Unit:
    """Products that are changed together: they share an input, which is quantised once, or a matrix, kept once."""

    products: list[Product]

    @property
    def inputs(self) -> list[ir.Value]:
        """The distinct left sides, in order."""
        return list(dict.fromkeys(product.x for product in self.products))

    @property
    def name(self) -> str:
        """Where it is: the names of the first product and of how many more."""
        first = self.products[0].node.name or self.products[0].y.name or "product"
        return first if len(self.products) == 1 else f"{first} and {len(self.products) - 1} more"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of a constant table that are looked up: ``Gather(table, ids, axis=0)``."""

    node: ir.Node
    weight: ir.Value


def opset_of(model: ir.Model) -> int:
    """The ai.onnx opset of a settled model."""
    return model.opset_imports[""]


def _matrix(value: ir.Value | None) -> bool:
    tensor = fixed(value)
    return (
        tensor is not None
        and tensor.dtype == ir.DataType.FLOAT
        and len(tensor.shape) == 2
        and tensor.size >= _LEAST_WEIGHTS
    )


def find_products(model: ir.Model) -> list[Product]:
    """Products of the main graph with constant float32 matrices, in order.

    Those inside of subgraphs are left: a Loop runs them on a few rows at a time.
    """
    found = []
    for node in model.graph:
        if node.domain or len(node.inputs) < 2:
            continue
        x, weight = node.inputs[:2]
        if x is None or weight is None or not _matrix(weight) or fixed(x) is not None:
            continue
        if x.dtype not in (None, ir.DataType.FLOAT):
            continue
        if node.op_type == "MatMul":
            found.append(Product(node, weight))
        elif node.op_type == "Gemm" and _plain(node):
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            found.append(Product(node, weight, bool(node.attributes.get_int("transB", 0)), bias))
    return found


def _plain(node: ir.Node) -> bool:
    get = node.attributes
    return get.get_int("transA", 0) == 0 and get.get_float("alpha", 1.0) == 1 and get.get_float("beta", 1.0) == 1


def find_tables(model: ir.Model) -> list[Table]:
    """Lookups in constant float32 tables of the main graph, in order.

    Tables of cosines and sines are left: 8 bits of an angle are felt at every position, and the tables are small.
    """
    found = []
    for node in model.graph:
        if node.op_type != "Gather" or node.domain or node.attributes.get_int("axis", 0) != 0:
            continue
        weight = node.inputs[0]
        if weight is not None and _matrix(weight) and not _turns(node.outputs[0]):
            found.append(Table(node, weight))
    return found


def _turns(value: ir.Value) -> bool:
    """Whether a rotary embedding has a value, moved about at most, for its cosines or sines."""
    for node, index in value.uses():
        if node.op_type == "RotaryEmbedding":
            if index in ((2, 3) if node.domain else (1, 2)):  # (x, positions, cos, sin) or (x, cos, sin, positions)
                return True
        elif not node.domain and node.op_type in _MOVES and any(_turns(each) for each in node.outputs):
            return True
    return False


def units(products: Iterable[Product]) -> list[Unit]:
    """Groups products that share an input or a matrix, directly or through others; in order of their first one."""
    groups: list[list[Product]] = []
    for product in products:
        mine = [group for group in groups if any(each.x is product.x or each.key == product.key for each in group)]
        joined = [*(each for group in mine for each in group), product]
        position = groups.index(mine[0]) if mine else len(groups)
        groups = [group for group in groups if not any(group is each for each in mine)]
        groups.insert(position, joined)
    return [Unit(group) for group in groups]
