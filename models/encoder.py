"""The textbook Transformer encoder, small to large.

Formulas: Vaswani et al. 2017, "Attention Is All You Need"; GELU: Hendrycks and Gimpel 2016;
pre-norm: Xiong et al. 2020. Everything is written out rather than taken from torch.nn, so that each
line can be read against its formula; tests hold the parts equal to torch's own.

Shapes in comments: B batch, S sequence, d d_model, H heads, d_k = d / H, f d_ff.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import FeedError
from .config import Activation, EncoderConfig
from .pooling import pool

__all__ = [
    "MASKED_SCORE",
    "Embeddings",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "MultiHeadAttention",
    "attention",
    "sinusoidal_table",
]

# Finite, so that a row with no attended position becomes a plain average and not NaN.
MASKED_SCORE = -1e9


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module | None = None) -> Tensor:
    """Scaled dot-product attention: softmax(Q K^T / sqrt(d_k)) V.

    Args:
        q: (..., S, d_k) queries.
        k: (..., S, d_k) keys.
        v: (..., S, d_k) values.
        mask: broadcastable to (..., S, S); where it is 0 the score becomes -1e9.
        dropout: applied to the attention weights.

    Returns:
        (..., S, d_k).
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, S, d_k) -> (B, H, S, S)
    scores = scores.masked_fill(mask == 0, MASKED_SCORE)
    weights = torch.softmax(scores, dim=-1)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ v  # (B, H, S, S) -> (B, H, S, d_k)


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_H) W_o, with head_i = attention(x W_q,i, x W_k,i, x W_v,i)."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend from every position to every unmasked one.

        Args:
            x: (B, S, d).
            mask: (B, 1, 1, S), 0 = do not attend to this key.

        Returns:
            (B, S, d).
        """
        q = self._split(self.w_q(x))  # (B, S, d) -> (B, H, S, d_k)
        k = self._split(self.w_k(x))
        v = self._split(self.w_v(x))
        heads = attention(q, k, v, mask, self.dropout)  # (B, H, S, d_k)
        return self.w_o(heads.transpose(1, 2).flatten(2))  # (B, H, S, d_k) -> (B, S, H, d_k) -> (B, S, d)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, S, d) -> (B, S, H, d_k) -> (B, H, S, d_k)


class FeedForward(nn.Module):
    """activation(x W_1 + b_1) W_2 + b_2."""

    def __init__(self, d_model: int, d_ff: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.activation: Activation = activation
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map each position alone: (B, S, d) -> (B, S, d)."""
        x = self.w_1(x)  # (B, S, d) -> (B, S, f)
        if self.activation == "gelu":
            x = F.gelu(x)
        elif self.activation == "gelu_tanh":
            x = F.gelu(x, approximate="tanh")
        else:
            x = F.relu(x)
        return self.w_2(self.dropout(x))  # (B, S, f) -> (B, S, d)


def sinusoidal_table(length: int, width: int) -> Tensor:
    """Position vectors: PE(pos, 2i) = sin(pos / 10000^(2i/width)), PE(pos, 2i+1) = cos of the same.

    Args:
        length: number of positions.
        width: width of a vector; an odd width ends on a sine.

    Returns:
        float32 (length, width), computed in float64.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]  # (length, 1)
    even = torch.arange(0, width, 2, dtype=torch.float64)  # the 2i, (ceil(width / 2),)
    angle = position / 10000.0 ** (even / width)  # (length, ceil(width / 2))
    table = torch.empty(length, width, dtype=torch.float64)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle[:, : width // 2].cos()
    return table.float()


class Embeddings(nn.Module):
    """Token vectors with position vectors added, or concatenated at half the width each."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.max_len = config.max_len
        self.combine = config.combine
        self.token = nn.Embedding(config.vocab_size, config.d_token, padding_idx=config.pad_id)
        if config.positions == "learned":
            self.position = nn.Parameter(torch.randn(config.max_len, config.d_position))
        else:
            table = sinusoidal_table(config.max_len, config.d_position)
            self.register_buffer("position", table, persistent=False)  # a formula, not a weight
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed token ids: int64 (B, S) -> (B, S, d)."""
        length = input_ids.shape[1]
        # While tracing, a comparison would pin the dynamic axis; there the manifest carries the limit.
        if not torch.compiler.is_exporting() and not 1 <= length <= self.max_len:
            raise FeedError(f"input_ids: found a sequence of {length}, wanted 1 to max_len = {self.max_len}")
        token = self.token(input_ids)  # (B, S) -> (B, S, d_token)
        # A lookup and not a slice: slicing would make torch.export bound the sequence axis.
        index = torch.arange(length, device=input_ids.device)  # (S,)
        position = F.embedding(index, self.position)[None]  # (S,) -> (1, S, d_position)
        if self.combine == "concat":
            position = position.expand(token.shape[0], -1, -1)  # (1, S, d_position) -> (B, S, d_position)
            x = torch.cat((token, position), dim=-1)  # -> (B, S, d)
        else:
            x = token + position  # (B, S, d)
        return self.dropout(x)


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual sum and a layer norm.

    Post-norm: x = norm(x + sublayer(x)). Pre-norm: x = x + sublayer(norm(x)).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.attention = MultiHeadAttention(config.d_model, config.heads, config.dropout)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation, config.dropout)
        self.norm_1 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.norm_2 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Run one layer: x (B, S, d), mask (B, 1, 1, S) -> (B, S, d)."""
        if self.pre:
            x = x + self.dropout(self.attention(self.norm_1(x), mask))
            return x + self.dropout(self.feed_forward(self.norm_2(x)))
        x = self.norm_1(x + self.dropout(self.attention(x, mask)))
        return self.norm_2(x + self.dropout(self.feed_forward(x)))


class Encoder(nn.Module):
    """The whole reference encoder: embeddings, layers, for pre-norm a final norm, optional pooling."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if config.norm == "pre" else nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Encode a batch of token ids.

        Args:
            input_ids: int64 (B, S), 1 <= S <= max_len.
            attention_mask: int64 (B, S), 1 = attend, 0 = padding.

        Returns:
            `last_hidden_state` (B, S, d) and, with pooling, `sentence_embedding` (B, d).

        Raises:
            FeedError: the sequence is empty or longer than max_len (eager mode only).
        """
        x = self.embeddings(input_ids)  # (B, S) -> (B, S, d)
        mask = attention_mask[:, None, None, :]  # (B, S) -> (B, 1, 1, S)
        for layer in self.layers:
            x = layer(x, mask)
        outputs = {"last_hidden_state": self.norm(x)}
        if self.config.pooling != "none":
            vector = pool(outputs["last_hidden_state"], attention_mask, self.config.pooling, self.config.normalize)
            outputs["sentence_embedding"] = vector  # (B, d)
        return outputs
