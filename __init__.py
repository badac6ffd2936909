"""tfx: PyTorch Transformer encoders to verified, fast ONNX bundles.

The public names are imported on first use (PEP 562), so `import tfx` needs neither torch nor
onnxruntime, and a machine that only runs bundles needs no torch at all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .errors import TfxError
    from .exporter.checkpoint import checkpoint
    from .exporter.export import export
    from .exporter.optimizing import optimize
    from .exporter.sources import Source, module, reference
    from .models.config import EncoderConfig
    from .models.encoder import Encoder
    from .models.pooling import Pooled
    from .runtime.bundle import Bundle
    from .runtime.parity import verify_bundle
    from .runtime.schedule import Schedule
    from .runtime.session import Session

# Public name -> the submodule that holds it. tests/test_imports.py holds it equal to the list above.
_HOMES = {
    "Bundle": "runtime.bundle",
    "Encoder": "models.encoder",
    "EncoderConfig": "models.config",
    "Pooled": "models.pooling",
    "Schedule": "runtime.schedule",
    "Session": "runtime.session",
    "Source": "exporter.sources",
    "TfxError": "errors",
    "checkpoint": "exporter.checkpoint",
    "export": "exporter.export",
    "module": "exporter.sources",
    "optimize": "exporter.optimizing",
    "reference": "exporter.sources",
    "verify_bundle": "runtime.parity",
}

__all__ = [
    "Bundle",
    "Encoder",
    "EncoderConfig",
    "Pooled",
    "Schedule",
    "Session",
    "Source",
    "TfxError",
    "__version__",
    "checkpoint",
    "export",
    "module",
    "optimize",
    "reference",
    "verify_bundle",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(__all__)
