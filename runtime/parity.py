"""Parity: do two sets of outputs agree where they have a meaning?

Judged on attended positions only, because a padded position has no meaning (and ragged graphs leave zeros there);
outputs without a sequence axis (pooled vectors) are judged whole. NaN, infinity or a constant never agrees with
anything. Cosines are per vector along the last axis, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ParityError
from .golden import GoldenCase
from .tensors import TensorSpec, attended_positions

if TYPE_CHECKING:
    from .bundle import Bundle

__all__ = [
    "TOLERANCES",
    "CaseResult",
    "Comparison",
    "ParityReport",
    "Tolerance",
    "compare",
    "verify",
    "verify_bundle",
]


@dataclass(frozen=True)
class Tolerance:
    """How far outputs may be apart.

    Attributes:
        max_abs: largest allowed absolute difference of any element, None for no bound.
        min_cosine: smallest allowed cosine of any vector, None for no bound.
        min_token_cosine: the same where an output has a vector for every position, None for ``min_cosine``: one token
            of many is judged there, and the tokens of a golden are random.
    """

    max_abs: float | None
    min_cosine: float | None
    min_token_cosine: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """Return the manifest's form."""
        bounds = {"max_abs": self.max_abs, "min_cosine": self.min_cosine}
        return bounds if self.min_token_cosine is None else {**bounds, "min_token_cosine": self.min_token_cosine}

    def allows(self, comparison: Comparison) -> bool:
        """Return whether a comparison is sound and within the bounds (NaN is within none)."""
        cosine = self.min_cosine
        if comparison.per_token and self.min_token_cosine is not None:
            cosine = self.min_token_cosine
        return (
            comparison.problem is None
            and (self.max_abs is None or comparison.max_abs <= self.max_abs)
            and (cosine is None or comparison.min_cosine >= cosine)
        )


TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(max_abs=1e-4, min_cosine=0.99999),
    "fp16": Tolerance(max_abs=None, min_cosine=0.9999),
    "int8": Tolerance(max_abs=None, min_cosine=0.99, min_token_cosine=0.97),
    "int8-dynamic": Tolerance(max_abs=None, min_cosine=0.95, min_token_cosine=0.9),
    "int8-block": Tolerance(max_abs=None, min_cosine=0.999, min_token_cosine=0.995),
    "int4": Tolerance(max_abs=None, min_cosine=0.95, min_token_cosine=0.85),
}
"""The one table of tolerances, by precision."""


@dataclass(frozen=True)
class Comparison:
    """How far two arrays are apart.

    Attributes:
        max_abs: largest absolute difference; NaN when it cannot be said.
        min_cosine: smallest cosine of any vector; NaN when it cannot be said.
        problem: why the arrays can never agree (shape, NaN, constant), None when they may.
        per_token: whether there is a vector for every position, of which the attended ones were compared.
    """

    max_abs: float
    min_cosine: float
    problem: str | None = None
    per_token: bool = False


@dataclass(frozen=True)
class CaseResult:
    """The comparison of one output in one golden case."""

    id: str
    output: str
    comparison: Comparison
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """Return the report's form; a number that cannot be said is null."""
        return {
            "id": self.id,
            "output": self.output,
            "max_abs": _finite(self.comparison.max_abs),
            "min_cosine": _finite(self.comparison.min_cosine),
            "passed": self.passed,
            "problem": self.comparison.problem,
        }


@dataclass(frozen=True)
class ParityReport:
    """What ``verify`` found.

    Attributes:
        cases: one result per golden case and output.
        tolerance: what was allowed. ``max_abs`` and ``min_cosine`` say what would have been needed.
        provider: where the model ran, None when ``verify`` was not told.
        placement: number of graph nodes per onnxruntime provider, None when unknown.
    """

    cases: tuple[CaseResult, ...]
    tolerance: Tolerance
    provider: str | None = None
    placement: Mapping[str, int] | None = None

    @property
    def passed(self) -> bool:
        """True when every output of every case is within the tolerance."""
        return bool(self.cases) and all(case.passed for case in self.cases)

    @property
    def max_abs(self) -> float:
        """The largest difference of all cases, NaN when one cannot be said."""
        return float(np.max([case.comparison.max_abs for case in self.cases]))

    @property
    def min_cosine(self) -> float:
        """The smallest cosine of all cases, NaN when one cannot be said."""
        return float(np.min([case.comparison.min_cosine for case in self.cases]))

    def to_json(self) -> dict[str, Any]:
        """Return the keys of ``tfx verify --json``."""
        return {
            "passed": self.passed,
            "max_abs": _finite(self.max_abs),
            "min_cosine": _finite(self.min_cosine),
            "tolerance": self.tolerance.to_json(),
            "provider": self.provider,
            "placement": None if self.placement is None else dict(self.placement),
            "cases": [case.to_json() for case in self.cases],
        }

    def summary(self) -> str:
        """Return one line: the verdict, what was needed, and the worst failure."""
        needed = f"max abs {self.max_abs:.3g} (allowed {_bound(self.tolerance.max_abs)})"
        needed += f", cosine {self.min_cosine:.8f} (wanted {_bound(self.tolerance.min_cosine)})"
        failures = [case for case in self.cases if not case.passed]
        if not failures:
            return f"parity passed on {len(self.cases)} outputs: {needed}"
        first = failures[0]
        numbers = first.comparison
        why = numbers.problem or f"max abs {numbers.max_abs:.3g}, cosine {numbers.min_cosine:.8f}"
        return (
            f"parity failed on {len(failures)} of {len(self.cases)} outputs: {needed}; "
            f"first {first.output} in {first.id}: {why}"
        )

    def check(self) -> None:
        """Raise ParityError with the summary unless the report passed."""
        if not self.passed:
            raise ParityError(self.summary())


def compare(
    actual: np.ndarray,
    expected: np.ndarray,
    attention_mask: np.ndarray | None = None,
    axes: Sequence[str | int] | None = None,
) -> Comparison:
    """Compare an output with what it should be.

    Args:
        actual: the output.
        expected: the wanted values, of the same shape.
        attention_mask: (batch, sequence), not 0 where attended; None judges every position.
        axes: the output's axes; the mask applies when they begin with ``"batch", "sequence"``. None takes an array
            of rank 3 or more whose first two sizes are the mask's as (batch, sequence, ...).

    Returns:
        The largest difference and the smallest cosine over the judged positions.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return _never(f"shape {actual.shape}, wanted {expected.shape}")
    per_token = attention_mask is not None and _has_positions(expected, attention_mask, axes)
    if per_token:
        attended = np.asarray(attention_mask) != 0
        actual, expected = actual[attended], expected[attended]
    if expected.size == 0:
        return _never("nothing to judge: no attended position")
    floating = expected.dtype.kind == "f"
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    for values, whose in ((a, "output"), (b, "expected output")):
        if not np.isfinite(values).all():
            return _never(f"{whose} holds NaN or infinity")
        if floating and values.size > 1 and values.min() == values.max():
            return _never(f"{whose} is constant ({values.flat[0]:.6g} everywhere)")
    return Comparison(float(np.abs(a - b).max()), _min_cosine(a, b), per_token=per_token)


def verify(
    run: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]],
    cases: Iterable[GoldenCase],
    tolerance: Tolerance,
    *,
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
) -> ParityReport:
    """Run golden cases and compare, output by output, by name.

    Args:
        run: takes feeds by input name, returns outputs by output name.
        cases: recorded calls, at least one.
        tolerance: what is allowed.
        inputs: the inputs' specs, which say which ones are masks; without them it is ``attention_mask``.
        outputs: the outputs' specs, which say which ones have a sequence axis, and of which each case must record every
            one; without them shapes decide, and what is recorded is compared.

    Raises:
        ParityError: there is no case, a case does not record an output, or ``run`` does not return one that was
            recorded.
    """
    axes = {spec.name: spec.shape for spec in outputs}
    results: list[CaseResult] = []
    for case in cases:
        for name in axes:
            if name not in case.outputs:
                raise ParityError(f"golden: case {case.id} does not record {name}")
        found = run(case.inputs)
        mask = attended_positions(inputs, case.inputs) if inputs else case.inputs.get("attention_mask")
        for name, expected in case.outputs.items():
            if name not in found:
                raise ParityError(f"parity: output {name} is missing in {case.id}; found {', '.join(found) or 'none'}")
            comparison = compare(found[name], expected, mask, axes.get(name))
            results.append(CaseResult(case.id, name, comparison, tolerance.allows(comparison)))
    if not results:
        raise ParityError("parity: found no golden case, wanted at least one")
    return ParityReport(tuple(results), tolerance)


def verify_bundle(
    bundle: Bundle,
    provider: str = "cpu",
    optimize: bool = True,
    tolerance: Tolerance | None = None,
    threads: int | None = None,
    progress: Callable[[Sequence[GoldenCase]], Iterable[GoldenCase]] = iter,
) -> ParityReport:
    """Run a bundle's own golden.

    Args:
        bundle: the bundle.
        provider: ``cpu`` or ``cuda``.
        optimize: False turns onnxruntime's graph optimization off.
        tolerance: overrides the manifest's.
        threads: threads of the session, None for onnxruntime's choice.
        progress: wraps the list of cases, to show how far it is.

    Raises:
        BundleError: the bundle has no golden.
        ProviderError: the provider does not run here.
    """
    from .session import Session

    session = Session(bundle, provider=provider, optimize=optimize, threads=threads)
    manifest = bundle.manifest
    report = verify(
        session.run,
        progress(bundle.golden()),
        tolerance or Tolerance(**manifest.tolerance),
        inputs=manifest.inputs,
        outputs=manifest.outputs,
    )
    return replace(report, provider=session.provider, placement=session.placement)


def _has_positions(values: np.ndarray, mask: np.ndarray, axes: Sequence[str | int] | None) -> bool:
    if np.ndim(mask) != 2 or values.shape[:2] != np.shape(mask):
        return False
    return values.ndim >= 3 if axes is None else tuple(axes[:2]) == ("batch", "sequence")


def _min_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the smallest cosine along the last axis; equal vectors have 1, a zero vector beside another 0."""
    a, b = np.atleast_1d(a), np.atleast_1d(b)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    dots = np.sum(a * b, axis=-1)
    equal = (a == b).all(axis=-1)  # two zero vectors among them; and no rounding error for what is the same
    cosines = np.where(equal, 1.0, dots / np.where(norms == 0, 1.0, norms))
    return float(np.clip(cosines, -1.0, 1.0).min())


def _never(problem: str) -> Comparison:
    return Comparison(math.nan, math.nan, problem)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bound(value: float | None) -> str:
    return "any" if value is None else f"{value:g}"
