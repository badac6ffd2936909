"""Engine ``onnxruntime`` of ``tfx bench --compare``: what one gets without tfx.

The bundle's source through ``torch.onnx.export(dynamo=True)`` with torch's own defaults, in a session with
onnxruntime's own defaults: every graph optimizer on.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from ..errors import MachineError
from ..runtime.bundle import Bundle
from ..runtime.providers import create_session

__all__ = ["PlainExport", "make_runner", "plain_export"]


class PlainExport:
    """A bundle's source as torch.onnx exports it by itself, in a folder that goes with this object.

    Args:
        bundle: says what was exported.
        source: see :func:`.rebuild.rebuild`.

    Attributes:
        path: the ``.onnx`` file.

    Raises:
        TfxError: the source cannot be made again.
        MachineError: the process that exports died.
    """

    def __init__(self, bundle: Bundle, source: str | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tfx-bench-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name) / "plain.onnx"
        # Elsewhere: torch's threads and memory are no part of what is measured here.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                pool.submit(plain_export, bundle.path, self.path, source).result()
            except BrokenProcessPool as error:
                raise MachineError(f"{bundle.path}: the process that makes the plain export died") from error


class _PlainRunner:
    """A session on the plain export."""

    def __init__(self, bundle: Bundle, provider: str, threads: int, source: str | None) -> None:
        self._plain = PlainExport(bundle, source)  # Lives as long as the session, which may read weights from it.
        start = time.perf_counter()
        self._session = create_session(self._plain.path, provider, threads, disabled_optimizers=())
        self.load_s = time.perf_counter() - start
        self._outputs = [spec.name for spec in bundle.manifest.outputs]
        self.provider = self._session.provider
        self.placement: Mapping[str, int] | None = self._session.placement
        self.threads = threads

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._session.run(feeds, self._outputs)


def make_runner(bundle: Bundle, provider: str, threads: int, source: str | None = None) -> _PlainRunner:
    """Make the engine.

    Args:
        bundle: says what was exported.
        provider: ``cpu`` or ``cuda``.
        threads: threads inside an operator.
        source: see :func:`.rebuild.rebuild`.

    Raises:
        ProviderError: the provider does not run here.
        TfxError: the source cannot be made again.
    """
    return _PlainRunner(bundle, provider, threads, source)


def plain_export(bundle: Path, path: Path, source: str | None = None) -> None:
    """Write a bundle's source as torch.onnx exports it by itself.

    Args:
        bundle: the bundle's folder.
        path: the ``.onnx`` file to write; weights go beside it.
        source: see :func:`.rebuild.rebuild`.
    """
    import torch

    from ..runtime.tensors import make_feeds
    from .capture import Positional, dynamic_axes
    from .probe import inference
    from .quiet import quiet
    from .rebuild import rebuild

    manifest = Bundle.open(bundle, check_hashes=False).manifest
    live = rebuild(manifest, source)
    # Two rows at least: torch.export bakes an axis of size 1 into the graph.
    feeds = make_feeds(live.inputs, batch=2, sequence=min(8, live.max_length or 8), pattern="right")
    with inference(live.module), quiet():
        torch.onnx.export(
            Positional(live),
            tuple(torch.from_numpy(array) for array in feeds.values()),
            path,
            dynamo=True,
            dynamic_shapes=(dynamic_axes(live.inputs),),
            input_names=list(feeds),
            output_names=[spec.name for spec in manifest.outputs],
            verbose=False,
        )
