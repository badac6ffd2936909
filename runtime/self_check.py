"""A bundle checks itself, stage by stage: files, runtime, tokens, outputs, vectors.

The same stages, in the same order and with the same rules, are in every app that ``tfx app`` writes; this is the one
for Python. The first stage that fails ends the check.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleError, FeedError, ParityError
from .bundle import Bundle
from .golden import GoldenCase
from .manifest import Manifest
from .parity import CaseResult, Comparison, ParityReport, Tolerance, compare, verify
from .session import Session
from .tensors import TensorSpec, attended_positions
from .text import text_encoder

__all__ = ["STAGES", "SelfCheck", "Stage", "self_check"]

STAGES = ("files", "runtime", "tokens", "outputs", "vectors")

_SHOWN = 40  # characters of a text in a message


@dataclass(frozen=True)
class Stage:
    """What one stage found.

    Attributes:
        stage: out of ``STAGES``.
        checked: files, texts or outputs that were compared; 0 where the bundle gives nothing to compare.
        problem: what differs, in one line, None when it passed.
        results: the comparisons, of the stages that compare numbers.
    """

    stage: str
    checked: int
    problem: str | None = None
    results: tuple[CaseResult, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report's form; a number that cannot be said is null."""
        head = {"stage": self.stage, "passed": self.problem is None, "checked": self.checked}
        return head if self.results is None else {**head, **_worst(self.results)}


@dataclass(frozen=True)
class SelfCheck:
    """What ``self_check`` found.

    Attributes:
        manifest: of the bundle.
        stages: those that ran; of all but the last one nothing differed.
        tolerance: what was allowed.
        library: onnxruntime's file, None when it was not reached.
        provider: where the model ran, likewise.
        placement: number of graph nodes per onnxruntime provider, None when unknown.
        batch_variance: largest difference between a text's values alone and beside others, None without texts.
    """

    manifest: Manifest
    stages: tuple[Stage, ...]
    tolerance: Tolerance
    library: Path | None = None
    provider: str | None = None
    placement: dict[str, int] | None = None
    batch_variance: float | None = None

    @property
    def passed(self) -> bool:
        """True when every stage ran and nothing differed."""
        return len(self.stages) == len(STAGES) and all(stage.problem is None for stage in self.stages)

    @property
    def failed(self) -> Stage | None:
        """The stage that failed."""
        return next((stage for stage in self.stages if stage.problem is not None), None)

    @property
    def parity(self) -> ParityReport | None:
        """The comparison of the graph's outputs with the golden, None when it was not reached."""
        results = next((stage.results for stage in self.stages if stage.stage == "outputs"), None)
        return None if results is None else ParityReport(results, self.tolerance, self.provider, self.placement)

    def to_json(self) -> dict[str, Any]:
        """Return the report that every app gives, and what ``tfx verify --json`` has beside it.

        That is ``tolerance``, ``placement``, ``cases`` (outputs of golden cases) and ``texts`` (vectors of recorded
        texts).
        """
        manifest, failed, parity = self.manifest, self.failed, self.parity
        texts = next((stage.results for stage in self.stages if stage.stage == "vectors"), None) or ()
        promised = (manifest.quantization or {}).get("batch_variance")
        return {
            "app": "python",
            "passed": self.passed,
            "stage": None if failed is None else failed.stage,
            "problem": None if failed is None else failed.problem,
            "runtime": None if self.library is None else f"onnxruntime {_version()}",
            "library": None if self.library is None else str(self.library),
            "provider": self.provider,
            "precision": manifest.precision,
            "target": manifest.target,
            "layout": manifest.layout,
            **_worst([result for stage in self.stages for result in stage.results or ()]),
            "stages": [stage.to_json() for stage in self.stages],
            "batch_variance": self.batch_variance,
            "promised_batch_variance": promised,
            "tolerance": self.tolerance.to_json(),
            "placement": self.placement,
            "cases": [] if parity is None else [case.to_json() for case in parity.cases],
            "texts": [text.to_json() for text in texts],
        }

    def check(self) -> None:
        """Raise ParityError that names the stage and what differs, unless all passed."""
        if self.failed is not None:
            raise ParityError(f"{self.failed.stage}: {self.failed.problem}")


def self_check(
    bundle: Bundle | str | Path,
    provider: str = "cpu",
    optimize: bool = True,
    tolerance: Tolerance | None = None,
    threads: int | None = None,
    progress: Callable[[Sequence[GoldenCase]], Iterable[GoldenCase]] = iter,
) -> SelfCheck:
    """Check a bundle against what was recorded when it was made.

    Args:
        bundle: the bundle or its folder; files are checked either way.
        provider: ``cpu`` or ``cuda``.
        optimize: False turns onnxruntime's graph optimization off.
        tolerance: overrides the manifest's.
        threads: threads of the session, None for what the bundle was tuned to, else onnxruntime's choice.
        progress: wraps the list of cases, to show how far it is.

    Raises:
        BundleError: there is no bundle, or its manifest cannot be read.
        MachineError: the provider does not run here, this onnxruntime is too old for the model, or memory ran out.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.unchecked(bundle)
    manifest = opened.manifest
    found = SelfCheck(manifest, (), tolerance or Tolerance(**manifest.tolerance))
    for stage, reached in _stages(opened, found, provider, optimize, threads, progress):
        found = replace(found, stages=(*found.stages, stage), **reached)
        if stage.problem is not None:
            break
    return found


def _stages(
    bundle: Bundle,
    check: SelfCheck,
    provider: str,
    optimize: bool,
    threads: int | None,
    progress: Callable[[Sequence[GoldenCase]], Iterable[GoldenCase]],
) -> Iterator[tuple[Stage, dict[str, Any]]]:
    """Yield each stage, and what is known since then."""
    manifest, tolerance = check.manifest, check.tolerance
    try:
        bundle.check_files()
        golden = bundle.golden()  # before the model is loaded: without one there is nothing to compare with
    except BundleError as error:
        yield Stage("files", len(manifest.files), str(error)), {}
        return
    yield Stage("files", len(manifest.files)), {}
    try:
        session = Session(bundle, provider=provider, optimize=optimize, threads=threads)
    except BundleError as error:
        yield Stage("runtime", 1, str(error)), {"library": _library()}
        return
    reached = {"library": _library(), "provider": session.provider, "placement": session.placement}
    yield Stage("runtime", 1), reached
    texts = [case for case in golden if case.texts and manifest.tokenizer is not None]
    yield Stage("tokens", sum(case.batch for case in texts), _tokens_differ(bundle, texts)), {}
    try:
        report = verify(session.run, progress(golden), tolerance, inputs=manifest.inputs, outputs=manifest.outputs)
    except (FeedError, ParityError) as error:
        yield Stage("outputs", 0, str(error)), {}
        return
    yield Stage("outputs", len(report.cases), None if report.passed else report.summary(), report.cases), {}
    results, variance = _vectors(session, texts, tolerance)
    report = ParityReport(results, tolerance)
    problem = None if not results or report.passed else report.summary()
    if problem is None and variance is not None and not math.isfinite(variance):
        problem = "a text's values alone and beside others: their difference is NaN or infinity"
    finite = variance if variance is None or math.isfinite(variance) else None
    yield Stage("vectors", sum(case.batch for case in texts), problem, results), {"batch_variance": finite}


def _tokens_differ(bundle: Bundle, cases: Sequence[GoldenCase]) -> str | None:
    """Return which recorded text has other tokens now, None when all have theirs, and the tokenizer can be opened."""
    if bundle.manifest.tokenizer is None:
        return None
    try:
        encoder = text_encoder(bundle)
        encodings = [encoder.encode(case.texts) for case in cases]
    except (BundleError, FeedError) as error:
        return str(error)
    for case, rows in zip(cases, encodings, strict=True):
        lengths = _lengths(bundle.manifest.inputs, case)
        for row, encoding in enumerate(rows):
            for spec in bundle.manifest.inputs:
                found = {"token_ids": encoding.ids, "token_type_ids": encoding.types}.get(spec.role)
                wanted = case.inputs[spec.name][row, : lengths[row]].tolist()
                if found is not None and list(found) != wanted:
                    return f"{_named(case, row)}: {spec.name}: {_first_difference(list(found), wanted)}"
    return None


def _first_difference(found: list[int], wanted: list[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    if place is None:
        return f"found {len(found)} tokens, wanted {len(wanted)}"
    return f"token {place}: found {found[place]}, wanted {wanted[place]}"


def _vectors(
    session: Session, cases: Sequence[GoldenCase], tolerance: Tolerance
) -> tuple[tuple[CaseResult, ...], float | None]:
    """Compare what each recorded text gives, together with the others, and alone.

    Returns:
        A result per text and output, and the largest difference between a text's values alone and together, which may
        be NaN.
    """
    if not cases:
        return (), None
    manifest = session.bundle.manifest
    specs = [spec for spec in manifest.outputs if manifest.pooling is None or spec.name == manifest.pooling["output"]]
    together = _by_output(session, [text for case in cases for text in case.texts])
    results, apart, number = [], [], 0
    for case in cases:
        lengths = _lengths(manifest.inputs, case)
        for row, text in enumerate(case.texts):
            alone = _by_output(session, [text])
            for spec in specs:
                # A vector for each position has no meaning beyond the text's own.
                own = slice(lengths[row] if spec.shape[1:2] == ("sequence",) else None)
                one, beside = alone[spec.name][0][own], together[spec.name][number][own]
                comparison = _of_text(beside, case.outputs[spec.name][row][own], spec)
                results.append(CaseResult(_named(case, row), spec.name, comparison, tolerance.allows(comparison)))
                apart.append(float(np.abs(one.astype(np.float64) - beside.astype(np.float64)).max()))
            number += 1
    return tuple(results), float(np.max(apart))


def _of_text(found: np.ndarray, wanted: np.ndarray, spec: TensorSpec) -> Comparison:
    """Compare one text's values, all of them attended."""
    mask = np.ones((1, len(wanted)), np.int64) if spec.shape[1:2] == ("sequence",) else None
    return compare(found[None], wanted[None], mask, spec.shape)


def _by_output(session: Session, texts: list[str]) -> dict[str, np.ndarray]:
    found = session.encode(texts)
    if isinstance(found, dict):
        return found
    pooling = session.bundle.manifest.pooling or {}
    return {pooling["output"]: found}


def _lengths(inputs: Sequence[TensorSpec], case: GoldenCase) -> list[int]:
    """Return how many tokens each row's text has."""
    attended = attended_positions(inputs, case.inputs)
    return [case.sequence] * case.batch if attended is None else attended.sum(axis=1).tolist()


def _named(case: GoldenCase, row: int) -> str:
    """Return what a recorded text is called: its case, its number there and how it begins, in ASCII."""
    return f"{case.id}[{row}] {json.dumps(case.texts[row][:_SHOWN])}"


def _worst(results: Sequence[CaseResult]) -> dict[str, float | None]:
    """Return the largest difference and the smallest cosine; None where there is none or one cannot be said."""
    if not results:
        return {"max_abs": None, "min_cosine": None}
    numbers = {
        "max_abs": float(np.max([result.comparison.max_abs for result in results])),
        "min_cosine": float(np.min([result.comparison.min_cosine for result in results])),
    }
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _library() -> Path | None:
    import onnxruntime  # noqa: F401 - it loads the module below

    path = getattr(sys.modules.get("onnxruntime.capi.onnxruntime_pybind11_state"), "__file__", None)
    return None if path is None else Path(path)


def _version() -> str:
    import onnxruntime

    return onnxruntime.__version__
