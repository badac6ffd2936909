"""What the CPU's integer units can do, as far as it matters for 8 bit products.

Without VNNI, x86 adds two products of unsigned and signed bytes in 16 bits, and saturates in silence. The graphs that
tfx writes cannot saturate; other int8 models can, and all of them are slower there.
"""

from __future__ import annotations

import functools
import platform
import sys
from pathlib import Path

__all__ = ["features", "has_byte_products"]

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
"""Names of Linux; the last two are ARM's."""


@functools.cache
def features() -> dict[str, bool] | None:
    """Return which of the units for 8 bit products the CPU has, None where that cannot be read (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = next(
        (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))), []
    )
    mine = _FLAGS[5:] if platform.machine().lower() in ("aarch64", "arm64") else _FLAGS[:5]
    return {name: name in found for name in mine} if found else None


def has_byte_products() -> bool | None:
    """Return whether 8 bit products are summed in 32 bits here; None when it is not known."""
    found = features()
    if found is None:
        return None
    # ARM's widening instructions never saturate, with or without dot products.
    return "i8mm" in found or any(found[name] for name in ("avx512_vnni", "avx_vnni", "amx_int8"))
