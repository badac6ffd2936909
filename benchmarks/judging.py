"""One encoder by one route: exported, raised once, lowered for every target, and held against the live torch module."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from routes import OUTPUT, captured, export, feeds, source
from zoo import Row

from tfx.errors import TfxError
from tfx.exporter import foreign, pipeline, targets
from tfx.exporter.probe import inference
from tfx.exporter.sources import Source
from tfx.runtime.providers import create_session
from tfx.runtime.tensors import MASK_PATTERNS, attended_positions

__all__ = ["CAPTURE", "LIMIT", "Case", "Judge", "Judged", "apart", "file_name", "kept_cases"]

CAPTURE = "capture"
"""The route that is tfx's own."""
LIMIT = 2e-5
"""Largest difference to torch, fp32, at attended positions."""
BATCHES = (1, 3)
TRACED = 7
LENGTHS = (TRACED, 13, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs, and what the live torch module answers.

    Attributes:
        name: batch, length and mask.
        length: of the sequences.
        inputs: arrays by name.
        attended: positions that count, None for all.
        wanted: the module's output.
    """

    name: str
    length: int
    inputs: dict[str, np.ndarray]
    attended: np.ndarray | None
    wanted: np.ndarray


@dataclasses.dataclass
class Judged:
    """What was found out about one row by one route.

    Attributes:
        row: its name.
        route: "capture" or one of ``routes.FOREIGN``.
        wrong: everything that is not as it has to be, one line each; empty where all is well.
        not_offered: why the exporter makes no such file, None where it does.
        notes: what is odd about the file itself.
        found: canonical counts after raising.
        wanted: those of the module.
        max_abs: largest difference to torch, by target; to the file where that differs from torch.
        file: largest difference of the file as exported to torch, None where it does not run.
        refusals: what raising left alone, and why.
        seconds: for all of it.
        peers: what ``coverage.py`` adds.
    """

    row: str
    route: str
    wrong: list[str] = dataclasses.field(default_factory=list)
    not_offered: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    found: dict[str, int] = dataclasses.field(default_factory=dict)
    wanted: dict[str, int] = dataclasses.field(default_factory=dict)
    max_abs: dict[str, float] = dataclasses.field(default_factory=dict)
    file: float | None = None
    refusals: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    peers: dict[str, Any] = dataclasses.field(default_factory=dict)


def file_name(route: str) -> str:
    """A route's name as that of a file."""
    return f"{route.replace(', ', '-').replace(' ', '_')}.onnx"


class Judge:
    """Judges the routes of one row; the module, its answers and its files are made once.

    Args:
        row: the encoder.
        folder: where files go, as ``<route>.onnx``.
    """

    def __init__(self, row: Row, folder: Path) -> None:
        self.row = row
        self.folder = folder
        self.source = source(row)
        self.cases = list(_cases(row, self.source))

    def file(self, route: str) -> Path:
        """The file of a route as its exporter wrote it; made once."""
        path = self.folder / file_name(route)
        if not path.exists():
            if route == CAPTURE:
                ir.save(captured(self.source), path)
            else:
                base = route.partition(", ")[0]
                export(self.row, route, path, None if base == route else self.file(base))
        return path

    def judge(self, route: str, names: Sequence[str] = ("cpu", "cuda", "web", "portable")) -> Judged:
        """Exports, raises, lowers and compares."""
        judged = Judged(self.row.name, route, wanted=dict(self.row.counts))
        start = time.perf_counter()
        try:
            path = self.file(route)
        except Exception as error:  # noqa: BLE001 - exporters raise what they like
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if route == CAPTURE:
                judged.wrong.append(f"capture fails: {reason}")
            else:
                judged.not_offered = reason
        else:
            self._judge(judged, path, names)
        judged.seconds = time.perf_counter() - start
        return judged

    def _judge(self, judged: Judged, path: Path, names: Sequence[str]) -> None:
        answers, failure = self.original(path)
        kept = kept_cases(self.cases, answers)
        if not answers:
            judged.notes.append(f"the file does not run in onnxruntime: {failure}")
        elif len(kept) < len(self.cases):
            judged.notes.append(f"the file runs at the traced length {TRACED} only: {failure}")
        elif len(answers) < len(self.cases):
            judged.notes.append(
                f"the file fails on {len(self.cases) - len(answers)} of {len(self.cases)} cases: {failure}"
            )
        judged.file = max((apart(case, answers[case.name]) for case in kept if case.name in answers), default=None)
        # A file that is wrong by itself stays as it is. Tfx's own capture has no such excuse.
        excused = {} if judged.route == CAPTURE else answers
        if judged.file is not None and judged.file > LIMIT:
            judged.notes.append(f"file differs from torch by {judged.file:.1e}")
        try:
            model = foreign.load(path)
            foreign.to_canonical_opset(model, path.name)
            report = pipeline.raise_model(model)
        except TfxError as error:
            judged.wrong.append(f"raising: {error}")
            return
        judged.found = {name: report.counts.get(name, 0) for name in self.row.counts}
        judged.refusals = [f"{each.rule}: {each.reason}" for each in report.refusals]
        judged.wrong += count_faults(self.row, judged.found)
        for name in names:
            judged.wrong += self._lowered(judged, model, report, name, kept, excused)

    def original(self, path: Path) -> tuple[dict[str, np.ndarray], str]:
        """What a file answers as it was exported, by case, without onnxruntime's optimizations; and its last error."""
        answers: dict[str, np.ndarray] = {}
        failure = ""
        try:
            session = create_session(path, threads=1, optimize=False)
        except TfxError as error:
            return answers, str(error)
        for case in self.cases:
            try:
                answers[case.name] = session.run(case.inputs, [OUTPUT])[OUTPUT]
            except TfxError as error:
                failure = str(error).rpartition("onnxruntime refuses it: ")[2][:200]
        return answers, failure

    def _lowered(
        self,
        judged: Judged,
        raised: ir.Model,
        report: pipeline.Report,
        name: str,
        cases: Sequence[Case],
        excused: Mapping[str, np.ndarray],
    ) -> list[str]:
        """Lowers a copy for one target and runs it, with onnxruntime's optimizations and without."""
        path = self.folder / f"{Path(file_name(judged.route)).stem}-{name}.onnx"
        wrong: list[str] = []
        try:
            model = raised.clone()
            pipeline.lower_model(model, targets.get(name), dataclasses.replace(report, fired={}, refusals=[]))
            ir.save(model, path)
            for optimize in (True, False):
                session = create_session(path, threads=1, optimize=optimize)
                differences = {
                    case.name: distance(case, session.run(case.inputs, [OUTPUT])[OUTPUT], excused.get(case.name))
                    for case in cases
                }
                worst = max(differences, key=lambda each: differences[each])
                judged.max_abs[name] = max(judged.max_abs.get(name, 0.0), differences[worst])
                if differences[worst] > LIMIT:
                    how = "" if optimize else ", onnxruntime's optimizations off"
                    wrong.append(f"{name}{how}: {worst} is off by {differences[worst]:.1e}, wanted {LIMIT:.0e}")
        except TfxError as error:
            wrong.append(f"{name}: {error}")
            judged.max_abs[name] = float("inf")
        return wrong


def count_faults(row: Row, found: Mapping[str, int]) -> list[str]:
    """Canonical counts that are not the module's; an exporter may have folded some away (``Row.foldable``)."""
    return [
        f"{name}: found {found[name]}, wanted {wanted}"
        for name, wanted in row.counts.items()
        if not wanted - row.foldable.get(name, 0) <= found[name] <= wanted
    ]


def kept_cases(cases: Sequence[Case], answers: Mapping[str, np.ndarray]) -> list[Case]:
    """The cases to judge on: all, unless the file as exported holds the length it was traced at as a number.

    That is so when it runs on cases of that length and on none of any other one.
    """
    lengths = {case.length for case in cases if case.name in answers}
    return [case for case in cases if case.length == TRACED] if lengths == {TRACED} else list(cases)


def distance(case: Case, found: np.ndarray, file: np.ndarray | None) -> float:
    """The difference to torch; to the file, where that is further from torch than the limit."""
    to_torch = apart(case, found)
    if to_torch <= LIMIT or file is None or apart(case, file) <= LIMIT:
        return to_torch
    return apart(case, found, file)


def apart(case: Case, found: np.ndarray, wanted: np.ndarray | None = None) -> float:
    """Largest absolute difference at attended positions; infinite for another shape, and where one is not a number."""
    wanted = case.wanted if wanted is None else wanted
    if found.shape != wanted.shape:
        return float("inf")
    if case.attended is not None:
        found, wanted = found[case.attended], wanted[case.attended]
    both = np.isnan(found) & np.isnan(wanted)
    difference = np.abs(found.astype(np.float64) - wanted)[~both]
    return float("inf") if np.isnan(difference).any() else float(difference.max(initial=0.0))


def _cases(row: Row, of: Source) -> Iterable[Case]:
    """Batches, lengths and masks; one length where every axis but the batch is fixed, no masks where there is none."""
    flexible = any("sequence" in spec.shape for spec in of.inputs)
    masked = any(spec.role == "attention_mask" for spec in of.inputs)
    for batch in BATCHES:
        for length in LENGTHS if flexible else (TRACED,):
            for pattern in MASK_PATTERNS if masked and length > 1 else ("full",):
                inputs = feeds(row, batch, length, pattern, seed=batch + length)
                with inference(of.module):
                    wanted = of.call({name: torch.from_numpy(array) for name, array in inputs.items()})[OUTPUT].numpy()
                name = f"batch {batch}, length {length}, {pattern}"
                yield Case(name, length, inputs, attended_positions(of.inputs, inputs), wanted)
