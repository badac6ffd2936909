"""Where an ``.onnx`` file keeps weights outside itself, read without the onnx package.

onnxruntime before 1.24 opens any path that a model names, so a model from elsewhere could read any file; and the sizes
of missing weights are only known from the model. The file is walked as protobuf, skipping over everything but the
path of fields that leads to ``TensorProto.external_data``.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import BundleError

__all__ = ["ExternalData", "check_external_data", "external_data"]

# Message -> field number -> message of that field, along onnx.proto: only what can hold a tensor.
_MESSAGES: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
    "Entry": {},
}


@dataclass(frozen=True)
class ExternalData:
    """A tensor's place in another file.

    Attributes:
        location: path of the file as the model gives it.
        end: byte of the file at which the tensor ends, 0 when the model does not say.
    """

    location: str
    end: int


def external_data(path: Path) -> list[ExternalData]:
    """Return the places of all external tensors of an ``.onnx`` file.

    Raises:
        BundleError: the file cannot be read or is no protobuf message.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return list(_walk(content))
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, IndexError) as error:  # an empty file, or bytes that do not parse
        raise BundleError(f"{path}: not an ONNX file") from error


def check_external_data(path: Path) -> list[str]:
    """Check that the external data of an ``.onnx`` file lies beside it and is all there.

    Returns:
        The names of the files, relative to the folder.

    Raises:
        BundleError: a path leaves the folder, or a file is missing or too short; the message has the sizes.
    """
    folder = path.parent.resolve()
    ends: dict[str, int] = {}
    for data in external_data(path):
        ends[data.location] = max(ends.get(data.location, 0), data.end)
    for location, end in ends.items():
        target = (folder / location).resolve()
        if not location or Path(location).is_absolute() or folder not in target.parents:
            raise BundleError(f'{path}: external data "{location}" leaves the folder of the model')
        if not target.is_file():
            raise BundleError(
                f"{folder / location}: found nothing, wanted the external data of {path.name}, {end} bytes"
            )
        size = target.stat().st_size
        if size < end:
            raise BundleError(f"{folder / location}: found {size} bytes, wanted at least {end}; the file is incomplete")
    return list(ends)


def _walk(content: mmap.mmap) -> Iterator[ExternalData]:
    # An explicit stack: graphs nest as deep as whoever made the file likes.
    stack = [("Model", 0, len(content))]
    while stack:
        message, start, end = stack.pop()
        entries: dict[bytes, bytes] = {}
        for field, begin, stop in _fields(content, start, end):
            inner = _MESSAGES[message].get(field)
            if inner == "Entry":
                entry = {number: content[a:b] for number, a, b in _fields(content, begin, stop)}
                entries[entry.get(1, b"")] = entry.get(2, b"")
            elif inner is not None:
                stack.append((inner, begin, stop))
        if b"location" in entries:
            extent = int(entries.get(b"offset") or 0) + int(entries.get(b"length") or 0)
            yield ExternalData(entries[b"location"].decode(), extent)


def _fields(content: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each length-delimited field of a message; skip the others."""
    while position < end:
        key, position = _varint(content, position)
        kind = key & 7
        if kind == 0:
            _, position = _varint(content, position)
        elif kind == 1:
            position += 8
        elif kind == 5:
            position += 4
        elif kind == 2:
            size, position = _varint(content, position)
            if position + size > end:
                raise ValueError("field beyond its message")
            yield key >> 3, position, position + size
            position += size
        else:
            raise ValueError("unknown wire type")
    if position > end:
        raise ValueError("field beyond its message")


def _varint(content: mmap.mmap, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("varint of more than 10 bytes")
