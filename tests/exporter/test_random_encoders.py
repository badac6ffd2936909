"""Random encoders, raised and lowered, give the numbers of their unfused graphs on every kind of mask.

``TFX_EXAMPLES=1000`` draws that many. A failure prints the design and a blob for ``reproduce_failure``.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfx.exporter.foreign import to_canonical_opset
from tfx.exporter.pipeline import lower_model, raise_model
from tfx.exporter.targets import get

from .random_encoders import DESIGNS, Design, write
from .running import Arrays, evaluate, masks, run

LOWERINGS = (("cpu", None), ("cuda", None), ("portable", 17), ("portable", 18), ("portable", 20), ("portable", 23))
EXAMPLES = int(os.environ.get("TFX_EXAMPLES", "60"))
TOLERANCE = 2e-5
PLAIN = Design(
    heads=2, size=8, value_size=4, layers=1, norm="node", square="pow", quotient="div", scale_rank=1, epsilon=1e-5,
    pre=False, gelu="node", linear="matmul", bias=True, packed=False, scale="div", mask="additive", value=-1e9,
    source="int64", window="", position=False, leftovers=False, seed=0,
)  # fmt: skip


def feeds(design: Design, batch: int) -> tuple[Arrays, np.ndarray]:
    """Full, left, right and holed masks, a row without any key where that has a meaning; and attended tokens."""
    rows = masks("11111", "00111", "11100", "10101")
    if design.finite:
        rows = np.concatenate([rows, masks("00000")])
    rows = rows if batch == 3 else rows[design.seed % len(rows)][None]
    rng = np.random.default_rng(design.seed)
    x = rng.standard_normal((len(rows), 5, design.heads * design.size)).astype(np.float32)
    return {"x": x, "attention_mask": rows.astype(design.source)}, rows


DRAWN = settings(
    max_examples=EXAMPLES,
    derandomize="TFX_EXAMPLES" not in os.environ,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@DRAWN
@given(DESIGNS, st.sampled_from(LOWERINGS))
def test_random_encoders_keep_their_numbers(design: Design, lowering: tuple[str, int | None]) -> None:
    # A query without any key: with -inf it is NaN in the unfused graph, and so is its whole row from there on.
    compare(design, lowering, everywhere=design.finite)


def test_a_mask_that_is_added_to_filled_scores_still_counts() -> None:
    design = dataclasses.replace(PLAIN, mask="fill", window="add")
    compare(design, ("portable", 23), everywhere=True)


def compare(design: Design, lowering: tuple[str, int | None], *, everywhere: bool) -> None:
    """Counts as they were written, and the unfused numbers: of all tokens, or of those that are attended."""
    unfused, model = write(design), write(design)
    inputs = {value.name for value in unfused.graph.inputs}
    to_canonical_opset(model, "random")
    report = raise_model(model)
    found = {name: report.counts[name] for name in design.counts}
    assert found == design.counts, report.refusals
    target, opset = lowering
    lower_model(model, get(target), report, opset=opset)
    before, after = run(unfused), run(model)
    for batch in (1, 3):
        made, rows = feeds(design, batch)
        made = {name: array for name, array in made.items() if name in inputs}
        wanted, got = before(made)["y"], after(made)["y"]
        known = np.full(rows.shape, True) if everywhere else (rows == 1) & np.isfinite(wanted).all(axis=-1)
        assert known.any() or batch == 1
        np.testing.assert_allclose(got[known], wanted[known], rtol=0, atol=TOLERANCE)


def test_the_reference_evaluator_agrees_about_the_unfused_graphs() -> None:
    """Else both sides of the comparison could share an error of onnxruntime's."""

    @settings(max_examples=3, derandomize=True, deadline=None, database=None)
    @given(DESIGNS)
    def agree(design: Design) -> None:
        model: ir.Model = write(design)
        made, _ = feeds(design, 3)
        np.testing.assert_allclose(evaluate(model)(made)["y"], run(model)(made)["y"], rtol=0, atol=TOLERANCE)

    agree()
