"""The configuration of the reference encoder: frozen, and valid once it exists."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ..errors import ConfigError

__all__ = ["Activation", "Combine", "EncoderConfig", "Norm", "Pooling", "Positions"]

Norm = Literal["post", "pre"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
Positions = Literal["sinusoidal", "learned"]
Combine = Literal["add", "concat"]
Pooling = Literal["none", "cls", "mean"]

_SIZES = ("d_model", "heads", "layers", "d_ff", "vocab_size", "max_len")
_CHOICES: dict[str, tuple[str, ...]] = {
    "norm": get_args(Norm),
    "activation": get_args(Activation),
    "positions": get_args(Positions),
    "combine": get_args(Combine),
    "pooling": get_args(Pooling),
}


@dataclass(frozen=True)
class EncoderConfig:
    """Options of `Encoder`.

    Attributes:
        d_model: width of a hidden state; any size that `heads` divides, odd ones included.
        heads: attention heads; each is d_model / heads wide.
        layers: encoder layers.
        d_ff: inner width of the feed-forward network.
        vocab_size: number of token ids; ids run from 0 to vocab_size - 1.
        max_len: longest sequence, in tokens.
        norm: "post" normalizes after each residual sum (Vaswani et al. 2017), "pre" before each
            sublayer, with one more norm at the end.
        activation: "gelu" is x Phi(x), "gelu_tanh" its tanh approximation, "relu" max(x, 0).
        positions: "sinusoidal" (fixed) or "learned".
        combine: "add" sums token and position vectors; "concat" joins a token vector of
            ceil(d_model / 2) and a position vector of floor(d_model / 2).
        dropout: probability in [0, 1); acts in training mode only.
        layer_norm_eps: the epsilon under the square root of every layer norm.
        pad_id: token id used for padding.
        pooling: "cls" and "mean" add a sentence vector to the outputs.
        normalize: scale the sentence vector to length 1; needs a pooling.

    Raises:
        ConfigError: an option has the wrong type, is out of range, or contradicts another.
    """

    d_model: int = 768
    heads: int = 12
    layers: int = 12
    d_ff: int = 3072
    vocab_size: int = 30522
    max_len: int = 5000
    norm: Norm = "post"
    activation: Activation = "gelu"
    positions: Positions = "sinusoidal"
    combine: Combine = "add"
    dropout: float = 0.1
    layer_norm_eps: float = 1e-5
    pad_id: int = 0
    pooling: Pooling = "none"
    normalize: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            _check(self, name, _is_int(value := getattr(self, name)) and value >= 1, "an integer >= 1")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _check(self, name, isinstance(value, str) and value in choices, "one of " + ", ".join(choices))
        _check(self, "dropout", _is_finite(self.dropout) and 0 <= self.dropout < 1, "a number in [0, 1)")
        _check(
            self, "layer_norm_eps", _is_finite(self.layer_norm_eps) and self.layer_norm_eps > 0, "a finite number > 0"
        )
        _check(
            self,
            "pad_id",
            _is_int(self.pad_id) and 0 <= self.pad_id < self.vocab_size,
            f"an integer in [0, vocab_size = {self.vocab_size})",
        )
        _check(self, "normalize", isinstance(self.normalize, bool), "true or false")
        near = next(n for n in range(min(self.heads, self.d_model), 0, -1) if self.d_model % n == 0)
        _check(self, "heads", near == self.heads, f"a divisor of d_model = {self.d_model} (such as {near})")
        if self.combine == "concat":
            _check(self, "d_model", self.d_model >= 2, "at least 2 with combine = 'concat'")
        if self.pooling == "none":
            _check(self, "normalize", not self.normalize, "false, or pooling = 'cls' or 'mean'")

    @property
    def d_head(self) -> int:
        """Width of one head, d_k in the formulas."""
        return self.d_model // self.heads

    @property
    def d_position(self) -> int:
        """Width of a position vector."""
        return self.d_model // 2 if self.combine == "concat" else self.d_model

    @property
    def d_token(self) -> int:
        """Width of a token vector."""
        return self.d_model - self.d_position if self.combine == "concat" else self.d_model

    def to_json(self) -> dict[str, Any]:
        """Return the options as plain JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> EncoderConfig:
        """Build a configuration from what `to_json` returned.

        Raises:
            ConfigError: a name is not an option, or a value is wrong.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"{name}: unknown option, wanted one of {', '.join(known)}")
        return cls(**values)


def _is_int(value: object) -> bool:
    # bool is an int to Python, but True is no size.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(config: EncoderConfig, name: str, ok: bool, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"{name}: found {getattr(config, name)!r}, wanted {wanted}")
