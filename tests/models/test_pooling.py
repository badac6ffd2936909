from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tfx.errors import ConfigError, SourceError
from tfx.models.config import EncoderConfig
from tfx.models.encoder import Encoder
from tfx.models.pooling import Pooled, PoolMode, pool

pytestmark = pytest.mark.usefixtures("seeded")

MODES = get_args(PoolMode)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]])


def by_loops(hidden: np.ndarray, mask: np.ndarray, mode: str, normalize: bool) -> np.ndarray:
    rows = []
    for states, attended in zip(hidden, mask, strict=True):
        kept = [state for state, here in zip(states, attended, strict=True) if here]
        if not kept:
            row = np.zeros(hidden.shape[2])
        elif mode == "cls":
            row = states[0]
        elif mode == "last":
            row = kept[-1]
        elif mode == "max":
            row = np.max(kept, axis=0)
        else:
            row = np.mean(kept, axis=0)
        length = np.sqrt((row**2).sum())
        rows.append(row / length if normalize and length else row)
    return np.stack(rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_pool_equals_loops(mode: Any, normalize: bool, dtype: torch.dtype):
    hidden = torch.randn(5, 5, 8) - 3  # negative, so that a maximum over zeroed padding would show
    got = pool(hidden, MASK.to(dtype), mode, normalize)
    assert got.dtype == hidden.dtype
    np.testing.assert_allclose(got.numpy(), by_loops(hidden.double().numpy(), MASK.numpy(), mode, normalize), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_what_stands_at_padding_has_no_influence(mode: Any):
    hidden = torch.randn(5, 5, 8)
    hidden[:, 0] = 1.0  # cls reads position 0 whatever the mask says
    dirty = hidden.masked_fill(MASK[:, :, None] == 0, float("nan"))
    dirty[:, 0] = 1.0
    dirty[2, 1] = dirty[4, 1] = float("inf")
    assert torch.equal(pool(dirty, MASK, mode), pool(hidden, MASK, mode))


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_masked_row_is_zero_also_normalized(mode: Any):
    got = pool(torch.randn(2, 3, 4), torch.tensor([[1, 1, 1], [0, 0, 0]]), mode, normalize=True)
    assert torch.equal(got[1], torch.zeros(4))
    assert got[0].norm().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalize", [False, True])
def test_a_padded_batch_equals_its_singles(mode: Any, normalize: bool):
    config = EncoderConfig(d_model=24, heads=4, layers=2, d_ff=48, vocab_size=50, max_len=20)
    module = Pooled(Encoder(config), mode, normalize).eval()
    lengths = (3, 9)
    ids = torch.randint(1, 50, (2, 9))
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
    batch = module(ids, mask)["sentence_embedding"]
    for i, n in enumerate(lengths):
        single = module(ids[i : i + 1, :n], mask[i : i + 1, :n])["sentence_embedding"]
        torch.testing.assert_close(batch[i : i + 1], single, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["cls", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_encoders_own_pooling_is_the_same(mode: Any, normalize: bool):
    options: dict[str, Any] = {"d_model": 24, "heads": 4, "layers": 1, "d_ff": 48, "vocab_size": 50}
    own = Encoder(EncoderConfig(**options, pooling=mode, normalize=normalize)).eval()
    ids = torch.randint(0, 50, MASK.shape)
    outputs = own(ids, MASK)
    assert list(outputs) == ["last_hidden_state", "sentence_embedding"]
    wanted = by_loops(outputs["last_hidden_state"].detach().double().numpy(), MASK.numpy(), mode, normalize)
    np.testing.assert_allclose(outputs["sentence_embedding"].detach().numpy(), wanted, atol=1e-6)


class Stub(nn.Module):
    """Returns what it is told to and remembers how it was called."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
        self.seen: dict[str, Tensor] = {}

    def forward(self, **inputs: Tensor) -> Any:
        self.seen = inputs
        return self.result


def test_inputs_are_passed_on_by_name_and_outputs_kept():
    stub = Stub({"last_hidden_state": torch.ones(1, 2, 3), "other": torch.zeros(1)})
    ids, mask, types = torch.randint(0, 9, (3, 1, 2))
    outputs = Pooled(stub, "mean")(ids, mask | 1, types)
    assert list(outputs) == ["last_hidden_state", "other", "sentence_embedding"]
    assert stub.seen["token_type_ids"] is types and stub.seen["input_ids"] is ids
    Pooled(stub, "mean")(ids, mask)
    assert list(stub.seen) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize(
    ("result", "found"),
    [(torch.ones(1, 2, 3), "Tensor"), ({"logits": torch.ones(1)}, r"\['logits'\]"), (SimpleNamespace(), "SimpleName")],
)
def test_a_module_without_hidden_states_is_a_clear_error(result: Any, found: str):
    ids = torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(SourceError, match=rf"^Stub returned {found}.*, wanted a mapping with 'last_hidden_state'$"):
        Pooled(Stub(result), "cls")(ids, ids)


def test_an_unknown_mode_is_a_clear_error():
    wrong: Any = "average"
    with pytest.raises(ConfigError, match=r"^pooling: found 'average', wanted one of cls, mean, max, last$"):
        Pooled(nn.Identity(), wrong)
    with pytest.raises(ConfigError, match="average"):
        pool(torch.ones(1, 1, 1), torch.ones(1, 1), wrong)
