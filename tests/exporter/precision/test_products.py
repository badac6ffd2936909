"""What is found to be kept in fewer bits: no tables of angles."""

from __future__ import annotations

import numpy as np
import pytest

from tfx.exporter.precision.products import find_tables

from ..running import parse

HEAD = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
g (int64[B, S] ids, int64[P] p, float[B, S, 64] x, float[B, 4, P, 32] q) => ({y}) {{ {line} }}"""
TABLES = {"cos": np.ones((512, 16), np.float32), "sin": np.ones((512, 16), np.float32)}
LINES = {
    "contrib": (
        "c = Gather(cos, p) s = Gather(sin, p) o = com.microsoft.RotaryEmbedding(q, zeros, c, s)",
        "float[B, 4, P, 32] o",
    ),
    "onnx, moved": (
        "c0 = Gather(cos, p) s0 = Gather(sin, p) c1 = Unsqueeze(c0, zero) s1 = Unsqueeze(s0, zero) "
        "c = Expand(c1, shape) s = Expand(s1, shape) o = RotaryEmbedding(q, c, s)",
        "float[B, 4, P, 32] o",
    ),
}
CONSTANTS = {"zeros": np.zeros((1, 1), np.int64), "zero": np.array([0]), "shape": np.array([3, 1, 1])}


@pytest.mark.parametrize("name", LINES)
def test_cosines_and_sines_are_no_embeddings(name: str):
    line, y = LINES[name]
    model = parse(
        HEAD.format(y=y, line=line + " w = Gather(words, ids)").replace(f"({y})", f"({y}, float[B, S, 64] w)"),
        {**TABLES, "words": np.ones((100, 64), np.float32), **CONSTANTS},
    )
    assert [table.weight.name for table in find_tables(model)] == ["words"]


def test_a_table_that_is_turned_itself_is_an_embedding():
    line = (
        "w = Gather(words, ids) h = Reshape(w, heads) k = Transpose <perm = [0, 2, 1, 3]> (h) c = Gather(cos, p) "
        "s = Gather(sin, p) o = com.microsoft.RotaryEmbedding(k, zeros, c, s)"
    )
    constants = {**TABLES, "words": np.ones((100, 64), np.float32), "heads": np.array([0, 0, 2, 32]), **CONSTANTS}
    model = parse(HEAD.format(y="float[B, 2, S, 32] o", line=line), constants)
    assert [table.weight.name for table in find_tables(model)] == ["words"]
