"""Cleanup between the steps, with the passes of onnx_ir and onnxscript."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer
from onnxscript.rewriter.pattern import RewriteRuleSet
from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule

from .guards import fixed
from .no_ops import drop_no_ops

__all__ = ["merge_transposes", "tidy"]

_SMALL = 1024
"""Constants up to this many elements are folded and merged; weights are neither computed nor compared."""


def tidy(model: ir.Model) -> None:
    """Folds constants, merges equal nodes and small constants, and drops what nothing uses, in place."""
    names = [value.name for value in model.graph.outputs]
    drop_no_ops(model)
    # One Transpose per weight first, so that a layer that is applied six times is folded once.
    passes.CommonSubexpressionEliminationPass()(model)
    onnxscript.optimizer.fold_constants(
        model,
        onnx_shape_inference=False,
        input_size_limit=_SMALL,
        output_size_limit=_SMALL,
        should_fold=_fold,
    )
    merge_transposes(model)
    ir.passes.Sequential(
        passes.LiftConstantsToInitializersPass(size_limit=0),
        passes.IdentityEliminationPass(),
        passes.DeduplicateInitializersPass(size_limit=_SMALL),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),
        passes.OutputFixPass(),  # outputs that have become one value are told apart again
    )(model)
    for value, name in zip(model.graph.outputs, names, strict=True):
        value.name = name


def merge_transposes(model: ir.Model) -> None:
    """Merges Transposes that follow each other and drops those that do nothing, in place."""
    RewriteRuleSet([transpose_transpose_rule, no_op_transpose_rule]).apply_to_model(model)
    passes.IdentityEliminationPass()(model)


def _fold(node: ir.Node) -> bool | None:
    """Whether to fold a node whatever its size; None leaves it to the size limit."""
    if node.domain or node.inputs[:1] in ((), (None,)):
        return None
    x = node.inputs[0]
    if node.op_type == "ConstantOfShape":  # left alone by default: a few numbers may ask for many
        sizes = fixed(x)
        return sizes is not None and sizes.size <= _SMALL and int(np.prod(sizes.numpy())) <= _SMALL
    if node.op_type == "Transpose" and x is not None and x.const_value is not None and not x.is_graph_output():
        # Unless the weight is used as it is too (a tied embedding).
        return len(x.uses()) == 1
    return None
