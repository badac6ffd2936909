"""``tfx optimize``: a foreign ``.onnx`` file through the same pipeline, proven against itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleError, FeedError, InputError, ParityError
from ..runtime.external import check_external_data
from ..runtime.golden import GoldenCase
from ..runtime.parity import TOLERANCES, ParityReport, verify
from ..runtime.providers import create_session
from ..runtime.signals import sigterm_raises
from ..runtime.swap import folder_problem
from ..runtime.tensors import Case, TensorSpec, default_cases, make_feeds
from . import targets
from .export import shown_as
from .foreign import input_specs, load, operators, to_canonical_opset
from .metadata import count
from .pipeline import check_counts, lower_model, raise_model
from .save import DATA_SUFFIX, MAX_INLINE_BYTES, save, weight_bytes

__all__ = ["optimize"]

_LONGEST = 64
"""Tokens of the longest comparison: a foreign file does not say how long it may be."""


def optimize(
    source: str | Path,
    out: str | Path,
    *,
    target: str = "cpu",
    opset: int | None = None,
    force: bool = False,
    expect: Mapping[str, int] | None = None,
    max_inline_bytes: int = MAX_INLINE_BYTES,
    step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Raises and lowers a file, compares it with the original and writes it.

    Args:
        source: The ``.onnx`` file.
        out: The file to write.
        target: ``cpu``, ``cuda`` or ``portable``.
        opset: ai.onnx opset to write.
        force: Replace ``out`` when it is there.
        expect: Canonical counts that must be found.
        max_inline_bytes: Weights larger than this go to an external data file.
        step: Told what is being done.

    Returns:
        ``before`` and ``after`` (nodes, operators, canonical counts, bytes), ``fired``, ``refusals``, ``parity``.

    Raises:
        InputError: A file is wrong.
        CountError: The canonical counts are not the expected ones.
        ParityError: The optimized model differs from the original; nothing is written.
    """
    source, out = Path(source), Path(out)
    profile = targets.get(target)
    profile.check_opset(opset)
    _check_destination(source, out, force)
    step("loading")
    model = load(source)
    before = {"nodes": sum(operators(model).values()), "ops": operators(model), "canonical": count(model)}
    before["bytes"] = weight_bytes(model)
    specs = input_specs(model, source.name)
    to_canonical_opset(model, source.name)
    step("raising")
    report = raise_model(model)
    check_counts(report.counts, expect or {})
    step("lowering")
    lower_model(model, profile, report, opset=opset)
    after = {"nodes": sum(operators(model).values()), "ops": operators(model), "canonical": report.counts}
    after["bytes"] = weight_bytes(model)
    try:
        with sigterm_raises(), tempfile.TemporaryDirectory(dir=out.parent, prefix=".tfx-") as folder:
            step("writing")
            written = Path(folder) / out.name
            save(model, written, max_inline_bytes=max_inline_bytes)
            del model
            step("verifying")
            with shown_as(written, out):
                parity = _compare(source, written, specs)
                parity.check()
            data = Path(folder) / (out.name + DATA_SUFFIX)
            moved = data.exists()
            if moved:
                data.replace(out.with_name(data.name))
            written.replace(out)
            if not moved:
                out.with_name(data.name).unlink(missing_ok=True)  # of the file that was replaced
    except OSError as error:
        raise BundleError(f"{out}: cannot be written: {error.strerror}") from error
    return {
        "out": str(out),
        "before": before,
        "after": after,
        "fired": report.fired,
        "refusals": [r.to_json() for r in report.refusals],
        "parity": {**parity.to_json(), "cases": len(parity.cases)},
    }


def _check_destination(source: Path, out: Path, force: bool) -> None:
    if out.is_dir():
        raise InputError(f"{out}: found a folder, wanted a file name for the optimized model")
    problem = folder_problem(out.parent)
    if problem is not None:
        raise InputError(f"{out}: {problem}")
    if out.exists() and source.exists() and out.samefile(source):
        raise InputError(f"{out}: is the input itself, wanted another file")
    data = out.with_name(out.name + DATA_SUFFIX)
    if source.is_file() and data.exists():
        for name in check_external_data(source):
            if data.samefile(source.parent / name):
                raise InputError(f"{out}: its weights would replace {data.name}, which {source.name} reads; rename it")
    for path in (out, data):
        if path.exists() and not force:
            raise InputError(f"{path}: exists; --force replaces it")


def _compare(original: Path, optimized: Path, specs: tuple[TensorSpec, ...]) -> ParityReport:
    """Both files on generated inputs, the original without onnxruntime's own optimizations."""
    reference = create_session(original, optimize=False)
    cases: list[GoldenCase] = []
    failures: list[str] = []
    for seed, case in enumerate(default_cases(specs, _LONGEST)):
        feeds = _feeds(specs, case, seed)
        try:
            outputs = reference.run(feeds)
        except FeedError as error:
            failures.append(str(error))
            continue
        if any(not np.isfinite(v).all() for v in outputs.values() if v.dtype.kind == "f"):
            failures.append(f"{case.id}: the original gives NaN or infinity")
            continue
        cases.append(GoldenCase(case.id, case.batch, case.sequence, case.pattern, feeds, outputs))
    if not cases:
        raise ParityError(f"{original}: does not run on generated inputs, so nothing can be proven: {failures[0]}")
    return verify(create_session(optimized).run, cases, TOLERANCES["fp32"], inputs=specs)


def _feeds(specs: tuple[TensorSpec, ...], case: Case, seed: int) -> dict[str, np.ndarray]:
    return make_feeds(specs, batch=case.batch, sequence=case.sequence, pattern=case.pattern, seed=seed)
