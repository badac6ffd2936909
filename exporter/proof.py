"""The proof of ``tfx optimize``: the original's answers, recorded, and the new file's beside them.

The two are never in memory together: a session holds all weights.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import FeedError, InputError, ParityError, SourceError, TfxError
from ..runtime.arrays import read_npz
from ..runtime.golden import GoldenCase
from ..runtime.parity import TOLERANCES, CaseResult, Comparison, ParityReport, Tolerance, compare
from ..runtime.providers import create_session
from ..runtime.tensors import TensorSpec, attended_positions, default_cases, make_feeds

__all__ = ["Proof", "read_inputs", "record"]

_LONGEST = 64
"""Tokens of the longest comparison: a foreign file does not say how long it may be."""

_MAX_INPUT_BYTES = 1 << 30
_TWICE = 2
"""Fixed sizes leave fewer shapes to try; each is tried with this many draws."""


def read_inputs(path: Path, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Reads a user's arrays and checks them against the model's inputs.

    Raises:
        InputError: The file is no ``.npz`` of plain arrays or too large, or an array does not fit.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile):
        size = 0  # said better below
    if size > _MAX_INPUT_BYTES:
        raise InputError(f"{path}: holds {size} bytes of arrays, wanted at most {_MAX_INPUT_BYTES}")
    arrays = read_npz(path)
    wanted = {spec.name: spec for spec in specs}
    if set(arrays) != set(wanted):
        raise InputError(
            f"{path}: found arrays {', '.join(sorted(arrays)) or 'none'}, wanted {', '.join(wanted) or 'none'}"
        )
    for name, spec in wanted.items():
        array = arrays[name]
        fits = array.ndim == len(spec.shape) and all(
            not isinstance(axis, int) or axis == size for axis, size in zip(spec.shape, array.shape, strict=True)
        )
        if str(array.dtype) != spec.dtype or not fits:
            raise InputError(f"{path}: {name} is {array.dtype} {list(array.shape)}, wanted {_shown(spec)}")
    return {name: arrays[name] for name in wanted}


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the original answers.

    Attributes:
        original: The file.
        specs: Its inputs.
        cases: Feeds and the original's outputs, without onnxruntime's own optimizations.
        skipped: Why it does not run on other feeds.
        tolerance: How far outputs may be apart.
    """

    original: Path
    specs: tuple[TensorSpec, ...]
    cases: tuple[GoldenCase, ...]
    skipped: tuple[str, ...]
    tolerance: Tolerance

    def check(self, optimized: Path, *, changed: bool) -> ParityReport:
        """Compares a file with the original.

        Args:
            optimized: The file, run as it will be deployed: with onnxruntime's optimizations.
            changed: Whether anything was replaced; then outputs that are constant prove nothing.

        Raises:
            ParityError: It differs, or nothing can be said.
        """
        if changed and all(_constant(array) for case in self.cases for array in case.outputs.values()):
            raise ParityError(
                f"{self.original}: every output is constant on every case, so nothing can be proven; {self.remedy()}"
            )
        report = self._compare(_run(optimized, self.cases, optimize=True), [case.outputs for case in self.cases])
        if report.passed:
            return report
        # onnxruntime's optimizations round quantized graphs otherwise; then they must do the same to both.
        plain = self._compare(_run(optimized, self.cases, optimize=False), [case.outputs for case in self.cases])
        if not plain.passed:
            report.check()
        alike = self._compare(
            _run(optimized, self.cases, optimize=True), _run(self.original, self.cases, optimize=True)
        )
        if not alike.passed:
            report.check()
        return plain

    def remedy(self) -> str:
        """How to give inputs, in one sentence."""
        return _remedy(self.specs)

    def _compare(
        self, found: Sequence[Mapping[str, np.ndarray]], wanted: Sequence[Mapping[str, np.ndarray]]
    ) -> ParityReport:
        results: list[CaseResult] = []
        for case, answers, expected in zip(self.cases, found, wanted, strict=True):
            mask = attended_positions(self.specs, case.inputs)
            for name, values in expected.items():
                if name not in answers:
                    raise ParityError(f"parity: output {name} is missing; found {', '.join(answers)}")
                comparison, passed = judge(answers[name], values, mask, self.tolerance)
                results.append(CaseResult(case.id, name, comparison, passed))
        return ParityReport(tuple(results), self.tolerance)


def record(
    original: Path,
    specs: tuple[TensorSpec, ...],
    *,
    feeds: Mapping[str, np.ndarray] | None = None,
    half: bool = False,
    domains: Sequence[str] = (),
) -> Proof:
    """Runs the original.

    Args:
        original: The file.
        specs: Its inputs.
        feeds: A user's inputs; without them some are made.
        half: Whether the graph computes in 16 bits.
        domains: Operator domains that onnxruntime may not know.

    Raises:
        SourceError: onnxruntime does not load it, for the domains it uses.
        ParityError: It gives no sound answer on any feeds.
    """
    try:
        session = create_session(original, optimize=False)
    except TfxError as error:
        if domains:
            raise SourceError(
                f"{original}: found operators of {', '.join(domains)}, wanted ones that onnxruntime loads: {error}"
            ) from error
        raise
    tried = [("given", 1, 1, "full", dict(feeds))] if feeds is not None else _made(specs)
    cases: list[GoldenCase] = []
    skipped: list[str] = []
    for id_, batch, sequence, pattern, arrays in tried:
        try:
            # Copies: onnxruntime's own arrays keep all memory of the session alive.
            outputs = {name: values.copy() for name, values in session.run(arrays).items()}
        except FeedError as error:
            skipped.append(f"{id_}: {error}")
            continue
        if any(np.isnan(values).any() for values in outputs.values() if values.dtype.kind == "f"):
            skipped.append(f"{id_}: the original gives NaN")
            continue
        cases.append(GoldenCase(id_, batch, sequence, pattern, arrays, outputs))
    if not cases:
        whose = "generated" if feeds is None else "the given"
        raise ParityError(
            f"{original}: does not run on {whose} inputs, so nothing can be proven: {skipped[0]}; {_remedy(specs)}"
        )
    return Proof(original, specs, tuple(cases), tuple(skipped), TOLERANCES["fp16" if half else "fp32"])


def judge(
    found: np.ndarray, wanted: np.ndarray, mask: np.ndarray | None, tolerance: Tolerance
) -> tuple[Comparison, bool]:
    """Compares one output; the same bits pass whatever they are, infinities must be the same ones.

    The allowed difference grows with what is compared: outputs of others need not be of the size of one.
    """
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        problem = f"{found.dtype} {list(found.shape)}, wanted {wanted.dtype} {list(wanted.shape)}"
        return Comparison(np.nan, np.nan, problem), False
    if np.array_equal(found, wanted):
        return Comparison(0.0, 1.0), True
    a, b = found, wanted
    if wanted.dtype.kind == "f":
        endless = np.isinf(wanted)
        if not np.array_equal(endless, np.isinf(found)) or not np.array_equal(found[endless], wanted[endless]):
            return Comparison(np.nan, np.nan, "infinities differ"), False
        a, b = np.where(endless, 0, found), np.where(endless, 0, wanted)
    comparison = compare(a, b, mask)
    if comparison.problem is not None and not np.isnan(a).any() and np.max(np.abs(a - b), initial=0) < 1e-6:
        comparison = Comparison(float(np.max(np.abs(a - b), initial=0)), 1.0)  # constant but for rounding
    if comparison.problem is not None or wanted.dtype.kind not in "f":
        return comparison, tolerance.allows(comparison) and comparison.max_abs == 0
    scale = max(1.0, float(np.sqrt(np.mean(np.square(b, dtype=np.float64)))))
    allowed = scale * (1e-2 if tolerance.max_abs is None else tolerance.max_abs)
    vectors = b.ndim == 0 or b.shape[-1] == 1  # a cosine of single numbers is only their sign
    alike = vectors or comparison.min_cosine >= (tolerance.min_cosine or -1) or comparison.max_abs < 1e-6
    return comparison, bool(comparison.max_abs <= allowed and alike)


def _constant(array: np.ndarray) -> bool:
    return array.size > 1 and bool((array == array.flat[0]).all())


def _run(path: Path, cases: Sequence[GoldenCase], *, optimize: bool) -> list[dict[str, np.ndarray]]:
    session = create_session(path, optimize=optimize)
    return [session.run(case.inputs) for case in cases]


def _made(specs: tuple[TensorSpec, ...]) -> list[tuple[str, int, int, str, dict[str, np.ndarray]]]:
    """Feeds at the shapes and mask patterns of :func:`default_cases`, as far as fixed sizes leave a choice."""
    made: list[tuple[str, int, int, str, dict[str, np.ndarray]]] = []
    tried: dict[object, int] = {}
    for seed, case in enumerate(default_cases(specs, _LONGEST)):
        shapes = (case.pattern, *(spec.resolve(case.batch, case.sequence) for spec in specs))
        tried[shapes] = tried.get(shapes, 0) + 1
        if tried[shapes] <= _TWICE:
            feeds = make_feeds(specs, batch=case.batch, sequence=case.sequence, pattern=case.pattern, seed=seed)
            made.append((case.id, case.batch, case.sequence, case.pattern, feeds))
    return made


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"


def _remedy(specs: Sequence[TensorSpec]) -> str:
    if not specs:
        return "the model takes no inputs"
    taken = ", ".join(
        f"{spec.name} {_shown(spec)} as {spec.role}{'' if spec.limit is None else f' below {spec.limit}'}"
        for spec in specs
    )
    first = specs[0]
    axes = ",".join(map(str, first.shape))
    return (
        f"inputs were taken for: {taken}; give arrays with --inputs FILE.npz, or say what they are, such as "
        f"--input {first.name}={first.role}:{first.limit or 16} or --input {first.name}:{first.dtype}:{axes}"
    )
