"""What the weights and products of a lowered graph are kept and computed in. :data:`PRECISIONS` is the table.

Here is nothing but the table and the door, so that ``tfx export --help`` can show it without loading onnx.
"""

from __future__ import annotations

import dataclasses
import importlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

    from ..targets import Target

__all__ = ["PRECISIONS", "Precision", "PrecisionReport", "apply_precision", "check", "get", "table"]


@dataclasses.dataclass(frozen=True)
class Precision:
    """A named precision.

    Attributes:
        name: What ``--precision`` takes.
        summary: What is kept in how many bits.
        gives: What it brings.
        costs: What it takes away.
        targets: Targets whose runtimes have the operators.
        module: The module of this package that has ``apply(model, samples, *, target) -> PrecisionReport``; empty
            where there is nothing to do.
        attention: Whether the projections may go into an attention operator, weights and all.
    """

    name: str
    summary: str
    gives: str
    costs: str
    targets: tuple[str, ...]
    module: str = ""
    attention: bool = False


@dataclasses.dataclass
class PrecisionReport:
    """What a precision did to a graph: the manifest's ``quantization``, but for what is measured on the bundle.

    Attributes:
        scheme: In words: how activations and weights are scaled.
        changed: How many products and tables are in the new precision.
        kept: ``{where, reason}`` of those that are not.
        calibration: What was run to find scales and judge layers: ``{samples, tokens}``.
        worst_cosine: Smallest cosine of any output vector with fp32 on the samples, ``None`` when not measured.
        notes: Whatever else a reader of the manifest should know, such as constants that were clamped.
    """

    scheme: str = ""
    changed: int = 0
    kept: list[dict[str, str]] = dataclasses.field(default_factory=list)
    calibration: dict[str, Any] = dataclasses.field(default_factory=dict)
    worst_cosine: float | None = None
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The manifest's form."""
        return dataclasses.asdict(self)


PRECISIONS: dict[str, Precision] = {
    each.name: each
    for each in (
        Precision(
            "fp32",
            "float32 throughout",
            "the source's numbers",
            "4 bytes a weight",
            ("cpu", "cuda", "web", "portable"),
            attention=True,
        ),
        Precision(
            "fp16",
            "weights, products and activations in float16; softmax, large norms and what would overflow in float32",
            "half the bytes; on a GPU the speed of its tensor cores",
            "three digits instead of seven; no time gained on a CPU; WebGPU needs an adapter with shader-f16",
            ("cuda", "web"),
            module="fp16",
            attention=True,
        ),
        Precision(
            "int8",
            "8 bit weights scaled per column, 8 bit activations scaled per token",
            "fastest on CPUs; a vector does not depend on what shares its batch, nor on padding",
            "cosine >= 0.995; needs calibration",
            ("cpu", "web"),
            module="int8",
        ),
        Precision(
            "int8-dynamic",
            "8 bit weights scaled per column, activations scaled per call (onnxruntime's dynamic scheme)",
            "needs no calibration",
            "a vector changes with what shares its batch and with padding",
            ("cpu", "web"),
            module="dynamic",
        ),
        Precision(
            "int8-block",
            "8 bit weights with a scale for every 32, activations in 8 bits likewise",
            "nearly float32's numbers (cosine >= 0.999) in about a quarter of the bytes; independent of batch mates",
            "slower than int8; needs calibration",
            ("cpu", "web"),
            module="int8_block",
        ),
        Precision(
            "int4",
            "4 bit weights with a scale for every 32; 8 bits where 4 hurt too much",
            "the smallest file",
            "numbers that are near, not equal (cosine >= 0.95); slower than int8; needs calibration",
            ("cpu",),
            module="int4",
        ),
    )
}


def get(name: str) -> Precision:
    """Returns a precision by its name.

    Raises:
        InputError: There is none of that name.
    """
    try:
        return PRECISIONS[name]
    except KeyError:
        raise InputError(f"precision: found {name!r}, wanted one of {', '.join(PRECISIONS)}") from None


def table() -> str:
    """The precisions as lines of text: what each is, gives and costs, and for which targets."""
    lines: list[str] = []
    for each in PRECISIONS.values():
        said = (each.summary, f"gives: {each.gives}", f"costs: {each.costs}", f"targets: {', '.join(each.targets)}")
        lines += [
            each.name,
            *(line for part in said for line in textwrap.wrap(part, 72, initial_indent="  ", subsequent_indent="    ")),
        ]
    return "\n".join(lines)


def check(precision: str, target: str) -> Precision:
    """Returns a precision that a target's runtimes can run.

    Raises:
        InputError: There is no such precision, or not for this target.
    """
    found = get(precision)
    if target not in found.targets:
        raise InputError(f"precision {precision}: found target {target}, wanted one of {', '.join(found.targets)}")
    return found


def apply_precision(
    model: ir.Model, precision: str, samples: Sequence[Mapping[str, np.ndarray]], *, target: Target
) -> PrecisionReport:
    """Rewrites a lowered graph to a precision, in place.

    Args:
        model: Lowered for ``target``; products with constant weights are MatMul and Gemm nodes.
        precision: A name in :data:`PRECISIONS`.
        samples: Feeds by input name to calibrate on, one unpadded text each, at least one.
        target: What the graph is for.

    Raises:
        InputError: The precision is unknown or not for this target.
    """
    found = check(precision, target.name)
    if not found.module:
        return PrecisionReport(scheme=found.summary)
    return importlib.import_module(f".{found.module}", __package__).apply(model, samples, target=target)
