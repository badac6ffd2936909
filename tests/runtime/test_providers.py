"""A26: nothing is called cuda that ran on the CPU. These tests hold on machines with and without a GPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tfx.errors import BundleError, MachineError, ProviderError
from tfx.runtime import providers
from tfx.runtime.providers import create_session, provider_problem
from tfx.runtime.session import Session

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
MISSING = ["libcuda.so.1", "libcublasLt.so.13"]


@pytest.fixture
def no_cuda(monkeypatch):
    """A machine with onnxruntime-gpu, and neither driver nor CUDA libraries."""
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(providers, "_missing_cuda_libraries", lambda folder: MISSING)
    monkeypatch.setattr(providers, "_driver", lambda: "libcuda.so.1")
    provider_problem.cache_clear()
    yield
    provider_problem.cache_clear()


def test_the_cpu_always_runs():
    assert provider_problem("cpu") is None


def test_cuda_runs_or_the_reason_and_remedy_are_said():
    problem = provider_problem("cuda")
    if problem is not None:
        assert problem.startswith("provider cuda ")
        assert "--provider cpu" in problem
        assert "\n" not in problem


def test_missing_libraries_are_named_with_the_remedy(no_cuda, bundle):
    with pytest.raises(ProviderError) as caught:
        Session(bundle, provider="cuda")
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        "provider cuda does not run here: missing libcuda.so.1 and libcublasLt.so.13; install the NVIDIA driver on a "
        'machine with a GPU and install the CUDA libraries with: pip install "onnxruntime-gpu[cuda,cudnn]"; '
        "or use --provider cpu"
    )


def test_fallback_only_when_asked_for_and_then_called_cpu(no_cuda, bundle):
    session = Session(bundle, provider="cuda", allow_fallback=True)
    assert session.provider == "cpu"
    assert set(session.placement or {CPU: 0}) == {CPU}


def test_an_onnxruntime_without_cuda(monkeypatch, bundle):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    provider_problem.cache_clear()
    try:
        with pytest.raises(ProviderError, match="install onnxruntime-gpu in place of onnxruntime"):
            Session(bundle, provider="cuda")
    finally:
        provider_problem.cache_clear()


@pytest.mark.parametrize(
    ("names", "placement", "message"),
    [
        ([CUDA, CPU], {CUDA: ["MatMul"] * 9, CPU: ["Shape", "Gather"]}, None),
        ([CUDA, CPU], {CUDA: ["Add"], CPU: ["MatMul", "MatMul", "Shape"]}, "2 MatMul would run elsewhere"),
        ([CUDA, CPU], {CPU: ["Add"]}, "every node would run elsewhere"),
        ([CUDA, CPU], None, "cannot tell where nodes run; install onnxruntime-gpu >= 1.24"),
        ([CPU], {CPU: ["Add"]}, "was dropped: the session has CPUExecutionProvider"),
    ],
)
def test_placement_is_judged_by_where_the_arithmetic_is(names, placement, message):
    # What onnxruntime reports of a session; the real thing needs a GPU to be tried.
    problem = providers._placement_problem(names, "cuda", placement)
    assert (problem is None) if message is None else message in problem


def test_the_cpu_does_not_fuse_skip_layer_norm(tmp_path):
    """Measured 2.4 to 4 times slower than the nodes it replaces."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    d = 8
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Add", ["x", "y"], ["s"]),
                helper.make_node("LayerNormalization", ["s", "g", "b"], ["z"], axis=-1),
            ],
            "skip",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", "sequence", d]) for n in "xy"],
            [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", "sequence", d])],
            [numpy_helper.from_array(np.full(d, i + 0.5, np.float32), n) for i, n in enumerate("gb")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = tmp_path / "skip.onnx"
    onnx.save(model, path)

    def optimized(disabled):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        onnxruntime.InferenceSession(path, options, providers=[CPU], disabled_optimizers=disabled)
        return {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}

    assert "SkipLayerNormalization" in optimized([])
    assert "SkipLayerNormalization" not in optimized(list(providers._SLOWER_OPTIMIZERS["cpu"]))
    x = np.random.default_rng(0).standard_normal((2, 3, d)).astype(np.float32)
    first, second = (create_session(path, disabled_optimizers=o).run({"x": x, "y": x})["z"] for o in (None, ()))
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_a_missing_file(tmp_path):
    with pytest.raises(BundleError, match=r"absent\.onnx: found nothing"):
        create_session(tmp_path / "absent.onnx")


def test_errors_are_not_printed_a_second_time_by_onnxruntime(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07")  # a model without a graph
    code = (
        "import sys; from tfx.runtime.providers import create_session; from tfx.errors import TfxError\n"
        "try: create_session(sys.argv[1])\n"
        "except TfxError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.onnx")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.onnx: onnxruntime refuses it" in found.stdout
    assert found.stderr == ""


@pytest.mark.parametrize(("changes", "limit"), [({"ir_version": 99}, "IR version: "), ({"opset": 99}, "till opset ")])
def test_a_model_that_is_too_new_is_no_damaged_one(tmp_path, tiny_graph, changes, limit):
    model = tiny_graph()
    model.ir_version = changes.get("ir_version", model.ir_version)
    model.opset_import[0].version = changes.get("opset", model.opset_import[0].version)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(MachineError, match=rf"model.onnx: is of a newer IR .* than onnx.* reads \(.*{limit}\d+"):
        create_session(path)
