"""Weights in blocks: what the kernel makes of them, what stays, and that batch mates change nothing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tfx.errors import InputError
from tfx.exporter import pipeline, targets
from tfx.exporter.precision import blocks, int4, int8_block
from tfx.exporter.precision.running import Agreement

from ..running import encoder, nodes_of, parse, run

Feeds = dict[str, np.ndarray]
CPU = targets.get("cpu")
CONTRIB = "com.microsoft"


def _drawn(*shape: int, seed: int = 0, size: float = 1.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def _model(body: str, constants: dict[str, np.ndarray], outputs: str = "float[B,S,96] y") -> ir.Model:
    text = f'<ir_version: 9, opset_import: ["" : 18, "{CONTRIB}" : 1]> g (float[B,S,80] x) => ({outputs}) {{ {body} }}'
    return parse(text, constants)


def _dequantized(packed: np.ndarray, scales: np.ndarray, bits: int, depth: int) -> np.ndarray:
    """By the operator's documentation, independent of how they were made."""
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1)
    whole = (packed.astype(np.float32) - (1 << (bits - 1))) * scales[..., None]
    return whole.reshape(len(scales), -1)[:, :depth].T


@pytest.mark.parametrize(("bits", "step"), [(8, 1 / 127), (4, 1 / 7)])
@pytest.mark.parametrize("importance", [None, np.linspace(0.1, 3, 80).astype(np.float32)], ids=["plain", "searched"])
def test_weights_are_off_by_half_a_step_of_their_own_block(bits: int, step: float, importance: np.ndarray | None):
    matrix = _drawn(80, 24)  # 2.5 blocks
    matrix[:32, 3] *= 100
    matrix[40:64, 5] = 0
    rounded, scales = blocks.quantize_blocks(matrix, bits, importance)
    assert rounded.shape == (24, 3, 32)
    found = _dequantized(blocks.pack(rounded, bits), scales, bits, 80)
    for start in (0, 32, 64):
        part = matrix[start : start + 32]
        # The largest number of the other sign is cut off by one step at most; a searched scale may cut off more.
        allowed = np.abs(part).max(axis=0) * step * (1.01 if importance is None else 3)
        assert (np.abs(found[start : start + 32] - part) <= allowed + 1e-7).all()
    plain = _dequantized(
        blocks.pack(*[blocks.quantize_blocks(matrix, bits)[0], bits]), blocks.quantize_blocks(matrix, bits)[1], bits, 80
    )
    if importance is not None:
        errors = [(importance[:, None] * (each - matrix) ** 2).sum() for each in (found, plain)]
        assert errors[0] < 0.99 * errors[1] if bits == 4 else errors[0] <= errors[1]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernel_multiplies_by_these_weights(bits: int):
    """Among them a Gemm with the matrix the other way round and a bias, a product with a bias behind it, and K = 80."""
    constants = {"w": _drawn(80, 96), "t": _drawn(96, 80, seed=1), "b": _drawn(96, seed=2), "c": np.array([-1, 80])}
    body = (
        "h = MatMul (x, w) s = Add (h, b) f = Reshape (x, c) g = Gemm <transB = 1> (f, t, b) o = Shape (s) "
        "r = Reshape (g, o) y = Add (s, r)"
    )
    model = _model(body, constants)
    changed = model.clone()
    feeds: Feeds = {"x": _drawn(2, 5, 80, seed=3)}
    report = blocks.apply_blocks(changed, [feeds], name="mine", bits=bits, aim=Agreement(0.0, 0.0))
    nodes = nodes_of(changed, "MatMulNBits", CONTRIB)
    assert report.changed == len(nodes) == 2
    assert {node.attributes.get_int("bits", 0) for node in nodes} == {bits}
    assert not nodes_of(changed, "Gemm")
    wanted: np.ndarray = np.zeros((2, 5, 96), np.float32)
    for node in nodes:
        packed, scales, bias = (node.inputs[i] for i in (1, 2, 5))
        assert packed is not None and scales is not None and bias is not None
        assert packed.const_value is not None and scales.const_value is not None and bias.const_value is not None
        weights = _dequantized(packed.const_value.numpy(), scales.const_value.numpy(), bits, 80)
        wanted = (
            wanted
            + blocks.quantize_rows(feeds["x"].reshape(10, 80)).reshape(2, 5, 80) @ weights
            + bias.const_value.numpy()
        )
    np.testing.assert_allclose(run(changed)(feeds)["y"], wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())
    assert np.abs(run(changed)(feeds)["y"] - run(model)(feeds)["y"]).max() < np.abs(wanted).max() * (
        0.01 if bits == 8 else 0.15
    )


def test_outlier_channels_are_evened_out_once_for_all_that_share_them():
    constants = {"w": _drawn(80, 96), "v": _drawn(80, 96, seed=1)}
    model = _model("h = MatMul (x, w) g = MatMul (x, v) y = Add (h, g)", constants)
    x = _drawn(2, 9, 80, seed=3)
    x[..., 7] *= 40
    changed = model.clone()
    report = int8_block.apply(changed, [{"x": x}], target=CPU)
    assert len(nodes_of(changed, "Mul")) == 1
    assert report.worst_cosine is not None and report.worst_cosine > 0.9999
    plain = model.clone()
    assert int8_block.apply(plain, [{"x": _drawn(2, 9, 80, seed=3)}], target=CPU).changed == 2
    assert not nodes_of(plain, "Mul"), "nothing to even out"


def _encoder() -> ir.Model:
    _, captured = encoder(d_model=64, d_ff=128, heads=4, vocab_size=500)
    model = captured.clone()
    pipeline.lower_model(model, CPU, pipeline.raise_model(model), packed=False)
    return model


def _tokens(*lengths: int) -> list[Feeds]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(1, 500, (1, n)), "attention_mask": np.ones((1, n), np.int64)} for n in lengths]


def test_a_vector_does_not_depend_on_batch_mates_or_padding():
    model = _encoder()
    report = int8_block.apply(model, _tokens(5, 17, 30), target=CPU)
    assert report.kept == []
    assert report.changed == 13, "twelve products and a table; the other one is small"
    answer = run(model)
    (alone,) = _tokens(9)
    found = answer(alone)["last_hidden_state"][0]
    ids = np.random.default_rng(1).integers(1, 500, (6, 30))
    ids[2, :9] = alone["input_ids"][0]
    mask = np.ones_like(ids)
    mask[2, 9:] = 0
    beside = answer({"input_ids": ids, "attention_mask": mask})["last_hidden_state"][2, :9]
    np.testing.assert_allclose(beside, found, rtol=0, atol=2e-6)  # The attention kernel pads, too.


def test_what_hurts_stays_in_fp32_or_in_8_bits():
    samples = _tokens(5, 17, 30)
    for bits, other in ((8, "MatMul"), (4, "MatMulNBits")):
        model = _encoder()
        loose = blocks.apply_blocks(model.clone(), samples, name="mine", bits=bits, aim=Agreement(0.0, 0.0))
        assert loose.kept == [] and loose.worst_cosine is not None
        aim = Agreement(1 - (1 - loose.worst_cosine) * 0.7, 0.0)
        report = blocks.apply_blocks(model, samples, name="mine", bits=bits, aim=aim)
        assert report.worst_cosine is not None and report.worst_cosine >= aim.texts
        assert 0 < len(report.kept) < 8
        left = [n for n in model.graph if n.op_type == other and n.attributes.get_int("bits", 8) == 8]
        assert len(left) >= len(report.kept)


def test_a_matrix_that_is_used_twice_is_stored_once():
    model = _model(
        "h = MatMul (x, w) g = Relu (h) i = MatMul (g, w) y = MatMul (i, v)", {"w": _drawn(80, 80), "v": _drawn(80, 96)}
    )
    int4.apply(model, [{"x": _drawn(1, 4, 80)}], target=CPU)
    assert len(nodes_of(model, "MatMulNBits", CONTRIB)) == 3
    assert len([v for v in model.graph.initializers.values() if v.dtype == ir.DataType.UINT8]) == 2


def test_what_cannot_be_done_is_said():
    with pytest.raises(InputError, match="precision int4: found no calibration sample, wanted at least one"):
        int4.apply(_encoder(), [], target=CPU)
    model = _model("y = Concat <axis = 2> (x, x)", {}, "float[B,S,160] y")
    with pytest.raises(InputError, match="precision int8-block: found no product with constant float32 weights"):
        int8_block.apply(model, [{"x": _drawn(1, 2, 80)}], target=CPU)
