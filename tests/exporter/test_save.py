"""The file that is written weight by weight is the one that onnx_ir would write at once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings

from tfx.exporter.save import save, weight_bytes
from tfx.exporter.targets import DATA_SUFFIX, MAX_INLINE_BYTES

from .running import encoder, lowered, parse, run

DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64")
arrays = st.sampled_from(DTYPES).flatmap(
    lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


def holding(tensors: dict[str, np.ndarray]) -> ir.Model:
    """A model with these initializers, which nothing uses."""
    model = parse('<ir_version: 8, opset_import: ["" : 17]> g (float[B] x) => (float[B] y) { y = Tanh(x) }')
    for name, array in tensors.items():
        model.graph.register_initializer(ir.val(name, const_value=ir.tensor(array, name=name)))
    model.metadata_props["note"] = "kept"
    model.producer_name = "tfx"
    return model


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Names, types, shapes and bytes, by onnx's own reader."""
    weights = onnx.load(path).graph.initializer
    found = {weight.name: onnx.numpy_helper.to_array(weight, str(path.parent)) for weight in weights}
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in found.items()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=st.dictionaries(st.text(min_size=1, max_size=8).map(lambda s: f"w_{s}"), arrays, max_size=4))
@pytest.mark.parametrize("limit", [MAX_INLINE_BYTES, 0])
def test_initializers_of_any_kind_come_back_as_they_were(
    tmp_path: Path, limit: int, tensors: dict[str, np.ndarray]
) -> None:
    path = tmp_path / "model.onnx"
    save(holding(tensors), path, max_inline_bytes=limit)
    wanted = {name: (str(a.dtype), a.shape, np.ascontiguousarray(a).tobytes()) for name, a in tensors.items()}
    assert read(path) == wanted
    model = ir.load(path)
    assert weight_bytes(model) == sum(array.nbytes for array in tensors.values())
    assert model.metadata_props["note"] == "kept"
    (tmp_path / ("model.onnx" + DATA_SUFFIX)).unlink(missing_ok=True)


@pytest.mark.parametrize("kind", [ir.DataType.BFLOAT16, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN])
def test_types_that_numpy_does_not_have(tmp_path: Path, kind: ir.DataType) -> None:
    values = np.array([1, -2, 3, 0, 5], np.float32).astype(kind.numpy())
    model = holding({})
    model.graph.register_initializer(ir.val("w", const_value=ir.Tensor(values, dtype=kind, name="w")))
    save(model, tmp_path / "model.onnx")
    tensor = ir.load(tmp_path / "model.onnx").graph.initializers["w"].const_value
    assert tensor is not None and tensor.dtype == kind
    np.testing.assert_array_equal(tensor.numpy().astype(np.float32), [1, -2, 3, 0, 5])
    onnx.checker.check_model(tmp_path / "model.onnx")


def apart(path: Path) -> tuple[Any, onnx.ModelProto]:
    """The weights by name, and the model without them; onnx_ir repeats their types, which adds nothing."""
    model = onnx.load(path)
    weights = {w.name: (w.data_type, tuple(w.dims), w.raw_data) for w in model.graph.initializer}
    values = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.initializer[:]
    del model.graph.value_info[:]
    model.graph.value_info.extend(values)
    return weights, model


@pytest.mark.parametrize("target", ["cpu", "portable"])
def test_the_streamed_file_is_onnx_irs_own(tmp_path: Path, target: str) -> None:
    model, _ = lowered(encoder()[1], target)
    save(model, tmp_path / "streamed.onnx")
    ir.save(model, tmp_path / "whole.onnx")
    assert apart(tmp_path / "streamed.onnx") == apart(tmp_path / "whole.onnx")
    onnx.checker.check_model(tmp_path / "streamed.onnx")


def test_the_model_is_as_it_was_afterwards(tmp_path: Path) -> None:
    model, _ = lowered(encoder()[1], "cpu")
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    for limit in (MAX_INLINE_BYTES, 0):
        save(model, tmp_path / f"{limit}.onnx", max_inline_bytes=limit)
        assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_weights_are_counted_against_the_limit(tmp_path: Path) -> None:
    model = holding({"a": np.zeros(100, np.float32), "b": np.zeros(75, np.int64)})
    assert weight_bytes(model) == 1000
    save(model, tmp_path / "inside.onnx", max_inline_bytes=1000)
    save(model, tmp_path / "beside.onnx", max_inline_bytes=999)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.onnx", "beside.onnx.data", "inside.onnx"]
    assert {e.value for w in onnx.load(tmp_path / "beside.onnx", load_external_data=False).graph.initializer
            for e in w.external_data if e.key == "location"} == {"beside.onnx.data"}  # fmt: skip
    x = {"x": np.zeros(2, np.float32)}
    assert run(onnx.load(tmp_path / "beside.onnx"))(x)["y"].shape == (2,)


def test_only_one_weight_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Eight weights of 4 MiB; a whole protobuf would hold them all, twice."""
    size = 1 << 20

    def lazy(name: str) -> ir.LazyTensor:
        return ir.LazyTensor(
            lambda: ir.tensor(np.zeros(size, np.float32)), dtype=ir.DataType.FLOAT, shape=ir.Shape([size]), name=name
        )

    model = holding({})
    for i in range(8):
        model.graph.register_initializer(ir.val(f"w{i}", const_value=lazy(f"w{i}")))
    tracemalloc.start()
    save(model, tmp_path / "model.onnx")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "model.onnx").stat().st_size > 32 << 20
    assert peak < 16 << 20
