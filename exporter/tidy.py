"""Cleanup between the steps, with the passes of onnx_ir and onnxscript."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer
from onnx.reference import ReferenceEvaluator
from onnxscript.rewriter.pattern import RewriteRuleSet
from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule

from .guards import fixed
from .no_ops import drop_no_ops
from .quiet import quiet

__all__ = ["merge_transposes", "name_apart", "tidy"]

_SMALL = 1024
"""Constants up to this many elements are folded and merged; weights are neither computed nor compared."""

_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_WEIGHTS = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Slice", "Gather", "Add", "MatMul"})
"""What is computed of weights too, where the result takes no more room than the weights it replaces."""


def tidy(model: ir.Model) -> None:
    """Folds constants, merges equal nodes and small constants, and drops what nothing uses, in place."""
    names = [value.name for value in model.graph.outputs]
    drop_no_ops(model)
    # One Transpose per weight first, so that a layer that is applied six times is folded once.
    passes.CommonSubexpressionEliminationPass()(model)
    _fold_constants(model)
    if _fold_norms(model):
        _fold_constants(model)
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


def _fold_constants(model: ir.Model) -> None:
    with quiet():
        onnxscript.optimizer.fold_constants(
            model,
            onnx_shape_inference=False,
            input_size_limit=_SMALL,
            output_size_limit=_SMALL,
            should_fold=_fold,
        )


def _fold_norms(model: ir.Model) -> bool:
    """Computes norms of weights (DeBERTa-v3 normalises its position table), which onnxscript leaves."""
    found = False
    for node in list(model.graph):
        y, *others = node.outputs
        if node.op_type not in _NORMS or node.domain or y.is_graph_output() or any(o.uses() for o in others):
            continue
        tensors = [fixed(x) for x in node.inputs]
        x = node.inputs[0]
        if None in tensors or x is None or not _single(x) or y.name is None:
            continue
        proto = ir.to_proto(node)
        names = [name for name in proto.input if name]
        feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
        result, *_ = ReferenceEvaluator(proto).run(None, feeds)
        array = np.asarray(result, feeds[names[0]].dtype)
        folded = ir.val(y.name, const_value=ir.tensor(array, name=y.name))
        y.name = None
        model.graph.register_initializer(folded)
        y.replace_all_uses_with(folded)
        model.graph.remove(node, safe=True)
        found = True
    return found


def _single(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def merge_transposes(model: ir.Model) -> None:
    """Merges Transposes that follow each other and drops those that do nothing, in place."""
    RewriteRuleSet([transpose_transpose_rule, no_op_transpose_rule]).apply_to_model(model)
    passes.IdentityEliminationPass()(model)


def _fold(node: ir.Node) -> bool | None:
    """Whether to fold a node whatever its size; None leaves it to the size limit."""
    if node.domain or node.inputs[:1] in ((), (None,)):
        return None
    x = node.inputs[0]
    if node.op_type in _NORMS:
        return False  # onnxscript would only warn of their other outputs
    if node.op_type == "ConstantOfShape":  # left alone by default: a few numbers may ask for many
        sizes = fixed(x)
        return sizes is not None and sizes.size <= _SMALL and int(np.prod(sizes.numpy())) <= _SMALL
    if node.op_type == "Transpose" and x is not None and x.const_value is not None and not x.is_graph_output():
        # Unless the weight is used as it is too (a tied embedding).
        return len(x.uses()) == 1
    if node.op_type in _WEIGHTS and all(value is None or fixed(value) is not None for value in node.inputs):
        # Of weights that are used elsewhere, nothing larger than a small constant is made.
        return any(value is not None and _single(value) and _large(value) for value in node.inputs) or None
    return None


def _large(value: ir.Value) -> bool:
    tensor = fixed(value)
    return tensor is not None and tensor.size > _SMALL


def name_apart(model: ir.Model) -> None:
    """Renames values of subgraphs that have the name of another value, in place.

    A name must be unlike all that come later in the graphs around too, which onnx_ir's NameFixPass does not see to.
    """
    taken = {value.name for value in _values(model.graph)}
    for graph in model.graph.subgraphs():
        if graph is model.graph:
            continue
        for value in _values(graph):
            number, name = 0, value.name
            while value.name in taken:
                number += 1
                value.name = f"{name}_{number}"
            taken.add(value.name)


def _values(graph: ir.Graph) -> list[ir.Value]:
    """The values that a graph itself makes, without those of its subgraphs."""
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
