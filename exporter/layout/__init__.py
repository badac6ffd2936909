"""Layouts: how a batch of texts of different lengths lies in memory.

``padded`` is (batch, sequence, d), as the source has it; ``ragged`` is (tokens, d), attended tokens only. The choice
per target follows ``benchmarks/README.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ...errors import InputError
from ...runtime.tensors import MASK_ROLES, TensorSpec
from ..fusion import Refusal
from ..guards import Refuse
from ..targets import LAYOUTS, Target
from .plan import MaskInput
from .ragged import to_ragged

__all__ = ["MaskInput", "apply_layout", "to_ragged"]


def apply_layout(
    model: ir.Model, layout: str | None, target: Target, inputs: Sequence[TensorSpec], refusals: list[Refusal]
) -> str:
    """Gives a canonical graph a layout, in place.

    Args:
        model: Raised; shapes inferred with named axes.
        layout: One of :data:`..targets.LAYOUTS`; ``None``: the target's own, or padded where that cannot be.
        target: What it is lowered for afterwards.
        inputs: The graph's inputs and what they mean.
        refusals: Receives the reason where a graph stays padded.

    Returns:
        The layout that the graph has.

    Raises:
        InputError: Unknown layout, or the graph cannot have the one that was asked for.
    """
    if layout not in (None, *LAYOUTS):
        raise InputError(f'layout: found "{layout}", wanted one of {", ".join(LAYOUTS)}')
    if (layout or target.layout) == "padded":
        return "padded"
    masks = [MaskInput(spec.name, spec.role == "padding_mask") for spec in inputs if spec.role in MASK_ROLES]
    try:
        to_ragged(model, masks)
    except Refuse as refusal:
        if layout is not None:
            raise InputError(f"layout ragged: {refusal.reason}") from None
        refusals.append(Refusal("ragged_layout", "graph", refusal.reason))
        return "padded"
    return "ragged"
