"""Feeds checked against the manifest before onnxruntime sees them.

Integer casts that lose nothing are made; everything else that differs from what the model wants is an error
that names the input, what was found and what was wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import FeedError
from .tensors import MASK_ROLES, TensorSpec

__all__ = ["FeedChecker"]

_LOG = logging.getLogger("tfx")

# What tokenizers return beside what a model takes (transformers' names).
_SURPLUS = (
    "token_type_ids",
    "position_ids",
    "special_tokens_mask",
    "offset_mapping",
    "overflow_to_sample_mapping",
    "length",
    "num_truncated_tokens",
    "bbox",
)
_ID_ROLES = ("token_ids", "token_type_ids", "position_ids")


class FeedChecker:
    """Turns what a caller passes into what the graph takes.

    Args:
        inputs: the model's inputs.
        max_length: longest sequence, None when there is no limit.
        pad_id: token id that pads a batch; rows that begin or end with it need a mask. None knows none.
    """

    def __init__(self, inputs: Sequence[TensorSpec], max_length: int | None, pad_id: int | None = None) -> None:
        self._pad_id = pad_id
        self._inputs = tuple(inputs)
        self._by_name = {spec.name: spec for spec in inputs}
        self._max_length = max_length
        self._noticed: set[str] = set()

    def __call__(self, feeds: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Check and complete feeds.

        A missing mask attends everywhere (ones, zeros for a padding mask) and is an error where ids look padded;
        missing segment ids become zeros.

        Args:
            feeds: arrays, or nested lists, by input name.

        Returns:
            The feeds in the graph's dtypes, and the size of every named axis.

        Raises:
            FeedError: a name, dtype, rank, size, value or length is wrong.
        """
        if not isinstance(feeds, Mapping):
            raise FeedError(
                f"feeds: found {type(feeds).__name__}, wanted arrays by input name: {', '.join(self._by_name)}"
            )
        arrays = {name: _array(name, feeds[name]) for name in self._known(feeds)}
        sizes: dict[str, int] = {}
        owners: dict[str, str] = {}
        for name, values in arrays.items():
            _check_shape(self._by_name[name], values.shape, sizes, owners)
        arrays = {name: _cast(self._by_name[name], values) for name, values in arrays.items()}
        for spec in self._inputs:
            if spec.name not in arrays:
                arrays[spec.name] = _default(spec, sizes)
                if spec.role in ("attention_mask", "padding_mask"):
                    self._check_unpadded(spec, arrays)
        if sizes.get("batch") != 0:
            self._check_length(sizes, owners)
            for spec in self._inputs:
                _check_values(spec, arrays[spec.name])
        return {spec.name: arrays[spec.name] for spec in self._inputs}, sizes

    def _check_unpadded(self, mask: TensorSpec, arrays: Mapping[str, np.ndarray]) -> None:
        """Refuse to make up a mask for rows that look padded: attending to padding is wrong in silence."""
        if self._pad_id is None:
            return
        for spec in self._inputs:
            ids = arrays.get(spec.name) if spec.role == "token_ids" else None
            if ids is None or ids.ndim != 2 or ids.shape[1] < 2:
                continue
            if (ids[:, [0, -1]] == self._pad_id).any():
                raise FeedError(
                    f"{mask.name}: missing, and {spec.name} has rows that begin or end with the padding id "
                    f"{self._pad_id}; give the mask"
                )

    def _known(self, feeds: Mapping[str, Any]) -> list[str]:
        """Return the names to feed; drop surplus tokenizer fields with one notice each."""
        for name in feeds:
            if name in self._by_name:
                continue
            names = ", ".join(self._by_name)
            if name == "attention_mask":
                # Without it the model attends everywhere: only a mask that says so may be dropped.
                if not np.all(np.asarray(feeds[name]) != 0):
                    raise FeedError(f"attention_mask: the model takes none, wanted one of all ones; it takes {names}")
            elif name not in _SURPLUS:
                raise FeedError(f'feeds: found "{name}", wanted only {names}')
            if name not in self._noticed:
                self._noticed.add(name)
                _LOG.warning("the model takes no %s; it is ignored", name)
        return [name for name in feeds if name in self._by_name]

    def _check_length(self, sizes: Mapping[str, int], owners: Mapping[str, str]) -> None:
        for axis, size in sizes.items():
            if size == 0:
                raise FeedError(f"{owners[axis]}: found {axis} length 0, wanted at least 1")
        length = sizes.get("sequence")
        if length is not None and self._max_length is not None and length > self._max_length:
            raise FeedError(f"{owners['sequence']}: found sequence length {length}, wanted at most {self._max_length}")


def axis_sizes(specs: Iterable[TensorSpec], sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor with named axes filled in; an axis that no input has counts 0."""
    return {
        spec.name: tuple(axis if isinstance(axis, int) else sizes.get(axis, 0) for axis in spec.shape) for spec in specs
    }


def _array(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError) as error:
        raise FeedError(f"{name}: rows differ in length or are no numbers; pad them to one length") from error
    if array.dtype == object:
        raise FeedError(
            f"{name}: found objects, wanted numbers (an integer beyond 64 bits, or rows of unequal length?)"
        )
    # Python floats arrive as float64 although nobody chose that precision; an empty list as well.
    if array.dtype == np.float64 and not hasattr(values, "dtype"):
        array = array.astype(np.int64) if array.size == 0 else array.astype(np.float32)
    return array


def _check_shape(spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, int], owners: dict[str, str]) -> None:
    wanted = "(" + ", ".join(str(axis) for axis in spec.shape) + ")"
    if len(shape) != len(spec.shape):
        raise FeedError(f"{spec.name}: found shape {shape}, wanted {wanted}")
    for axis, size in zip(spec.shape, shape, strict=True):
        if isinstance(axis, int):
            if axis != size:
                raise FeedError(f"{spec.name}: found shape {shape}, wanted {wanted}")
        elif sizes.setdefault(axis, size) != size:
            raise FeedError(f"{spec.name}: found {axis} {size}, wanted {sizes[axis]} as in {owners[axis]}")
        owners.setdefault(str(axis), spec.name)


def _cast(spec: TensorSpec, values: np.ndarray) -> np.ndarray:
    """Return the values in the wanted dtype if that loses nothing."""
    wanted = np.dtype(spec.dtype)
    found = values.dtype
    if found == wanted:
        return values
    if values.size == 0:
        return values.astype(wanted)
    if wanted.kind in "iub" and found.kind in "iub":
        low, high = (0, 1) if wanted.kind == "b" else (int(np.iinfo(wanted).min), int(np.iinfo(wanted).max))
        smallest, largest = int(values.min()), int(values.max())
        if smallest < low or largest > high:
            bad = smallest if smallest < low else largest
            raise FeedError(f"{spec.name}: found {bad} ({found}), wanted {wanted} values of {low} to {high}")
        return values.astype(wanted)
    if wanted.kind == "f" and (
        (found.kind == "f" and found.itemsize < wanted.itemsize)
        or (found.kind in "iub" and np.array_equal(values.astype(wanted).astype(found), values))
    ):
        return values.astype(wanted)
    raise FeedError(f"{spec.name}: found {found}, wanted {wanted}")


def _default(spec: TensorSpec, sizes: Mapping[str, int]) -> np.ndarray:
    shape = axis_sizes([spec], sizes)[spec.name]
    if all(isinstance(axis, int) or axis in sizes for axis in spec.shape):
        if spec.role == "attention_mask":
            return np.ones(shape, spec.dtype)
        if spec.role in ("padding_mask", "token_type_ids"):
            return np.zeros(shape, spec.dtype)
    raise FeedError(f"{spec.name}: missing")


def _check_values(spec: TensorSpec, values: np.ndarray) -> None:
    """Refuse ids that an embedding table does not have and masks that are neither 0 nor 1."""
    if values.dtype.kind == "f" and spec.role in MASK_ROLES:
        odd = values[(values != 0) & (values != 1)]
        if odd.size:
            raise FeedError(f"{spec.name}: found {odd.flat[0]:g}, wanted 0 or 1")
    if values.dtype.kind not in "iu" or values.size == 0:
        return
    smallest, largest = int(values.min()), int(values.max())
    if spec.role in MASK_ROLES:
        if smallest < 0 or largest > 1:
            raise FeedError(f"{spec.name}: found {largest if largest > 1 else smallest}, wanted 0 or 1")
    elif spec.limit is not None and (smallest < 0 or largest >= spec.limit):
        bad = smallest if smallest < 0 else largest
        raise FeedError(f"{spec.name}: found {bad}, wanted values of 0 to {spec.limit - 1}")
    elif smallest < 0 and spec.role in _ID_ROLES:
        raise FeedError(f"{spec.name}: found {smallest}, wanted at least 0")
