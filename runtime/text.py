"""Texts to feeds, through the bundle's ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BundleError, FeedError
from .tensors import TensorSpec

if TYPE_CHECKING:
    from .bundle import Bundle

__all__ = ["Encoding", "TextEncoder", "pad", "text_encoder", "token_encoding", "vector_output"]


class Encoding:
    """The tokens of one text: ``ids`` and segment ``types``, not padded, and whether it was ``cut`` to a length."""

    __slots__ = ("cut", "ids", "types")

    def __init__(self, ids: Sequence[int], types: Sequence[int], cut: bool = False) -> None:
        self.ids = ids
        self.types = types
        self.cut = cut

    def __len__(self) -> int:
        return len(self.ids)


class TextEncoder:
    """A tokenizer that pads with the model's own pad id; safe to call from several threads.

    Args:
        path: the ``tokenizer.json``.
        inputs: the model's inputs; the feeds are made for them.
        pad_id: id that fills up shorter rows.
        max_length: longer texts are cut to this many tokens, None cuts nothing.

    Raises:
        BundleError: the file is no tokenizer.
    """

    def __init__(self, path: Path, inputs: Sequence[TensorSpec], pad_id: int, max_length: int | None) -> None:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{path}: not a tokenizer: {error}") from error
        # The file may carry the padding and the cut of some training run.
        tokenizer.no_padding()
        if max_length is None:
            tokenizer.no_truncation()
        else:
            direction = (tokenizer.truncation or {}).get("direction", "right")
            tokenizer.enable_truncation(max_length, direction=direction)
        self._tokenizer = tokenizer
        self._inputs = tuple(inputs)
        self._pad_id = pad_id

    def encode(self, texts: Sequence[str], first: int = 0, what: str = "texts") -> list[Encoding]:
        """Tokenize, special tokens added.

        Args:
            texts: at least one.
            first: number of the first text, for errors.
            what: what the texts are a part of, for errors.

        Raises:
            FeedError: no texts, a text that is no string, or a text without any token.
        """
        if isinstance(texts, str):
            raise FeedError("texts: found one string, wanted a list of strings")
        texts = list(texts)
        if not texts:
            raise FeedError("texts: found an empty list, wanted at least one text")
        for i, text in enumerate(texts, first):
            if not isinstance(text, str):
                raise FeedError(f"{what}[{i}]: found {type(text).__name__}, wanted a string")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise FeedError(f"{what}[{i}]: no valid Unicode (a lone surrogate)") from error
        encodings = self._tokenizer.encode_batch(texts)
        for i, encoding in enumerate(encodings, first):
            if not encoding.ids:
                raise FeedError(f"{what}[{i}]: has no tokens")
        return [Encoding(encoding.ids, encoding.type_ids, bool(encoding.overflowing)) for encoding in encodings]

    @property
    def special_tokens(self) -> list[str]:
        """Tokens, but for the padding one, that are found in a text as they are written, such as ``[SEP]``, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [added[id_].content for id_ in sorted(added) if id_ != self._pad_id]

    def feeds(self, encodings: Sequence[Encoding]) -> dict[str, np.ndarray]:
        """Pad tokens as ``pad`` does, for the inputs and with the id given to the encoder."""
        return pad(encodings, self._inputs, self._pad_id)


def pad(encodings: Sequence[Encoding], inputs: Sequence[TensorSpec], pad_id: int) -> dict[str, np.ndarray]:
    """Pad tokens on the right to one (batch, sequence) array per input of the model.

    Args:
        encodings: at least one, none of them empty.
        inputs: of the model.
        pad_id: id that fills up shorter rows; the mask is 0 there.

    Raises:
        FeedError: the model has an input that tokens do not give.
    """
    lengths = np.array([len(encoding) for encoding in encodings])
    mask = np.arange(lengths.max())[None, :] < lengths[:, None]  # (batch, sequence)
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    types = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = np.concatenate([encoding.ids for encoding in encodings])
    types[mask] = np.concatenate([encoding.types for encoding in encodings])
    by_role = {
        "token_ids": ids,
        "attention_mask": mask,
        "padding_mask": ~mask,
        "token_type_ids": types,
        "position_ids": np.broadcast_to(np.arange(mask.shape[1]), mask.shape),
    }
    feeds = {}
    for spec in inputs:
        if spec.role not in by_role:
            raise FeedError(f"{spec.name}: text gives no {spec.role}; this bundle takes arrays")
        feeds[spec.name] = by_role[spec.role].astype(spec.dtype)
    return feeds


def token_encoding(item: Any, inputs: Sequence[TensorSpec], max_length: int | None, what: str) -> Encoding:
    """Check a sequence of token ids, special tokens in it, by itself: a check of a whole batch would not name it.

    Args:
        item: an ``Encoding``, or integers.
        inputs: of the model; they say which ids there are.
        max_length: longest sequence, None when there is no limit.
        what: what the sequence is called in errors.

    Raises:
        FeedError: no integers, none at all or more than the longest, or an id that the model does not have.
    """
    if isinstance(item, Encoding):
        encoding = item
    else:
        ids = np.asarray(item)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise FeedError(f"{what}: found {type(item).__name__}, wanted a text or token ids")
        encoding = Encoding(ids.tolist(), [0] * len(ids))
    if not len(encoding) or (max_length is not None and len(encoding) > max_length):
        raise FeedError(f"{what}: found {len(encoding)} tokens, wanted 1 to {max_length or 'any number'}")
    limit = next((spec.limit for spec in inputs if spec.role == "token_ids"), None)
    low, high = min(encoding.ids), max(encoding.ids)
    if low < 0 or (limit is not None and high >= limit):
        wanted = "at least 0" if limit is None else f"ids of 0 to {limit - 1}"
        raise FeedError(f"{what}: found the token id {low if low < 0 else high}, wanted {wanted}")
    return encoding


def text_encoder(bundle: Bundle) -> TextEncoder:
    """Return a bundle's tokenizer, which cuts texts to the longest that tokenizer and model take.

    Raises:
        BundleError: the bundle has no tokenizer, or its file is none.
    """
    manifest, path = bundle.manifest, bundle.tokenizer_path
    if manifest.tokenizer is None or path is None:
        raise BundleError(f"{bundle.path}: has no tokenizer, so it takes arrays and no text")
    limits = [limit for limit in (manifest.tokenizer["max_length"], manifest.max_length) if limit is not None]
    return TextEncoder(path, manifest.inputs, manifest.pad_id, min(limits, default=None))


def vector_output(bundle: Bundle) -> TensorSpec:
    """Return the output that holds one vector for each text.

    Raises:
        BundleError: the bundle has no pooling, or its output is not (batch, d).
    """
    manifest = bundle.manifest
    if manifest.pooling is None:
        raise BundleError(f"{bundle.path}: has no pooling, so a text has no one vector; export it with --pooling mean")
    output = next(spec for spec in manifest.outputs if spec.name == manifest.pooling["output"])
    if len(output.shape) != 2 or not isinstance(output.shape[1], int):
        raise BundleError(f"{bundle.path}: {output.name} has the shape {output.shape}, wanted one vector per text")
    return output
