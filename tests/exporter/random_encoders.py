"""Encoders as anybody may write them, drawn by hypothesis and written straight as ONNX graphs."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from hypothesis import strategies as st

from tfx.exporter.fusion import COMMUTATIVE, GraphWriter

LOWEST = float(np.finfo(np.float32).min)
MASKS = ("none", "additive", "fill", "keep", "bool", "expanded", "square")
SCALES = ("none", "div", "mul", "q", "k", "both", "after")


@dataclasses.dataclass(frozen=True)
class Design:
    """How an encoder is written; ``seed`` gives weights and the order of operands."""

    heads: int
    size: int
    value_size: int
    layers: int
    norm: str  # "node", "pieces"
    square: str  # "pow", "mul"
    quotient: str  # "div", "reciprocal"
    scale_rank: int  # of a norm's scale: 1 or 3
    epsilon: float
    pre: bool
    gelu: str
    linear: str  # "matmul", "gemm"
    bias: bool
    packed: bool
    scale: str
    mask: str
    value: float
    source: str  # element type of the mask input
    window: str  # "", "and" (one condition), "add" (a second mask)
    position: bool
    leftovers: bool
    seed: int

    @property
    def finite(self) -> bool:
        """Whether a query without a key is an average and not NaN."""
        return math.isfinite(self.value) and not (self.value == LOWEST and self.window == "add")

    @property
    def fill_then_add(self) -> bool:
        """Whether a mask is added to scores that a finite value fills already."""
        return self.window == "add" and self.mask not in ("none", "additive")

    @property
    def counts(self) -> dict[str, int]:
        """The canonical nodes that were written."""
        return {"attention": self.layers, "layer_norm": 2 * self.layers, "gelu": self.layers}


DESIGNS = st.builds(
    Design,
    heads=st.integers(1, 3),
    size=st.sampled_from((4, 8)),
    value_size=st.sampled_from((4, 8)),
    layers=st.integers(1, 2),
    norm=st.sampled_from(("node", "pieces")),
    square=st.sampled_from(("pow", "mul")),
    quotient=st.sampled_from(("div", "reciprocal")),
    scale_rank=st.sampled_from((1, 3)),
    epsilon=st.sampled_from((1e-12, 1e-6, 1e-5, 1e-3)),
    pre=st.booleans(),
    gelu=st.sampled_from(("node", "erf", "erf_halved", "cdf", "tanh", "tanh_product")),
    linear=st.sampled_from(("matmul", "gemm")),
    bias=st.booleans(),
    packed=st.booleans(),
    scale=st.sampled_from(SCALES),
    mask=st.sampled_from(MASKS),
    value=st.sampled_from((-1e9, LOWEST, -math.inf)),
    source=st.sampled_from(("int64", "int32", "float32", "bool")),
    window=st.sampled_from(("", "and", "add")),
    position=st.booleans(),
    leftovers=st.booleans(),
    seed=st.integers(0, 2**31),
)


class Writer:
    """Writes one design."""

    def __init__(self, design: Design) -> None:
        self.design = design
        self.op = GraphWriter()
        self.rng = np.random.default_rng(design.seed)
        self.coin = random.Random(design.seed)
        self.constants: list[ir.Value] = []
        self.width = design.heads * design.size

    def constant(self, array: Any, kind: Any = np.float32) -> ir.Value:
        name = f"c{len(self.constants)}"
        self.constants.append(ir.val(name, const_value=ir.tensor(np.asarray(array, kind), name=name)))
        return self.constants[-1]

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(numbers, np.int64)

    def weight(self, *shape: int, scale: float = 0.5) -> ir.Value:
        return self.constant(scale * self.rng.standard_normal(shape))

    def two(self, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        """An operator of two inputs, in either order where that is the same."""
        swap = op_type in COMMUTATIVE and self.coin.random() < 0.5
        return getattr(self.op, op_type)(*((b, a) if swap else (a, b)))

    def passed(self, x: ir.Value) -> ir.Value:
        """What inference leaves of dropout."""
        if not self.design.leftovers:
            return x
        return self.op.Dropout(x) if self.coin.random() < 0.5 else self.op.Identity(x)

    def linear(self, x: ir.Value, rows: int, columns: int) -> ir.Value:
        w, bias = self.weight(rows, columns, scale=rows**-0.5), self.design.bias
        if self.design.linear == "matmul":
            y = self.op.MatMul(x, w)
            return self.two("Add", y, self.weight(columns)) if bias else y
        flat = self.op.Reshape(x, self.ints(-1, rows))
        y = self.op.Gemm(flat, w, self.weight(columns)) if bias else self.op.Gemm(flat, w)
        return self.op.Reshape(y, self.op.Concat(self.op.Shape(x, end=2), self.ints(columns), axis=0))

    def norm(self, x: ir.Value) -> ir.Value:
        d, width = self.design, self.width
        scale = self.constant(self.rng.uniform(0.5, 1.5, width))
        bias = self.weight(width)
        if d.norm == "node":
            return self.op.LayerNormalization(x, scale, bias, axis=-1, epsilon=d.epsilon)
        if d.scale_rank == 3:
            scale = self.constant(self.rng.uniform(0.5, 1.5, (1, 1, width)))
        deviation = self.op.Sub(x, self.op.ReduceMean(x, self.ints(-1)))
        squared = self.op.Mul(deviation, deviation) if d.square == "mul" else self.op.Pow(deviation, self.constant(2))
        root = self.op.Sqrt(self.two("Add", self.op.ReduceMean(squared, self.ints(-1)), self.constant(d.epsilon)))
        if d.quotient == "div":
            y = self.op.Div(deviation, root)
        else:
            y = self.two("Mul", deviation, self.op.Reciprocal(root))
        return self.two("Add", self.two("Mul", y, scale), bias)

    def gelu(self, x: ir.Value) -> ir.Value:
        kind, one, half = self.design.gelu, self.constant(1), self.constant(0.5)
        if kind == "node":
            return self.op.Gelu(x)
        if kind.startswith("tanh"):
            cube = self.op.Pow(x, self.constant(3)) if kind == "tanh" else self.two("Mul", self.two("Mul", x, x), x)
            inner = self.two("Add", x, self.two("Mul", cube, self.constant(0.044715)))
            gate = self.op.Tanh(self.two("Mul", inner, self.constant(math.sqrt(2 / math.pi))))
        else:
            gate = self.op.Erf(self.op.Div(x, self.constant(math.sqrt(2))))
        if kind == "cdf":
            return self.two("Mul", x, self.two("Add", self.two("Mul", gate, half), half))
        if kind == "erf_halved":
            return self.two("Mul", self.two("Mul", x, half), self.two("Add", gate, one))
        return self.two("Mul", self.two("Mul", x, self.two("Add", gate, one)), half)

    def near(self, x: ir.Value) -> ir.Value:
        """Bool (S, S): keys at most two places away."""
        length = self.op.Squeeze(self.op.Shape(x, start=1, end=2), self.ints(0))
        places = self.op.Range(self.constant(0, np.int64), length, self.constant(1, np.int64))
        apart = self.op.Sub(self.op.Unsqueeze(places, self.ints(0)), self.op.Unsqueeze(places, self.ints(1)))
        return self.op.LessOrEqual(self.op.Abs(apart), self.constant(2, np.int64))

    def kept(self, x: ir.Value, mask: ir.Value) -> ir.Value:
        """Bool, (B, 1, 1, S) or wider: true where a key is attended."""
        four = self.op.Unsqueeze(mask, self.ints(1, 2))
        kept = four if self.design.source == "bool" else self.op.Cast(four, to=9)
        if self.design.mask == "square":
            kept = self.op.And(kept, self.op.Transpose(kept, perm=[0, 1, 3, 2]))
        if self.design.window == "and":
            kept = self.op.And(kept, self.near(x))
        if self.design.mask == "expanded":
            length = self.op.Shape(x, start=1, end=2)
            sizes = self.op.Concat(self.op.Shape(x, end=1), self.ints(1), length, length, axis=0)
            kept = self.op.Expand(kept, sizes)
        return kept

    def additive(self, kept: ir.Value) -> ir.Value:
        if not math.isfinite(self.design.value):
            return self.op.Where(kept, self.constant(0), self.constant(self.design.value))
        masked = self.op.Sub(self.constant(1), self.op.Cast(kept, to=1))
        return self.two("Mul", masked, self.constant(self.design.value))

    def heads(self, x: ir.Value, size: int) -> ir.Value:
        split = self.op.Reshape(x, self.ints(0, 0, self.design.heads, size))
        return self.op.Transpose(split, perm=[0, 2, 1, 3])

    def attention(self, x: ir.Value, kept: ir.Value, near: ir.Value | None, position: ir.Value | None) -> ir.Value:
        d, root = self.design, math.sqrt(self.design.size)
        widths = [self.width, self.width, d.heads * d.value_size]
        if d.packed:
            parts = self.linear(x, self.width, sum(widths))
            q, k, v = self.op.Split(parts, self.ints(*widths), axis=-1, _outputs=3)
        else:
            q, k, v = (self.linear(x, self.width, width) for width in widths)
        q, k, v = self.heads(q, d.size), self.heads(k, d.size), self.heads(v, d.value_size)
        if d.scale == "q":
            q = self.op.Div(q, self.constant(root))
        if d.scale == "k":
            k = self.two("Mul", k, self.constant(1 / root))
        if d.scale == "both":
            q, k = (self.two("Mul", each, self.constant(root**-0.5)) for each in (q, k))
        scores = self.op.MatMul(q, self.op.Transpose(k, perm=[0, 1, 3, 2]))
        if d.scale == "div":
            scores = self.op.Div(scores, self.constant(root))
        if d.scale == "mul":
            scores = self.two("Mul", scores, self.constant(1 / root))
        if position is not None:
            scores = self.two("Add", scores, position)
        if d.mask == "additive":
            scores = self.two("Add", scores, self.additive(kept))
        elif d.mask in ("fill", "expanded"):
            scores = self.op.Where(self.op.Not(kept), self.constant(d.value), scores)
        elif d.mask in ("keep", "bool", "square"):
            scores = self.op.Where(kept, scores, self.constant(d.value))
        if near is not None:
            scores = self.two("Add", scores, self.additive(near))
        if d.scale == "after":
            scores = self.op.Div(scores, self.constant(2))
        weights = self.passed(self.op.Softmax(scores, axis=-1))
        merged = self.op.Transpose(self.op.MatMul(weights, v), perm=[0, 2, 1, 3])
        out = self.op.Reshape(merged, self.ints(0, 0, d.heads * d.value_size))
        return self.passed(self.linear(out, d.heads * d.value_size, self.width))

    def layer(self, x: ir.Value, *masks: Any) -> ir.Value:
        d = self.design
        y = self.two("Add", x, self.attention(self.norm(x) if d.pre else x, *masks))
        y = y if d.pre else self.norm(y)
        inner = self.gelu(self.linear(self.norm(y) if d.pre else y, self.width, 2 * self.width))
        y = self.two("Add", y, self.passed(self.linear(inner, 2 * self.width, self.width)))
        return y if d.pre else self.norm(y)


def write(design: Design) -> ir.Model:
    """The unfused graph: ``x`` (B, S, D), ``attention_mask`` (B, S) -> ``y`` (B, S, D)."""
    writer = Writer(design)
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape(["B", "S", writer.width]))
    kind = ir.DataType.from_numpy(np.dtype(design.source))
    mask = ir.val("attention_mask", kind, ir.Shape(["B", "S"]))
    kept = writer.kept(x, mask)
    near = writer.near(x) if design.window == "add" else None
    # A bias by position that is learned: one number per head, times the distance.
    position = None
    if design.position:
        far = writer.op.Cast(writer.op.Not(writer.near(x)), to=1)
        position = writer.op.Mul(far, writer.weight(1, design.heads, 1, 1))
    y = x
    for _ in range(design.layers):
        y = writer.layer(y, kept, near, position)
    y.name = "y"
    graph = ir.Graph(
        [x, mask], [y], nodes=writer.op.nodes, initializers=writer.constants, opset_imports={"": 23}, name="random"
    )
    model = ir.Model(graph, ir_version=10)
    passes.NameFixPass()(model)
    passes.RemoveUnusedNodesPass()(model)
    return model
