"""What this machine is and what can run on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from .providers import PROVIDERS, provider_problem

__all__ = ["cpu_features", "default_threads", "diagnose", "environment", "listing", "peak_rss_mb"]

# What decides the speed of matrix products and which int8 schemes are safe, by the names of /proc/cpuinfo.
_FEATURES = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip

# macOS's `sysctl` name -> the name that Linux uses.
_MAC_FEATURES = {
    "hw.optional.avx2_0": "avx2",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_SME": "sme",
}

# Both hold the module onnxruntime: one is enough, and only one may be installed.
_EITHER = ("onnxruntime", "onnxruntime-gpu")

_PACKAGES = {
    "run bundles": ("numpy", *_EITHER, "tokenizers", "safetensors"),
    'export (pip install "tfx-onnx[export]")': ("torch", "onnx", "onnx-ir", "onnxscript"),
    'checkpoints (pip install "tfx-onnx[hf]")': ("transformers",),
    'embed from and to Parquet (pip install "tfx-onnx[parquet]")': ("pyarrow",),
    'serve (pip install "tfx-onnx[serve]")': ("fastapi", "uvicorn", "prometheus-client"),
}


def cpu_features() -> list[str]:
    """Return the instruction sets that matter here and that this CPU has, by Linux's names.

    Source: ``/proc/cpuinfo`` on Linux, ``sysctl`` on macOS; elsewhere the list is empty, which means unknown.
    """
    if sys.platform == "linux":
        found = _cpuinfo(("flags", "Features")).split()
        return [feature for feature in _FEATURES if feature in found]
    if sys.platform == "darwin":
        lines = _command_output(["sysctl", "hw.optional"]).splitlines()
        on = {line.partition(":")[0] for line in lines if line.rpartition(":")[2].strip() == "1"}
        return [name for key, name in _MAC_FEATURES.items() if key in on]
    return []


def default_threads() -> int:
    """Return the number of physical cores that this process may use, at least 1.

    A container's share of CPU time counts too: more threads than it allows would only be stopped by the kernel.
    """
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable, _quota() or usable))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the cores that the process's control group (version 2, then 1) grants it, rounded up; None for all."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((root / file).read_text(encoding="ascii") for file in files).split()
            return -(-int(quota) // int(period)) if int(quota) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            continue
    return None


def peak_rss_mb() -> float | None:
    """Return the most memory that this process has held so far, in MB (1e6 bytes), None where it is unknown."""
    if sys.platform == "linux":
        # Not getrusage: its figure survives exec, so a worker would report its parent's memory.
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii", errors="replace"))
        return int(match[1]) * 1024 / 1e6 if match else None
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # bytes on macOS


def environment() -> dict[str, Any]:
    """Return what a measurement depends on: versions, system, CPU and its features, cores, memory in MB."""
    import onnxruntime
    import psutil

    return {
        "tfx": __version__,
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_features": cpu_features(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
    }


def diagnose() -> dict[str, Any]:
    """Return the report of ``tfx doctor``.

    Returns:
        ``environment``; ``providers`` {name: {runs, problem}}, each really tried; ``packages`` {use: {name: version
        or null}}; ``warnings``, a list of sentences.
    """
    problems = {name: provider_problem(name) for name in PROVIDERS}
    packages = {use: {name: _version(name) for name in names} for use, names in _PACKAGES.items()}
    return {
        "environment": environment(),
        "providers": {name: {"runs": problem is None, "problem": problem} for name, problem in problems.items()},
        "packages": packages,
        "warnings": _warnings(),
    }


def listing(packages: Mapping[str, str | None]) -> str:
    """Return one use's packages and their versions as a line for people."""
    shown = dict(packages)
    if all(name in shown for name in _EITHER):
        missing = [name for name in _EITHER if shown[name] is None]
        if len(missing) == len(_EITHER):
            shown = {name: version for name, version in shown.items() if name not in _EITHER}
            shown[" or ".join(_EITHER)] = None
        elif missing:
            del shown[missing[0]]
            here = next(name for name in _EITHER if name in shown)
            shown[here] = f"{shown[here]} ({missing[0]} is not needed beside it)"
    return ", ".join(f"{name} {version or 'missing'}" for name, version in shown.items())


def _warnings() -> list[str]:
    found = []
    if _version("onnxruntime") and _version("onnxruntime-gpu"):
        found.append(
            "onnxruntime and onnxruntime-gpu are both installed and own the same files; which one runs is chance: "
            "uninstall both, then install one"
        )
    if _version("tfx") is not None:
        found.append("the package tfx (TensorFlow Extended) is installed too; both own the command tfx and the import")
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    if sys.platform == "linux":
        return _cpuinfo(("model name", "Model")) or platform.machine()
    if sys.platform == "darwin":
        return _command_output(["sysctl", "-n", "machdep.cpu.brand_string"]).strip() or platform.machine()
    return platform.processor() or platform.machine()


def _cpuinfo(keys: tuple[str, ...]) -> str:
    """Return the first value of any of the keys."""
    try:
        content = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^(?:{'|'.join(keys)})\s*:\s*(.*)$", content, re.MULTILINE)
    return match[1].strip() if match else ""


def _command_output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
