"""Engine ``torch`` of ``tfx bench --compare``: the bundle's source, eager, in float32."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from ..errors import ProviderError
from ..runtime.bundle import Bundle
from .rebuild import rebuild

__all__ = ["make_runner"]


class _TorchRunner:
    """The live module."""

    def __init__(self, bundle: Bundle, provider: str, threads: int, source: str | None) -> None:
        if provider == "cuda" and not torch.cuda.is_available():
            raise ProviderError(
                f"provider cuda does not run here: torch {torch.__version__} finds no GPU; use --provider cpu"
            )
        torch.set_num_threads(threads)
        start = time.perf_counter()
        self._source = rebuild(bundle.manifest, source)
        self._source.module.to(provider)
        self.load_s = time.perf_counter() - start
        self.provider = provider
        self.threads = torch.get_num_threads()
        self.placement: Mapping[str, int] | None = None

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(array).to(self.provider) for name, array in feeds.items()}
            return {name: tensor.cpu().numpy() for name, tensor in self._source.call(tensors).items()}


def make_runner(bundle: Bundle, provider: str, threads: int, source: str | None = None) -> _TorchRunner:
    """Make the engine.

    Args:
        bundle: says what was exported.
        provider: ``cpu`` or ``cuda``.
        threads: threads of torch in this process.
        source: see :func:`.rebuild.rebuild`.

    Raises:
        ProviderError: torch has no such device here.
        TfxError: the source cannot be made again.
    """
    return _TorchRunner(bundle, provider, threads, source)
