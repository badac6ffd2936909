"""onnxruntime's dynamic scheme: 8 bit products with one activation scale per call.

For comparison, and for engines that want it: the scale follows the largest value among everything that shares the
call, padding included, so a vector changes with its company. :mod:`.int8` does not have that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ...errors import InputError
from . import PrecisionReport
from .products import find_products, find_tables
from .running import agreement, answers, tokens
from .writing import Writer

if TYPE_CHECKING:
    from ..targets import Target

__all__ = ["apply"]


def apply(model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]], *, target: Target) -> PrecisionReport:
    """Quantises the products and tables of a lowered graph, in place.

    Args:
        model: Lowered.
        samples: Feeds by input name; the result is judged on them, nothing is calibrated.
        target: What the graph is for.

    Raises:
        InputError: There is nothing to quantise.
    """
    del target  # The operators are the same for all that have them.
    products, tables = find_products(model), find_tables(model)
    if not products:
        raise InputError("precision int8-dynamic: found no product with constant float32 weights, wanted at least one")
    exact = answers(model, samples)
    writer = Writer(model)
    for product in products:
        writer.dynamic(product)
    for table in tables:
        writer.table(table)
    passes.RemoveUnusedNodesPass()(model)
    return PrecisionReport(
        scheme="int8 weights per column without saturating pairs; one activation scale per call",
        changed=len(products) + len(tables),
        calibration={"samples": len(samples), "tokens": tokens(samples)},
        worst_cosine=agreement(answers(model, samples), exact).texts if samples else None,
    )
