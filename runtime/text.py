"""Texts to feeds, through the bundle's ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BundleError, FeedError
from .tensors import TensorSpec

if TYPE_CHECKING:
    from .bundle import Bundle

__all__ = ["Encoding", "TextEncoder", "text_encoder"]


class Encoding:
    """The tokens of one text: ``ids`` and segment ``types``, not padded."""

    __slots__ = ("ids", "types")

    def __init__(self, ids: Sequence[int], types: Sequence[int]) -> None:
        self.ids = ids
        self.types = types

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

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokenize, special tokens added.

        Raises:
            FeedError: no texts, a text that is no string, or a text without any token.
        """
        if isinstance(texts, str):
            raise FeedError("texts: found one string, wanted a list of strings")
        texts = list(texts)
        if not texts:
            raise FeedError("texts: found an empty list, wanted at least one text")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise FeedError(f"texts[{i}]: found {type(text).__name__}, wanted a string")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise FeedError(f"texts[{i}]: no valid Unicode (a lone surrogate)") from error
        encodings = self._tokenizer.encode_batch(texts)
        for i, encoding in enumerate(encodings):
            if not encoding.ids:
                raise FeedError(f"texts[{i}]: has no tokens")
        return [Encoding(encoding.ids, encoding.type_ids) for encoding in encodings]

    def feeds(self, encodings: Sequence[Encoding]) -> dict[str, np.ndarray]:
        """Pad tokens on the right to one (batch, sequence) array per input of the model.

        Raises:
            FeedError: the model has an input that text does not give.
        """
        lengths = np.array([len(encoding) for encoding in encodings])
        mask = np.arange(lengths.max())[None, :] < lengths[:, None]  # (batch, sequence)
        ids = np.full(mask.shape, self._pad_id, dtype=np.int64)
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
        for spec in self._inputs:
            if spec.role not in by_role:
                raise FeedError(f"{spec.name}: text gives no {spec.role}; this bundle takes arrays")
            feeds[spec.name] = by_role[spec.role].astype(spec.dtype)
        return feeds


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
