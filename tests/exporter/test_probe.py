from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfx.errors import ConfigError, SourceError
from tfx.exporter.probe import Findings, first_line, inference, probe
from tfx.exporter.sources import parse_input

IDS = parse_input("ids:int64:batch,sequence")


def look(module: nn.Module, *inputs) -> Findings:
    return probe(module, inputs or (IDS,), lambda feeds: module(**feeds))


class Offset(nn.Module):
    """Counts positions from `offset` over the tokens that are not padding, as RoBERTa does."""

    def __init__(self, rows: int, pad: int | None) -> None:
        super().__init__()
        self.word, self.place, self.pad = nn.Embedding(9, 4, padding_idx=pad), nn.Embedding(rows, 4), pad

    def forward(self, ids: Tensor) -> Tensor:
        if self.pad is None:
            return self.word(ids) + self.place(torch.arange(ids.shape[1]))
        real = (ids != self.pad).long()
        return self.word(ids) + self.place(torch.cumsum(real, 1) * real + self.pad)


@pytest.mark.parametrize(
    ("rows", "pad", "length"), [(18, None, 18), (18, 0, 17), (18, 1, 16), (18, 3, 14), (4, None, 4)]
)
def test_the_longest_sequence_is_rows_minus_offset(rows, pad, length):
    found = look(Offset(rows, pad))
    assert (found.max_length, found.pad_id, dict(found.limits)) == (length, pad, {"ids": 9})


class Relative(nn.Module):
    """A table of relative distances is read at (S, S) indices: it bounds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.bias = nn.Embedding(9, 4), nn.Embedding(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        steps = torch.arange(ids.shape[1])
        distance = (steps[:, None] - steps[None]).abs().clamp(max=7)
        return self.bias(distance)[..., 0] @ self.word(ids)


class Indexed(nn.Module):
    """Reads plain parameters by indexing, without `nn.Embedding`."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(6, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.word[ids] + self.place[torch.arange(ids.shape[1])]


def test_relative_tables_do_not_bound_and_indexed_parameters_do():
    assert look(Relative()).max_length is None
    assert (look(Indexed()).max_length, dict(look(Indexed()).limits)) == (6, {"ids": 9})


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.GELU(), TanhGELU(), QuickGELU(), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(F.scaled_dot_product_attention(x, x, self.parts(x))), (4,))


def test_calls_are_counted_once_however_they_are_written():
    found = look(Calls(), parse_input("x:float32:batch,sequence,4"))
    assert found.counts == {"attention": 1, "layer_norm": 2, "gelu": 3}
    assert (found.max_length, dict(found.limits), found.pad_id) == (None, {}, None)


def test_a_module_that_does_not_run_says_on_what():
    with pytest.raises(SourceError, match=r"does not run on x float32\[3, 2\]: RuntimeError: ") as caught:
        look(Calls(), parse_input("x:float32:3,2"))
    assert "\n" not in str(caught.value)


def test_inference_restores_each_part():
    module = nn.Sequential(nn.Dropout(), nn.Dropout()).train()
    module[1].eval()
    with inference(module):
        assert not any(part.training for part in module.modules())
        assert not torch.is_grad_enabled()
    assert [part.training for part in module.modules()] == [True, True, False]
    assert torch.is_grad_enabled()


def test_an_error_becomes_one_line():
    assert first_line(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ConfigError("ours")) == "ours"
