"""Engine ``openvino`` of ``tfx bench --compare``: the plain torch.onnx export in OpenVINO's CPU plugin, in float32.

Its own default is bfloat16 where the CPU has it; then outputs would not pass for those of the bundle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ProviderError
from ..runtime.bundle import Bundle
from .bench_onnxruntime import PlainExport

__all__ = ["make_runner"]


class _OpenVinoRunner:
    """A compiled model."""

    def __init__(self, bundle: Bundle, provider: str, threads: int, source: str | None) -> None:
        if provider != "cpu":
            raise ProviderError(f"provider {provider} is none of OpenVINO's; use --provider cpu")
        import openvino  # pyright: ignore[reportMissingImports]

        self._plain = PlainExport(bundle, source)
        start = time.perf_counter()
        core: Any = openvino.Core()
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        compiled = core.compile_model(core.read_model(self._plain.path), "CPU", settings)
        self._request = compiled.create_infer_request()
        self.load_s = time.perf_counter() - start
        self._outputs = {spec.name: compiled.output(spec.name) for spec in bundle.manifest.outputs}
        self.provider = "cpu"
        self.placement: Mapping[str, int] | None = None
        self.threads = int(compiled.get_property("INFERENCE_NUM_THREADS"))

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = self._request.infer(dict(feeds), share_outputs=True)
        return {name: np.asarray(found[port]) for name, port in self._outputs.items()}


def make_runner(bundle: Bundle, provider: str, threads: int, source: str | None = None) -> _OpenVinoRunner:
    """Make the engine.

    Args:
        bundle: says what was exported.
        provider: ``cpu``.
        threads: threads of an inference.
        source: see :func:`.rebuild.rebuild`.

    Raises:
        ProviderError: another provider.
        TfxError: the source cannot be made again.
    """
    return _OpenVinoRunner(bundle, provider, threads, source)
