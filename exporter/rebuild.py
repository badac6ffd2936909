"""A bundle's manifest -> the source it was made of: what other engines need to be compared with the bundle."""

from __future__ import annotations

from ..errors import BundleError, ConfigError, InputError, SourceError
from ..models.config import EncoderConfig
from ..runtime.manifest import MANIFEST_NAME, Manifest
from . import sources
from .checkpoint import checkpoint
from .sources import Source

__all__ = ["rebuild"]

_WANTED = {"checkpoint": "the checkpoint's folder (--source DIR)", "module": "its factory (--source pkg.mod:factory)"}


def rebuild(manifest: Manifest, origin: str | None = None) -> Source:
    """Make a bundle's source again.

    Args:
        manifest: the bundle's.
        origin: the checkpoint's folder, or pkg.mod:factory; a bundle says neither, lest it leak a path or name code
            to run. None for the reference encoder, whose manifest holds all of it.

    Raises:
        InputError: an origin is missing, or given where none is needed.
        SourceError: the origin cannot be used, or has other weights than the bundle was made of.
        BundleError: the manifest does not say what the reference encoder is made of.
    """
    kind, name = manifest.source["kind"], manifest.source["name"]
    if kind == "reference":
        if origin is not None:
            raise InputError(f"source: found {origin}, but {name} is made again from the bundle itself")
        source = _reference(manifest)
    elif kind not in _WANTED:
        raise InputError(f"a bundle of kind {kind} has no torch module to compare with")
    elif origin is None:
        raise InputError(f"{name}: the bundle holds no torch module to compare with, wanted {_WANTED[kind]}")
    elif kind == "checkpoint":
        pooling = manifest.pooling or {"mode": "none", "normalize": False}
        source = checkpoint(origin, pooling=pooling["mode"], normalize=pooling["normalize"])
    else:
        inputs = [f"{spec.name}:{spec.dtype}:{','.join(map(str, spec.shape))}" for spec in manifest.inputs]
        source = sources.module(origin, inputs, [spec.name for spec in manifest.outputs])
    if source.sha256 != manifest.source["sha256"]:
        raise SourceError(f"{origin or name}: has other weights than the bundle was made of")
    return source


def _reference(manifest: Manifest) -> Source:
    notes = manifest.source.get("notes")
    where = f"{MANIFEST_NAME}: source.notes"
    if not isinstance(notes, dict) or not isinstance(notes.get("config"), dict) or "seed" not in notes:
        raise BundleError(f"{where}: no config and seed to make the encoder of; export it again")
    try:
        return sources.reference(EncoderConfig.from_json(notes["config"]), notes["seed"])
    except (ConfigError, InputError) as error:
        raise BundleError(f"{where}: {error}") from error
