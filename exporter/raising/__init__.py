"""Decomposed subgraphs -> canonical nodes. :data:`RULES` is the one ordered table."""

from __future__ import annotations

from ..fusion import Fusion
from .attention import AttentionPieces
from .attention_form import AttentionHeads, AttentionScale, SwapLastAxes
from .attention_mask import AttentionMaskExpand, AttentionOpenMask
from .contrib import ContribBiasGelu, ContribErfGelu, ContribFastGelu, ContribQuickGelu, ContribRotaryEmbedding
from .contrib_attention import ContribAttention, ContribMultiHeadAttention
from .contrib_norm import ContribSkipLayerNorm
from .einsum import EinsumLinear, EinsumProduct
from .gelu import GeluErf, GeluTanh, QuickGelu
from .layer_norm import LayerNormPieces
from .live_rows import AttentionLiveRows
from .rms_norm import RmsNormPieces
from .rotary import RotaryParts, RotarySum
from .rotary_partial import RotaryPartial

RULES: tuple[type[Fusion], ...] = (
    ContribBiasGelu,
    ContribErfGelu,
    ContribFastGelu,
    ContribQuickGelu,
    ContribRotaryEmbedding,
    ContribSkipLayerNorm,
    ContribMultiHeadAttention,
    ContribAttention,
    EinsumProduct,
    EinsumLinear,
    GeluErf,
    GeluTanh,
    QuickGelu,
    LayerNormPieces,
    RmsNormPieces,
    RotarySum,
    RotaryParts,
    RotaryPartial,
    SwapLastAxes,
    AttentionPieces,
    AttentionScale,
    AttentionMaskExpand,
    AttentionLiveRows,
    AttentionOpenMask,
    AttentionHeads,
    AttentionScale,  # Once more: with the heads in the node, a factor before they were split is next to it.
)
"""Applied in this order: the later attention rules work on the node the first one makes."""
