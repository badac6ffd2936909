"""A module whose mask marks what to ignore, as torch.nn's layers take it, goes the whole road."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tfx.exporter.export import export
from tfx.exporter.sources import module
from tfx.runtime.parity import verify_bundle
from tfx.runtime.session import Session
from tfx.runtime.tensors import MASK_PATTERNS


class Torch(nn.Module):
    """nn.TransformerEncoder as it comes; forward hands its padding mask straight on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
        self.words = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids: torch.Tensor, src_key_padding_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.encoder(self.words(input_ids), src_key_padding_mask=src_key_padding_mask)
        return {"last_hidden_state": hidden}


@pytest.mark.parametrize("target", ["cpu", "portable"])
def test_transformer_encoder_with_its_own_padding_mask(tmp_path: Path, target: str) -> None:
    inputs = ["input_ids:int64:batch,sequence", "src_key_padding_mask:bool:batch,sequence"]
    bundle = export(module(Torch(), inputs), tmp_path / "out", target=target)
    manifest = bundle.manifest
    assert [spec.role for spec in manifest.inputs] == ["token_ids", "padding_mask"]
    assert manifest.counts == {"attention": 2, "layer_norm": 4, "rms_norm": 0, "gelu": 2, "rotary": 0}
    assert manifest.refusals == ()
    cases = bundle.golden()
    assert {case.pattern for case in cases} == set(MASK_PATTERNS)
    for case in cases:
        ignored = case.inputs["src_key_padding_mask"]
        assert ignored.dtype == bool
        assert ignored.any() == (case.pattern != "full" and case.sequence > 1)
        assert not ignored.all(axis=1).any()
        assert np.isfinite(case.outputs["last_hidden_state"]).all()
    assert verify_bundle(bundle).passed

    session = Session(bundle, threads=1)
    ids = np.arange(12).reshape(2, 6)
    cut = session.run({"input_ids": ids, "src_key_padding_mask": np.arange(6) >= np.array([[6], [4]])})
    alone = session.run({"input_ids": ids[1:, :4]})
    np.testing.assert_allclose(cut["last_hidden_state"][1:, :4], alone["last_hidden_state"], atol=1e-5)
