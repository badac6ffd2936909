"""Attention, GELU and layer norm as people write them in torch, each way an output of one module."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, SIZE = 2, 8
D = HEADS * SIZE

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ROOT = math.sqrt(SIZE)
LOWEST = torch.finfo(torch.float32).min


def _bool(mask: Tensor) -> Tensor:
    return mask[:, None, None, :].bool()


def _additive(mask: Tensor, value: float) -> Tensor:
    return (1.0 - mask[:, None, None, :].to(torch.float32)) * value


def _softmax(scores: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores, -1) @ v


def _distances(q: Tensor) -> Tensor:
    """(1, 1, S, S): how far apart two positions are."""
    places = torch.arange(q.shape[2])
    return (places[:, None] - places[None, :]).abs()[None, None]


def _window(q: Tensor) -> Tensor:
    return (_distances(q) > 3) * LOWEST


def _merged(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Batch and heads in one axis, apart again for the mask, as bmm wants them."""
    batch, heads, length, _ = q.shape
    q, k, v = (x.reshape(batch * heads, length, -1) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2) / ROOT).view(batch, heads, length, length) + _additive(m, LOWEST)
    weights = torch.softmax(scores, -1).view(batch * heads, length, length)
    return torch.bmm(weights, v).view(batch, heads, length, -1)


def _einsum(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / ROOT
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores.masked_fill(~_bool(m), -1e9), -1), v)


# (B, H, S, d) queries, keys, values and the mask (B, S), 1 = attend -> (B, H, S, d).
ATTENTION: dict[str, Attend] = {
    "scores_divided": lambda q, k, v, m: _softmax((q @ k.mT / ROOT).masked_fill(~_bool(m), -1e9), v),
    "scale_on_q": lambda q, k, v, m: _softmax((q * SIZE**-0.5 @ k.mT).masked_fill(m[:, None, None] == 0, -1e9), v),
    "scale_on_k": lambda q, k, v, m: _softmax(q @ (k / ROOT).mT + _additive(m, LOWEST), v),
    "scale_on_k_transposed": lambda q, k, v, m: _softmax(q @ (k.mT / ROOT) + _additive(m, -1e9), v),
    "scale_on_both": lambda q, k, v, m: _softmax((q * SIZE**-0.25) @ (k * SIZE**-0.25).mT + _additive(m, LOWEST), v),
    "no_scale": lambda q, k, v, m: _softmax(q @ k.mT + _additive(m, -1e9), v),
    "another_scale": lambda q, k, v, m: _softmax(q @ k.mT * 0.3 + _additive(m, -1e9), v),
    "mask_before_scores": lambda q, k, v, m: _softmax(_additive(m, -1e9) + q @ k.mT / ROOT, v),
    "where_keep": lambda q, k, v, m: _softmax(torch.where(_bool(m), q @ k.mT / ROOT, -1e9), v),
    "whole_mask": lambda q, k, v, m: _softmax(
        (q @ k.mT / ROOT).masked_fill((m[:, None, :, None] * m[:, None, None, :]) == 0, -1e9), v
    ),
    "no_mask": lambda q, k, v, m: _softmax(q @ k.mT / ROOT, v),
    "sdpa_bool": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, _bool(m)),
    "sdpa_float": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, _additive(m, LOWEST)),
    "sdpa_no_mask": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v),
    "sdpa_expanded": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, k, v, _bool(m).expand(-1, -1, q.shape[2], -1)
    ),
    "mask_before_scale": lambda q, k, v, m: _softmax((q @ k.mT + _additive(m, LOWEST)) / ROOT, v),
    "window_and_mask": lambda q, k, v, m: _softmax((q @ k.mT / ROOT + _window(q)).masked_fill(~_bool(m), LOWEST), v),
    "position_bias": lambda q, k, v, m: _softmax(q @ k.mT / ROOT - _distances(q) * 0.3 + _additive(m, LOWEST), v),
    "mask_subtracted": lambda q, k, v, m: _softmax(q @ k.mT / ROOT - (1.0 - m[:, None, None].float()) * 1e9, v),
    "merged": _merged,
    "einsum": _einsum,
    "softmax_in_float": lambda q, k, v, m: F.softmax(q @ k.mT / ROOT + _additive(m, -1e9), -1, dtype=torch.float32) @ v,
}  # fmt: skip

# With these a row without a key is NaN in torch, and zero in the canonical node.
INFINITE: dict[str, Attend] = {
    "masked_fill": lambda q, k, v, m: _softmax((q @ k.mT / ROOT).masked_fill(~_bool(m), -math.inf), v),
    "additive": lambda q, k, v, m: _softmax(
        q @ k.mT / ROOT + torch.zeros(m.shape).masked_fill(m == 0, -math.inf)[:, None, None, :], v
    ),
    "where": lambda q, k, v, m: _softmax(torch.where(_bool(m), q @ k.mT / ROOT, -math.inf), v),
    "sdpa": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, k, v, torch.zeros(m.shape).masked_fill(m == 0, -math.inf)[:, None, None, :]
    ),
}


class Attentions(nn.Module):
    """One multi-head self-attention per way of writing it, each with projections of its own."""

    def __init__(self, ways: dict[str, Attend]) -> None:
        super().__init__()
        self.ways = ways
        self.projections = nn.ModuleDict({name: nn.Linear(D, 3 * D) for name in ways})
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """x (B, S, D), mask (B, S) -> (B, S, D) for each way."""
        outputs = {}
        for name, attend in self.ways.items():
            q, k, v = (
                part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.projections[name](x).chunk(3, -1)
            )
            outputs[name] = attend(q, k, v, attention_mask).transpose(1, 2).flatten(2)
        return outputs


A, B, C = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715

GELU_ERF: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": F.gelu,
    "module": nn.GELU(),
    "textbook": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "bert": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "half_last": lambda x: x * (1.0 + torch.erf(x / math.sqrt(2.0))) * 0.5,
    "half_on_the_gate": lambda x: x * (0.5 * (1 + torch.erf(x * A))),
    "cdf": lambda x: x * (0.5 * torch.erf(A * x) + 0.5),
    "gate_first": lambda x: (torch.erf(A * x) + 1) * x * 0.5,
    "gate_first_halved": lambda x: (torch.erf(x / math.sqrt(2)) + 1) * 0.5 * x,
}

GELU_TANH: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda x: F.gelu(x, approximate="tanh"),
    "module": nn.GELU("tanh"),
    "gpt2": lambda x: 0.5 * x * (1.0 + torch.tanh(B * (x + C * torch.pow(x, 3.0)))),
    "cube_as_product": lambda x: 0.5 * x * (1 + torch.tanh(B * (x + C * x * x * x))),
    "cube_grouped": lambda x: x * 0.5 * (1 + torch.tanh((x + (x * x * x) * C) * B)),
    "cube_from_square": lambda x: x * (0.5 * (1 + torch.tanh(B * (C * x**3 + x)))),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "half_last": lambda x: x * (1 + torch.tanh(B * (x + C * x**3))) * 0.5,
    "cdf": lambda x: x * (0.5 + 0.5 * torch.tanh(B * (x + C * x**3))),
}

GELU_QUICK: dict[str, Callable[[Tensor], Tensor]] = {
    "clip": lambda x: x * torch.sigmoid(1.702 * x),
    "gate_first": lambda x: torch.sigmoid(x * 1.702) * x,
    "divided": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "negated": lambda x: x / (torch.exp(-(x * 1.702)) + 1),
    "reciprocal": lambda x: x * (1 / (1 + torch.exp(-x * 1.702))),
}

# A GELU beside another factor: the products in either order.
GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "erf": lambda x, b: F.gelu(x) * b,
    "erf_second": lambda x, b: b * (x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    "erf_pieces": lambda x, b: (x * 0.5 * (1 + torch.erf(x * A))) * b,
    "erf_half_last": lambda x, b: b * ((1 + torch.erf(x * A)) * x * 0.5),
    "tanh": lambda x, b: b * (0.5 * x * (1 + torch.tanh(B * (x + C * torch.pow(x, 3.0))))),
    "tanh_product": lambda x, b: 0.5 * x * (1 + torch.tanh(B * (x + C * x * x * x))) * b,
    "quick": lambda x, b: x * torch.sigmoid(1.702 * x) * b,
    "quick_second": lambda x, b: b * (torch.sigmoid(1.702 * x) * x),
}

NOT_GELU: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": lambda x: x * torch.sigmoid(1.6 * x),
    "silu": F.silu,
    "root_forgotten": lambda x: 0.5 * x * (1 + torch.erf(x)),
    "another_cubic": lambda x: 0.5 * x * (1 + torch.tanh(B * (x + 0.05 * x**3))),
    "mish": F.mish,
}


class Activations(nn.Module):
    """One activation per way, each on a slice of its own."""

    def __init__(self, ways: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.ways = ways

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x (B, ways, S) -> (B, S) for each way."""
        return {name: way(x[:, i]) for i, (name, way) in enumerate(self.ways.items())}


class Gates(nn.Module):
    """One activation per way, each times a slice of the other input."""

    def __init__(self, ways: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.ways = ways

    def forward(self, x: Tensor, gate: Tensor) -> dict[str, Tensor]:
        """x and gate (B, ways, S) -> (B, S) for each way."""
        return {name: way(x[:, i], gate[:, i]) for i, (name, way) in enumerate(self.ways.items())}


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


# Input (B, S, D), scale and bias (D), epsilon -> (B, S, D).
LAYER_NORM: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "pow": lambda x, w, b, e: w * (_centred(x) / torch.sqrt(_centred(x).pow(2).mean(-1, keepdim=True) + e)) + b,
    "functional": lambda x, w, b, e: F.layer_norm(x, (D,), w, b, e),
    "no_bias": lambda x, w, b, e: F.layer_norm(x, (D,), w, None, e),
    "bare": lambda x, w, b, e: F.layer_norm(x, (D,), eps=e),
    "square": lambda x, w, b, e: _centred(x) / (_centred(x).square().mean(-1, keepdim=True) + e).sqrt() * w + b,
    "product": lambda x, w, b, e: b + w * _centred(x) * torch.rsqrt((_centred(x) * _centred(x)).mean(-1, True) + e),
    "product_grouped": lambda x, w, b, e: (_centred(x) * torch.rsqrt(_centred(x).pow(2).mean(-1, True) + e)) * w + b,
    "var": lambda x, w, b, e: w * (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + e) + b,
    "scale_only": lambda x, w, b, e: w * (_centred(x) / torch.sqrt(_centred(x).pow(2).mean(-1, True) + e)),
    "pieces_bare": lambda x, w, b, e: _centred(x) / torch.sqrt(_centred(x).pow(2).mean(-1, True) + e),
}

LAYER_NORM |= {
    "power": lambda x, w, b, e: _centred(x) * (_centred(x).square().mean(-1, keepdim=True) + e) ** -0.5 * w + b,
    "root_power": lambda x, w, b, e: _centred(x) / (_centred(x).square().mean(-1, keepdim=True) + e) ** 0.5 * w + b,
    "over_root": lambda x, w, b, e: w * (_centred(x) * (1 / (_centred(x).pow(2).mean(-1, True) + e).sqrt())) + b,
    "scale_beside": lambda x, w, b, e: _centred(x) * (torch.rsqrt(_centred(x).pow(2).mean(-1, True) + e) * w) + b,
    "long_weights": lambda x, w, b, e: (
        w[None, None] * (_centred(x) / torch.sqrt(_centred(x).pow(2).mean(2, True) + e)) + b[None, None]
    ),
}


# Input (B, S, D), scale (D), epsilon -> (B, S, D).
RMS_NORM: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "t5": lambda x, w, b, e: w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + e)),
    "llama": lambda x, w, b, e: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + e)).type_as(x),
    "functional": lambda x, w, b, e: F.rms_norm(x, (D,), w, e),
    "functional_bare": lambda x, w, b, e: F.rms_norm(x, (D,), eps=e),
    "product": lambda x, w, b, e: x * torch.rsqrt((x * x).mean(-1, True) + e) * w,
    "divided": lambda x, w, b, e: x / torch.sqrt(x.square().mean(-1, keepdim=True) + e) * w,
    "divided_early": lambda x, w, b, e: (w * x) / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + e),
    "over_root": lambda x, w, b, e: w * (x * (1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + e))),
    "power": lambda x, w, b, e: w * (x * (x.pow(2).mean(-1, keepdim=True) + e) ** -0.5),
    "root_power": lambda x, w, b, e: x / (x.pow(2).mean(-1, keepdim=True) + e) ** 0.5 * w,
    "scale_beside": lambda x, w, b, e: x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e) * w),
    "long_scale": lambda x, w, b, e: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e) * w[None, None],
    "zero_centred": lambda x, w, b, e: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e) * (1 + w),
    "bare": lambda x, w, b, e: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e),
}

NOT_LAYER_NORM: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "epsilon_outside": lambda x, w, b, e: w * _centred(x) / (x.std(-1, keepdim=True) + e) + b,
    "unbiased": lambda x, w, b, e: w * _centred(x) / torch.sqrt(x.var(-1, keepdim=True) + e) + b,
    "two_passes": lambda x, w, b, e: (
        (x - x.mean(-1, True)) / torch.sqrt(x.pow(2).mean(-1, True) - x.mean(-1, True).pow(2) + e)
    ),
    "over_tokens": lambda x, w, b, e: (x - x.mean(1, True)) / torch.sqrt(x.var(1, unbiased=False, keepdim=True) + e),
}


class Norms(nn.Module):
    """One layer norm per way, each with weights and an epsilon of its own; the first way with every epsilon."""

    def __init__(self, ways: dict[str, Callable[..., Tensor]], epsilons: tuple[float, ...]) -> None:
        super().__init__()
        first, *rest = ways
        pairs = [(first, e) for e in epsilons] + [(name, epsilons[i % len(epsilons)]) for i, name in enumerate(rest)]
        self.ways = {f"{name}_{e:g}".replace("-", "m"): (ways[name], e) for name, e in pairs}
        self.scales = nn.Parameter(torch.rand(len(self.ways), D) + 0.5)
        self.biases = nn.Parameter(torch.rand(len(self.ways), D) - 0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x (B, ways, S, D) -> (B, S, D) for each way."""
        return {
            name: way(x[:, i], self.scales[i], self.biases[i], e)
            for i, (name, (way, e)) in enumerate(self.ways.items())
        }
