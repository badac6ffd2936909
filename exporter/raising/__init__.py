"""Decomposed subgraphs -> canonical nodes. :data:`RULES` is the one ordered table."""

from __future__ import annotations

from ..fusion import Fusion
from .attention import AttentionHeads, AttentionMaskExpand, AttentionPieces, AttentionScale
from .gelu import GeluErf, GeluTanh
from .layer_norm import LayerNormPieces

RULES: tuple[type[Fusion], ...] = (
    GeluErf,
    GeluTanh,
    LayerNormPieces,
    AttentionPieces,
    AttentionScale,
    AttentionMaskExpand,
    AttentionHeads,
)
"""Applied in this order: the later attention rules work on the node the first one makes."""
