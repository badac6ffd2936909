"""A bundle that runs: arrays or texts in, named arrays or text vectors out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleError, FeedError
from .bundle import DEFAULT_BUNDLE, Bundle
from .feeds import FeedChecker, axis_sizes
from .providers import create_session
from .text import Encoding, TextEncoder, text_encoder

__all__ = ["Session"]

# onnxruntime's names of the dtypes that a bundle's inputs can have.
_ORT_TYPES = {"float": "float32", "double": "float64"}


class Session:
    """Runs a bundle on a provider, strictly; safe to call from several threads.

    Args:
        bundle: the bundle or its folder.
        provider: ``cpu`` or ``cuda``; it runs there or an error says why not.
        threads: threads inside an operator, None for onnxruntime's choice.
        optimize: False turns onnxruntime's graph optimization off.
        allow_fallback: take the CPU where the provider does not run; ``provider`` then says ``cpu``.

    Attributes:
        bundle: the bundle.
        provider: where the model runs.
        placement: number of graph nodes per onnxruntime provider, None when onnxruntime cannot tell.

    Raises:
        BundleError: the bundle is damaged.
        ProviderError: the provider does not run here.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path = DEFAULT_BUNDLE,
        *,
        provider: str = "cpu",
        threads: int | None = None,
        optimize: bool = True,
        allow_fallback: bool = False,
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        manifest = self.bundle.manifest
        self._session = create_session(
            self.bundle.model_path, provider, threads, optimize, allow_fallback=allow_fallback
        )
        self.provider = self._session.provider
        self.placement = self._session.placement
        self._check_graph()
        self._check_feeds = FeedChecker(manifest.inputs, manifest.max_length, manifest.pad_id)
        self._outputs = {spec.name: spec for spec in manifest.outputs}
        self._text: TextEncoder | None = None
        self._text_lock = threading.Lock()

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Run the model once.

        Args:
            feeds: arrays or nested lists by input name. Integers are cast where nothing is lost. A missing mask attends
                everywhere, and is an error where ids begin or end with the padding id; missing segment ids are
                zeros. Tokenizer fields that the model does not take are ignored with one notice.
            outputs: names of the wanted outputs, None for all.

        Returns:
            Arrays by output name. A batch of 0 rows gives outputs of 0 rows without running.

        Raises:
            FeedError: an unknown name, or a feed of a wrong dtype, rank, size, range or length.
            MachineError: memory ran out.
        """
        names = list(self._outputs if outputs is None else outputs)
        for name in names:
            if name not in self._outputs:
                raise FeedError(f'outputs: found "{name}", wanted only {", ".join(self._outputs)}')
        arrays, sizes = self._check_feeds(feeds)
        if sizes.get("batch") == 0:
            specs = [self._outputs[name] for name in names]
            shapes = axis_sizes(specs, sizes)
            return {spec.name: np.zeros(shapes[spec.name], spec.dtype) for spec in specs}
        return self._session.run(arrays, names)

    def tokenize(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Turn texts into feeds of shape (batch, sequence), padded to the longest, cut to the longest the model takes.

        Raises:
            FeedError: no texts, a text that is no string or has no tokens, or the model takes no text.
            BundleError: the bundle has no tokenizer.
        """
        encoder = self._text_encoder()
        return encoder.feeds(encoder.encode(texts))

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray | dict[str, np.ndarray]:
        """Run texts, batched by length, in the order they were given.

        Args:
            texts: at least one text.
            batch_size: texts in one call.

        Returns:
            With pooling in the bundle, one vector per text (texts, d). Without, every output by name; positions beyond
            a text's own length are zeros.

        Raises:
            FeedError: as ``tokenize``, or a batch size below 1.
            BundleError: the bundle has no tokenizer.
        """
        if batch_size < 1:
            raise FeedError(f"batch_size: found {batch_size}, wanted at least 1")
        encoder = self._text_encoder()
        encodings = encoder.encode(texts)
        pooling = self.bundle.manifest.pooling
        names = list(self._outputs) if pooling is None else [pooling["output"]]
        # Neighbours in length share a batch, so little of it is padding.
        order = sorted(range(len(encodings)), key=lambda i: -len(encodings[i]))
        collected: dict[str, np.ndarray] = {}
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = [encodings[i] for i in rows]
            for name, values in self.run(encoder.feeds(batch), names).items():
                self._scatter(collected, name, values, rows, batch, len(encodings))
        return collected if pooling is None else collected[pooling["output"]]

    def _scatter(
        self,
        collected: dict[str, np.ndarray],
        name: str,
        values: np.ndarray,
        rows: list[int],
        batch: list[Encoding],
        count: int,
    ) -> None:
        """Put a batch's rows where they belong; the first batch is the longest and sets the size."""
        whole = collected.setdefault(name, np.zeros((count, *values.shape[1:]), values.dtype))
        if self._outputs[name].shape[1:2] == ("sequence",):
            for row, row_values, encoding in zip(rows, values, batch, strict=True):
                whole[row, : len(encoding)] = row_values[: len(encoding)]
        else:
            whole[rows] = values

    def _text_encoder(self) -> TextEncoder:
        with self._text_lock:
            if self._text is None:
                self._text = text_encoder(self.bundle)
            return self._text

    def _check_graph(self) -> None:
        """Refuse a graph whose inputs or outputs are not those of the manifest."""
        manifest, ort = self.bundle.manifest, self._session.ort
        for kind, nodes, specs in (
            ("inputs", ort.get_inputs(), manifest.inputs),
            ("outputs", ort.get_outputs(), manifest.outputs),
        ):
            found = {node.name: _dtype(node.type) for node in nodes}
            wanted = {spec.name: spec.dtype for spec in specs}
            if found != wanted:
                raise BundleError(
                    f"{self.bundle.model_path}: found {kind} {_show(found)}, tfx.json says {_show(wanted)}"
                )


def _dtype(ort_type: str) -> str:
    """Return the numpy name of ``tensor(...)``."""
    inner = ort_type.removeprefix("tensor(").removesuffix(")")
    return _ORT_TYPES.get(inner, inner)


def _show(tensors: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {dtype}" for name, dtype in tensors.items())
