"""A bundle on a GPU: buffers that stay where they are, and recorded launches for a few shapes.

Small batches on a GPU wait for the CPU, which launches every operator by itself. onnxruntime can record the launches of
a call as a CUDA graph and replay them, if the shapes and the addresses are those that were recorded. So calls are
padded to the shapes of a bucket table, each with buffers of its own. What no bucket holds runs without a recording.

tf32 is off unless it is asked for: it rounds the factors of float32 products to 10 bits, so that parity with the
source would be lost without a word.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FeedError, InputError
from .bundle import DEFAULT_BUNDLE, Bundle
from .feeds import FeedChecker, axis_sizes
from .providers import StrictSession, create_session
from .tensors import TensorSpec

__all__ = ["KERNELS", "BucketTable", "CudaOptions", "GraphSession"]

KERNELS: Mapping[str, int] = {"flash": 1, "efficient": 2, "trt": 4, "cudnn": 8, "math": 16}
"""Attention kernels and their bits in onnxruntime's ``sdpa_kernel``."""

_VARIABLES = (
    "ORT_DISABLE_FLASH_ATTENTION",
    "ORT_DISABLE_FUSED_ATTENTION",
    "ORT_DISABLE_FUSED_CROSS_ATTENTION",
    "ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION",
    "ORT_DISABLE_TRT_FLASH_ATTENTION",
    "ORT_ENABLE_CUDNN_FLASH_ATTENTION",
    "ORT_ENABLE_FUSED_CAUSAL_ATTENTION",
)
"""Environment variables that change onnxruntime's choice of an attention kernel where no option does."""


@dataclasses.dataclass(frozen=True)
class CudaOptions:
    """How onnxruntime uses a GPU.

    Attributes:
        device: number of the GPU.
        graphs: record and replay launches.
        tf32: let float32 products round their factors to 10 bits.
        kernels: attention kernels it may choose from, names in ``KERNELS``; empty leaves the choice to onnxruntime.
        strict_norms: sum in float32 inside SkipLayerNormalization of halves.
    """

    device: int = 0
    graphs: bool = True
    tf32: bool = False
    kernels: tuple[str, ...] = ()
    strict_norms: bool = True

    def provider_options(self) -> dict[str, str]:
        """Return them by onnxruntime's names.

        Raises:
            InputError: an unknown kernel.
        """
        unknown = [name for name in self.kernels if name not in KERNELS]
        if unknown:
            raise InputError(f'kernels: found "{unknown[0]}", wanted some of {", ".join(KERNELS)}')
        return {
            "device_id": str(self.device),
            "enable_cuda_graph": str(int(self.graphs)),
            "use_tf32": str(int(self.tf32)),
            "sdpa_kernel": str(sum(KERNELS[name] for name in set(self.kernels))),
            "enable_skip_layer_norm_strict_mode": str(int(self.strict_norms)),
            # Buckets need what they need; doubling would only hold memory back from others.
            "arena_extend_strategy": "kSameAsRequested",
        }

    def to_json(self) -> dict[str, Any]:
        """Return what was chosen, and the environment variables that choose where no option does."""
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        chosen = {**dataclasses.asdict(self), "kernels": list(self.kernels) or ["onnxruntime's choice"]}
        return {**chosen, "environment": variables}


@dataclasses.dataclass(frozen=True)
class BucketTable:
    """The shapes that calls are padded to.

    Attributes:
        batches: rows, rising.
        lengths: tokens per row, rising.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)

    def __post_init__(self) -> None:
        for name, sizes in (("batches", self.batches), ("lengths", self.lengths)):
            if not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes)):
                raise InputError(f"{name}: found {list(sizes)}, wanted rising sizes from 1 on")

    def limited(self, max_length: int | None) -> BucketTable:
        """Return the table with no length beyond a model's, and that length as the last one where it cuts some off."""
        if max_length is None or self.lengths[-1] <= max_length:
            return self
        kept = [length for length in self.lengths if length < max_length]
        return dataclasses.replace(self, lengths=(*kept, max_length))

    def find(self, batch: int, length: int) -> tuple[int, int] | None:
        """Return the smallest bucket that holds a call, None when there is none."""
        rows = next((size for size in self.batches if size >= batch), None)
        tokens = next((size for size in self.lengths if size >= length), None)
        return None if rows is None or tokens is None else (rows, tokens)

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, int]], buckets: int = 32) -> BucketTable:
        """Return a table for calls that were seen, with lengths that pad the fewest tokens.

        Args:
            shapes: (batch, sequence) of typical calls, at least one.
            buckets: most entries, batches times lengths; the batches are powers of two.

        Raises:
            InputError: no shapes, or fewer buckets than the batches alone need.
        """
        if not shapes:
            raise InputError("shapes: found none, wanted at least one call to make buckets for")
        batches = sorted({1 << (batch - 1).bit_length() for batch, _ in shapes})
        count = buckets // len(batches)
        if count < 1:
            raise InputError(f"buckets: found {buckets}, wanted at least {len(batches)}, one for each batch size")
        # Lengths in steps of 8, which tensor cores want; each one weighs its rows.
        weights: dict[int, int] = {}
        for batch, length in shapes:
            rounded = -(-length // 8) * 8
            weights[rounded] = weights.get(rounded, 0) + batch
        return cls(tuple(batches), tuple(_fewest_padded(sorted(weights.items()), count)))


def _fewest_padded(weights: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Return at most ``count`` of the lengths, the last among them, so that rounding up to them adds least."""
    lengths = [length for length, _ in weights]
    # best[k][i]: least padding of the first i lengths with k bounds, the last of which is lengths[i - 1].
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] + [(float("inf"), ())] * len(lengths)
    answer = best
    for _ in range(min(count, len(lengths))):
        after: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(float("inf"), ())] * len(lengths)]
        for end in range(1, len(lengths) + 1):
            bound = lengths[end - 1]
            added = 0.0
            for start in range(end - 1, -1, -1):
                added += (bound - lengths[start]) * weights[start][1]
                total = best[start][0] + added
                if total < after[end][0]:
                    after[end] = (total, (*best[start][1], bound))
        best = after
        if best[-1][0] < answer[-1][0]:
            answer = best
    return list(answer[-1][1])


class _Bucket:
    """The buffers of one shape, at addresses that do not change."""

    def __init__(
        self,
        session: StrictSession,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        sizes: Mapping[str, int],
        device: tuple[str, int],
        number: int | None,
    ) -> None:
        import onnxruntime

        self._session = session
        self._binding = session.ort.io_binding()
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = 4
        if number is not None:
            self._options.add_run_config_entry("gpu_graph_id", str(number))
        self._inputs, self._outputs = {}, {}
        for specs, held in ((inputs, self._inputs), (outputs, self._outputs)):
            for spec in specs:
                shape = axis_sizes([spec], sizes)[spec.name]
                held[spec.name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, spec.dtype), *device)
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, array in feeds.items():
            self._inputs[name].update_inplace(np.ascontiguousarray(array))
        self._session.ort.run_with_iobinding(self._binding, self._options)
        # A copy: the next call writes to the same buffers.
        return {name: np.array(value.numpy()) for name, value in self._outputs.items()}


class GraphSession:
    """Runs a bundle in padded calls of a few shapes, recorded on a GPU; safe to call from several threads, in turn.

    Args:
        bundle: the bundle or its folder.
        buckets: the shapes; a table for batches up to 32 and the model's length when None.
        options: how the GPU is used.
        provider: ``cuda``, or ``cpu`` to run the same calls without recordings.

    Attributes:
        bundle: the bundle.
        provider: where the model runs.
        placement: number of graph nodes per onnxruntime provider.
        options: how the GPU is used.
        buckets: the shapes.
        used: how often each bucket has run; ``None`` counts calls that none holds.

    Raises:
        BundleError: the bundle is damaged.
        InputError: the bundle has an input without batch and sequence, or no mask to hide padding with.
        ProviderError: the provider does not run here.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path = DEFAULT_BUNDLE,
        *,
        buckets: BucketTable | None = None,
        options: CudaOptions | None = None,
        provider: str = "cuda",
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        manifest = self.bundle.manifest
        self.options = options or CudaOptions()
        self.buckets = (buckets or BucketTable()).limited(manifest.max_length)
        _check_inputs(self.bundle)
        chosen = self.options.provider_options() if provider == "cuda" else None
        self._session = create_session(self.bundle.model_path, provider, provider_options=chosen)
        self.provider, self.placement = self._session.provider, self._session.placement
        self.used: dict[tuple[int, int] | None, int] = {}
        self._check_feeds = FeedChecker(manifest.inputs, manifest.max_length, manifest.pad_id)
        self._held: dict[tuple[int, int], _Bucket] = {}
        self._lock = threading.Lock()

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Run the model once; as ``Session.run``.

        Raises:
            FeedError: an unknown name, or a feed of a wrong dtype, rank, size, range or length.
            MachineError: memory ran out.
        """
        manifest = self.bundle.manifest
        names = [spec.name for spec in manifest.outputs] if outputs is None else list(outputs)
        known = {spec.name for spec in manifest.outputs}
        for name in names:
            if name not in known:
                raise FeedError(f'outputs: found "{name}", wanted only {", ".join(known)}')
        arrays, sizes = self._check_feeds(feeds)
        if sizes["batch"] == 0:
            shapes = axis_sizes(manifest.outputs, sizes)
            return {s.name: np.zeros(shapes[s.name], s.dtype) for s in manifest.outputs if s.name in names}
        bucket = self.buckets.find(sizes["batch"], sizes["sequence"])
        with self._lock:
            self.used[bucket] = self.used.get(bucket, 0) + 1
            if bucket is None:
                return self._plain(arrays, names)
            found = self._bucket(bucket).run(_padded(manifest.inputs, arrays, bucket, manifest.pad_id or 0))
        shapes = axis_sizes(manifest.outputs, sizes)
        return {name: found[name][tuple(slice(size) for size in shapes[name])] for name in names}

    def _bucket(self, bucket: tuple[int, int]) -> _Bucket:
        if bucket not in self._held:
            sizes = {"batch": bucket[0], "sequence": bucket[1]}
            manifest, on_gpu = self.bundle.manifest, self.provider == "cuda"
            # -1 means "do not record"; 0 is the recording of calls that name none.
            number = len(self._held) + 1 if on_gpu and self.options.graphs else None
            device = ("cuda", self.options.device) if on_gpu else ("cpu", 0)
            self._held[bucket] = _Bucket(self._session, manifest.inputs, manifest.outputs, sizes, device, number)
        return self._held[bucket]

    def _plain(self, arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
        import onnxruntime

        options = onnxruntime.RunOptions()
        if self.provider == "cuda" and self.options.graphs:
            options.add_run_config_entry("gpu_graph_id", "-1")
        values: list[Any] = list(self._session.ort.run(list(names), dict(arrays), options))
        return dict(zip(names, values, strict=True))

    def report(self) -> dict[str, Any]:
        """Return where it runs, how, and how often which bucket ran."""
        used = [
            {"batch": None if key is None else key[0], "sequence": None if key is None else key[1], "calls": calls}
            for key, calls in self.used.items()
        ]
        placement = None if self.placement is None else dict(self.placement)
        return {"provider": self.provider, "placement": placement, "cuda": self.options.to_json(), "buckets": used}


def _check_inputs(bundle: Bundle) -> None:
    inputs = bundle.manifest.inputs
    for spec in inputs:
        if tuple(spec.shape[:2]) != ("batch", "sequence"):
            raise InputError(f"{bundle.path}: input {spec.name} is {list(spec.shape)}, wanted [batch, sequence, ...]")
    if not any(spec.role in ("attention_mask", "padding_mask") for spec in inputs):
        raise InputError(f"{bundle.path}: has no mask, so calls cannot be padded to recorded shapes")


def _padded(
    inputs: Sequence[TensorSpec], arrays: Mapping[str, np.ndarray], bucket: tuple[int, int], pad_id: int
) -> dict[str, np.ndarray]:
    """Return feeds of a bucket's size; what is added is hidden, but for one token of each added row."""
    padded = {}
    for spec in inputs:
        array = arrays[spec.name]
        rows, tokens = array.shape[:2]
        ignored = spec.role == "padding_mask"
        filler = pad_id if spec.role == "token_ids" else int(ignored)
        whole = np.full((*bucket, *array.shape[2:]), filler, array.dtype)
        whole[:rows, :tokens] = array
        if spec.role in ("attention_mask", "padding_mask"):
            whole[rows:, :1] = int(not ignored)
        padded[spec.name] = whole
    return padded
