"""A25: resident memory over calls of ever other shapes comes to rest, and what is held is the session's choice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from onnx import TensorProto, helper, numpy_helper

from tfx.errors import InputError
from tfx.runtime import providers
from tfx.runtime.bench_memory import plateau
from tfx.runtime.providers import MEMORY, create_session
from tfx.runtime.schedule import packed
from tfx.runtime.session import Session
from tfx.runtime.text import Encoding

RUNS = 300

# A process of its own: what else has been allocated and freed before would hide growth.
WATCH = """
import json, sys
import numpy as np, psutil
from tfx.runtime.bench_memory import varying
from tfx.runtime.providers import create_session

session = create_session(sys.argv[1], threads=1, memory=sys.argv[2])
held = []
for lengths in varying(int(sys.argv[3]), None):
    session.run({"input_ids": np.ones((len(lengths), lengths[0]), np.int64)})
    held.append(psutil.Process().memory_info().rss / 1e6)
print(json.dumps(held))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A graph whose inner values are large: 64 -> 512 -> 64, twice."""
    import numpy as np

    random = np.random.default_rng(0)
    weights = {"table": (8, 64), "up": (64, 512), "down": (512, 64)}
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["x0"])]
    for i in range(2):
        nodes += [
            helper.make_node("MatMul", [f"x{i}", "up"], [f"u{i}"]),
            helper.make_node("Sigmoid", [f"u{i}"], [f"s{i}"]),
            helper.make_node("MatMul", [f"s{i}", "down"], [f"d{i}"]),
            helper.make_node("Add", [f"d{i}", f"x{i}"], [f"x{i + 1}"]),
        ]
    nodes.append(helper.make_node("ReduceMean", ["x2"], ["y"], axes=[1], keepdims=0))
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "wide",
            [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64])],
            [
                numpy_helper.from_array((random.standard_normal(shape) / 8).astype(np.float32), name)
                for name, shape in weights.items()
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = tmp_path_factory.mktemp("wide") / "wide.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def watched(model, memory: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", WATCH, str(model), memory, str(RUNS)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_300_shapes_come_to_rest(wide):
    """The default, and what it is better than: onnxruntime's own keeps a plan for every shape."""
    steady, lean, own = (watched(wide, memory) for memory in ("steady", "lean", "onnxruntime"))
    for held in (steady, lean):
        assert plateau(held)["plateau"], plateau(held)
    assert max(steady) < max(own)


@pytest.mark.parametrize(("memory", "pattern", "arena"), [("steady", 0, 1), ("lean", 0, 0), ("onnxruntime", 1, 1)])
def test_what_is_asked_of_onnxruntime(bundle, memory, pattern, arena):
    options = create_session(bundle.model_path, memory=memory).ort.get_session_options()
    assert (options.enable_mem_pattern, options.enable_cpu_mem_arena) == (bool(pattern), bool(arena))


def test_steady_is_the_default_of_every_session(bundle):
    for session in (create_session(bundle.model_path), Session(bundle)._session):
        assert not session.ort.get_session_options().enable_mem_pattern
    assert next(iter(MEMORY)) == "steady"


def test_spinning_can_be_turned_off(bundle):
    key = "session.intra_op.allow_spinning"
    assert (
        create_session(bundle.model_path, spinning=False).ort.get_session_options().get_session_config_entry(key) == "0"
    )
    with pytest.raises(RuntimeError):
        create_session(bundle.model_path).ort.get_session_options().get_session_config_entry(key)


def test_a_second_session_takes_no_core_from_the_first_between_its_calls(bundle):
    key = "session.force_spinning_stop"
    session = Session(bundle, threads=1)
    list(session.caller(packed(2))([Encoding([1, 2], [0, 0])]))
    assert session._other is not None
    assert session._other.ort.get_session_options().get_session_config_entry(key) == "1"
    with pytest.raises(RuntimeError):
        session._session.ort.get_session_options().get_session_config_entry(key)


def test_what_loading_freed_goes_back(bundle, monkeypatch):
    asked = []

    class Library:
        def malloc_trim(self, padding):
            asked.append(padding)

    monkeypatch.setattr(providers.sys, "platform", "linux")
    monkeypatch.setattr(providers.ctypes, "CDLL", lambda name: Library())
    create_session(bundle.model_path, memory="onnxruntime")
    assert asked == []
    create_session(bundle.model_path)
    assert asked == [0]
    monkeypatch.setattr(providers.ctypes, "CDLL", lambda name: object())  # a C library that has no such function
    create_session(bundle.model_path)


def test_unknown_memory(bundle):
    with pytest.raises(InputError, match='memory: found "huge", wanted one of steady, lean, onnxruntime'):
        Session(bundle, memory="huge")
