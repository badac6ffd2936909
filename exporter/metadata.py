"""What the nodes of a graph remember: the torch module they came from and what they stand for.

Exporters leave stack traces and file paths in node metadata; a deployed file keeps only the module path.
Node metadata exists since IR version 10. In an older file the same facts stand in the model's metadata,
under :data:`MEANINGS`, keyed by node name.
"""

from __future__ import annotations

import ast
import json

import onnx_ir as ir

from ..runtime.manifest import COUNTS
from .fusion import MEANING, ORIGIN
from .versions import METADATA_IR, nodes

MEANINGS = "tfx.meanings"
"""Model metadata: JSON ``{node name: [meaning, origin]}``."""

CANONICAL = {
    ("", "Attention"): "attention",
    ("com.microsoft", "Attention"): "attention",
    ("com.microsoft", "MultiHeadAttention"): "attention",
    ("com.microsoft", "PackedAttention"): "attention",
    ("com.microsoft", "PackedMultiHeadAttention"): "attention",
    ("", "LayerNormalization"): "layer_norm",
    ("com.microsoft", "SkipLayerNormalization"): "layer_norm",
    ("", "RMSNormalization"): "rms_norm",
    ("", "SimplifiedLayerNormalization"): "rms_norm",
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): "rms_norm",
    ("", "Gelu"): "gelu",
    ("com.microsoft", "Gelu"): "gelu",
    ("com.microsoft", "BiasGelu"): "gelu",
    ("com.microsoft", "FastGelu"): "gelu",
    ("com.microsoft", "QuickGelu"): "gelu",
    ("", "RotaryEmbedding"): "rotary",
    ("com.microsoft", "RotaryEmbedding"): "rotary",
}
"""What an operator stands for, by (domain, operator)."""


def keep_origins(model: ir.Model) -> None:
    """Reduces every node's and value's metadata to the module path, in place."""
    for node in nodes(model):
        path = node.metadata_props.get(ORIGIN) or _module_path(node)
        meaning = node.metadata_props.get(MEANING)
        node.metadata_props.clear()
        node.doc_string = None
        if path:
            node.metadata_props[ORIGIN] = path
        if meaning:
            node.metadata_props[MEANING] = meaning
        for value in node.outputs:
            value.metadata_props.clear()


def _module_path(node: ir.Node) -> str:
    """torch.onnx keeps ``['', 'encoder', 'encoder.layer.0', 'matmul']``: the last is the operation itself."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as literal_eval documents
        return ""
    return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""


def settle_metadata(model: ir.Model) -> None:
    """Moves node metadata to the model where the IR version has none on nodes, in place."""
    keep_origins(model)
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    if model.ir_version >= METADATA_IR:
        return
    meanings: dict[str, list[str]] = {}
    for node in nodes(model):
        meaning = node.metadata_props.get(MEANING, "")
        if meaning or node.op_identifier()[:2] in CANONICAL:
            meanings[node.name or ""] = [meaning, node.metadata_props.get(ORIGIN, "")]
        node.metadata_props.clear()
    if meanings:
        model.metadata_props[MEANINGS] = json.dumps(meanings)


def restore_metadata(model: ir.Model) -> None:
    """Undoes :func:`settle_metadata` on a loaded model, in place."""
    raw = model.metadata_props.pop(MEANINGS, None)
    try:
        meanings = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return
    if not isinstance(meanings, dict):
        return
    for node in nodes(model):
        found = meanings.get(node.name)
        if isinstance(found, list) and len(found) == 2:
            for key, value in zip((MEANING, ORIGIN), found, strict=True):
                if value:
                    node.metadata_props[key] = str(value)


def count(model: ir.Model) -> dict[str, int]:
    """Counts what the nodes mean, whatever they were lowered to.

    The branches of an ``If`` are ways to compute one thing, so the fuller one counts.

    Returns:
        ``{"attention": n, "layer_norm": n, "rms_norm": n, "gelu": n, "rotary": n}``.
    """
    return _count(model.graph)


def _count(graph: ir.Graph) -> dict[str, int]:
    counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
    for node in graph:
        inner = [_count(a.as_graph()) for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
        for name in counts:
            found = [each[name] for each in inner]
            counts[name] += max(found, default=0) if node.op_type == "If" else sum(found)
        meaning = CANONICAL.get(node.op_identifier()[:2]) or node.metadata_props.get(MEANING)
        if node.op_type == "QuickGelu" and abs(node.attributes.get_float("alpha", 1.702) - 1.702) > 1e-4:
            continue  # onnxruntime's name for x * sigmoid(alpha x): with another alpha it is SiLU
        if meaning in counts:
            counts[meaning] += 1
    return counts
