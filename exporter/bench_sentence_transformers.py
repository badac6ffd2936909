"""Engine ``sentence-transformers`` of ``tfx bench --compare``: the checkpoint's folder, with torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import InputError, ProviderError, SourceError
from ..runtime.bundle import Bundle

__all__ = ["make_runner"]


class _SentenceRunner:
    """Tokens to one vector per row."""

    def __init__(self, bundle: Bundle, provider: str, threads: int, source: str | None) -> None:
        _check_bundle(bundle, source)
        if provider == "cuda" and not torch.cuda.is_available():
            raise ProviderError(
                f"provider cuda does not run here: torch {torch.__version__} finds no GPU; use --provider cpu"
            )
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        start = time.perf_counter()
        try:
            self._model: Any = SentenceTransformer(source, device=provider, local_files_only=True)
        except (OSError, ValueError) as error:
            raise SourceError(f"{source}: sentence-transformers cannot load it: {error}") from error
        self.load_s = time.perf_counter() - start
        self._model.eval()
        pooling = bundle.manifest.pooling or {}
        # Its names of what a bundle calls otherwise.
        self._names = {
            spec.name: "sentence_embedding" if spec.name == pooling["output"] else "token_embeddings"
            for spec in bundle.manifest.outputs
        }
        self.provider = provider
        self.threads = torch.get_num_threads()
        self.placement: Mapping[str, int] | None = None

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            features = {name: torch.from_numpy(array).to(self.provider) for name, array in feeds.items()}
            found = self._model(features)
            return {name: found[theirs].cpu().numpy() for name, theirs in self._names.items()}


def _check_bundle(bundle: Bundle, source: str | None) -> None:
    manifest = bundle.manifest
    if source is None or manifest.source["kind"] != "checkpoint" or manifest.pooling is None:
        raise InputError(
            "engine sentence-transformers: wanted a bundle of a checkpoint that gives one vector per text, and its "
            "folder (--source DIR)"
        )


def make_runner(bundle: Bundle, provider: str, threads: int, source: str | None = None) -> _SentenceRunner:
    """Make the engine.

    Args:
        bundle: made of a checkpoint, with pooling.
        provider: ``cpu`` or ``cuda``.
        threads: threads of torch in this process.
        source: the checkpoint's folder.

    Raises:
        InputError: the bundle is of another kind, or the folder is missing.
        ProviderError: torch has no such device here.
        SourceError: the folder cannot be loaded.
    """
    return _SentenceRunner(bundle, provider, threads, source)
