"""What a lowering has made is raised again: the same canonical nodes and numbers, nothing of onnxruntime's own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st

from tfx.exporter.foreign import to_canonical_opset
from tfx.exporter.optimizing import raise_whole
from tfx.exporter.pipeline import lower_model, raise_model
from tfx.exporter.targets import get

from .random_encoders import DESIGNS, Design, write
from .running import evaluate, run
from .test_random_encoders import TOLERANCE, feeds


def there_and_back(design: Design, target: str) -> ir.Model:
    model = write(design)
    to_canonical_opset(model, "random")
    wanted = raise_model(model).counts
    assert wanted["attention"] == design.layers
    lower_model(model, get(target), raise_model(model))
    lowered = ir.serde.deserialize_model(ir.to_proto(model))  # as from a file
    to_canonical_opset(lowered, "lowered")
    report = raise_whole(lowered)
    assert report.counts == wanted, report.refusals
    left = {node.op_type for node in lowered.graph if node.domain == "com.microsoft"}
    assert not left
    return lowered


@settings(max_examples=25)
@given(DESIGNS, st.sampled_from(("cpu", "cuda")))
def test_random_encoders_come_back(design: Design, target: str) -> None:
    raised = there_and_back(design, target)
    inputs = {value.name for value in raised.graph.inputs}
    before, after = run(write(design)), evaluate(raised)
    made, rows = feeds(design, 3)
    made = {name: array for name, array in made.items() if name in inputs}
    wanted, got = before(made)["y"], after(made)["y"]
    kept = np.ones(wanted.shape[:2], bool) if design.finite else rows != 0
    np.testing.assert_allclose(got[kept], wanted[kept], rtol=0, atol=TOLERANCE)


BOOL = """<ir_version: 10, opset_import: ["" : 23]>
g (float[batch, sequence, 16] q, float[batch, sequence, 16] k, float[batch, sequence, 16] v,
   bool[batch, sequence] keep) => (float[batch, sequence, 16] y) {
    axes = Constant<value_ints = [1, 2]>()
    mask = Unsqueeze(keep, axes)
    a = Attention <q_num_heads = 2, kv_num_heads = 2>(q, k, v, mask)
    b = Attention <q_num_heads = 4, kv_num_heads = 4>(a, k, v, mask)
    y = Add(a, b)
}"""


def test_a_bool_mask_is_bool_again() -> None:
    """Rows that attend to nothing are zeros, by the product that a lowering writes and by the node itself."""
    model = ir.from_onnx_text(BOOL)
    to_canonical_opset(model, "bool")
    lower_model(model, get("cpu"), raise_model(model))
    assert [node for node in model.graph if node.op_type == "ReduceMax"]
    lowered = ir.serde.deserialize_model(ir.to_proto(model))
    to_canonical_opset(lowered, "lowered")
    raise_whole(lowered)
    masks = [node.inputs[3] for node in lowered.graph if node.op_type == "Attention"]
    assert [mask.dtype for mask in masks if mask is not None] == [ir.DataType.BOOL] * 2
    assert not [node for node in lowered.graph if node.op_type in ("ReduceMax", "Where", "Mul")]
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal((3, 5, 16)).astype(np.float32) for name in "qkv"}
    made["keep"] = np.array([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)
    found, wanted = evaluate(lowered)(made)["y"], evaluate(ir.from_onnx_text(BOOL))(made)["y"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert not found[2].any()
