"""Sentence vectors from hidden states, inside the graph, so that no caller averages padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, SourceError

__all__ = ["PoolMode", "Pooled", "pool"]

PoolMode = Literal["cls", "mean", "max", "last"]


def pool(hidden: Tensor, mask: Tensor, mode: PoolMode, normalize: bool = False) -> Tensor:
    """Reduce hidden states to one vector per row, as sentence-transformers does.

    Args:
        hidden: (batch, sequence, d) hidden states.
        mask: (batch, sequence), nonzero = attended.
        mode: "cls" takes position 0, attended or not; "last" the last attended position; "mean" and
            "max" reduce over attended positions.
        normalize: divide by the Euclidean length.

    Returns:
        (batch, d), in the dtype of `hidden`; the zero vector for a row with no attended position.

    Raises:
        ConfigError: the mode is unknown.
    """
    attended = mask != 0  # (B, S)
    if mode == "cls":
        vector = hidden[:, 0]  # (B, S, d) -> (B, d)
    elif mode == "mean":
        kept = hidden.masked_fill(~attended[:, :, None], 0.0)  # (B, S, d)
        count = attended.to(hidden.dtype).sum(dim=1, keepdim=True)  # (B, 1)
        vector = kept.sum(dim=1) / count.clamp(min=1.0)  # (B, S, d) -> (B, d)
    elif mode == "max":
        vector = hidden.masked_fill(~attended[:, :, None], float("-inf")).amax(dim=1)  # (B, S, d) -> (B, d)
    elif mode == "last":
        positions = torch.arange(mask.shape[1], device=mask.device)  # (S,)
        last = (positions * attended).amax(dim=1)  # (B,)
        index = last[:, None, None].expand(-1, 1, hidden.shape[2])  # (B, 1, d)
        vector = hidden.gather(1, index).squeeze(1)  # (B, S, d) -> (B, d)
    else:
        raise ConfigError(f"pooling: found {mode!r}, wanted one of {', '.join(get_args(PoolMode))}")
    vector = vector.masked_fill(~attended.any(dim=1, keepdim=True), 0.0)
    return F.normalize(vector, dim=1) if normalize else vector


class Pooled(nn.Module):
    """A module with a sentence vector added to its outputs.

    Args:
        module: returns a mapping with `last_hidden_state` (batch, sequence, d) when it is called with
            `input_ids`, `attention_mask` and, if given, `token_type_ids`, by name.
        mode: see `pool`.
        normalize: see `pool`.
    """

    def __init__(self, module: nn.Module, mode: PoolMode, normalize: bool = False) -> None:
        super().__init__()
        if mode not in get_args(PoolMode):
            raise ConfigError(f"pooling: found {mode!r}, wanted one of {', '.join(get_args(PoolMode))}")
        self.module = module
        self.mode: PoolMode = mode
        self.normalize = normalize

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Run the module and pool.

        Args:
            input_ids: int64 (batch, sequence).
            attention_mask: int64 (batch, sequence), 1 = attend.
            token_type_ids: int64 (batch, sequence), passed on only when given.

        Returns:
            The module's outputs by name, and `sentence_embedding` (batch, d).

        Raises:
            SourceError: the module returned no mapping with `last_hidden_state`.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        outputs = self.module(**inputs)
        if not isinstance(outputs, Mapping) or "last_hidden_state" not in outputs:
            found = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise SourceError(
                f"{type(self.module).__name__} returned {found}, wanted a mapping with 'last_hidden_state'"
            )
        vector = pool(outputs["last_hidden_state"], attention_mask, self.mode, self.normalize)
        return {**outputs, "sentence_embedding": vector}
