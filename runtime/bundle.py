"""The folder that is deployed: opened with every file checked, written whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from ..errors import BundleError
from .external import external_data
from .golden import GOLDEN_NAME, GoldenCase, load_golden
from .manifest import MANIFEST_NAME, Manifest
from .swap import ensure_free, replace_folder

__all__ = ["DEFAULT_BUNDLE", "Bundle", "ensure_free", "sha256_file", "write_bundle"]

DEFAULT_BUNDLE = "tfx-model"

_MAX_MANIFEST_BYTES = 16 << 20


class Bundle:
    """A checked bundle; made by ``Bundle.open`` and ``write_bundle``. ``unchecked`` trusts its files.

    Attributes:
        path: the folder.
        manifest: what ``tfx.json`` says.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path = DEFAULT_BUNDLE, *, check_hashes: bool = True) -> Bundle:
        """Open a bundle and check it.

        Args:
            path: the folder; it may have been moved or copied since it was written.
            check_hashes: also compare the sha256 of every file; False still compares sizes.

        Raises:
            BundleError: the folder or ``tfx.json`` is missing or wrong, or a file is missing, of another size or
                altered, or leaves the folder through a link, or the model's external data is none of the files. The
                message names it.
        """
        bundle = cls.unchecked(path)
        bundle.check_files(check_hashes=check_hashes)
        return bundle

    @classmethod
    def unchecked(cls, path: str | Path) -> Bundle:
        """Read the manifest alone.

        Raises:
            BundleError: the folder or ``tfx.json`` is missing or wrong.
        """
        folder = Path(path).absolute()
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise BundleError(f"{path}: found {found}, wanted a bundle folder (tfx export makes one)")
        return cls(folder, Manifest.parse(_read_manifest(folder)))

    def check_files(self, *, check_hashes: bool = True) -> None:
        """Compare the files with the manifest; arguments and errors as ``open``."""
        manifest = self.manifest
        for name, entry in manifest.files.items():
            _check_file(self.path, name, entry["bytes"], entry["sha256"] if check_hashes else None)
        for name in (manifest.model["file"], *([manifest.tokenizer["file"]] if manifest.tokenizer else [])):
            if name not in manifest.files:
                raise BundleError(f'{self.path / MANIFEST_NAME}: "{name}" is not among the files')
        for data in external_data(self.model_path):
            if data.location not in manifest.files:
                raise BundleError(f'{manifest.model["file"]}: external data "{data.location}" is not among the files')

    @property
    def model_path(self) -> Path:
        """The ``.onnx`` file."""
        return self.path / self.manifest.model["file"]

    @property
    def tokenizer_path(self) -> Path | None:
        """The ``tokenizer.json`` file, None when the source had none."""
        return None if self.manifest.tokenizer is None else self.path / self.manifest.tokenizer["file"]

    def golden(self) -> list[GoldenCase]:
        """Read the recorded inputs and outputs.

        Raises:
            BundleError: the bundle has no golden, it is damaged, or it is not one of these inputs and outputs.
        """
        if GOLDEN_NAME not in self.manifest.files:
            raise BundleError(f"{self.path}: has no {GOLDEN_NAME}, so there is nothing to compare with")
        return load_golden(self.path / GOLDEN_NAME, self.manifest.inputs, self.manifest.outputs)

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r})"


def write_bundle(destination: str | Path, fill: Callable[[Path], Manifest], *, force: bool = False) -> Bundle:
    """Write a bundle whole or not at all.

    Args:
        destination: the folder to make.
        fill: writes the files, without subfolders, into the empty folder that it is given and returns the manifest;
            its ``files`` is ignored and filled in here.
        force: replace a bundle or an empty folder that is there.

    Returns:
        The bundle at ``destination``.

    Raises:
        BundleError: the destination exists without ``force``, is no bundle, cannot be written, or the disk is full.
            Whatever was there before is untouched. What ``fill`` raises passes through.
    """

    def fill_and_seal(folder: Path) -> None:
        manifest = fill(folder)
        files = {
            entry.name: {"bytes": entry.stat().st_size, "sha256": sha256_file(entry)}
            for entry in sorted(folder.iterdir())
            if entry.name != MANIFEST_NAME
        }
        # Read back what is about to be written: a bundle that cannot be opened must not be made.
        sealed = Manifest.from_json(dataclasses.replace(manifest, files=files).to_json())
        text = json.dumps(sealed.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")

    return Bundle.open(replace_folder(destination, fill_and_seal, force=force), check_hashes=False)


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_manifest(folder: Path) -> bytes:
    path = folder / MANIFEST_NAME
    try:
        size = path.stat().st_size
        if size > _MAX_MANIFEST_BYTES:
            raise BundleError(f"{path}: found {size} bytes, wanted at most {_MAX_MANIFEST_BYTES}")
        return path.read_bytes()
    except FileNotFoundError:
        raise BundleError(f"{folder}: not a bundle: it has no {MANIFEST_NAME}") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error


def _check_file(folder: Path, name: str, size: int, sha256: str | None) -> None:
    path = folder / name
    try:
        # Links inside the folder are how some volume mounts present files; a link out of it is not ours to follow.
        if path.resolve().parent != folder.resolve() and folder.resolve() not in path.resolve().parents:
            raise BundleError(f"{path}: is a link that leaves the bundle")
        if not path.is_file():
            raise BundleError(f"{path}: found {'no file' if path.exists() else 'nothing'}, wanted {size} bytes")
        found = path.stat().st_size
        if found != size:
            raise BundleError(f"{path}: found {found} bytes, wanted {size}; the file is incomplete or altered")
        if sha256 is not None and sha256_file(path) != sha256:
            raise BundleError(f"{path}: altered: its sha256 is not the one in {MANIFEST_NAME}")
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
