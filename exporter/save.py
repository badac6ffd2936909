"""Writes a model to disk one weight at a time, inside the ``.onnx`` file or beside it."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from .targets import DATA_SUFFIX, MAX_INLINE_BYTES

__all__ = ["save", "weight_bytes"]

# Field numbers of onnx.proto: ModelProto.graph, GraphProto.initializer (both length-delimited).
_GRAPH, _INITIALIZER = 7, 5


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all weights."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def save(
    model: ir.Model, path: Path, *, max_inline_bytes: int = MAX_INLINE_BYTES, data_name: str | None = None
) -> None:
    """Writes ``path``, and its weights to another file beside it when they are larger than allowed inside.

    Only one weight is in memory as bytes at a time: a whole protobuf would hold them all twice.

    Args:
        model: The model; as it was afterwards.
        path: The ``.onnx`` file to write.
        max_inline_bytes: Largest total of weights inside the file.
        data_name: Name of the other file; that of ``path`` and ``.data`` when ``None``.
    """
    if weight_bytes(model) > max_inline_bytes:
        ir.save(model, path, external_data=data_name or path.name + DATA_SUFFIX)
        return
    initializers = dict(model.graph.initializers)
    model.graph.initializers.clear()
    try:
        frame = ir.to_proto(model)
    finally:
        model.graph.initializers.update(initializers)
    graph = frame.graph.SerializeToString()
    frame.ClearField("graph")
    tensors = [(name, value.const_value) for name, value in initializers.items() if value.const_value is not None]
    # The length of the graph comes before the graph, so the weights are sized first.
    sizes = [_head(name, tensor).ByteSize() + _raw_size(tensor.nbytes) for name, tensor in tensors]
    total = len(graph) + sum(len(_prefix(_INITIALIZER, size)) + size for size in sizes)
    with path.open("wb") as file:
        file.write(frame.SerializeToString())
        file.write(_prefix(_GRAPH, total))
        file.write(graph)
        for (name, tensor), size in zip(tensors, sizes, strict=True):
            content = tensor.tobytes()
            file.write(_prefix(_INITIALIZER, size))
            file.write(_head(name, tensor).SerializeToString())
            file.write(_prefix(_RAW_DATA, len(content)))
            file.write(content)


_RAW_DATA = 9  # TensorProto.raw_data


def _head(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    return onnx.TensorProto(name=name, dims=list(tensor.shape.numpy()), data_type=int(tensor.dtype))


def _raw_size(length: int) -> int:
    return len(_prefix(_RAW_DATA, length)) + length


def _prefix(field: int, length: int) -> bytes:
    """Tag and length of a length-delimited protobuf field (wire type 2)."""
    return _varint(field << 3 | 2) + _varint(length)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
