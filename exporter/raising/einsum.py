"""``Einsum`` of two operands -> ``MatMul``, which is what the other rules know (ai.onnx Einsum, since opset 12)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..fusion import Arg, Example, Fusion, NearMiss
from ..guards import Refuse, axis_of, constant, fixed, ints, producer, rank, same_axis, static, transpose, weight

Letters = tuple[str, str, str]


class _Einsum(Fusion):
    result = ("", "MatMul")
    tolerance = 4e-6
    one_pattern = True

    def __init__(self, equation: str = "") -> None:
        super().__init__()
        self._equation: str = equation or self.variants[0]["equation"]

    def open_attributes(self) -> dict[str, dict[str, Any]]:
        return {"Einsum": {"equation": self._equation}}


class EinsumProduct(_Einsum):
    """``Einsum("bqhd,bkhd->bhqk", x, y)`` -> ``MatMul(Transpose(x), Transpose(y))``.

    For any order of the axes, with one letter summed over, one that only x has, one that only y has, and the
    others shared by both.
    """

    variants = tuple(
        {"equation": equation}
        for equation in ("bqhd,bkhd->bhqk", "bhqd,bhkd->bhqk", "bhqk,bkhd->bqhd", "bhqk,bhkd->bhqd", "bqhd,bkhd->bqhk")
    )

    def pattern(self, op: Any, x: Any, y: Any) -> Any:
        return op.Einsum(x, y, _outputs=["z"])

    def check(self, op: Any, x: ir.Value, y: ir.Value, z: ir.Value) -> None:
        left, right, out = _letters(z)
        if (fixed(x) is not None or fixed(y) is not None) and not set(left) & set(right) & set(out):
            raise Refuse()  # a projection: another rule's
        summed = [c for c in left if c in right and c not in out]
        only = [[c for c in one if c not in other] for one, other in ((left, right), (right, left))]
        wrong = [len(summed), *map(len, only)] != [1, 1, 1]
        if wrong or not {*left} | {*right} >= {*out} or not {*only[0], *only[1]} <= {*out}:
            raise Refuse(
                f"equation {left},{right}->{out} is no matrix product: it sums over {len(summed)} letters and has "
                f"{len(only[0])} and {len(only[1])} of one side alone, wanted one each",
                x,
            )
        for c in left:
            if c in right and not same_axis(axis_of(x, left.index(c)), axis_of(y, right.index(c))):
                raise Refuse(f'axis "{c}" is {axis_of(x, left.index(c))} and {axis_of(y, right.index(c))}', x)

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        left, right, out = _letters(z)
        shared = [c for c in out if c in left and c in right]
        (summed,) = (c for c in left if c in right and c not in out)
        (rows,), (columns,) = ([c for c in out if c in one and c not in shared] for one in (left, right))
        a = _ordered(op, x, left, [*shared, rows, summed])
        b = _ordered(op, y, right, [*shared, summed, columns])
        product = op.MatMul(a, b)
        order = [*shared, rows, columns]
        if "".join(order) == out:
            return product
        if a.shape is not None and b.shape is not None:
            product.dtype, product.shape = x.dtype, ir.Shape([*list(a.shape)[:-1], b.shape[-1]])
        return transpose(op, product, [order.index(c) for c in out])

    def example(self) -> Example:
        sizes: dict[str, int | str] = {"b": "B", "h": 2, "d": 8, "q": "S", "k": "S"}
        left, right = self._equation.split("->")[0].split(",")
        return {"x": Arg(tuple(sizes[c] for c in left)), "y": Arg(tuple(sizes[c] for c in right))}

    near_misses = (
        NearMiss(
            "a sum over two axes",
            "sums over 2 letters",
            build=lambda op, x, y: op.Einsum(x, y, equation="bqhd,bqhd->bh"),
        ),
        NearMiss(
            "a product element by element",
            "sums over 0 letters",
            build=lambda op, x, y: op.Einsum(x, y, equation="bqhd,bqhd->bqhd"),
        ),
    )


class EinsumLinear(_Einsum):
    """``Einsum("bsd,dhk->bshk", x, W)`` -> ``Reshape(MatMul(x, W as a matrix))``; ``"bshk,hkd->bsd"`` likewise.

    W is a constant; the letters summed over come last in x and first in W, in the same order.
    """

    variants = tuple({"equation": equation} for equation in ("bsd,dhk->bshk", "bshk,hkd->bsd", "bsd,df->bsf"))

    def pattern(self, op: Any, x: Any, w: Any) -> Any:
        return op.Einsum(x, w, _outputs=["z"])

    def check(self, op: Any, x: ir.Value, w: ir.Value, z: ir.Value) -> None:
        left, right, out = _letters(z)
        if fixed(w) is None or fixed(x) is not None or set(left) & set(right) & set(out):
            raise Refuse()
        rows, summed, columns = _linear(left, right, out)
        if not summed:
            raise Refuse()  # An outer product.
        if left != rows + summed or right != summed + columns or out != rows + columns or not (rows and columns):
            raise Refuse(f"equation {left},{right}->{out} is no projection of the last axes", w)
        shape = constant(w, "weight").shape
        for axis, c in enumerate(summed, len(rows)):
            found, wanted = static(x, axis, "input"), shape[right.index(c)]
            if found != wanted:  # Einsum stretches an axis of size 1, a matrix product does not
                raise Refuse(f'axis "{c}" is {found} in the input, {wanted} in the weight; wanted them equal', x)

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value, z: ir.Value) -> ir.Value:
        rows, summed, columns = _linear(*_letters(z))
        array = constant(w, "weight")
        matrix, y = w, x
        if len(array.shape) != 2:
            flat = array.reshape(int(np.prod(array.shape[: len(summed)])), -1)
            matrix = weight(op, x, f"{w.name}_matrix", f"matrix {w.name} {flat.shape}", lambda: ir.tensor(flat))
        if len(summed) > 1:
            y = op.Reshape(y, ints(op, *[0] * len(rows), -1))
            y.dtype = x.dtype
            y.shape = ir.Shape([*list(x.shape or ())[: len(rows)], matrix.shape[0]]) if matrix.shape else None
        product = op.MatMul(y, matrix)
        if len(columns) == 1:
            return product
        product.dtype = x.dtype
        if y.shape is not None and matrix.shape is not None:
            product.shape = ir.Shape([*list(y.shape)[:-1], matrix.shape[1]])
        return op.Reshape(product, ints(op, *[0] * len(rows), *array.shape[len(summed) :]))

    def example(self) -> Example:
        sizes: dict[str, int] = {"h": 2, "k": 8, "d": 16, "f": 24}
        left, right = self._equation.split("->")[0].split(",")
        shape = tuple(sizes.get(c, {"b": "B", "s": "S"}.get(c, 1)) for c in left)
        rng = np.random.default_rng(0)
        return {"x": Arg(shape), "w": (rng.standard_normal([sizes[c] for c in right]) / 4).astype(np.float32)}

    near_misses = (
        NearMiss(
            "the weight's axes the other way round",
            "is no projection of the last axes",
            {"w": np.ones((2, 8, 16), np.float32)},
            build=lambda op, x, w: op.Einsum(x, w, equation="bsd,hkd->bshk"),
        ),
        NearMiss(
            "an input of one channel, which is used for all of the weight's",
            'axis "d" is 1 in the input, 16 in the weight',
            {"x": Arg(("B", "S", 1))},
        ),
        NearMiss(
            "a weight of one row, which is used for all channels",
            'axis "d" is 16 in the input, 1 in the weight',
            {"w": np.ones((1, 24), np.float32)},
            {"equation": "bsd,df->bsf"},
        ),
        NearMiss(
            "an outer product, as rotary embeddings make their angles",
            None,
            {"x": Arg(("S",)), "w": np.ones(4, np.float32)},
            build=lambda op, x, w: op.Einsum(x, w, equation="i,j->ij"),
        ),
    )


def _letters(z: ir.Value) -> Letters:
    """The equation of an Einsum of two operands, without spaces; others are not ours."""
    text = producer(z).attributes["equation"].as_string().replace(" ", "")
    sides, arrow, out = text.partition("->")
    operands = sides.split(",")
    if not arrow or len(operands) != 2 or "." in text or any(len({*each}) != len(each) for each in (*operands, out)):
        raise Refuse()
    left, right = operands
    for value, letters in zip(producer(z).inputs, operands, strict=True):
        if rank(value) not in (None, len(letters)):
            raise Refuse()
    return left, right, out


def _linear(left: str, right: str, out: str) -> Letters:
    """(letters of the rows, summed over, of the columns), each in the order of its operand."""
    rows = "".join(c for c in left if c in out)
    return rows, "".join(c for c in left if c not in out), "".join(c for c in right if c in out)


def _ordered(op: Any, x: ir.Value, letters: str, wanted: list[str]) -> ir.Value:
    return x if list(letters) == wanted else transpose(op, x, [letters.index(c) for c in wanted])
