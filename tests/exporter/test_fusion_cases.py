"""Fusions that went wrong for others, in miniature: each is right here, or is left alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from tfx.exporter.capture import capture
from tfx.exporter.pipeline import raise_model
from tfx.runtime.tensors import MASK_PATTERNS, make_feeds

from .running import (
    MASK,
    assert_close,
    encoder,
    evaluate,
    lowered,
    masks,
    nodes_of,
    parse,
    run,
    source_of,
    torch_answers,
)

SEVERAL = [("cpu", None), ("cuda", None), ("portable", 17), ("portable", 20), ("portable", 23)]
ROWS = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return ROWS.standard_normal(shape).astype(np.float32)


# --- A09: the mask is a pattern, not a length


@pytest.mark.parametrize(("target", "opset"), SEVERAL)
def test_a09_any_mask_pattern_equals_the_unfused_graph(target: str, opset: int | None) -> None:
    source, captured = encoder()
    model, _ = lowered(captured, target, opset)
    mask = masks("1111000", "0001111", "1010110", "0000001", "1111111")
    feeds = {"input_ids": np.random.default_rng(1).integers(0, 50, mask.shape), "attention_mask": mask}
    found = run(model)(feeds)
    assert_close(found, run(captured)(feeds), atol=3e-6)
    assert_close(found, torch_answers(source, feeds), atol=3e-6)


# --- A11: every node keeps its own epsilon


PIECES = """
<ir_version: 10, opset_import: ["" : 23]>
pieces (float[B, S, 16] x) => (float[B, S, 16] y0, float[B, S, 16] y1, float[B, S, 16] y2, float[B, S, 16] y3)
<int64[1] last = {{-1}}, float two = {{2}}>
{{
    {nodes}
}}
"""
STORED = {
    "0-d": lambda e: (np.array(e, np.float32), ""),
    "1 element": lambda e: (np.array([e], np.float32), ""),
    "rank 3": lambda e: (np.full((1, 1, 1), e, np.float32), ""),
    "half": lambda e: (np.array(e, np.float16), "Cast<to = 1>"),
    "double": lambda e: (np.array([e], np.float64), "Cast<to = 1>"),
}
EPSILONS = (1e-12, 1e-6, 1e-5, 1e-3)


def four_norms(stored: str) -> tuple[ir.Model, list[float]]:
    """Four layer norms in pieces, one after the other's input, each with another epsilon."""
    nodes, constants, epsilons = [], [], []
    for i, epsilon in enumerate(EPSILONS):
        array, cast = STORED[stored](epsilon)
        constants += [(f"e{i}", array), (f"w{i}", np.linspace(0.5, 1.5, 16, dtype=np.float32) + i)]
        epsilons.append(float(array.astype(np.float32).reshape(())))
        nodes.append(f"""
    s{i} = Constant<value_float = {i + 1}.0>()
    x{i} = Mul(x, s{i})
    m{i} = ReduceMean<keepdims = 1>(x{i}, last)
    d{i} = Sub(x{i}, m{i})
    q{i} = Pow(d{i}, two)
    v{i} = ReduceMean<keepdims = 1>(q{i}, last)
    f{i} = {cast or "Identity"}(e{i})
    a{i} = Add(f{i}, v{i})
    r{i} = Sqrt(a{i})
    n{i} = Div(d{i}, r{i})
    y{i} = Mul(w{i}, n{i})""")
    return parse(PIECES.format(nodes="".join(nodes)), constants), epsilons


@pytest.mark.parametrize("stored", STORED)
def test_a11_every_norm_keeps_its_own_epsilon_however_it_is_stored(stored: str) -> None:
    model, epsilons = four_norms(stored)
    unfused = run(model)
    report = raise_model(model)

    assert report.counts["layer_norm"] == 4
    assert report.refusals == []
    found = [node.attributes.get_float("epsilon", 1e-5) for node in nodes_of(model, "LayerNormalization")]
    assert sorted(found) == pytest.approx(sorted(epsilons), rel=1e-6, abs=0)
    # Rows whose variance is as small as the epsilons: a default of 1e-5 would be seen.
    feeds = {"x": normal(2, 3, 16) * np.float32(1e-3)}
    assert_close(run(model)(feeds), unfused(feeds), atol=5e-6)
    x = feeds["x"].astype(np.float64)
    for i, (answer, epsilon) in enumerate(zip(run(model)(feeds).values(), epsilons, strict=True)):
        centred = (i + 1) * (x - x.mean(-1, keepdims=True))
        wanted = (np.linspace(0.5, 1.5, 16) + i) * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        np.testing.assert_allclose(answer, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("target", ["cpu", "cuda", "portable"])
def test_a11_lowering_keeps_the_epsilons_too(target: str) -> None:
    source = parse(PIECES.format(nodes="".join(
        f"""
    s{i} = Constant<value_float = {i + 1}.0>()
    x{i} = Mul(x, s{i})
    a{i} = Add(x, x{i})
    y{i} = LayerNormalization<axis = -1, epsilon = {epsilon}>(a{i}, w)"""
        for i, epsilon in enumerate(EPSILONS)
    )), [("w", np.ones(16, np.float32))])  # fmt: skip
    model, _ = lowered(source, target)
    kind = ("SkipLayerNormalization", "com.microsoft") if target == "cuda" else ("LayerNormalization", "")
    found = [node.attributes.get_float("epsilon", 1e-5) for node in nodes_of(model, *kind)]
    assert found == pytest.approx(EPSILONS, rel=1e-6, abs=0)
    feeds = {"x": normal(2, 3, 16) * np.float32(1e-3)}
    assert_close(run(model)(feeds), run(source)(feeds), atol=5e-6)


# --- A13: the sum before a norm is needed again


SUMS = """
<ir_version: 10, opset_import: ["" : 23]>
sums (float[B, S, 16] a, float[B, S, 16] b) => (float[B, S, 16] y, float[B, S, 16] z)
{{
    {nodes}
}}
"""
NEEDED_AGAIN = {
    "an output": """
    z = Add(a, b)
    y = LayerNormalization<epsilon = 0.001>(z, w, c)""",
    "the next residual": """
    s = Add(a, b)
    y = LayerNormalization<epsilon = 0.001>(s, w, c)
    g = Gelu(y)
    z = Add(s, g)""",
    "both a residual and an output": """
    z = Add(a, b)
    n = LayerNormalization<epsilon = 0.001>(z, w, c)
    g = Gelu(n)
    t = Add(z, g)
    y = LayerNormalization<epsilon = 0.001>(t, w, c)""",
    "two norms of one sum": """
    s = Add(a, b)
    y = LayerNormalization<epsilon = 0.001>(s, w, c)
    z = LayerNormalization<epsilon = 0.001>(s, c, w)""",
    "a norm in pieces": """
    last = Constant<value_ints = [-1]>()
    two = Constant<value_float = 2.0>()
    e = Constant<value_float = 0.001>()
    z = Add(a, b)
    m = ReduceMean<keepdims = 1>(z, last)
    d = Sub(z, m)
    q = Pow(d, two)
    v = ReduceMean<keepdims = 1>(q, last)
    u = Add(v, e)
    r = Sqrt(u)
    n = Div(d, r)
    p = Mul(n, w)
    y = Add(p, c)""",
    "the biased sum before a gelu": """
    z = Add(a, c)
    y = Gelu(z)""",
}


@pytest.mark.parametrize("target", ["cpu", "cuda", "portable"])
@pytest.mark.parametrize("again", NEEDED_AGAIN)
def test_a13_a_sum_that_is_needed_again_survives(again: str, target: str) -> None:
    constants = [("w", np.linspace(0.5, 1.5, 16, dtype=np.float32)), ("c", np.linspace(-1, 1, 16, dtype=np.float32))]
    nodes = NEEDED_AGAIN[again]
    source = parse(SUMS.format(nodes=nodes), [each for each in constants if f" {each[0]}" in nodes])
    model, report = lowered(source, target)
    norms = nodes.count("LayerNormalization") + ("pieces" in again)
    assert (report.counts["layer_norm"], report.counts["gelu"]) == (norms, nodes.count("Gelu("))
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    feeds = {"a": normal(2, 3, 16), "b": normal(2, 3, 16)}
    feeds = {name: array for name, array in feeds.items() if name in {v.name for v in model.graph.inputs}}
    assert_close(run(model)(feeds), evaluate(source)(feeds), atol=5e-6)


def test_a13_the_kernel_gives_the_sum_that_is_needed_again() -> None:
    """A pre-norm encoder: every sum but the first is a kernel's fourth output."""
    source, captured = encoder(norm="pre", combine="concat")
    model, report = lowered(captured, "cuda")
    fused = nodes_of(model, "SkipLayerNormalization", "com.microsoft")
    assert [len(node.outputs) for node in fused] == [4, 4, 4, 1]
    assert report.refusals == []
    feeds = make_feeds(source.inputs, batch=2, sequence=5, pattern="left")
    assert_close(run(model)(feeds), torch_answers(source, feeds), atol=3e-6)


# --- A14: heads are the layer's own


class Attention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(24, heads * 8), nn.Linear(24, heads * 8)
        self.v, self.o = nn.Linear(24, heads * width), nn.Linear(heads * width, 24)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = (q @ k.mT / 8**0.5).masked_fill(mask[:, None, None, :] == 0, -1e9)
        return self.o((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))


class Uneven(nn.Module):
    """Heads 4, 3 and 1 of size 8; the values 8, 5 and 16 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(heads, width) for heads, width in ((4, 8), (3, 5), (1, 16)))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, attention_mask)
        return x


def test_a14_heads_and_widths_are_read_per_layer() -> None:
    torch.manual_seed(0)
    source = source_of(Uneven(), "x:float32:batch,sequence,24", MASK)
    captured = capture(source)
    canonical = captured.clone()
    raise_model(canonical)
    heads = [node.attributes.get_int("q_num_heads", 0) for node in nodes_of(canonical, "Attention")]
    assert heads == [4, 3, 1]
    for target, opset in SEVERAL:
        model, report = lowered(captured, target, opset)
        assert report.counts["attention"] == 3
        assert report.refusals == [], target
        answer = run(model)
        for pattern in MASK_PATTERNS:
            feeds = make_feeds(source.inputs, batch=3, sequence=7, pattern=pattern, seed=1)
            assert_close(answer(feeds), torch_answers(source, feeds), atol=5e-6)
