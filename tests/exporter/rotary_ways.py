"""Rotary position embedding as people write it in torch, each way an output of one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, SIZE, ROWS, PART = 2, 8, 40, 4


class Tables(nn.Module):
    """Frequencies and tables, whole and for the first channels only (``part``)."""

    inv: Tensor
    inv_twice: Tensor
    cos: Tensor
    sin: Tensor
    cos_halves: Tensor
    sin_halves: Tensor
    cos_pairs: Tensor
    sin_pairs: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        inv = 100.0 ** -(torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(ROWS).float(), inv)
        for name, table in {
            "inv": inv, "inv_twice": torch.cat((inv, inv)), "cos": angles.cos(), "sin": angles.sin(),
            "cos_halves": torch.cat((angles, angles), -1).cos(), "sin_halves": torch.cat((angles, angles), -1).sin(),
            "cos_pairs": angles.repeat_interleave(2, -1).cos(), "sin_pairs": angles.repeat_interleave(2, -1).sin(),
        }.items():  # fmt: skip
            self.register_buffer(name, table)


def halves(x: Tensor) -> Tensor:
    """[-x2, x1] of the halves."""
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), -1)


def chunks(x: Tensor) -> Tensor:
    """The same with chunk."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def pairs(x: Tensor) -> Tensor:
    """[-x2, x1] of neighbours, by strides."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def unbound(x: Tensor) -> Tensor:
    """The same by a reshape to (..., d/2, 2)."""
    first, second = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    return torch.stack((-second, first), -1).flatten(-2)


def angles(t: Tables, p: Tensor) -> Tensor:
    """As transformers computes them: positions (B, S) -> (B, S, d/2)."""
    return (t.inv[None, :, None].expand(p.shape[0], -1, 1) @ p[:, None, :].float()).transpose(1, 2)


def twice(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)


def summed(x: Tensor, cos: Tensor, sin: Tensor, turn: Callable[[Tensor], Tensor] = halves) -> Tensor:
    return x * cos + turn(x) * sin


def parts(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    return first * cos - second * sin, second * cos + first * sin


def neighbours(x: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1)


def counted(x: Tensor, axis: int) -> Tensor:
    return torch.arange(x.shape[axis])


Way = Callable[[Tensor, Tensor, Tables, Tables], Tensor]

# x (B, H, S, d), positions (B, S), the tables of d and of the first channels.
HEADS_FIRST: dict[str, Way] = {
    "transformers": lambda x, p, t, s: summed(x, twice(angles(t, p)).cos()[:, None] * 1.0,
                                              twice(angles(t, p)).sin()[:, None] * 1.0),
    "by_order": lambda x, p, t, s: summed(x, twice(angles(t, counted(x, 2)[None])).cos()[:, None],
                                          twice(angles(t, counted(x, 2)[None])).sin()[:, None]),
    "scaled": lambda x, p, t, s: summed(x, (twice(angles(t, p)).cos() * 0.7)[:, None],
                                        (twice(angles(t, p)).sin() * 0.7)[:, None]),
    "chunk_first": lambda x, p, t, s: chunks(x) * twice(angles(t, p)).sin()[:, None]
                                      + twice(angles(t, p)).cos()[:, None] * x,
    "angles_by_outer": lambda x, p, t, s: summed(
        x, twice(torch.outer(counted(x, 2).float(), t.inv)).cos(),
        twice(torch.outer(counted(x, 2).float(), t.inv)).sin(),
    ),
    "angles_by_einsum": lambda x, p, t, s: summed(
        x, twice(torch.einsum("i,j->ij", counted(x, 2).float(), t.inv)).cos()[None],
        twice(torch.einsum("i,j->ij", counted(x, 2).float(), t.inv)).sin()[None],
    ),
    "frequencies_twice": lambda x, p, t, s: summed(x, (p[:, None, :, None].float() * t.inv_twice).cos(),
                                                   (p[:, None, :, None].float() * t.inv_twice).sin()),
    "frequencies_twice_by_matmul": lambda x, p, t, s: summed(
        x, (p[:, :, None].float() @ t.inv_twice[None]).cos()[:, None],
        (p[:, :, None].float() @ t.inv_twice[None]).sin()[:, None],
    ),
    "repeated": lambda x, p, t, s: summed(x, angles(t, p).cos().repeat(1, 1, 2)[:, None],
                                          angles(t, p).sin().repeat(1, 1, 2)[:, None]),
    "cos_then_twice": lambda x, p, t, s: summed(x, twice(angles(t, p).cos())[:, None],
                                                twice(angles(t, p).sin())[:, None]),
    "table_cut": lambda x, p, t, s: summed(x, t.cos_halves[: x.shape[2]], t.sin_halves[: x.shape[2]]),
    "table_picked": lambda x, p, t, s: summed(x, t.cos_halves[p][:, None], t.sin_halves[p][:, None]),
    "half_tables": lambda x, p, t, s: torch.cat(parts(x, t.cos[: x.shape[2]], t.sin[: x.shape[2]]), -1),
    "half_tables_embedded": lambda x, p, t, s: torch.cat(
        parts(x, F.embedding(p, t.cos)[:, None], F.embedding(p, t.sin)[:, None]), 3
    ),
    "roformer": lambda x, p, t, s: summed(
        x, torch.stack([t.cos[: x.shape[2]]] * 2, -1).reshape(x.shape[2], SIZE)[None, None],
        torch.stack([t.sin[: x.shape[2]]] * 2, -1).reshape(x.shape[2], SIZE)[None, None], pairs,
    ),
    "table_of_pairs": lambda x, p, t, s: summed(x, t.cos_pairs[: x.shape[2]], t.sin_pairs[: x.shape[2]], unbound),
    "neighbours": lambda x, p, t, s: neighbours(
        (x[..., ::2], x[..., 1::2]), t.cos[: x.shape[2]], t.sin[: x.shape[2]]
    ).flatten(-2),
    "neighbours_unbound": lambda x, p, t, s: neighbours(
        x.unflatten(-1, (-1, 2)).unbind(-1), t.cos[p][:, None], t.sin[p][:, None]
    ).flatten(3),
    "partial": lambda x, p, t, s: torch.cat(
        (summed(x[..., :PART], twice(p[:, None, :, None].float() * s.inv).cos(),
                twice(p[:, None, :, None].float() * s.inv).sin()), x[..., PART:]), -1
    ),
    "partial_joined_at_once": lambda x, p, t, s: torch.cat(
        (*parts(x[..., :PART], s.cos[: x.shape[2]], s.sin[: x.shape[2]]), x[..., PART:]), -1
    ),
}  # fmt: skip

# x (B, S, H, d)
HEADS_LAST: dict[str, Way] = {
    "last_transformers": lambda x, p, t, s: summed(x, twice(angles(t, p)).cos()[:, :, None],
                                                   twice(angles(t, p)).sin()[:, :, None]),
    "last_table_picked": lambda x, p, t, s: summed(x, t.cos_halves[p].unsqueeze(2), t.sin_halves[p].unsqueeze(2)),
    "last_half_tables": lambda x, p, t, s: torch.cat(parts(x, t.cos[: x.shape[1], None], t.sin[: x.shape[1], None]),
                                                     -1),
    "gptj": lambda x, p, t, s: summed(x, t.cos[p][:, :, None].repeat_interleave(2, 3),
                                      t.sin[p][:, :, None].repeat_interleave(2, 3), pairs),
    "last_neighbours": lambda x, p, t, s: neighbours(
        (x.reshape(*x.shape[:-1], -1, 2)[..., 0], x.reshape(*x.shape[:-1], -1, 2)[..., 1]),
        t.cos[: x.shape[1], None], t.sin[: x.shape[1], None],
    ).reshape(*x.shape),
    "last_partial": lambda x, p, t, s: torch.cat(
        (summed(x[..., :PART], twice(p[:, :, None, None].float() * s.inv).cos(),
                twice(p[:, :, None, None].float() * s.inv).sin()), x[..., PART:]), -1
    ),
    "gptj_partial": lambda x, p, t, s: torch.cat(
        (summed(x[:, :, :, :PART], s.cos[p][:, :, None].repeat_interleave(2, 3),
                s.sin[p][:, :, None].repeat_interleave(2, 3), pairs), x[:, :, :, PART:]), -1
    ),
}  # fmt: skip

# Not rotary embedding, or not shown to be.
OTHERS: dict[str, Way] = {
    "angles_that_differ": lambda x, p, t, s: summed(
        x, torch.cat((angles(t, p), 2 * angles(t, p)), -1).cos()[:, None],
        torch.cat((angles(t, p), 2 * angles(t, p)), -1).sin()[:, None],
    ),
    "table_of_other_halves": lambda x, p, t, s: summed(x, t.cos_pairs[p][:, None], t.sin_pairs[p][:, None]),
    "pairs_with_a_table_of_halves": lambda x, p, t, s: summed(
        x, t.cos_halves[p][:, None], t.sin_halves[p][:, None], pairs
    ),
    "other_way_round": lambda x, p, t, s: x * twice(angles(t, p)).cos()[:, None]
                                          - halves(x) * twice(angles(t, p)).sin()[:, None],
    "second_part_negated": lambda x, p, t, s: x * t.cos_halves[p][:, None] + torch.cat(
        (x[..., SIZE // 2 :], -x[..., : SIZE // 2]), -1) * t.sin_halves[p][:, None],
    "halves_not_swapped": lambda x, p, t, s: x * t.cos_halves[p][:, None] + torch.cat(
        (-x[..., : SIZE // 2], x[..., SIZE // 2 :]), -1) * t.sin_halves[p][:, None],
    "angles_that_differ_between_heads": lambda x, p, t, s: summed(
        x, torch.stack((t.cos_halves[p], t.cos_halves[p // 2]), 1),
        torch.stack((t.sin_halves[p], t.sin_halves[p // 2]), 1),
    ),
}  # fmt: skip


class Rotations(nn.Module):
    """Every way on a tensor of its own: x (B, S, H * d) and positions (B, S) -> x turned, for each way."""

    def __init__(self, ways: dict[str, Way]) -> None:
        super().__init__()
        self.ways = ways
        self.whole, self.part = Tables(SIZE), Tables(PART)

    def forward(self, x: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        """Without the factor, alike graphs would be merged."""
        many = x.view(*x.shape[:2], HEADS, SIZE)
        turned: dict[str, Tensor] = {}
        for number, (name, way) in enumerate(self.ways.items()):
            mine = many * (1 + number / 16)
            first = name not in HEADS_LAST
            y = way(mine.transpose(1, 2) if first else mine, position_ids, self.whole, self.part)
            turned[name] = (y.transpose(1, 2) if first else y).reshape(x.shape)
        return turned
