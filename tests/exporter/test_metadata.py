"""What nodes remember, in every IR version, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest

from tfx.exporter.fusion import MEANING, ORIGIN
from tfx.exporter.metadata import CANONICAL, MEANINGS, count, keep_origins, restore_metadata, settle_metadata
from tfx.runtime.manifest import COUNTS

from .running import parse

TEXT = """<ir_version: {}, opset_import: ["" : {}, "com.microsoft" : 1]> g (float[B, 4] x) => (float[B, 4] y)
<float[4] w = {{1.0, 1.0, 1.0, 1.0}}>
{{ a = Erf(x) b = com.microsoft.FastGelu(a) c = LayerNormalization(b, w) y = Relu(c) }}"""


def model(ir_version: int = 10, opset: int = 21) -> ir.Model:
    made = parse(TEXT.format(ir_version, opset))
    for i, node in enumerate(made.graph):
        node.name = f"n{i}"
        node.doc_string = "File somewhere.py, line 3"
        node.metadata_props["pkg.torch.onnx.stack_trace"] = "File somewhere.py, line 3"
        node.metadata_props["pkg.torch.onnx.name_scopes"] = f"['', 'encoder', 'encoder.layer.{i}', 'op']"
        for value in node.outputs:
            value.metadata_props["pkg.torch.onnx.original_node_name"] = "x"
    made.graph[0].metadata_props[MEANING] = "gelu"
    return made


def remembered(made: ir.Model) -> list[dict[str, str]]:
    return [dict(node.metadata_props) for node in made.graph]


def test_only_the_module_path_and_the_meaning_are_kept() -> None:
    made = model()
    keep_origins(made)
    assert remembered(made) == [
        {ORIGIN: "encoder.layer.0", MEANING: "gelu"},
        {ORIGIN: "encoder.layer.1"},
        {ORIGIN: "encoder.layer.2"},
        {ORIGIN: "encoder.layer.3"},
    ]
    assert not any(node.doc_string or any(v.metadata_props for v in node.outputs) for node in made.graph)
    keep_origins(made)
    assert remembered(made)[1] == {ORIGIN: "encoder.layer.1"}


@pytest.mark.parametrize("scopes", ["", "[]", "['']", "nonsense", "{'a': 1}", "[1, 2", "__import__('os')"])
def test_scopes_that_say_nothing_are_no_path(scopes: str) -> None:
    made = model()
    made.graph[1].metadata_props["pkg.torch.onnx.name_scopes"] = scopes
    keep_origins(made)
    assert remembered(made)[1] == {}


@pytest.mark.parametrize(("ir_version", "opset"), [(8, 18), (9, 20), (10, 21), (11, 23)])
def test_a23_nodes_are_remembered_in_every_ir_version(tmp_path: Path, ir_version: int, opset: int) -> None:
    made = model(ir_version, opset)
    keep_origins(made)
    wanted = remembered(made)
    settle_metadata(made)
    # Below IR 10 a node has no metadata: only what is counted is remembered, by the model.
    assert (MEANINGS in made.metadata_props) == (ir_version < 10)
    assert any(remembered(made)) == (ir_version >= 10)
    ir.save(made, tmp_path / "model.onnx")
    loaded = ir.load(tmp_path / "model.onnx")
    restore_metadata(loaded)
    assert MEANINGS not in loaded.metadata_props
    assert remembered(loaded) == (wanted if ir_version >= 10 else [*wanted[:3], {}])
    assert count(loaded) == {"attention": 0, "layer_norm": 1, "rms_norm": 0, "gelu": 2, "rotary": 0}


@pytest.mark.parametrize("raw", ["", "{", "[]", "null", "3", '{"n0": "gelu"}', '{"n0": [1]}', '{"n0": {"a": 1}}'])
def test_a_damaged_memory_is_forgotten(raw: str) -> None:
    made = model(8, 18)
    settle_metadata(made)
    made.metadata_props[MEANINGS] = raw
    restore_metadata(made)
    assert remembered(made) == [{}, {}, {}, {}]
    assert count(made)["gelu"] == 1


def test_the_memory_is_json_by_node_name() -> None:
    made = model(8, 18)
    settle_metadata(made)
    assert json.loads(made.metadata_props[MEANINGS]) == {
        "n0": ["gelu", "encoder.layer.0"],
        "n1": ["", "encoder.layer.1"],
        "n2": ["", "encoder.layer.2"],
    }


def test_every_meaning_is_one_that_is_counted() -> None:
    assert set(CANONICAL.values()) <= set(COUNTS)
    made = model()
    made.graph[3].metadata_props[MEANING] = "something else"
    assert list(count(made)) == list(COUNTS)
    assert count(made)["gelu"] == 2
