"""What a bundle's inputs and outputs look like, and random feeds of that look.

The feeds are made to tell mistakes apart: segment ids do not equal the mask (a swap of the two shows),
and the rows of a padded batch have different lengths (so does a mask that was reduced to one length).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from . import fields

__all__ = [
    "DTYPES",
    "MASK_PATTERNS",
    "MASK_ROLES",
    "ROLES",
    "Case",
    "TensorSpec",
    "attended_positions",
    "default_cases",
    "make_feeds",
]

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
MASK_ROLES = ("attention_mask", "padding_mask")
"""1 (True) attends in the first, as transformers has it, and is ignored in the second, as torch.nn has it."""

ROLES = ("token_ids", *MASK_ROLES, "token_type_ids", "position_ids", "features", "output")
MASK_PATTERNS = ("full", "right", "left", "holes")

_UNKNOWN_VOCABULARY = 16
"""Ids stay this small when an input states no limit: any real vocabulary holds them."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output.

    Attributes:
        name: its name in the graph.
        dtype: a numpy dtype name out of ``DTYPES``.
        shape: one entry per axis, an int when fixed, else the name of the axis (``"batch"``, ``"sequence"``).
        role: what the values mean, out of ``ROLES``. An ``attention_mask`` has 1 (True) where a position is attended;
            a ``padding_mask``, bool or integer, has 1 (True) where it is ignored.
        limit: exclusive upper bound of integer values (vocabulary size, number of segments), None when unknown.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    role: str
    limit: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's form of this tensor; outputs have neither role nor limit."""
        head: dict[str, Any] = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        return head if self.role == "output" else {**head, "role": self.role, "limit": self.limit}

    @classmethod
    def from_json(cls, value: object, where: str = "tensor", *, output: bool = False) -> TensorSpec:
        """Read what ``to_json`` wrote.

        Args:
            value: the parsed JSON.
            where: path of the field, for messages.
            output: True for an entry of ``outputs``.

        Raises:
            BundleError: a field is missing, unknown or of the wrong kind.
        """
        entry = fields.mapping(value, where)
        known = ("name", "dtype", "shape") + (() if output else ("role", "limit"))
        fields.only_keys(entry, known, where)
        axes = fields.array(fields.required(entry, "shape", where), f"{where}.shape")
        shape = tuple(
            axis if isinstance(axis, str) and axis else fields.integer(axis, f"{where}.shape[{i}]", minimum=1)
            for i, axis in enumerate(axes)
        )
        role, limit = "output", None
        if not output:
            role = fields.choice(fields.required(entry, "role", where), ROLES[:-1], f"{where}.role")
            limit = entry.get("limit")
        # A padding mask of floats is added to the scores: other numbers, with another meaning.
        dtypes = tuple(dtype for dtype in DTYPES if role != "padding_mask" or np.dtype(dtype).kind != "f")
        return cls(
            name=fields.text(fields.required(entry, "name", where), f"{where}.name"),
            dtype=fields.choice(fields.required(entry, "dtype", where), dtypes, f"{where}.dtype"),
            shape=shape,
            role=role,
            limit=None if limit is None else fields.integer(limit, f"{where}.limit", minimum=1),
        )

    def resolve(self, batch: int, sequence: int) -> tuple[int, ...]:
        """Return the shape with ``"batch"`` and every other axis name (taken as a length) filled in."""
        sizes = {"batch": batch}
        return tuple(axis if isinstance(axis, int) else sizes.get(axis, sequence) for axis in self.shape)


@dataclass(frozen=True)
class Case:
    """A shape and mask pattern at which a bundle is checked."""

    id: str
    batch: int
    sequence: int
    pattern: str


def default_cases(inputs: Sequence[TensorSpec], max_length: int | None) -> list[Case]:
    """Return the shapes and mask patterns that every bundle is checked at.

    Args:
        inputs: the model's inputs; without a mask among them only the pattern ``full`` is used.
        max_length: longest sequence the model takes, None when it has no limit.

    Returns:
        (1, 1), (1, 7), (3, 16) and (2, the longest up to 512), clipped to ``max_length``, in each pattern.
    """
    longest = min(max_length or 512, 512)
    masked = any(spec.role in MASK_ROLES for spec in inputs)
    shapes = dict.fromkeys((batch, min(length, longest)) for batch, length in ((1, 1), (1, 7), (3, 16), (2, longest)))
    return [
        Case(f"b{batch}-s{length}-{pattern}", batch, length, pattern)
        for batch, length in shapes
        for pattern in (MASK_PATTERNS if masked else MASK_PATTERNS[:1])
    ]


def make_feeds(
    inputs: Sequence[TensorSpec], *, batch: int, sequence: int, pattern: str = "full", seed: int = 0
) -> dict[str, np.ndarray]:
    """Make random feeds.

    Args:
        inputs: the inputs to fill.
        batch: size of the axis ``"batch"``, at least 1.
        sequence: size of every other named axis, at least 1.
        pattern: attended positions, out of ``MASK_PATTERNS``; each row attends at least one. A padding mask is the
            inverse of the attention mask.
        seed: the same seed gives the same feeds.

    Returns:
        One array per input: ids in [0, limit), positions 0..sequence-1, features from N(0, 1).

    Raises:
        InputError: unknown pattern or a size below 1.
    """
    if pattern not in MASK_PATTERNS:
        raise InputError(f'mask pattern: found "{pattern}", wanted one of {", ".join(MASK_PATTERNS)}')
    if batch < 1 or sequence < 1:
        raise InputError(f"feeds: found batch {batch}, sequence {sequence}, wanted both at least 1")
    random = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    masks: list[np.ndarray] = []
    # Masks first: a padding mask ignores what an attention mask does not attend, segment ids differ from them.
    order = {role: i for i, role in enumerate(MASK_ROLES)}
    for spec in sorted(inputs, key=lambda spec: order.get(spec.role, len(order))):
        shape = spec.resolve(batch, sequence)
        if spec.role == "attention_mask":
            values = _mask(shape, pattern, random)
            masks.append(values)
        elif spec.role == "padding_mask":
            attended = next((mask for mask in masks if mask.shape == shape), None)
            values = 1 - (_mask(shape, pattern, random) if attended is None else attended)
            masks.append(values)
        elif spec.role == "position_ids":
            values = np.broadcast_to(np.arange(shape[-1]), shape)
        elif spec.role == "token_type_ids":
            values = _segments(shape, spec.limit or 2, masks, random)
        elif np.dtype(spec.dtype).kind == "f":
            values = random.standard_normal(shape)
        elif spec.dtype == "bool":
            values = random.integers(0, 2, shape)
        else:
            values = random.integers(0, spec.limit or _UNKNOWN_VOCABULARY, shape)
        feeds[spec.name] = np.array(values, dtype=spec.dtype, order="C")
    return {spec.name: feeds[spec.name] for spec in inputs}


def attended_positions(inputs: Sequence[TensorSpec], feeds: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return which positions all (batch, sequence) masks among the feeds attend; None without such a mask."""
    found: np.ndarray | None = None
    for spec in inputs:
        values = feeds.get(spec.name)
        if spec.role not in MASK_ROLES or values is None or values.ndim != 2:
            continue
        marked = values != 0
        attended = ~marked if spec.role == "padding_mask" else marked
        if found is None:
            found = attended
        elif found.shape == attended.shape:
            found = found & attended
    return found


def _mask(shape: tuple[int, ...], pattern: str, random: np.random.Generator) -> np.ndarray:
    """Return 1 where attended; axes between the first and the last repeat the same row."""
    *leading, length = shape
    rows = leading[0] if leading else 1
    mask = np.ones((rows, length), dtype=np.int64)
    if pattern == "holes" and length > 1:
        mask[:] = random.random((rows, length)) < 0.6
        mask[:, length // 2] = 0
        mask[:, [0, -1] if length > 2 else [0]] = 1
    elif pattern in ("right", "left"):
        # One row is padded too; in a batch the first row is full and each further one is shorter.
        cut = np.arange(rows) * length // rows if rows > 1 else np.array([length // 3])
        keep = np.maximum(length - cut, 1)[:, None]
        places = np.arange(length)
        mask[:] = places < keep if pattern == "right" else places >= length - keep
    return np.broadcast_to(mask.reshape(rows, *(1,) * (len(shape) - 2), length) if leading else mask[0], shape)


def _segments(shape: tuple[int, ...], limit: int, masks: list[np.ndarray], random: np.random.Generator) -> np.ndarray:
    """Return random segment ids that differ from every mask of the same shape."""
    values = random.integers(0, limit, shape)
    if limit > 1 and any(np.array_equal(mask, values) for mask in masks):
        values.flat[0] = 1 - min(int(values.flat[0]), 1)
    return values
