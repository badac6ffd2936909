"""``tfx optimize``: a foreign ``.onnx`` file through the same pipeline, proven against itself."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..errors import BundleError, InputError
from ..runtime.external import check_external_data
from ..runtime.parity import ParityReport
from ..runtime.signals import sigterm_raises
from . import targets
from .export import shown_as
from .foreign import input_specs, load, operators, to_canonical_opset
from .fusion import MEANING
from .inspection import check_expected
from .kinds import given
from .layout import apply_layout
from .metadata import count, restore_metadata, settle_metadata
from .pair import check_destination, data_name, move_in
from .pipeline import Report, lower_model, raise_model
from .proof import Proof, read_inputs, record
from .save import save, weight_bytes
from .shapes import forget_invented, infer_shapes
from .targets import Target
from .tidy import tidy
from .versions import METADATA_IR, nodes

__all__ = ["optimize", "raise_whole"]

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NUMBERED, _NUMBERED_NODE = re.compile(r"val_\d+"), re.compile(r"node_[A-Za-z]+_\d+(_\d+)*")
"""Names that onnx_ir makes up, and torch.onnx with it."""

_ROUNDS = 3

_TORCH = "pkg."
"""How torch.onnx begins the keys of what it leaves in metadata for its own use."""


def optimize(
    source: str | Path,
    out: str | Path,
    *,
    target: str = "cpu",
    layout: str | None = None,
    opset: int | None = None,
    force: bool = False,
    expect: Mapping[str, int] | None = None,
    inputs: Sequence[str] = (),
    feeds: str | Path | None = None,
    max_inline_bytes: int | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Raises and lowers a file, compares it with the original and writes it.

    Args:
        source: The ``.onnx`` file.
        out: The file to write.
        target: ``cpu``, ``cuda``, ``web`` or ``portable``.
        layout: ``ragged`` computes attended positions only and leaves zeros elsewhere; ``None`` keeps the file's.
        opset: ai.onnx opset to write.
        force: Replace ``out`` when it is there.
        expect: Canonical counts that must be found.
        inputs: What inputs mean, where that is judged wrongly: ``NAME[:DTYPE:AXES][=ROLE[:LIMIT]]`` each.
        feeds: An ``.npz`` of arrays by input name to compare on, instead of generated ones.
        max_inline_bytes: Weights larger than this go to an external data file; the target's own limit when ``None``.
        step: Told what is being done.

    Returns:
        ``before`` and ``after`` (nodes, operators, canonical counts, bytes of the weights and on disk, layout),
        ``fired``, ``refusals``, ``parity``.

    Raises:
        InputError: A file is wrong.
        CountError: The canonical counts are not the expected ones.
        ParityError: The optimized model differs from the original, or nothing can be proven; nothing is written.
    """
    source, out = Path(source), Path(out)
    profile = targets.get(target)
    profile.check_opset(opset)
    check_destination(source, out, force)
    step("loading")
    model = load(source)
    before = _counted(model, count(model), source)
    foreign = sorted({node.domain for node in nodes(model)} - {"", "ai.onnx", "com.microsoft"})
    half = any(value.dtype in _HALF for node in nodes(model) for value in node.outputs)
    ends = _Ends.of(model)
    input_specs(model, source.name)  # what is no input to us is said before any work is done
    to_canonical_opset(model, source.name)
    specs = given(input_specs(model, source.name), inputs)
    arrays = None if feeds is None else read_inputs(Path(feeds), specs)
    step("raising")
    report = raise_whole(model)
    check_expected({"canonical": report.counts, "refusals": [r.to_json() for r in report.refusals]}, expect or {})
    step("lowering")
    profile = _open(profile, foreign)
    had = "ragged" if any(node.op_type == "SequenceInsert" for node in nodes(model)) else "padded"
    if layout == "padded" and had == "ragged":
        raise InputError(f"{source}: packed token by token already; padded positions cannot be had back from it")
    has = had if layout is None else apply_layout(model, layout, profile, specs, report.refusals)
    lower_model(model, profile, report, opset=opset)
    for _ in range(_ROUNDS):
        if not _tidied(model):
            break
        restore_metadata(model)  # what the last round moved to the model
        lower_model(model, profile, report, opset=opset)
    _settle_names(model)
    forget_invented(model)
    ends.restore(model)
    try:
        with sigterm_raises(), tempfile.TemporaryDirectory(dir=out.parent, prefix=".tfx-") as folder:
            step("writing")
            written, data = Path(folder) / out.name, data_name(model, out)
            inline = profile.inline_bytes if max_inline_bytes is None else max_inline_bytes
            save(model, written, max_inline_bytes=inline, data_name=data)
            after = _counted(model, report.counts, written)
            del model, ends
            gc.collect()  # the sessions of the proof hold the weights; nothing else may, and graphs are circles
            step("verifying")
            proof = record(source, specs, feeds=arrays, half=half, domains=foreign)
            with shown_as(written, out):
                parity = proof.check(written, changed=bool(report.fired))
                parity.check()
            move_in(written, data, out)
    except OSError as error:
        raise BundleError(f"{out}: cannot be written: {error.strerror}") from error
    return {
        "out": str(out),
        "before": {**before, "layout": had},
        "after": {**after, "layout": has},
        "fired": report.fired,
        "refusals": [r.to_json() for r in report.refusals],
        "parity": _told(parity, proof),
    }


def raise_whole(model: ir.Model) -> Report:
    """Raises until nothing changes: what was raised makes more shapes known, and known shapes fold more."""
    report = raise_model(model)
    for _ in range(_ROUNDS):
        if not _tidied(model):
            break
        again = raise_model(model)
        fired = {rule: report.fired.get(rule, 0) + again.fired.get(rule, 0) for rule in {**report.fired, **again.fired}}
        report = dataclasses.replace(again, fired=fired)
    return report


def _tidied(model: ir.Model) -> bool:
    """Whether tidying drops anything once shapes are inferred anew."""
    size = sum(1 for _ in nodes(model))
    marked = [
        (node, node.inputs[0], dict(node.metadata_props)) for node in nodes(model) if MEANING in node.metadata_props
    ]
    infer_shapes(model)
    tidy(model)
    for node, value, props in marked:
        before = value.producer() if value is not None else None
        if node.graph is None and before is not None and before.graph is not None:
            before.metadata_props.update(props)  # a last node that did nothing has gone
    return sum(1 for _ in nodes(model)) != size


def _counted(model: ir.Model, canonical: Mapping[str, int], path: Path) -> dict[str, Any]:
    ops = operators(model)
    on_disk = path.stat().st_size
    on_disk += sum((path.parent / name).stat().st_size for name in check_external_data(path))
    return {
        "nodes": sum(ops.values()), "ops": ops, "canonical": canonical, "bytes": weight_bytes(model), "on_disk": on_disk
    }  # fmt: skip


def _told(parity: ParityReport, proof: Proof) -> dict[str, Any]:
    return {**parity.to_json(), "cases": len(parity.cases), "skipped": list(proof.skipped)}


def _open(profile: Target, foreign: Sequence[str]) -> Target:
    """The target with the domains of the file: they are kept, unless the target is there to be without any."""
    if profile.domains == {""}:
        return profile
    return dataclasses.replace(profile, domains=profile.domains | set(foreign))


@dataclasses.dataclass(frozen=True)
class _Ends:
    """What people wrote about a graph, its inputs and its outputs: kept as it is."""

    graph: tuple[str | None, dict[str, str]]
    values: dict[str, tuple[ir.TypeProtocol | None, ir.Shape | None, str | None, dict[str, str]]]

    @classmethod
    def of(cls, model: ir.Model) -> _Ends:
        values = {
            str(value.name): (value.type, _copied(value.shape), value.doc_string, _kept(value.metadata_props))
            for value in (*model.graph.inputs, *model.graph.outputs)
        }
        return cls((model.graph.doc_string, _kept(model.graph.metadata_props)), values)

    def restore(self, model: ir.Model) -> None:
        model.graph.doc_string = self.graph[0]
        model.graph.metadata_props.update(self.graph[1])
        for value in (*model.graph.inputs, *model.graph.outputs):
            kind, shape, text, props = self.values[str(value.name)]
            value.type = kind if kind is not None else value.type
            value.shape = shape if shape is not None else value.shape
            value.doc_string = text
            value.metadata_props.update(props)
        if self.graph[1] or any(props for *_, props in self.values.values()):
            model.ir_version = max(model.ir_version, METADATA_IR)


def _settle_names(model: ir.Model) -> None:
    """Numbers what has no name of its own and sorts weights by use, so that the same graph gives the same file."""
    restore_metadata(model)  # it knows nodes by name
    graph = model.graph
    _sort(graph)
    weights: dict[str, ir.Value] = {}
    fresh: dict[ir.Value, None] = {}
    for number, node in enumerate(nodes(model)):
        if not node.name or _NUMBERED_NODE.fullmatch(node.name):
            node.name = f"node_{node.op_type}_{number}"
        for value in (*node.inputs, *node.outputs):
            if value is None:
                continue
            if value.is_initializer() and value.graph is graph:
                weights.setdefault(str(value.name), value)
            if _NUMBERED.fullmatch(value.name or "") and not value.is_graph_input() and not value.is_graph_output():
                fresh.setdefault(value)
    for value in graph.initializers.values():  # those that a caller may set, or that are outputs
        weights.setdefault(str(value.name), value)
    taken = {
        value.name
        for node in nodes(model)
        for value in (*node.inputs, *node.outputs)
        if value is not None and value not in fresh
    }
    for each in (graph, *graph.subgraphs()):  # nothing may read them, and they keep their names
        taken |= {value.name for value in (*each.inputs, *each.initializers.values()) if value not in fresh}
    names = (name for name in (f"val_{number}" for number in itertools.count()) if name not in taken)
    graph.initializers.clear()
    for value in fresh:
        value.name = f"{value.name}#"  # out of each other's way
    for value, name in zip(fresh, names, strict=False):
        value.name = name
    graph.initializers.update({str(value.name): value for value in weights.values()})
    settle_metadata(model)


def _sort(graph: ir.Graph) -> None:
    """Puts nodes in the order in which the outputs ask for them, which does not depend on how they lay before."""
    order: dict[ir.Node, None] = {}
    own = set(graph)
    roots = [value.producer() for value in graph.outputs]
    waiting = [(node, False) for node in (*reversed(list(graph)), *reversed(roots)) if node is not None]
    while waiting:
        node, ready = waiting.pop()
        if node in order or node not in own:
            continue
        if ready:
            order[node] = None
            continue
        waiting.append((node, True))
        inner = [each for attribute in node.attributes.values() for each in _graphs(attribute)]
        read = [*node.inputs, *(value for each in inner for below in each for value in below.inputs)]
        waiting += [
            (made, False) for made in (v.producer() for v in reversed(read) if v is not None) if made is not None
        ]
    graph.remove(list(graph))
    graph.extend(order)


def _graphs(attribute: ir.Attr) -> Iterator[Iterator[ir.Node]]:
    if attribute.type == ir.AttributeType.GRAPH:
        yield ir.traversal.RecursiveGraphIterator(attribute.as_graph())
    elif attribute.type == ir.AttributeType.GRAPHS:
        yield from (ir.traversal.RecursiveGraphIterator(each) for each in attribute.as_graphs())


def _kept(props: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in props.items() if not key.startswith(_TORCH)}


def _copied(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None else shape.copy()
