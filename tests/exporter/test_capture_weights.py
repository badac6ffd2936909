from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tfx.exporter.capture import capture

from .capturing import (
    CASES,
    IDS,
    MASK,
    check_equal,
    source_of,
    stored_bytes,
)

# --- A20: shared weights


class Shared(nn.Module):
    """One layer applied six times, and the embedding used again for the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.out = nn.Linear(32, 64, bias=False)
        self.out.weight = self.word.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.word(ids)
        for _ in range(6):
            x = self.layer(x, src_key_padding_mask=mask == 0)
        return {"hidden": x, "logits": self.out(x)}


def test_a20_shared_weights_are_stored_once(seeded):
    source = source_of(Shared(), IDS, MASK)
    model = capture(source)
    parameters = sum(parameter.nbytes for parameter in source.module.parameters())
    assert stored_bytes(model) <= parameters * 1.05
    check_equal(source, model, CASES[4:12], tolerance=3e-5)


class Copies(nn.Module):
    """Two layers with equal weights, and one that differs from them in a single element."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = (nn.Linear(64, 64, bias=False) for _ in range(3))
        for layer in (second, third):
            layer.weight.data.copy_(first.weight.data)
        third.weight.data[63, 62] += 1.0
        self.layers = nn.ModuleList((first, second, third))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def test_a20_equal_weights_are_merged_and_nearly_equal_ones_are_not(seeded):
    source = source_of(Copies(), "x:float32:batch,64")
    model = capture(source)
    assert stored_bytes(model) == pytest.approx(2 * 64 * 64 * 4, rel=0.01)
    check_equal(source, model, CASES[:5], tolerance=3e-6)
