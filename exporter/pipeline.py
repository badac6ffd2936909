"""raise -> lower, in place, with a report of what fired and what was refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as passes

from ..errors import CountError
from . import fusion, raising
from .fusion import MEANING, Fusion, Refusal
from .leftovers import leftovers
from .lowering import rules_for
from .metadata import CANONICAL, count, keep_origins, settle_metadata
from .no_ops import drop_no_ops
from .quiet import quiet
from .shapes import sizes_from_inputs
from .targets import Target
from .tidy import merge_transposes, name_apart, tidy
from .versions import nodes, settle


@dataclasses.dataclass
class Report:
    """What the pipeline did.

    Attributes:
        counts: Canonical nodes after raising: attention, layer_norm, rms_norm, gelu, rotary.
        fired: How often each rule fired.
        refusals: Subgraphs that were left alone, with the reason.
    """

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    fired: dict[str, int] = dataclasses.field(default_factory=dict)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)


def _run(rules: Sequence[type[Fusion]], model: ir.Model, report: Report) -> None:
    refused: list[tuple[ir.Node, Refusal]] = []
    for rule in rules:
        fired = fusion.apply(rule, model, refused)
        if fired:
            report.fired[rule.id()] = report.fired.get(rule.id(), 0) + fired
            drop_no_ops(model)
            passes.RemoveUnusedNodesPass()(model)  # What a rule has read beyond its pattern is still there.
            merge_transposes(model)  # Rules hand Transposes to each other; a later one wants them whole.
            passes.TopologicalSortPass()(model)
    # A node that another rule replaced after all was not left alone.
    seen = {(each.rule, each.where) for each in report.refusals}
    # One variant may stop at an inner value that another one keeps; then that one's guard knows more.
    refused.sort(key=lambda each: each[1].reason == fusion.NEEDED_ELSEWHERE)
    for node, refusal in refused:
        if node.graph is not None and (refusal.rule, refusal.where) not in seen:
            seen.add((refusal.rule, refusal.where))
            report.refusals.append(refusal)


def _feeds(meaning: str, node: ir.Node, depth: int = 3) -> bool:
    """Whether what a node stood for has been raised: the canonical node comes shortly before it."""
    made = [value.producer() for value in node.inputs if value is not None]
    return any(
        CANONICAL.get(each.op_identifier()[:2]) == meaning or (depth > 1 and _feeds(meaning, each, depth - 1))
        for each in made
        if each is not None
    )


@quiet()
def raise_model(model: ir.Model) -> Report:
    """Recognises decomposed subgraphs and replaces them by canonical nodes, in place.

    Args:
        model: ai.onnx opset 23, shapes inferred.

    Returns:
        Counts, fired rules and refusals.
    """
    report = Report()
    keep_origins(model)
    sizes_from_inputs(model)
    tidy(model)
    # A rule's new nodes inherit what the old ones remember, but they stand for something else, or for a part.
    meanings = {node: node.metadata_props.pop(MEANING) for node in nodes(model) if MEANING in node.metadata_props}
    _run(raising.RULES, model, report)
    for node, meaning in meanings.items():
        if not _feeds(meaning, node):
            node.metadata_props[MEANING] = meaning
    tidy(model)
    report.refusals += leftovers(model, report.refusals)
    report.counts = count(model)
    return report


@quiet()
def lower_model(
    model: ir.Model,
    target: Target,
    report: Report,
    *,
    opset: int | None = None,
    packed: bool = True,
    rules: Sequence[type[Fusion]] | None = None,
) -> None:
    """Rewrites canonical nodes into what a target runs and settles opset and IR version, in place.

    Args:
        model: Canonical.
        target: See :mod:`.targets`.
        report: Of raising; what fired here is added.
        opset: ai.onnx opset to write; the target's default when ``None``.
        packed: Whether projections may go into an attention operator.
        rules: In place of the target's own.

    Raises:
        InputError: The graph needs a newer opset or another domain than the target allows.
    """
    target.check_opset(opset)
    _run(rules_for(target, opset, packed=packed) if rules is None else rules, model, report)
    sizes_from_inputs(model)
    tidy(model)
    passes.NameFixPass()(model)
    name_apart(model)
    settle(model, target, opset)
    settle_metadata(model)


def optimize(model: ir.Model, target: Target, *, opset: int | None = None) -> Report:
    """Raises and lowers a model for a target, in place.

    Args:
        model: ai.onnx opset 23, shapes inferred.
        target: See :mod:`.targets`.
        opset: ai.onnx opset to write; the target's default when ``None``.

    Returns:
        What was found, what fired, what was refused and why.
    """
    report = raise_model(model)
    lower_model(model, target, report, opset=opset)
    return report


def check_counts(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """Compares canonical counts with the ones a model is known to have.

    Raises:
        CountError: They differ; says which, found and wanted.
    """
    wrong = [
        f"{name}: found {found.get(name, 0)}, wanted {wanted}"
        for name, wanted in expected.items()
        if found.get(name, 0) != wanted
    ]
    if wrong:
        raise CountError("canonical counts differ: " + "; ".join(wrong))
