"""Weights in blocks with a scale each: onnxruntime's ``MatMulNBits``, 8 or 4 bits, blocks of 32 along K.

With blocks of 32 and ``accuracy_level`` 4 the kernel scales the activations in the same blocks, row by row, so a vector
does not depend on what shares its batch: measured, exactly. With blocks of 128, or at level 0, the last digits differ
between small and large batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ...errors import InputError
from ..calibration import spread
from . import PrecisionReport
from .products import Product, Unit, find_products, find_tables, units
from .running import Activations, Agreement, Samples, agreement, answers, observe
from .schemes import smoothing
from .sensitivity import choose_kept
from .writing import Writer

__all__ = ["BLOCK", "apply_blocks", "pack", "quantize_blocks", "quantize_rows"]

BLOCK = 32

_SHRINK = np.linspace(1.0, 0.7, 7)
"""Scales that are tried for a block, relative to the one that cuts nothing off."""

_STRENGTHS = (0.5, 0.65)
_PAYS = 0.85
"""The channels are evened out where that leaves less than this much of the error: it is one more pass over them."""

_FEW = 12
"""Samples on which the harm of a single unit is measured."""


def quantize_blocks(
    matrix: np.ndarray, bits: int, importance: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds weights in blocks of 32 along K, symmetrically around the middle of the range.

    Args:
        matrix: (K, N) float32.
        bits: 8 or 4.
        importance: Mean square of each input channel, (K,): what an error of its weights counts for. With it the scale
            of each block is searched for; without, it is the one that cuts nothing off.

    Returns:
        uint8 (N, blocks, 32), the middle ``2 ** (bits - 1)`` meaning 0, and float32 scales (N, blocks).
    """
    depth, width = matrix.shape
    blocks, middle = -(-depth // BLOCK), 1 << (bits - 1)
    padded = np.zeros((blocks * BLOCK, width), np.float32)
    padded[:depth] = matrix
    parts = padded.reshape(blocks, BLOCK, width).transpose(2, 0, 1)
    counts = np.zeros(blocks * BLOCK, np.float32)
    counts[:depth] = 1 if importance is None else importance
    counts = counts.reshape(blocks, BLOCK)
    # The element of largest magnitude becomes the lowest number, of which there is one more than of highest ones.
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=-1)[..., None], axis=-1)
    full = np.where(largest == 0, 1, largest / -middle).astype(np.float32)
    best, error = full, np.full((width, blocks, 1), np.inf, np.float32)
    for factor in _SHRINK if importance is not None else _SHRINK[:1]:
        scale = full * np.float32(factor)
        wrong = np.clip(np.rint(parts / scale), -middle, middle - 1) * scale - parts
        found = np.einsum("nbk,bk->nb", wrong * wrong, counts)[..., None]
        best, error = np.where(found < error, scale, best), np.minimum(found, error)
    rounded = np.clip(np.rint(parts / best), -middle, middle - 1) + middle
    return rounded.astype(np.uint8), best[..., 0]


def pack(rounded: np.ndarray, bits: int) -> np.ndarray:
    """The operator's form, uint8 (N, blocks, 32 * bits / 8): of two 4 bit numbers the first one is the lower half."""
    return rounded if bits == 8 else rounded[..., 0::2] | (rounded[..., 1::2] << 4)


def quantize_rows(rows: np.ndarray) -> np.ndarray:
    """What the kernel sees in place of activations (rows, K): 8 bits with a scale for each block of a row."""
    count, depth = rows.shape
    padded = np.zeros((count, -(-depth // BLOCK) * BLOCK), np.float32)
    padded[:, :depth] = rows
    parts = padded.reshape(count, -1, BLOCK)
    scales = np.abs(parts).max(axis=-1, keepdims=True) / 127
    scales[scales == 0] = 1
    return (np.rint(parts / scales) * scales).reshape(count, -1)[:, :depth]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Products that share an input or a matrix: their nodes, by name, and what the channels are divided by."""

    names: tuple[str, ...]
    smooth: np.ndarray | None


def apply_blocks(model: ir.Model, samples: Samples, *, name: str, bits: int, aim: Agreement) -> PrecisionReport:
    """Keeps the weights of a lowered graph's products in blocks, in place.

    Products that 8 bits hurt too much stay in float32, and those that 4 bits hurt too much get 8.

    Args:
        model: Lowered.
        samples: Feeds by input name, at least one.
        name: The precision's name, for messages.
        bits: 8 or 4.
        aim: Smallest cosines with fp32 to reach on the samples.

    Raises:
        InputError: There is nothing to quantise, or nothing to calibrate on.
    """
    if not samples:
        raise InputError(f"precision {name}: found no calibration sample, wanted at least one")
    groups = units(find_products(model))
    if not groups:
        raise InputError(f"precision {name}: found no product with constant float32 weights, wanted at least one")
    for group in groups:
        for number, product in enumerate(group.products):
            product.node.name = product.node.name or f"product_{product.y.name}_{number}"
    seen, exact = observe(model, [x for group in groups for x in group.inputs], samples)
    parts = [_plan(group, seen) for group in groups]
    writing = _Blocks(seen, bits)

    def joint(chosen: Sequence[Part], few: int | None = None) -> Agreement:
        changed = model.clone()
        writing.write(changed, chosen, parts)
        picked = range(len(samples)) if few is None else spread(range(len(samples)), few)
        return agreement(answers(changed, [samples[i] for i in picked]), [exact[i] for i in picked])

    kept, found = choose_kept(parts, joint, lambda part: joint([part], _FEW), aim)
    changed = writing.write(model, [part for part in parts if part not in kept], parts)
    instead = "8 bits instead, " if bits == 4 else ""
    return PrecisionReport(
        scheme=f"{bits} bit weights in blocks of {BLOCK} along the input, a scale each; activations in 8 bit blocks",
        changed=changed,
        kept=[
            {"where": part.names[0], "reason": f"{instead}costs {harm:.2g} of cosine"} for part, harm in kept.items()
        ],
        calibration={"samples": len(samples)},
        worst_cosine=found.texts,
    )


def _plan(group: Unit, seen: Mapping[str, Activations]) -> Part:
    """Whether dividing the channels by SmoothQuant's vector, and the weights by its inverse, pays for the pass."""
    matrix = np.concatenate(list({each.key: each.matrix() for each in group.products}.values()), axis=1)
    rows = np.concatenate([seen[str(x.name)].rows for x in group.inputs])
    channels = np.max([seen[str(x.name)].channels for x in group.inputs], axis=0)
    exact = rows @ matrix

    def error(smooth: np.ndarray | None) -> float:
        divided, weights = (rows, matrix) if smooth is None else (rows / smooth, matrix * smooth[:, None])
        rounded, scales = quantize_blocks(weights, 8)
        kept = ((rounded.astype(np.float32) - 128) * scales[..., None]).reshape(len(scales), -1)[:, : len(matrix)]
        wrong = quantize_rows(divided) @ kept.T - exact
        return float(np.sqrt(((wrong**2).sum(axis=1) / np.maximum((exact**2).sum(axis=1), 1e-30)).mean()))

    best = min((smoothing(channels, matrix, strength) for strength in _STRENGTHS), key=error)
    pays = error(best) < _PAYS * error(None)
    return Part(tuple(str(each.node.name) for each in group.products), best if pays else None)


class _Blocks:
    """Writes parts into copies of a graph; what was rounded once is not rounded again."""

    def __init__(self, seen: Mapping[str, Activations], bits: int) -> None:
        self._seen, self._bits = seen, bits
        self._rounded: dict[tuple[str, bool, int], tuple[np.ndarray, np.ndarray]] = {}

    def write(self, model: ir.Model, chosen: Sequence[Part], parts: Sequence[Part]) -> int:
        """Writes the chosen parts, and with 4 bits the others in 8; returns how many products and tables changed."""
        writer, changed = Writer(model), 0
        products = {product.node.name: product for product in find_products(model)}
        for part in chosen if self._bits == 8 else parts:
            bits, divided = self._bits if part in chosen else 8, {}
            for each in (products[name] for name in part.names):
                packed, scales = self._weights(each, part.smooth, bits)
                if part.smooth is not None:
                    x = each.x
                    if x not in divided:
                        divided[x] = writer.op(each.node, "Mul", [x, writer.constant(1 / part.smooth, "smoothing")])
                    each.node.replace_input_with(0, divided[x])
                writer.blocks(each, packed, scales, bits=bits, block=BLOCK)
            changed += len(part.names)
        for table in find_tables(model):
            writer.table(table)
            changed += 1
        passes.RemoveUnusedNodesPass()(model)
        return changed

    def _weights(self, product: Product, smooth: np.ndarray | None, bits: int) -> tuple[np.ndarray, np.ndarray]:
        key = str(product.weight.name), product.transposed, bits
        if key not in self._rounded:
            matrix = product.matrix() if smooth is None else product.matrix() * smooth[:, None]
            importance = None
            if bits == 4:
                rows = self._seen[str(product.x.name)].rows
                importance = np.square(rows if smooth is None else rows / smooth).mean(axis=0)
            rounded, scales = quantize_blocks(matrix, bits, importance)
            self._rounded[key] = pack(rounded, bits), scales
        return self._rounded[key]
