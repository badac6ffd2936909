"""Writes the nodes of 8 bit products: onnxruntime's ``MatMulIntegerToFloat`` and what prepares its left side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import ORIGIN
from ..guards import fixed
from .columns import quantize_columns, quantize_rows
from .products import Product, Table, opset_of
from .schemes import Scheme, static_scale

__all__ = ["Writer"]

CONTRIB = "com.microsoft"


class Writer:
    """Adds nodes to a graph; what several products need is written once.

    Args:
        model: Changed in place.
    """

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        model.opset_imports.setdefault(CONTRIB, 1)  # Settling drops the domains that no node is of.
        self._opset = opset_of(model)
        self._columns: dict[tuple[ir.Value, bool], tuple[ir.Value, ir.Value]] = {}
        self._rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._left: dict[ir.Value, tuple[ir.Value, ...]] = {}
        self._by_axes: dict[tuple[str, ...], ir.Value] = {}
        self._taken = _names(model.graph)
        self._number = 0

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """An initializer; that of the same name and content when it is there."""
        array, free, number = np.array(array, order="C"), name, 1
        while free in self._taken:
            value = self._graph.initializers.get(free)
            tensor = fixed(value)
            same = tensor is not None and tensor.numpy().dtype == array.dtype and np.array_equal(tensor.numpy(), array)
            if value is not None and same:
                return value
            free, number = f"{name}_{number}", number + 1
        value = ir.val(free, const_value=ir.tensor(array, name=free))
        self._graph.register_initializer(value)
        self._taken.add(free)
        return value

    def op(
        self, before: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], *, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """The result of a new node that stands before another one."""
        return self.ops(before, op_type, inputs, 1, domain=domain, **attributes)[0]

    def ops(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        count: int,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """The results of a new node."""
        names: list[str] = []
        while not names or not self._taken.isdisjoint(names):
            self._number += 1
            stem = f"{before.name or before.op_type}_{op_type}_{self._number}"
            names = [f"{stem}_{i}" if i else stem for i in range(count)]
        self._taken.update(names)
        outputs = [ir.val(name) for name in names]
        node = ir.node(op_type, inputs, attributes, domain=domain, name=names[0], outputs=outputs)
        if ORIGIN in before.metadata_props:
            node.metadata_props[ORIGIN] = before.metadata_props[ORIGIN]
        self._graph.insert_before(before, node)
        return outputs

    def columns(self, product: Product, smooth: np.ndarray | None) -> tuple[ir.Value, ir.Value]:
        """The 8 bit weights and their scales, one copy for all products of a matrix."""
        if product.key not in self._columns:
            matrix = product.matrix()
            name = product.weight.name or "weight"
            weights, scales = quantize_columns(matrix if smooth is None else matrix * smooth[:, None])
            made = self.constant(weights, f"{name}_int8"), self.constant(scales, f"{name}_scales")
            self._columns[product.key] = made
        return self._columns[product.key]

    def product(
        self, product: Product, scheme: Scheme, channels: np.ndarray, lacking: np.ndarray, *, folded: bool = False
    ) -> None:
        """Puts an 8 bit product in the place of one.

        Args:
            product: What is replaced.
            scheme: How its input is scaled.
            channels: Largest magnitude of the input's channels.
            lacking: What is to be added to the result, (N,), if that costs no operator.
            folded: Whether the smoothing is in the norm before already.
        """
        node = product.node
        weights, scales = self.columns(product, scheme.smooth)
        shifted = scheme.kind == "shifted"
        if shifted:
            columns, steps = fixed(weights), fixed(scales)
            assert columns is not None and steps is not None
            sums = columns.numpy().sum(axis=0, dtype=np.int64) * steps.numpy()
            lacking = lacking - scheme.shift * sums
        bias, after = self._bias(product)
        if after is None and self._into_gelu(product, lacking):
            lacking = np.zeros_like(lacking)
        elif bias is not None or shifted or scheme.kind == "static":
            bias = (lacking if bias is None else bias + lacking).astype(np.float32)
        added = None if bias is None else self.constant(bias, f"{product.weight.name}_bias")
        zero = self.constant(np.array(0 if shifted else 128, np.uint8), "zero_0" if shifted else "zero_128")
        q, scale = self._left_side(product, scheme, channels, folded)
        if scheme.kind == "static":
            inputs = [q, weights, scale, scales, zero, None, added][: 5 if added is None else 7]
            self._replace(product, self.op(node, "MatMulIntegerToFloat", inputs, domain=CONTRIB), after)
            return
        one = self.constant(np.array(1, np.float32), "one")
        y = self.op(node, "MatMulIntegerToFloat", [q, weights, one, scales, zero], domain=CONTRIB)
        y = self.op(node, "Mul", [y, scale])
        if added is not None:
            y = self.op(node, "Add", [y, added])
        self._replace(product, y, after)

    def _left_side(self, product: Product, scheme: Scheme, channels: np.ndarray, folded: bool) -> tuple[ir.Value, ...]:
        """The input in 8 bits and its scale, written once for all products that have it."""
        if product.x not in self._left:
            node, x = product.node, product.x
            if scheme.smooth is not None and not folded:
                x = self.op(node, "Mul", [x, self.constant(1 / scheme.smooth, "smoothing")])
                x.type, x.shape = ir.TensorType(ir.DataType.FLOAT), product.x.shape
            if scheme.kind == "static":
                scale = self.constant(np.array(static_scale(channels, scheme.smooth), np.float32), "scale")
                zero = self.constant(np.array(128, np.uint8), "zero_128")
                self._left[product.x] = self.op(node, "QuantizeLinear", [x, scale, zero]), scale
            elif scheme.kind == "shifted":
                self._left[product.x] = self._shifted(node, x, scheme.shift)
            else:
                self._left[product.x] = self._token(node, x)
        return self._left[product.x]

    def _into_gelu(self, product: Product, lacking: np.ndarray) -> bool:
        """Adds a vector to the bias that a GELU adds itself; says whether there was one."""
        users = list(product.y.uses())
        if len(users) != 1 or product.y.is_graph_output() or users[0].node.op_type not in ("BiasGelu", "FastGelu"):
            return False
        gelu = users[0].node
        tensor = fixed(gelu.inputs[1]) if len(gelu.inputs) > 1 and users[0].idx == 0 else None
        if tensor is None or tensor.size != lacking.size:
            return False
        bias = (tensor.numpy().reshape(-1) + lacking).astype(np.float32)
        gelu.replace_input_with(1, self.constant(bias, f"{product.weight.name}_bias"))
        return True

    def dynamic(self, product: Product) -> None:
        """Puts a product with one scale per call in the place of one."""
        node = product.node
        weights, scales = self.columns(product, None)
        bias, after = self._bias(product)
        if product.x not in self._left:
            self._left[product.x] = tuple(self.ops(node, "DynamicQuantizeLinear", [product.x], 3))
        q, scale, zero = self._left[product.x]
        inputs = [q, weights, scale, scales, zero]
        if bias is not None:
            inputs += [None, self.constant(bias, f"{product.weight.name}_bias")]
        self._replace(product, self.op(node, "MatMulIntegerToFloat", inputs, domain=CONTRIB), after)

    def blocks(self, product: Product, packed: np.ndarray, scales: np.ndarray, *, bits: int, block: int) -> None:
        """Puts a product with weights in blocks in the place of one; see :mod:`.blocks`."""
        bias, after = self._bias(product)
        name = f"{product.weight.name}_{bits}bit"
        inputs: list[ir.Value | None] = [
            product.x,
            self.constant(packed, name),
            self.constant(scales, f"{name}_scales"),
        ]
        if bias is not None:
            inputs += [None, None, self.constant(bias, f"{product.weight.name}_bias")]
        depth, width = product.matrix().shape
        sizes = {"K": depth, "N": width, "bits": bits, "block_size": block, "accuracy_level": 4}
        y = self.op(product.node, "MatMulNBits", inputs, domain=CONTRIB, **sizes)
        self._replace(product, y, after)

    def table(self, table: Table) -> None:
        """Looks rows up in 8 bits and scales each by its own scale."""
        node = table.node
        if table.weight not in self._rows:
            tensor = fixed(table.weight)
            assert tensor is not None
            rows, scales = quantize_rows(tensor.numpy())
            name = table.weight.name or "table"
            made = self.constant(rows, f"{name}_int8"), self.constant(scales[:, None], f"{name}_scales")
            self._rows[table.weight] = made
        rows, scales = self._rows[table.weight]
        ids = node.inputs[1]
        found = self.op(node, "Cast", [self.op(node, "Gather", [rows, ids], axis=0)], to=ir.DataType.FLOAT)
        y = self.op(node, "Mul", [found, self.op(node, "Gather", [scales, ids], axis=0)])
        self.replace(node, y)

    def replace(self, node: ir.Node, y: ir.Value) -> None:
        """Puts a value in the place of a node's result."""
        _take_over(node.outputs[0], y)
        self._graph.remove(node, safe=True)

    def _token(self, node: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """8 bit values around 128, and scales (..., 1)."""
        # Two reductions read x twice; Abs would write it once more. A token of zeros must not divide by zero.
        sides = [self._largest(node, x), self.op(node, "Neg", [self._largest(node, x, "ReduceMin")])]
        largest = self.op(node, "Max", [*sides, self.constant(np.array(1e-20, np.float32), "least")])
        scale = self.op(node, "Mul", [largest, self.constant(np.array(1 / 127, np.float32), "per_127")])
        flat = self._flat(node, scale)
        key = ("zero", *_axes(x))
        zero = self._by_axes.get(key) if len(key) > 1 else None
        if zero is None:
            shape = self.op(node, "Shape", [flat])
            zero = self.op(node, "ConstantOfShape", [shape], value=ir.tensor(np.array([128], np.uint8)))
            self._by_axes[key] = zero
        return self._rounded(node, x, flat, zero), scale

    def _shifted(self, node: ir.Node, x: ir.Value, shift: float) -> tuple[ir.Value, ir.Value]:
        """8 bit values, shifted up by ``shift`` in the scale of each token, and scales (..., 1)."""
        c = self.constant(np.array(shift, np.float32), "shift")
        above = self.op(node, "Add", [self._largest(node, x), c])
        steps = self.op(node, "Div", [self.constant(np.array(255 * shift, np.float32), "steps"), above])
        # A token of nothing but negative values would get more steps than there are.
        ends = self.constant(np.array(1, np.float32), "one"), self.constant(np.array(255, np.float32), "most")
        zero = self.op(node, "Clip", [self.op(node, "Floor", [steps]), *ends])
        scale = self.op(node, "Div", [c, zero])
        zero = self.op(node, "Cast", [self._flat(node, zero)], to=ir.DataType.UINT8)
        return self._rounded(node, x, self._flat(node, scale), zero), scale

    def _largest(self, node: ir.Node, x: ir.Value, op_type: str = "ReduceMax") -> ir.Value:
        if self._opset >= 18:
            last = self.constant(np.array([-1], np.int64), "last_axis")
            return self.op(node, op_type, [x, last], keepdims=1)
        return self.op(node, op_type, [x], axes=[-1], keepdims=1)

    def _flat(self, node: ir.Node, scale: ir.Value) -> ir.Value:
        return self.op(node, "Reshape", [scale, self.constant(np.array([-1], np.int64), "flat")])

    def _rounded(self, node: ir.Node, x: ir.Value, scale: ir.Value, zero: ir.Value) -> ir.Value:
        """X in 8 bits with a scale and a zero point per token. The operator has them along one axis."""
        if x.shape is not None and len(x.shape) == 2:
            return self.op(node, "QuantizeLinear", [x, scale, zero], axis=0)
        width = _width(node)
        flat = self.op(node, "Reshape", [x, self.constant(np.array([-1, width], np.int64), f"rows_of_{width}")])
        q = self.op(node, "QuantizeLinear", [flat, scale, zero], axis=0)
        key = ("shape", *_axes(x), str(width))
        shape = self._by_axes.get(key) if len(key) > 2 else None
        if shape is None:
            shape = self._by_axes[key] = self.op(node, "Shape", [x])
        return self.op(node, "Reshape", [q, shape])

    def _bias(self, product: Product) -> tuple[np.ndarray | None, ir.Node | None]:
        """What is added to a product, (N,), and the node that adds it, which the new product takes in."""
        if product.bias is not None:
            tensor = fixed(product.bias)
            if tensor is not None and tensor.size == product.matrix().shape[1]:
                return tensor.numpy().reshape(-1), product.node
        users = [node for node, _ in product.y.uses()]
        if len(users) != 1 or product.y.is_graph_output() or product.bias is not None:
            return None, None
        if users[0].op_type != "Add" or users[0].domain:
            return None, None
        other = next((value for value in users[0].inputs if value is not product.y), None)
        tensor = fixed(other)
        if tensor is None or len(tensor.shape) != 1 or tensor.size != product.matrix().shape[1]:
            return None, None
        return tensor.numpy(), users[0]

    def _replace(self, product: Product, y: ir.Value, after: ir.Node | None) -> None:
        node = product.node
        if product.bias is not None and after is not node:  # a bias of another shape than (N,)
            y = self.op(node, "Add", [y, product.bias])
        old = node if after is None or after is node else after
        _take_over(old.outputs[0], y)
        for each in dict.fromkeys((old, node)):
            self._graph.remove(each, safe=True)


def _names(graph: ir.Graph) -> set[str]:
    """Names of all values, those of subgraphs among them: a constant of the same name would hide one or be hidden."""
    graphs = [graph, *graph.subgraphs()]
    values = [value for each in graphs for value in (*each.inputs, *each.initializers.values())]
    values += [value for each in graphs for node in each for value in node.outputs]
    return {value.name for value in values if value.name}


def _take_over(old: ir.Value, new: ir.Value) -> None:
    """Puts a value in the place of another one, under its name."""
    new.type, new.shape = old.type, old.shape
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = None, name


def _axes(x: ir.Value) -> tuple[str, ...]:
    """Names of the axes but the last; none when one has no name."""
    names = [] if x.shape is None else [str(axis) for axis in x.shape[:-1]]
    return () if any(name in ("None", "?") for name in names) else tuple(names)


def _width(node: ir.Node) -> int:
    """K of a product."""
    weight = fixed(node.inputs[1])
    assert weight is not None
    return weight.shape.numpy()[1 if node.attributes.get_int("transB", 0) else 0]
