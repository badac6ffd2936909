"""Other graphs that compute what a bundle computes: its own graph, raised and put together in another way."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes

from ..errors import SourceError
from ..runtime.bundle import Bundle, write_bundle
from ..runtime.golden import GOLDEN_NAME
from ..runtime.manifest import COUNTS, Manifest
from ..runtime.parity import TOLERANCES, ParityReport, Tolerance, verify
from ..runtime.providers import StrictSession, create_session
from ..runtime.text import text_encoder
from . import targets
from .calibration import Calibration, calibrate
from .foreign import load, to_canonical_opset
from .fusion import Fusion
from .layout import apply_layout
from .lowering import PRIMITIVES, rules_for
from .lowering.attention import PackedAttention
from .lowering.layer_norm import SkipLayerNorm
from .optimizing import raise_whole
from .pipeline import Report, lower_model, raise_model
from .precision import PRECISIONS, PrecisionReport, apply_precision
from .save import save

__all__ = ["LOWERINGS", "Agreement", "Limit", "Lowering", "Variants", "precisions"]


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A way to write canonical nodes for onnxruntime.

    Attributes:
        summary: What it does differently.
        rules: In order.
    """

    summary: str
    rules: tuple[type[Fusion], ...]


_CPU = rules_for(targets.get("cpu"), None)
_PRIMITIVES = tuple(rule for since, rules in PRIMITIVES if since > 18 for rule in rules)

LOWERINGS: Mapping[str, Lowering] = {
    "packed": Lowering("what --target cpu writes: projections in the attention operator", _CPU),
    "split": Lowering(
        "projections beside the attention operator, not in it",
        tuple(rule for rule in _CPU if rule is not PackedAttention),
    ),
    "skip": Lowering("residual addition and norm in one operator", (SkipLayerNorm, *_CPU)),
    "pieces": Lowering("ai.onnx alone, attention as products and softmax", _PRIMITIVES),
}
"""By name; the first one is what is taken when a graph is put together again for another reason."""

_LOSSY = 0.9999
"""A limit above this lets no precision in but the bundle's own, so none is made."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How near a variant comes to the golden.

    Attributes:
        max_abs: Largest difference.
        min_cosine: Smallest cosine of a vector that stands for a text where there are such outputs, else of any.
        report: All of it.
        calibrated: Smallest cosine with fp32 on the samples that a precision was judged on, ``None`` without.
    """

    max_abs: float
    min_cosine: float
    report: ParityReport
    calibrated: float | None = None

    @property
    def cosine(self) -> float:
        """What a limit is held against: the cosine on real texts where there is one, else on the golden."""
        return self.min_cosine if self.calibrated is None else self.calibrated


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a variant has to reach.

    Attributes:
        own: The bundle's own tolerance.
        min_cosine: Of vectors, in its place; ``None`` for the bundle's own. A precision that was judged on texts is
            held to it there, and to its own tolerance on the golden.
    """

    own: Tolerance
    min_cosine: float | None

    @classmethod
    def of(cls, manifest: Manifest, min_cosine: float | None) -> Limit:
        """The limit of a bundle."""
        return cls(Tolerance(**manifest.tolerance), min_cosine)

    @property
    def lossy(self) -> bool:
        """Whether other precisions have a chance."""
        return self.min_cosine is not None and self.min_cosine <= _LOSSY

    def problem(self, found: Agreement) -> str | None:
        """Why a variant is outside of the limit, ``None`` when it is inside."""
        if self.min_cosine is None:
            report = dataclasses.replace(found.report, tolerance=self.own, cases=_judged(found.report, self.own))
            return None if report.passed else report.summary()
        broken = [case.comparison.problem for case in found.report.cases if case.comparison.problem]
        if broken:
            return f"outputs can never agree: {broken[0]}"
        # What is written has to pass `tfx verify`, whatever else is allowed.
        if not found.report.passed:
            return found.report.summary()
        where = "the golden" if found.calibrated is None else "calibration texts"
        if not found.cosine >= self.min_cosine:
            return f"smallest cosine on {where} is {found.cosine:.6f}, wanted {self.min_cosine:g}"
        return None


def _judged(report: ParityReport, tolerance: Tolerance) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(case, passed=tolerance.allows(case.comparison)) for case in report.cases)


def precisions(manifest: Manifest, limit: Limit) -> list[str]:
    """Precisions worth trying: the others that run on a CPU, where the limit lets one in.

    No cosine says that a text's vector changes with its company, so nobody gets int8-dynamic without asking for it.
    """
    if not limit.lossy:
        return []
    left_out = {manifest.precision, "int8-dynamic"}
    return [name for name, each in PRECISIONS.items() if name not in left_out and "cpu" in each.targets]


class Variants:
    """Makes variants of a bundle, each once.

    Args:
        base: The bundle.
        folder: Where variants are written.
        lowering: What the bundle's own is called.
        source: What the bundle was made of, as :func:`.rebuild.rebuild` takes it; needed where its own graph has lost
            what a variant wants.
        texts: A file of texts to calibrate and judge precisions on, as :func:`.calibration.calibrate` takes it.
    """

    def __init__(
        self, base: Bundle, folder: Path, lowering: str, source: str | None = None, texts: str | None = None
    ) -> None:
        self.base = base
        self._source = source
        self._texts = texts
        self._folder = folder
        self._own = (base.manifest.layout, lowering, base.manifest.precision)
        self._made: dict[tuple[str, str, str], Bundle] = {self._own: base}
        self._agreement: dict[tuple[str, str, str], Agreement] = {}
        self._quantized: dict[tuple[str, str, str], PrecisionReport] = {}
        self._proven: dict[tuple[str, str, str], Manifest] = {self._own: base.manifest}

    def bundle(self, layout: str, lowering: str, precision: str) -> Bundle:
        """The variant, verified against nothing yet.

        Raises:
            TfxError: It cannot be made; the message says why.
        """
        key = (layout, lowering, precision)
        if key not in self._made:
            self._made[key] = write_bundle(self._folder / "-".join(key), lambda folder: self._fill(folder, *key))
            gc.collect()  # graphs are circles, and hold weights
        return self._made[key]

    def agreement(self, layout: str, lowering: str, precision: str) -> Agreement:
        """How near the variant comes to the golden.

        Raises:
            TfxError: It cannot be made or run.
        """
        key = (layout, lowering, precision)
        if key not in self._agreement:
            made = self.bundle(*key)
            session = create_session(made.model_path)
            manifest = made.manifest
            report = verify(
                session.run,
                made.golden(),
                Tolerance(**manifest.tolerance),
                inputs=manifest.inputs,
                outputs=manifest.outputs,
            )
            texts = [case.comparison for case in report.cases if not case.comparison.per_token]
            cosines = [each.min_cosine for each in texts or [case.comparison for case in report.cases]]
            calibrated = (manifest.quantization or {}).get("worst_cosine")
            if report.passed and key not in self._proven:
                self._proven[key] = self._evidence(key, made, session)
            self._agreement[key] = Agreement(report.max_abs, min(cosines), report, calibrated)
        return self._agreement[key]

    def proven(self, layout: str, lowering: str, precision: str) -> Manifest:
        """The variant's manifest with what was measured on its own file: parity, and variance where it is quantised.

        Raises:
            TfxError: It cannot be made or run, or does not keep to its tolerance.
        """
        key = (layout, lowering, precision)
        if key not in self._proven:
            self.agreement(*key).report.check()
        return self._proven[key]

    def _evidence(self, key: tuple[str, str, str], made: Bundle, session: StrictSession) -> Manifest:
        from .export import _measured, _verify

        manifest = dataclasses.replace(made.manifest, parity=_verify(session, made.golden(), made.manifest))
        if manifest.quantization is None:
            return manifest
        quantized = self._quantized.get(key)
        if quantized is None:  # the bundle's own quantised weights, lowered in another way
            names = [field.name for field in dataclasses.fields(PrecisionReport)]
            quantized = PrecisionReport(**{name: each for name, each in manifest.quantization.items() if name in names})
        return dataclasses.replace(
            manifest, quantization=_measured(session, quantized, self._samples().feeds, manifest)
        )

    def _samples(self) -> Calibration:
        base = self.base.manifest
        encoder = text_encoder(self.base) if base.tokenizer is not None else None
        return calibrate(base.inputs, self._texts, encoder=encoder, max_length=base.max_length)

    def _fill(self, folder: Path, layout: str, lowering: str, precision: str) -> Manifest:
        """Writes the variant's files and returns its manifest."""
        base, profile = self.base.manifest, targets.get("cpu")
        if lowering not in LOWERINGS:
            raise SourceError(f"{self.base.path}: its graph cannot be made again as it was {lowering}")
        model, report, own, has = self._canonical(layout, precision)
        if layout != own:
            apply_layout(model, layout, profile, base.inputs, report.refusals)
        # No precision reaches weights inside of an attention operator.
        packed = PRECISIONS[precision].attention
        rules = [rule for rule in LOWERINGS[lowering].rules if packed or rule is not PackedAttention]
        lower_model(model, profile, report, rules=rules)
        quantization = base.quantization if precision == base.precision else None
        tolerance = dict(base.tolerance) if precision == base.precision else TOLERANCES[precision].to_json()
        if precision != has:
            samples = self._samples()
            quantized = apply_precision(model, precision, samples.feeds, target=profile)
            quantized.calibration["source"] = samples.source
            self._quantized[layout, lowering, precision] = quantized
            quantization = quantized.to_json()
        passes.CheckerPass()(model)
        save(model, folder / base.model["file"])
        opset, ir_version = model.opset_imports[""], model.ir_version
        domains = sorted(model.opset_imports)
        del model
        kept = [GOLDEN_NAME, *([base.tokenizer["file"]] if base.tokenizer else [])]
        for name in (name for name in base.files if name in kept):
            shutil.copyfile(self.base.path / name, folder / name)
        return dataclasses.replace(
            base,
            target="cpu",
            layout=layout,
            precision=precision,
            tolerance=tolerance,
            quantization=quantization,
            model={"file": base.model["file"], "opset": opset, "ir_version": ir_version, "domains": domains},
            tuning=None,
            parity=None,
        )

    def _canonical(self, layout: str, precision: str) -> tuple[ir.Model, Report, str, str]:
        """A canonical graph that can get this layout and precision, its report, and the layout and precision it has.

        It is the bundle's own graph, raised again, where that has lost nothing that is wanted: float32 numbers, or
        padded positions. Else the source is captured anew.
        """
        base = self.base.manifest
        if base.precision in ("fp32", precision) and base.layout in ("padded", layout):
            model = load(self.base.model_path)
            to_canonical_opset(model, self.base.model_path.name)
            report = raise_whole(model)
            lost = [name for name in COUNTS if report.counts[name] < base.counts[name]]
            if lost:
                raise SourceError(f"{self.base.path}: its {lost[0]} nodes cannot all be raised again")
            return model, report, base.layout, base.precision
        from .capture import bounded, capture
        from .rebuild import rebuild

        live = rebuild(base, self._source)
        model = capture(live)
        bounded(live, model)
        model.metadata_props.clear()
        return model, raise_model(model), "padded", "fp32"
