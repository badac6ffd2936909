from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfx.errors import ConfigError
from tfx.models.config import EncoderConfig


def test_defaults_are_the_documented_ones():
    config = EncoderConfig()
    sizes = (config.d_model, config.heads, config.layers, config.d_ff, config.vocab_size, config.max_len)
    assert sizes == (768, 12, 12, 3072, 30522, 5000)
    assert (config.norm, config.activation, config.positions, config.combine) == ("post", "gelu", "sinusoidal", "add")
    assert (config.pooling, config.normalize, config.d_head) == ("none", False, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 0}, "d_model: found 0, wanted an integer >= 1"),
        ({"layers": -1}, "layers: found -1, wanted an integer >= 1"),
        ({"heads": True}, "heads: found True, wanted an integer >= 1"),
        ({"d_model": 768.0}, "d_model: found 768.0, wanted an integer >= 1"),
        ({"d_ff": "64"}, "d_ff: found '64', wanted an integer >= 1"),
        ({"vocab_size": None}, "vocab_size: found None, wanted an integer >= 1"),
        ({"heads": 5}, "heads: found 5, wanted a divisor of d_model = 768 (such as 4)"),
        ({"d_model": 7, "heads": 12}, "heads: found 12, wanted a divisor of d_model = 7 (such as 7)"),
        ({"norm": "both"}, "norm: found 'both', wanted one of post, pre"),
        ({"activation": "silu"}, "activation: found 'silu', wanted one of gelu, gelu_tanh, relu"),
        ({"positions": None}, "positions: found None, wanted one of sinusoidal, learned"),
        ({"combine": ["add"]}, "combine: found ['add'], wanted one of add, concat"),
        ({"pooling": "max"}, "pooling: found 'max', wanted one of none, cls, mean"),
        ({"dropout": 1.0}, "dropout: found 1.0, wanted a number in [0, 1)"),
        ({"dropout": float("nan")}, "dropout: found nan, wanted a number in [0, 1)"),
        ({"dropout": False}, "dropout: found False, wanted a number in [0, 1)"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps: found 0.0, wanted a finite number > 0"),
        ({"layer_norm_eps": float("inf")}, "layer_norm_eps: found inf, wanted a finite number > 0"),
        ({"layer_norm_eps": True}, "layer_norm_eps: found True, wanted a finite number > 0"),
        ({"pad_id": 30522}, "pad_id: found 30522, wanted an integer in [0, vocab_size = 30522)"),
        ({"pad_id": -1}, "pad_id: found -1, wanted an integer in [0, vocab_size = 30522)"),
        ({"normalize": 1}, "normalize: found 1, wanted true or false"),
        ({"normalize": True}, "normalize: found True, wanted false, or pooling = 'cls' or 'mean'"),
        (
            {"d_model": 1, "heads": 1, "combine": "concat"},
            "d_model: found 1, wanted at least 2 with combine = 'concat'",
        ),
    ],
)
def test_a_wrong_option_is_one_line_with_name_found_and_wanted(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        EncoderConfig(**options)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EncoderConfig().d_model = 1  # pyright: ignore[reportAttributeAccessIssue]


@given(d_model=st.integers(2, 200))
def test_concatenated_widths_add_up(d_model: int):
    config = EncoderConfig(d_model=d_model, heads=1, combine="concat")
    assert config.d_token + config.d_position == d_model
    assert 0 <= config.d_token - config.d_position <= 1


def test_json_round_trip():
    config = EncoderConfig(d_model=33, heads=3, pooling="mean", normalize=True)
    assert EncoderConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_json_with_an_unknown_option():
    with pytest.raises(ConfigError, match=r"^hidden_size: unknown option, wanted one of d_model, heads, "):
        EncoderConfig.from_json({"hidden_size": 4})
