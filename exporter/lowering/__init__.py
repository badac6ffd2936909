"""Canonical nodes -> what a target runs. :func:`rules_for` is the table, one row per target.

Each choice follows a measurement; ``benchmarks/README.md`` has the figures.
"""

from __future__ import annotations

from ..fusion import Fusion
from ..targets import Target
from .attention import AttentionMask, AttentionPrimitives, MultiHeadAttention, PackedAttention
from .gelu import (
    BiasGelu,
    ContribGelu,
    ContribQuickGelu,
    FastBiasGelu,
    FastGelu,
    GeluErfPrimitives,
    GeluTanhPrimitives,
)
from .group_norm import GroupNormPrimitives
from .layer_norm import SkipLayerNorm
from .rms_norm import RmsNormPrimitives
from .rotary import ContribRotary, RotaryPrimitives, RotaryTables

_GELU = (BiasGelu, FastBiasGelu, ContribGelu, FastGelu, ContribQuickGelu)

RULES: dict[str, tuple[type[Fusion], ...]] = {
    # No SkipLayerNormalization: with it a whole encoder takes 4 to 6 % longer at 128 tokens and more.
    "cpu": (PackedAttention, MultiHeadAttention, ContribRotary, *_GELU),
    # Attention stays in pieces: in WASM all forms take the same time, and on WebGPU onnxruntime-web 1.30's
    # MultiHeadAttention was seen to be wrong from 32 positions on.
    "web": (AttentionPrimitives, ContribRotary, *_GELU),
    "cuda": (MultiHeadAttention, SkipLayerNorm, ContribRotary, *_GELU),
}


# Operators that came with an ai.onnx opset, and what stands in their place below it.
PRIMITIVES: tuple[tuple[int, tuple[type[Fusion], ...]], ...] = (
    (23, (AttentionPrimitives, RmsNormPrimitives, RotaryPrimitives)),
    (21, (GroupNormPrimitives,)),
    (20, (GeluErfPrimitives, GeluTanhPrimitives)),
)


def rules_for(target: Target, opset: int | None, *, packed: bool = True) -> tuple[type[Fusion], ...]:
    """The rules that lower canonical nodes for a target, in order.

    Args:
        target: The profile.
        opset: The ai.onnx opset to reach; it matters where only ai.onnx may be used.
        packed: Whether projections may go into an attention operator, where no precision reaches their weights.
    """
    if target.name in RULES:
        rules = tuple(rule for rule in RULES[target.name] if packed or rule is not PackedAttention)
        # Below opset 23 every onnxruntime loads it, and makes its own kernel of the pieces.
        return rules if opset is not None and opset >= 23 else (*rules, RmsNormPrimitives)
    wanted = target.default_opset if opset is None else opset
    version = 23 if wanted is None else wanted
    older = [rule for since, rules in PRIMITIVES for rule in rules if version < since]
    return tuple(older) if version < 23 else (AttentionMask, RotaryTables, *older)
