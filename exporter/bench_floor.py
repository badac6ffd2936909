"""Engine ``floor`` of ``tfx bench``: the products with weights that a bundle makes, and nothing else.

No engine that makes the same products with the same kernels can be faster than them. Each product keeps its place in
a chain and its own weights, so that these come from memory as often as the model's do, and takes the attended tokens
only. Products of 8 bits are made by ``MatMulInteger`` on unsigned activations and signed weights. Attention's own
products, of activations with each other, are not among them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..runtime.bundle import Bundle
from ..runtime.providers import create_session
from ..runtime.tensors import attended_positions
from .save import save

__all__ = ["Product", "floor_model", "make_runner", "products"]

_FLOAT = {("", "MatMul"): 1, ("", "Gemm"): 1, ("com.microsoft", "FusedMatMul"): 1, ("com.microsoft", "Attention"): 1}
_INT8 = {
    ("", "MatMulInteger"): 1,
    ("", "QLinearMatMul"): 3,
    ("com.microsoft", "MatMulIntegerToFloat"): 1,
    ("com.microsoft", "DynamicQuantizeMatMul"): 1,
    ("com.microsoft", "QAttention"): 1,
}
"""Operators with weights, and which input these are."""

_INT8_LEVEL = 4  # of MatMulNBits' accuracy_level: activations are taken as int8


@dataclass(frozen=True)
class Product:
    """(tokens, inner) by (inner, outer).

    Attributes:
        inner: rows of the weights.
        outer: their columns.
        dtype: ``float32``, ``float16``, ``float64`` or ``int8``.
        per_row: True for a product on one vector per row of the batch.
    """

    inner: int
    outer: int
    dtype: str
    per_row: bool = False


def products(model: ir.Model) -> list[Product]:
    """Return a graph's products with constant weights, in order."""
    found = []
    for node in model.graph:
        key = (node.domain, node.op_type)
        if key == ("com.microsoft", "MatMulNBits"):
            inner, outer = node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)
            exact = node.attributes.get_int("accuracy_level", 0) != _INT8_LEVEL
            found.append(Product(inner, outer, "float32" if exact else "int8", _per_row(node)))
            continue
        place = _FLOAT.get(key, _INT8.get(key))
        weights = node.inputs[place] if place is not None and len(node.inputs) > place else None
        tensor = weights.const_value if weights is not None else None
        if tensor is None or len(tensor.shape) != 2:
            continue
        inner, outer = (int(size) for size in tensor.shape.numpy())
        if node.attributes.get_int("transB", 0):
            inner, outer = outer, inner
        found.append(Product(inner, outer, str(tensor.dtype.numpy()) if key in _FLOAT else "int8", _per_row(node)))
    return found


def _per_row(node: ir.Node) -> bool:
    shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
    return shape is not None and len(shape) == 2 and str(getattr(shape[0], "value", "")) == "batch"


def floor_model(wanted: list[Product]) -> ir.Model:
    """Return a model of these products; inputs are called ``dtype_inner``, ``row_dtype_inner`` for one per row.

    Raises:
        InputError: there is none.
    """
    if not wanted:
        raise InputError("floor: the bundle has no product with weights")
    table = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    inputs: dict[str, ir.Value] = {}
    latest: dict[str, ir.Value] = {}
    nodes: list[ir.Node] = []
    initializers: list[ir.Value] = []

    def constant(name: str, array: np.ndarray) -> ir.Value:
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        initializers.append(value)
        return value

    corner = [constant(name, np.array([0, 0] if name == "from" else [1, 1], np.int64)) for name in ("from", "to")]
    outputs = []
    for i, product in enumerate(wanted):
        whole = product.dtype == "int8"
        kind = "row_" * product.per_row + product.dtype
        name = f"{kind}_{product.inner}"
        if name not in latest:
            dtype = ir.DataType.UINT8 if whole else ir.DataType.from_numpy(np.dtype(product.dtype))
            shape = ir.Shape(["rows" if product.per_row else "tokens", product.inner])
            inputs[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
            latest[name] = inputs[name]
        drawn = np.resize(table, (product.inner, product.outer))
        # Floats keep their size along the chain; neither infinite nor denormal numbers, which take longer.
        scaled = np.clip(drawn * 30, -127, 127) if whole else drawn / product.inner**0.5
        weights = constant(f"w{i}", scaled.astype(product.dtype))
        node = ir.node("MatMulInteger" if whole else "MatMul", [latest[name], weights])
        # A value that nobody wants would not be computed: its corner is an output.
        seen = ir.node("Slice", [node.outputs[0], *corner])
        nodes += [node, seen]
        outputs.append(seen.outputs[0])
        if not whole:
            latest[f"{kind}_{product.outer}"] = node.outputs[0]
    for i, node in enumerate(nodes):
        node.outputs[0].name = f"y{i}"
    for value, product in zip(outputs, wanted, strict=True):
        value.dtype = ir.DataType.INT32 if product.dtype == "int8" else ir.DataType.from_numpy(np.dtype(product.dtype))
        value.shape = ir.Shape([1, 1])
    graph = ir.Graph(
        list(inputs.values()), outputs, nodes=nodes, initializers=initializers, opset_imports={"": 17}, name="floor"
    )
    return ir.Model(graph, ir_version=8)


class _FloorRunner:
    """A session on the products."""

    def __init__(self, bundle: Bundle, provider: str, threads: int) -> None:
        model = floor_model(products(ir.load(bundle.model_path)))
        self._inputs = {value.name or "": value for value in model.graph.inputs}
        self._specs = bundle.manifest.inputs
        self._folder = tempfile.TemporaryDirectory(prefix="tfx-bench-", ignore_cleanup_errors=True)
        path = Path(self._folder.name) / "floor.onnx"
        save(model, path)
        del model
        start = time.perf_counter()
        self._session = create_session(path, provider, threads, optimize=False)
        self.load_s = time.perf_counter() - start
        self.provider = self._session.provider
        self.placement: Mapping[str, int] | None = self._session.placement
        self.threads = threads
        self._made: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        attended = attended_positions(self._specs, feeds)
        first = next(iter(feeds.values()))
        rows = first.shape[0]
        tokens = int(np.prod(first.shape[:2])) if attended is None else int(attended.sum())
        if (tokens, rows) not in self._made:
            self._made = {(tokens, rows): self._draw(tokens, rows)}
        return self._session.run(self._made[tokens, rows])

    def _draw(self, tokens: int, rows: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        made = {}
        for name, value in self._inputs.items():
            assert value.shape is not None and value.dtype is not None
            shape = (rows if name.startswith("row_") else tokens, int(str(value.shape[1])))
            drawn = random.standard_normal(shape, dtype=np.float32)
            dtype = value.dtype.numpy()
            made[name] = np.clip(drawn * 30 + 128, 0, 255).astype(dtype) if dtype == np.uint8 else drawn.astype(dtype)
        return made


def make_runner(bundle: Bundle, provider: str, threads: int, source: str | None = None) -> _FloorRunner:
    """Make the engine, which needs no source.

    Raises:
        InputError: the bundle's graph has no product with weights.
        ProviderError: the provider does not run here.
    """
    del source
    return _FloorRunner(bundle, provider, threads)
