"""What can really run here, and sessions that run where they were told to or fail.

onnxruntime lists CUDA as available on a machine without a GPU and falls back to the CPU in silence. Here a provider
is tried with a one-node session that may not fall back, and the node placement of every session is read back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BundleError, FeedError, InputError, MachineError, ProviderError
from .external import check_external_data

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["MEMORY", "PROVIDERS", "StrictSession", "create_session", "provider_problem"]

PROVIDERS: Mapping[str, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""tfx's name of a provider and onnxruntime's."""

MEMORY: Mapping[str, str] = {
    "steady": "an arena that calls of every shape share; no plan is kept per shape",
    "lean": "no arena: what a call does not need goes back at once, and large calls take about 7 % longer",
    "onnxruntime": "onnxruntime's default: a plan per shape, which the first call of a shape makes and the arena keeps",
}
"""How a session on the CPU holds memory between calls. ``benchmarks/schedule.py`` measures them over varying shapes."""

# Slower than what it replaces on the CPU, and onnxruntime applies it by itself at load.
_SLOWER_OPTIMIZERS: Mapping[str, tuple[str, ...]] = {"cpu": ("SkipLayerNormFusion",)}

# Nodes that carry the model's arithmetic. onnxruntime keeps shape bookkeeping on the CPU beside any
# accelerator on purpose, but one of these on the CPU means that the accelerator does not run the model.
# fmt: off
_HEAVY = frozenset({
    "MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "Attention", "MultiHeadAttention", "LayerNormalization", "SkipLayerNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization", "Softmax", "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "RotaryEmbedding", "Conv",
    "Einsum",
})
# fmt: on

# y = Relu(x) on one float, opset 13: tells whether a provider runs anything at all.
_PROBE = (
    b'\x08\x07:3\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x01pZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)

_FATAL = 4  # onnxruntime's log level; what goes wrong is in the exception, not to be printed twice


class StrictSession:
    """An onnxruntime session that is known to run where it says; made by ``create_session``.

    Safe to call from several threads.

    Attributes:
        ort: the ``onnxruntime.InferenceSession``.
        provider: tfx's name of the provider that runs the model.
        placement: number of graph nodes per onnxruntime provider, None when this onnxruntime cannot tell (< 1.24).
        threads: threads inside an operator, None for onnxruntime's choice.
    """

    def __init__(
        self, ort: onnxruntime.InferenceSession, provider: str, placement: dict[str, int] | None, threads: int | None
    ) -> None:
        self.ort = ort
        self.provider = provider
        self.placement = placement
        self.threads = threads
        self.output_names = tuple(output.name for output in ort.get_outputs())

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Run the graph on feeds of exactly its own names and dtypes.

        Raises:
            FeedError: onnxruntime refuses the feeds.
            MachineError: memory ran out.
        """
        names = list(self.output_names if outputs is None else outputs)
        try:
            values: list[Any] = list(self.ort.run(names, dict(feeds)))
            return dict(zip(names, values, strict=True))
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise _translate(error, "run", FeedError) from error


def create_session(
    model: str | Path,
    provider: str = "cpu",
    threads: int | None = None,
    optimize: bool = True,
    *,
    allow_fallback: bool = False,
    disabled_optimizers: Sequence[str] | None = None,
    spinning: bool = True,
    rest: bool = False,
    memory: str = "steady",
    provider_options: Mapping[str, str] | None = None,
) -> StrictSession:
    """Load an ``.onnx`` file, with its external data from the same folder.

    Args:
        model: the file.
        provider: ``cpu`` or ``cuda``.
        threads: threads inside an operator, None for onnxruntime's choice.
        optimize: False turns onnxruntime's graph optimization off.
        allow_fallback: take the CPU, and say so in ``provider``, where the provider does not run.
        disabled_optimizers: onnxruntime graph optimizers to leave out; None leaves out those measured to be slower
            than what they replace, ``()`` leaves out none.
        spinning: let idle threads wait in a loop, which starts the next operator sooner and keeps cores busy.
        rest: end that loop with the call: the next one starts a little later, and other work has the cores meanwhile.
        memory: one of ``MEMORY``; other providers than the CPU keep onnxruntime's default.
        provider_options: the provider's own options, by onnxruntime's names; on CUDA, tf32 is off unless it is set.

    Raises:
        InputError: unknown provider or memory, or a thread count below 1.
        BundleError: the file is missing, is not ONNX, or its external data is missing, short or outside its folder.
        ProviderError: the provider, or an operator of the model on it, does not run here.
        MachineError: memory ran out, or this onnxruntime is too old for the model.
    """
    import onnxruntime

    if provider not in PROVIDERS:
        raise InputError(f'provider: found "{provider}", wanted one of {", ".join(PROVIDERS)}')
    if threads is not None and threads < 1:
        raise InputError(f"threads: found {threads}, wanted at least 1")
    if memory not in MEMORY:
        raise InputError(f'memory: found "{memory}", wanted one of {", ".join(MEMORY)}')
    problem = provider_problem(provider)
    if problem is not None:
        if not allow_fallback:
            raise ProviderError(problem)
        provider = "cpu"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if rest:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if provider == "cpu":
        options.enable_mem_pattern = memory == "onnxruntime"
        options.enable_cpu_mem_arena = memory != "lean"
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if disabled_optimizers is None:
        disabled_optimizers = _SLOWER_OPTIMIZERS.get(provider, ())
    path = Path(model)
    if not path.is_file():
        raise BundleError(f"{path}: found nothing, wanted an .onnx file")
    check_external_data(path)
    try:
        session = onnxruntime.InferenceSession(
            str(path),
            options,
            providers=_chosen(provider, provider_options),
            disabled_optimizers=list(disabled_optimizers),
            enable_fallback=0,
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise _translate(error, str(path), BundleError) from error
    if memory != "onnxruntime":
        _trim()
    placement = _placement(session)
    problem = _placement_problem(session.get_providers(), provider, placement)
    if problem is not None:
        if not allow_fallback:
            raise ProviderError(problem)
        provider = "cpu"
    return StrictSession(session, provider, None if placement is None else _count(placement), threads)


def _chosen(provider: str, options: Mapping[str, str] | None) -> list[Any]:
    """Return onnxruntime's list of providers, the CPU last."""
    if provider == "cpu":
        return [PROVIDERS["cpu"]]
    # tf32 rounds factors to 10 bits, and onnxruntime takes it where the GPU has it.
    return [(PROVIDERS[provider], {"use_tf32": "0", **(options or {})}), PROVIDERS["cpu"]]


def _trim() -> None:
    """Give back to the system what loading a model freed: about a fifth of its weights, which glibc would keep."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def provider_problem(provider: str) -> str | None:
    """Return why a provider does not run here and what to do, None when it runs.

    The provider is tried, not looked up: its libraries are loaded and a one-node session is made on it that may not
    fall back.
    """
    import onnxruntime

    name = PROVIDERS[provider]
    available = onnxruntime.get_available_providers()
    if name not in available:
        return (
            f"provider {provider} is not in onnxruntime {onnxruntime.__version__} here (found {', '.join(available)}); "
            "install onnxruntime-gpu in place of onnxruntime, or use --provider cpu"
        )
    if provider == "cuda":
        missing = _missing_cuda_libraries(Path(onnxruntime.__file__).parent / "capi")
        if missing:
            return _cuda_remedy(missing)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    if provider != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = onnxruntime.InferenceSession(_PROBE, options, providers=[name], enable_fallback=0)
        session.run(None, {"x": np.ones(1, np.float32)})
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base class
        return f"provider {provider} does not run here: {_reason(error)}; see tfx doctor, or use --provider cpu"
    return None


def _missing_cuda_libraries(folder: Path) -> list[str]:
    """Return the libraries that keep onnxruntime's CUDA provider from loading, the driver's first."""
    import onnxruntime

    # The pip packages nvidia-* are not on the loader's path; its messages would mix with our output.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(AttributeError, RuntimeError, OSError):
        onnxruntime.preload_dlls()
    windows = sys.platform == "win32"
    missing = [] if _load_error(_driver()) is None else [_driver()]
    prefix, suffix = ("", ".dll") if windows else ("lib", ".so")
    _load_error(str(folder / f"{prefix}onnxruntime_providers_shared{suffix}"))
    error = _load_error(str(folder / f"{prefix}onnxruntime_providers_cuda{suffix}"))
    found = re.match(r"(\S+): cannot open shared object file", error or "")
    if found:
        missing.append(found[1])
    elif error and windows:  # Windows does not say which one
        missing.append("a CUDA or cuDNN library")
    return list(dict.fromkeys(missing))


def _driver() -> str:
    return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def _load_error(library: str) -> str | None:
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return None


def _cuda_remedy(missing: list[str]) -> str:
    remedies = ["install the NVIDIA driver on a machine with a GPU"] if _driver() in missing else []
    if set(missing) - {_driver()}:
        remedies.append('install the CUDA libraries with: pip install "onnxruntime-gpu[cuda,cudnn]"')
    return (
        f"provider cuda does not run here: missing {' and '.join(missing)}; {' and '.join(remedies)}; "
        "or use --provider cpu"
    )


def _placement(session: onnxruntime.InferenceSession) -> dict[str, list[str]] | None:
    """Return the operator types of the nodes on each provider."""
    read = getattr(session, "get_provider_graph_assignment_info", None)
    if read is None:
        return None
    placement: dict[str, list[str]] = {}
    for part in read():
        placement.setdefault(part.ep_name, []).extend(node.op_type for node in part.get_nodes())
    return placement


def _count(placement: Mapping[str, Sequence[str]]) -> dict[str, int]:
    return {provider: len(nodes) for provider, nodes in placement.items()}


def _placement_problem(
    registered: Sequence[str], provider: str, placement: Mapping[str, Sequence[str]] | None
) -> str | None:
    """Return why a session does not run the model's arithmetic where it was asked to."""
    wanted = PROVIDERS[provider]
    if wanted not in registered:
        return f"provider {provider} was dropped: the session has {', '.join(registered)}"
    if provider == "cpu":
        return None
    if placement is None:
        return f"provider {provider}: this onnxruntime cannot tell where nodes run; install onnxruntime-gpu >= 1.24"
    strays = Counter(op for name, ops in placement.items() if name != wanted for op in ops if op in _HEAVY)
    if strays or not placement.get(wanted):
        found = ", ".join(f"{count} {op}" for op, count in strays.most_common(3)) or "every node"
        return f"provider {provider}: {found} would run elsewhere; placement {_count(placement)}"
    return None


def _reason(error: BaseException) -> str:
    """Return an onnxruntime message as one short line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(line.strip() for line in lines))[:500]


def _translate(error: Exception, what: str, otherwise: type[BundleError | FeedError]) -> Exception:
    """Turn an onnxruntime exception into ours."""
    reason: Any = _reason(error)
    if isinstance(error, MemoryError) or re.search(
        r"bad.?alloc|failed to allocate|out of memory", reason, re.IGNORECASE
    ):
        return MachineError(f"{what}: out of memory: {reason}")
    newer = re.search(r"max supported IR version: \d+|till opset \d+", str(error), re.IGNORECASE)
    if re.search(r"unsupported model IR version|opset \d+ is under development", str(error), re.IGNORECASE):
        import onnxruntime

        return MachineError(
            f"{what}: is of a newer IR version or opset than onnxruntime {onnxruntime.__version__} reads"
            f"{f' ({newer[0]})' if newer else ''}; install a newer onnxruntime, or export with --target portable"
        )
    if "NOT_IMPLEMENTED" in str(error):
        return ProviderError(f"{what}: this onnxruntime has no kernel for an operator: {reason}")
    return otherwise(f"{what}: onnxruntime refuses it: {reason}")
