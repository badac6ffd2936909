"""Every error that tfx raises on purpose, and the exit code that it becomes.

    TfxError                      2
    ├── InputError                2  bad usage or bad input
    │   ├── ConfigError           2  an encoder option (also a ValueError)
    │   ├── SourceError           2  a checkpoint, module or .onnx that cannot be used
    │   ├── BundleError           2  a bundle's folder, manifest, files, hashes or destination
    │   └── FeedError             2  feeds at run time: name, dtype, rank, range, length
    ├── CheckError                1  a check ran and did not pass
    │   ├── ParityError           1  numbers differ from the golden or the live source
    │   └── CountError            1  fusion counts differ from the expected ones
    └── MachineError              3  this machine cannot do it
        ├── ProviderError         3  an execution provider does not run here
        └── DependencyError       3  a package is not installed

A message is one line that names the thing, what was found and what was wanted.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BundleError",
    "CheckError",
    "ConfigError",
    "CountError",
    "DependencyError",
    "FeedError",
    "InputError",
    "MachineError",
    "ParityError",
    "ProviderError",
    "SourceError",
    "TfxError",
]


class TfxError(Exception):
    """Base of every error that tfx raises on purpose."""

    exit_code: ClassVar[int] = 2


class InputError(TfxError):
    """Bad usage or bad input; the caller can correct it."""


class ConfigError(InputError, ValueError):
    """An encoder option is of the wrong type, out of range or contradicts another."""


class SourceError(InputError):
    """A checkpoint, a module or an .onnx file cannot be used as a source."""


class BundleError(InputError):
    """A bundle's folder, manifest, files, hashes or destination is wrong."""


class FeedError(InputError):
    """A feed has a wrong name, dtype, rank, range or length."""


class CheckError(TfxError):
    """A check ran to its end and did not pass."""

    exit_code: ClassVar[int] = 1


class ParityError(CheckError):
    """Outputs differ from the golden or from the live source by more than the tolerance."""


class CountError(CheckError):
    """The canonical graph does not hold the expected number of attentions, norms or activations."""


class MachineError(TfxError):
    """This machine cannot do what was asked: provider, library or memory."""

    exit_code: ClassVar[int] = 3


class ProviderError(MachineError):
    """The requested execution provider does not run here."""


class DependencyError(MachineError):
    """A package is not installed; the message says the pip line."""

    _SOURCES: ClassVar[dict[str, str]] = {
        "onnxruntime": "tfx-onnx",
        "torch": "tfx-onnx[export]",
        "onnx": "tfx-onnx[export]",
        "onnx_ir": "tfx-onnx[export]",
        "onnxscript": "tfx-onnx[export]",
        "transformers": "tfx-onnx[hf]",
        "matplotlib": "tfx-onnx[plot]",
        "pyarrow": "tfx-onnx[parquet]",
        **dict.fromkeys(("fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "orjson"), "tfx-onnx[serve]"),
        "openvino": "openvino",
        "sentence_transformers": "sentence-transformers",
    }

    @classmethod
    def from_import(cls, error: ImportError) -> DependencyError | None:
        """Translate a failed import of a package that tfx can do without for a while.

        Args:
            error: what the import statement raised.

        Returns:
            The error to show, or None when the import failed for another reason.
        """
        package = (error.name or "").partition(".")[0]
        source = cls._SOURCES.get(package)
        if source is None or not isinstance(error, ModuleNotFoundError):
            return None
        return cls(f'{package} is not installed; install it with: pip install "{source}"')
