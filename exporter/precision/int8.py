"""8 bit products whose result for a token depends on nothing but that token, chosen layer by layer by their harm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from ...errors import InputError, ParityError
from ..calibration import spread
from ..targets import Target
from . import PrecisionReport
from .products import Unit, find_products, find_tables, units
from .running import Activations, Agreement, Answers, Samples, agreement, answers, observe, tokens
from .schemes import FLOORS, Scheme, choose, drift
from .sensitivity import choose_kept, reaches
from .smooth import fold, normed_by
from .steady import steady_sums
from .writing import Writer

__all__ = ["AIM", "apply"]

PROMISED = Agreement(texts=0.995, vectors=0.97)
"""Below this a graph is refused."""

AIM = Agreement(texts=0.996, vectors=0.975)
"""What calibration tries to reach: above what is promised, as other texts are a little worse."""

_FEW = 12
"""Samples on which the harm of a single unit is measured."""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How one unit is written: its nodes by name, since copies of a graph share nothing else."""

    scheme: Scheme
    drifts: Mapping[str, np.ndarray]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the products' nodes."""
        return tuple(self.drifts)


def apply(model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]], *, target: Target) -> PrecisionReport:
    """Quantises the products and tables of a lowered graph, in place.

    Raises:
        InputError: There is nothing to quantise, or nothing to calibrate on.
        ParityError: With all products in float32 the tables alone cost more than what is promised.
    """
    del target
    if not samples:
        raise InputError("precision int8: found no calibration sample, wanted at least one")
    groups = units(find_products(model))
    if not groups:
        raise InputError("precision int8: found no product with constant float32 weights, wanted at least one")
    for unit in groups:
        for i, product in enumerate(unit.products):
            product.node.name = product.node.name or f"product_{product.y.name}_{i}"
    seen, exact = observe(model, [x for unit in groups for x in unit.inputs], samples)
    plans = [plan(unit, seen) for unit in groups]
    kept, found = _judge(model, plans, seen, samples, exact)
    if not reaches(found, PROMISED):
        raise ParityError(
            f"precision int8: the smallest cosine with fp32 on the samples is {found.texts:.4g}, at single positions "
            f"{found.vectors:.4g}, wanted {PROMISED.texts:g} and {PROMISED.vectors:g}; "
            f"{len(kept)} of {len(plans)} groups of products stayed in float32"
        )
    changed = write(model, [each for each in plans if each not in kept], seen, tables=True)
    kinds = sorted({each.scheme.kind for each in plans if each not in kept})
    return PrecisionReport(
        scheme="int8 weights per column without saturating pairs; activations " + ", ".join(kinds),
        changed=changed,
        kept=[{"where": each.names[0], "reason": f"costs {harm:.2g} of cosine"} for each, harm in kept.items()],
        calibration={"samples": len(samples), "tokens": tokens(samples)},
        worst_cosine=found.texts,
    )


def plan(unit: Unit, seen: Mapping[str, Activations]) -> Plan:
    """The scheme of a unit, judged on what entered it, and what it lacks on average."""
    matrices = {product.key: product.matrix() for product in unit.products}
    entered = [seen[str(x.name)] for x in unit.inputs]
    rows = [(np.concatenate([each.rows, each.peaks]), each.channels) for each in entered]
    made = [x.producer() for x in unit.inputs]
    normed = all(normed_by(x) is not None for x in unit.inputs)
    floors = [FLOORS.get(node.op_type) if node is not None else None for node in made]
    known = [floor for floor in floors if floor is not None]
    floor = max(known) if len(known) == len(made) else None
    scheme = choose(rows, np.concatenate(list(matrices.values()), axis=1), normed=normed, floor=floor)
    drifts = {}
    for product in unit.products:
        x = seen[str(product.x.name)]
        drifts[str(product.node.name)] = drift(scheme, x.rows, x.channels, matrices[product.key])
    return Plan(scheme, drifts)


def write(model: ir.Model, plans: Iterable[Plan], seen: Mapping[str, Activations], *, tables: bool) -> int:
    """Writes the plans into a model, in place, and returns how many products and tables were changed."""
    writer, changed = Writer(model), 0
    by_name = {product.node.name: product for product in find_products(model)}
    for each in plans:
        products = [by_name[name] for name in each.names]
        # By name: where one product leads to another one of the unit, writing it replaces what enters the other.
        entered = dict.fromkeys(product.x for product in products)
        folded = {x.name: fold(writer, x, products, each.scheme.smooth) for x in entered}
        for product in products:
            channels = seen[str(product.x.name)].channels
            lacking = each.drifts[str(product.node.name)]
            writer.product(product, each.scheme, channels, lacking, folded=folded[product.x.name])
        changed += len(products)
    for table in find_tables(model) if tables else ():
        writer.table(table)
        changed += 1
    steady_sums(model, writer)
    passes.RemoveUnusedNodesPass()(model)
    return changed


def _judge(
    model: ir.Model, plans: Sequence[Plan], seen: Mapping[str, Activations], samples: Samples, exact: Answers
) -> tuple[dict[Plan, float], Agreement]:
    """Which plans to leave out, and what the others reach."""

    def joint(chosen: Sequence[Plan], few: int | None = None) -> Agreement:
        changed = model.clone()
        write(changed, chosen, seen, tables=True)
        picked = range(len(samples)) if few is None else spread(range(len(samples)), few)
        return agreement(answers(changed, [samples[i] for i in picked]), [exact[i] for i in picked])

    return choose_kept(plans, joint, lambda each: joint([each], _FEW), AIM)
