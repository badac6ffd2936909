"""Each part against something that shares no code with it: float64 numpy, torch's own modules, loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfx.errors import FeedError
from tfx.models.config import EncoderConfig
from tfx.models.encoder import (
    Embeddings,
    Encoder,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    attention,
    sinusoidal_table,
)

pytestmark = pytest.mark.usefixtures("seeded")

TINY: dict[str, Any] = {"d_model": 24, "heads": 4, "layers": 2, "d_ff": 48, "vocab_size": 50, "max_len": 20}
# full, right-padded, left-padded, holes; every row attends somewhere
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1]])


def heads_mask(mask: Tensor) -> Tensor:
    return mask[:, None, None, :]


def in_numpy(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy() for name, value in module.state_dict().items()}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layer_norm(x: np.ndarray, w: dict[str, np.ndarray], name: str, eps: float) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def activated(x: np.ndarray, name: str) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def attended_head_by_head(x: np.ndarray, w: dict[str, np.ndarray], prefix: str, heads: int, mask: np.ndarray):
    batch, _, d = x.shape
    width = d // heads
    q, k, v = (x @ w[f"{prefix}w_{n}.weight"].T + w[f"{prefix}w_{n}.bias"] for n in "qkv")
    joined = np.empty_like(x)
    for b in range(batch):
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            scores = q[b, :, part] @ k[b, :, part].T / math.sqrt(width)
            scores[:, mask[b] == 0] = -1e9
            joined[b, :, part] = softmax(scores) @ v[b, :, part]
    return joined @ w[f"{prefix}w_o.weight"].T + w[f"{prefix}w_o.bias"]


def fed_forward(x: np.ndarray, w: dict[str, np.ndarray], prefix: str, activation: str) -> np.ndarray:
    inner = activated(x @ w[f"{prefix}w_1.weight"].T + w[f"{prefix}w_1.bias"], activation)
    return inner @ w[f"{prefix}w_2.weight"].T + w[f"{prefix}w_2.bias"]


def test_attention_equals_torch():
    q, k, v = torch.randn(3, 4, 2, 6, 8).double()
    got = attention(q, k, v, heads_mask(MASK))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=heads_mask(MASK).bool())
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_a_row_without_attended_positions_is_the_plain_average():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    got = attention(q, k, v, torch.zeros(1, 1, 1, 6))
    torch.testing.assert_close(got, v.mean(dim=2, keepdim=True).expand_as(v))


def test_a_masked_key_has_no_influence():
    q, k, v = torch.randn(3, 4, 2, 6, 8)
    mask = heads_mask(MASK)
    hidden = (mask == 0).transpose(-1, -2)
    got = attention(q, k.masked_fill(hidden, 1e3), v.masked_fill(hidden, 1e3), mask)
    torch.testing.assert_close(got, attention(q, k, v, mask), rtol=0, atol=0)


def test_multi_head_attention_equals_the_formula_head_by_head():
    module = MultiHeadAttention(24, 4).double()
    x = torch.randn(4, 6, 24).double()
    wanted = attended_head_by_head(x.numpy(), in_numpy(module), "", 4, MASK.numpy())
    np.testing.assert_allclose(module(x, heads_mask(MASK)).detach().numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_feed_forward_equals_the_formula(activation: Any):
    module = FeedForward(24, 48, activation).double()
    x = 3 * torch.randn(4, 6, 24).double()
    wanted = fed_forward(x.numpy(), in_numpy(module), "", activation)
    np.testing.assert_allclose(module(x).detach().numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "width"), [(1, 1), (7, 8), (30, 9), (5, 2)])
def test_sinusoidal_table_equals_the_formula(length: int, width: int):
    table = sinusoidal_table(length, width)
    assert table.shape == (length, width) and table.dtype == torch.float32
    for position in range(length):
        for column in range(width):
            angle = position / 10000 ** (2 * (column // 2) / width)
            wanted = math.sin(angle) if column % 2 == 0 else math.cos(angle)
            assert abs(table[position, column].item() - wanted) < 1e-7


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("d_model", [24, 25])
def test_positions_are_added_or_concatenated(positions: Any, d_model: int):
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    options = {**TINY, "d_model": d_model, "heads": 1, "positions": positions}
    for combine in ("add", "concat"):
        module = Embeddings(EncoderConfig(**options, combine=combine)).eval()
        got = module(ids)
        assert got.shape == (2, 3, d_model)
        for b in range(2):
            for s in range(3):
                token, position = module.token.weight[ids[b, s]], module.position[s]
                wanted = token + position if combine == "add" else torch.cat((token, position))
                assert torch.equal(got[b, s], wanted)


def test_the_fixed_table_is_no_weight_and_the_learned_one_is():
    assert "position" not in Embeddings(EncoderConfig(**TINY)).state_dict()
    assert "position" in dict(Embeddings(EncoderConfig(**TINY, positions="learned")).named_parameters())


def torch_twin(layer: EncoderLayer, config: EncoderConfig) -> nn.TransformerEncoderLayer:
    """Torch's own layer with the same weights, in float64."""
    twin = nn.TransformerEncoderLayer(
        config.d_model,
        config.heads,
        config.d_ff,
        dropout=0.0,
        activation="relu" if config.activation == "relu" else "gelu",
        layer_norm_eps=config.layer_norm_eps,
        batch_first=True,
        norm_first=config.norm == "pre",
        dtype=torch.float64,
    )
    ours = layer.state_dict()
    twin.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([ours[f"attention.w_{n}.weight"] for n in "qkv"]),
            "self_attn.in_proj_bias": torch.cat([ours[f"attention.w_{n}.bias"] for n in "qkv"]),
            "self_attn.out_proj.weight": ours["attention.w_o.weight"],
            "self_attn.out_proj.bias": ours["attention.w_o.bias"],
            **{f"linear{i}.{n}": ours[f"feed_forward.w_{i}.{n}"] for i in (1, 2) for n in ("weight", "bias")},
            **{f"norm{i}.{n}": ours[f"norm_{i}.{n}"] for i in (1, 2) for n in ("weight", "bias")},
        }
    )
    return twin


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_layer_equals_torch_with_the_same_weights(norm: Any, activation: Any):
    config = EncoderConfig(**TINY, norm=norm, activation=activation, layer_norm_eps=1e-3)
    layer = EncoderLayer(config).double().eval()
    for parameter in layer.parameters():  # norms start at 1 and 0, which would hide a swap
        nn.init.normal_(parameter, std=0.3)
    # train() keeps torch off its fused path; dropout is 0 there
    twin = torch_twin(layer, config).train()
    x = torch.randn(4, 6, 24).double()
    wanted = twin(x, src_key_padding_mask=MASK == 0)
    torch.testing.assert_close(layer(x, heads_mask(MASK)), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("combine", ["add", "concat"])
def test_encoder_equals_the_formulas_in_float64(norm: Any, activation: Any, combine: Any):
    config = EncoderConfig(**{**TINY, "d_model": 27, "heads": 3}, norm=norm, activation=activation, combine=combine)
    module = Encoder(config).eval()
    for name, parameter in module.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    ids = torch.randint(0, 50, (4, 6))
    with torch.no_grad():
        got = module(ids, MASK)["last_hidden_state"].numpy()

    w, eps = in_numpy(module), config.layer_norm_eps
    table = module.embeddings.position.double().numpy()[:6]
    token = w["embeddings.token.weight"][ids.numpy()]
    x = token + table if combine == "add" else np.concatenate((token, np.broadcast_to(table, (4, *table.shape))), -1)
    for i in range(config.layers):
        p = f"layers.{i}."
        if norm == "pre":
            x = x + attended_head_by_head(
                layer_norm(x, w, f"{p}norm_1", eps), w, f"{p}attention.", config.heads, MASK.numpy()
            )
            x = x + fed_forward(layer_norm(x, w, f"{p}norm_2", eps), w, f"{p}feed_forward.", activation)
        else:
            attended = attended_head_by_head(x, w, f"{p}attention.", config.heads, MASK.numpy())
            x = layer_norm(x + attended, w, f"{p}norm_1", eps)
            x = layer_norm(x + fed_forward(x, w, f"{p}feed_forward.", activation), w, f"{p}norm_2", eps)
    if norm == "pre":
        x = layer_norm(x, w, "norm", eps)
    np.testing.assert_allclose(got, x, rtol=0, atol=2e-5)


def test_padding_does_not_change_attended_positions():
    module = Encoder(EncoderConfig(**TINY)).eval()
    ids = torch.randint(1, 50, (2, 9))
    alone = module(ids[:, :4], torch.ones(2, 4, dtype=torch.int64))["last_hidden_state"]
    mask = torch.tensor([[1] * 4 + [0] * 5] * 2)
    torch.testing.assert_close(module(ids, mask)["last_hidden_state"][:, :4], alone, rtol=0, atol=1e-5)


def test_dropout_acts_in_training_only():
    module = Encoder(EncoderConfig(**TINY, dropout=0.5))
    ids, mask = torch.randint(0, 50, (2, 5)), torch.ones(2, 5)
    run = lambda: module(ids, mask)["last_hidden_state"]  # noqa: E731
    assert not torch.equal(run(), run())
    module.eval()
    assert torch.equal(run(), run())


def test_every_parameter_takes_part():
    module = Encoder(EncoderConfig(**TINY, norm="pre", positions="learned", combine="concat"))
    module(torch.randint(1, 50, (2, 5)), torch.ones(2, 5))["last_hidden_state"].square().sum().backward()
    unused = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # softmax(q (k + b)) does not depend on b: the key bias has no gradient but rounding.
    assert [n for n in unused if "w_k.bias" not in n] == []


@pytest.mark.parametrize("length", [0, 21])
def test_a_sequence_out_of_range_is_a_clear_error(length: int):
    module = Encoder(EncoderConfig(**TINY))
    ids = torch.zeros(1, length, dtype=torch.int64)
    with pytest.raises(FeedError, match=rf"^input_ids: found a sequence of {length}, wanted 1 to max_len = 20$"):
        module(ids, torch.ones_like(ids))
