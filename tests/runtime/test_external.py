"""The protobuf walk against the onnx package, and every way in which external data can be wrong."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tfx.errors import BundleError
from tfx.runtime.external import check_external_data, external_data
from tfx.runtime.providers import create_session


def outside(name, location, length: int | str | None = 4, offset: int | None = None):
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    if offset is not None:
        tensor.external_data.add(key="offset", value=str(offset))
    if length is not None:
        tensor.external_data.add(key="length", value=str(length))
    return tensor


def model(*initializers, nodes=(), **options):
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([*nodes, helper.make_node("Identity", ["w"], ["y"])], "g", [], [y], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, **options)


@pytest.fixture
def save(tmp_path):
    def save(proto):
        path = tmp_path / "folder" / "model.onnx"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(proto.SerializeToString())
        return path

    return save


def found(path):
    return {(data.location, data.end) for data in external_data(path)}


def test_tensors_are_found_wherever_onnx_can_keep_them(save):
    inner = helper.make_graph([], "inner", [], [], [outside("i", "in_subgraph", 8, 16)])
    deep = helper.make_graph([helper.make_node("If", ["c"], ["z"], then_branch=inner)], "deep", [], [])
    nodes = [
        helper.make_node("Constant", [], ["a"], value=outside("a", "in_attribute", None)),
        helper.make_node("If", ["c"], ["b"], then_branch=deep),
        helper.make_node("Fancy", [], ["d"], domain="x", many=[outside("t", "in_list")], graphs=[inner]),
    ]
    function = helper.make_function(
        "x", "Fancy", [], ["o"], [helper.make_node("Constant", [], ["o"], value=outside("f", "in_function"))], []
    )
    proto = model(
        outside("w", "in_graph"),
        numpy_helper.from_array(np.ones(1000, np.float32), "v"),
        nodes=nodes,
        functions=[function],
    )
    sparse = proto.graph.sparse_initializer.add()
    sparse.values.CopyFrom(outside("s", "in_sparse"))
    assert found(save(proto)) == {
        ("in_graph", 4),
        ("in_subgraph", 24),
        ("in_attribute", 0),
        ("in_list", 4),
        ("in_function", 4),
        ("in_sparse", 4),
    }


def test_a_model_without_external_data(save):
    path = save(model(numpy_helper.from_array(np.ones(1, np.float32), "w")))
    assert check_external_data(path) == []
    assert create_session(path).run({})["y"] == 1


def test_data_beside_the_model_and_below_it(save):
    path = save(model(outside("w", "weights/w.data", 4, 4)))
    (path.parent / "weights").mkdir()
    (path.parent / "weights" / "w.data").write_bytes(np.array([1, 2], np.float32).tobytes())
    assert check_external_data(path) == ["weights/w.data"]
    assert create_session(path).run({})["y"] == 2


@pytest.mark.parametrize("location", ["../secret", "ABSOLUTE", "link", "a/../../secret", "", "."])
def test_paths_that_leave_the_folder(save, tmp_path, location):
    (tmp_path / "secret").write_bytes(b"\0" * 4)
    path = save(model(outside("w", str(tmp_path / "secret") if location == "ABSOLUTE" else location)))
    (path.parent / "link").symlink_to("../secret")
    with pytest.raises(BundleError, match=r'external data ".*" leaves the folder of the model'):
        create_session(path)


def test_missing_and_short_files_are_named_with_sizes(save):
    """A21 for a bare .onnx, where no manifest knows the sizes."""
    path = save(model(outside("w", "w.data", 4, 96)))
    with pytest.raises(BundleError, match=r"w\.data: found nothing, wanted the external data of model\.onnx"):
        create_session(path)
    (path.parent / "w.data").write_bytes(b"\0" * 99)
    with pytest.raises(BundleError, match=r"w\.data: found 99 bytes, wanted at least 100"):
        create_session(path)
    (path.parent / "w.data").write_bytes(b"\0" * 100)
    assert create_session(path).run({})["y"] == 0


@pytest.mark.parametrize("content", [b"", b"not onnx", b"\xff" * 20, b"\x3a\x7f", b"\x3a", b"\x0b"])
def test_bytes_that_are_no_model(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.onnx: not an ONNX file"):
        external_data(path)


def test_a_number_that_is_none(save):
    path = save(model(outside("w", "w.data", "many")))
    with pytest.raises(BundleError, match="not an ONNX file"):
        external_data(path)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz", numbered=True) / "model.onnx"
    path.write_bytes(content)
    try:
        external_data(path)
    except BundleError as error:
        assert "\n" not in str(error)


def test_truncation_anywhere_never_ends_in_another_error(save, tmp_path):
    content = save(model(outside("w", "w.data"))).read_bytes()
    path = tmp_path / "cut.onnx"
    for end in range(len(content)):
        path.write_bytes(content[:end])
        try:
            external_data(path)
        except BundleError:
            continue
        onnx.ModelProto().ParseFromString(content[:end])  # what the walk accepts, protobuf accepts
