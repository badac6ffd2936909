"""``tfx.json``, the manifest of a bundle, format 1.

==========  ==========================================================================================
key         value
==========  ==========================================================================================
format      1
source      {kind, name, sha256, notes}: what was exported; a reference encoder's notes hold its config and seed
inputs      [{name, dtype, shape, role, limit}]: an axis is a size or a name; ``limit`` bounds integer values;
            role is token_ids | attention_mask (1 attends) | padding_mask (1 is ignored; bool or integer) |
            token_type_ids | position_ids | features
outputs     [{name, dtype, shape}]
max_length  longest sequence in tokens, or null
pad_id      token id that pads a batch
pooling     {mode, normalize, output} or null: the output that holds one vector per text
tokenizer   {file, max_length} or null
target      cpu | cuda | web | portable
precision   fp32 | fp16 | int8 | int8-dynamic | int8-block | int4
layout      padded | ragged
model       {file, opset, ir_version, domains}
counts      {attention, layer_norm, rms_norm, gelu, rotary}: canonical nodes
refusals    [{rule, where, reason}]: fusions that did not fire
tolerance   {max_abs, min_cosine, min_token_cosine}, each a number or null; the last one, for vectors of single
            positions, may be missing
parity      {passed, max_abs, min_cosine, provider, cases} measured at export, or null
files       {name: {bytes, sha256}}: every file but this one
versions    {package: version} of what made the bundle
quantization  may be missing; {scheme, changed, kept, calibration, worst_cosine, batch_variance, padding_variance,
            cpu, notes}: how numbers are kept in fewer bits, how many products and tables are, {where, reason} of
            those that are not, {samples, tokens, source} it was calibrated and judged on, the smallest cosine of a
            text's vector with fp32 there, the largest change of an output when the same text is run beside others
            or padded (0: none; null: not measured), the features of the CPU that measured it
tuning      may be missing; {threads, spinning, schedule, log}: what ``tfx tune`` found fastest and a session takes
            unless told otherwise: threads inside an operator, whether idle ones wait in a loop, {workers, threads,
            batch_tokens} of ``Session.run_many``; each may be null. The log is one of the files
==========  ==========================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import BundleError
from . import fields
from .tensors import TensorSpec

__all__ = ["COUNTS", "FORMAT", "MANIFEST_NAME", "Manifest", "bare_name"]

FORMAT = 1
MANIFEST_NAME = "tfx.json"

COUNTS = ("attention", "layer_norm", "rms_norm", "gelu", "rotary")
"""Canonical nodes that are counted, by the names that ``counts`` has; the one list of them."""

_LAYOUTS = ("padded", "ragged")
_POOLINGS = ("cls", "mean", "max", "last")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """The fields of ``tfx.json``, as the module's table lists them; ``format`` is implied."""

    source: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_length: int | None
    pad_id: int
    target: str
    precision: str
    layout: str
    model: Mapping[str, Any]
    counts: Mapping[str, int]
    tolerance: Mapping[str, float | None]
    pooling: Mapping[str, Any] | None = None
    tokenizer: Mapping[str, Any] | None = None
    refusals: tuple[Mapping[str, str], ...] = ()
    parity: Mapping[str, Any] | None = None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    tuning: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``tfx.json`` holds."""
        optional = {key: getattr(self, key) for key in _OPTIONAL}
        return {
            "format": FORMAT,
            "source": dict(self.source),
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "max_length": self.max_length,
            "pad_id": self.pad_id,
            "pooling": None if self.pooling is None else dict(self.pooling),
            "tokenizer": None if self.tokenizer is None else dict(self.tokenizer),
            "target": self.target,
            "precision": self.precision,
            "layout": self.layout,
            "model": dict(self.model),
            "counts": dict(self.counts),
            "refusals": [dict(refusal) for refusal in self.refusals],
            "tolerance": dict(self.tolerance),
            "parity": None if self.parity is None else dict(self.parity),
            "files": {name: dict(entry) for name, entry in self.files.items()},
            "versions": dict(self.versions),
            **{key: dict(value) for key, value in optional.items() if value is not None},
        }

    @classmethod
    def parse(cls, content: str | bytes) -> Manifest:
        """Read the text of a ``tfx.json``.

        Raises:
            BundleError: not JSON, a newer format, or a field that is missing or wrong; the message names it.
        """
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{MANIFEST_NAME}: not JSON: {error}") from error
        return cls.from_json(value)

    @classmethod
    def from_json(cls, value: object) -> Manifest:
        """Check and read a parsed ``tfx.json``; errors as in ``parse``."""
        top = fields.mapping(value, MANIFEST_NAME)
        version = fields.integer(fields.required(top, "format", MANIFEST_NAME), _at("format"), minimum=1)
        if version > FORMAT:
            raise BundleError(
                f"{_at('format')}: found {version}, this tfx reads format {FORMAT}; install a newer tfx-onnx"
            )
        fields.only_keys(top, ("format", *_KEYS, *_OPTIONAL), MANIFEST_NAME)
        get = {key: fields.required(top, key, MANIFEST_NAME) for key in _KEYS}
        manifest = cls(
            source=_source(get["source"]),
            inputs=_tensors(get["inputs"], _at("inputs"), output=False),
            outputs=_tensors(get["outputs"], _at("outputs"), output=True),
            max_length=None
            if get["max_length"] is None
            else fields.integer(get["max_length"], _at("max_length"), minimum=1),
            pad_id=fields.integer(get["pad_id"], _at("pad_id")),
            pooling=None if get["pooling"] is None else _pooling(get["pooling"]),
            tokenizer=None if get["tokenizer"] is None else _tokenizer(get["tokenizer"]),
            target=fields.text(get["target"], _at("target")),
            precision=fields.text(get["precision"], _at("precision")),
            layout=fields.choice(get["layout"], _LAYOUTS, _at("layout")),
            model=_model(get["model"]),
            counts=_counts(get["counts"]),
            refusals=tuple(
                _texts(entry, ("rule", "where", "reason"), f"{_at('refusals')}[{i}]")
                for i, entry in enumerate(fields.array(get["refusals"], _at("refusals")))
            ),
            tolerance=_tolerance(get["tolerance"]),
            parity=None if get["parity"] is None else _parity(get["parity"]),
            files=_files(get["files"]),
            versions={
                key: fields.text(entry, f"{_at('versions')}.{key}")
                for key, entry in fields.mapping(get["versions"], _at("versions")).items()
            },
            quantization=None if top.get("quantization") is None else _quantization(top["quantization"]),
            tuning=None if top.get("tuning") is None else _tuning(top["tuning"]),
        )
        manifest._check_references()
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            # NaN or a lone surrogate where any value may stand, such as in the source's notes.
            raise BundleError(f"{MANIFEST_NAME}: cannot be written as JSON: {error}") from error
        return manifest

    def _check_references(self) -> None:
        """Refuse a manifest whose fields name tensors or files that it does not list."""
        if self.pooling is not None and self.pooling["output"] not in [spec.name for spec in self.outputs]:
            names = ", ".join(spec.name for spec in self.outputs)
            raise BundleError(f'{_at("pooling.output")}: found "{self.pooling["output"]}", wanted one of {names}')
        owners = {"model.file": self.model, "tokenizer.file": self.tokenizer, "tuning.log": self.tuning}
        for where, owner in owners.items():
            name = None if owner is None else owner[where.partition(".")[2]]
            if name is not None and self.files and name not in self.files:
                raise BundleError(f'{_at(where)}: "{name}" is not among the files')


_OPTIONAL = ("quantization", "tuning")
"""Keys that came after the first bundles of this format were written; they are left out where they say nothing."""

_KEYS = tuple(key for key in Manifest.__dataclass_fields__ if key not in _OPTIONAL)


def bare_name(value: object, where: str) -> str:
    """Return a file name that cannot leave its folder: no separators, drives, dots alone or control characters.

    Raises:
        BundleError: the name could.
    """
    name = fields.text(value, where)
    if name in (".", "..") or re.search(r'[/\\:\x00-\x1f<>"|?*]', name) or len(name.encode()) > 255:
        raise fields.wrong(where, name, "a bare file name inside the bundle")
    return name


def _at(key: str) -> str:
    return f"{MANIFEST_NAME}: {key}"


def _texts(value: object, keys: tuple[str, ...], where: str) -> dict[str, str]:
    entry = fields.mapping(value, where)
    fields.only_keys(entry, keys, where)
    return {key: fields.text(fields.required(entry, key, where), f"{where}.{key}", empty=True) for key in keys}


def _source(value: object) -> dict[str, Any]:
    where = _at("source")
    entry = fields.mapping(value, where)
    for key in ("kind", "name"):
        fields.text(fields.required(entry, key, where), f"{where}.{key}")
    if entry.get("sha256") is not None:
        fields.text(entry["sha256"], f"{where}.sha256")
    return entry


def _tensors(value: object, where: str, *, output: bool) -> tuple[TensorSpec, ...]:
    specs = tuple(
        TensorSpec.from_json(entry, f"{where}[{i}]", output=output)
        for i, entry in enumerate(fields.array(value, where))
    )
    if not specs:
        raise BundleError(f"{where}: found none, wanted at least one")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise BundleError(f"{where}: names repeat: {', '.join(names)}")
    return specs


def _pooling(value: object) -> dict[str, Any]:
    where = _at("pooling")
    entry = fields.mapping(value, where)
    fields.only_keys(entry, ("mode", "normalize", "output"), where)
    fields.choice(fields.required(entry, "mode", where), _POOLINGS, f"{where}.mode")
    fields.text(fields.required(entry, "output", where), f"{where}.output")
    if not isinstance(fields.required(entry, "normalize", where), bool):
        raise BundleError(f"{where}.normalize: found {entry['normalize']!r}, wanted true or false")
    return entry


def _tokenizer(value: object) -> dict[str, Any]:
    where = _at("tokenizer")
    entry = fields.mapping(value, where)
    fields.only_keys(entry, ("file", "max_length"), where)
    bare_name(fields.required(entry, "file", where), f"{where}.file")
    if entry.get("max_length") is not None:
        fields.integer(entry["max_length"], f"{where}.max_length", minimum=1)
    return {"file": entry["file"], "max_length": entry.get("max_length")}


def _model(value: object) -> dict[str, Any]:
    where = _at("model")
    entry = fields.mapping(value, where)
    bare_name(fields.required(entry, "file", where), f"{where}.file")
    for key in ("opset", "ir_version"):
        fields.integer(fields.required(entry, key, where), f"{where}.{key}", minimum=1)
    for i, domain in enumerate(fields.array(fields.required(entry, "domains", where), f"{where}.domains")):
        fields.text(domain, f"{where}.domains[{i}]", empty=True)
    return entry


def _counts(value: object) -> dict[str, int]:
    where = _at("counts")
    entry = fields.mapping(value, where)
    fields.only_keys(entry, COUNTS, where)
    return {key: fields.integer(fields.required(entry, key, where), f"{where}.{key}") for key in COUNTS}


def _tolerance(value: object) -> dict[str, float | None]:
    where = _at("tolerance")
    entry = fields.mapping(value, where)
    bounds = {"max_abs": (0,), "min_cosine": (-1, 1), "min_token_cosine": (-1, 1)}
    fields.only_keys(entry, tuple(bounds), where)
    return {
        key: None if entry.get(key) is None else fields.number(entry[key], f"{where}.{key}", *limits)
        for key, limits in bounds.items()
        if key in entry or key != "min_token_cosine"
    }


def _parity(value: object) -> dict[str, Any]:
    where = _at("parity")
    entry = fields.mapping(value, where)
    if not isinstance(fields.required(entry, "passed", where), bool):
        raise BundleError(f"{where}.passed: found {entry['passed']!r}, wanted true or false")
    for key in ("max_abs", "min_cosine"):
        if fields.required(entry, key, where) is not None:
            fields.number(entry[key], f"{where}.{key}")
    return entry


def _quantization(value: object) -> dict[str, Any]:
    where = _at("quantization")
    entry = fields.mapping(value, where)
    numbers = {"worst_cosine": (-1, 1), "batch_variance": (0,), "padding_variance": (0,)}
    objects = ("calibration", "cpu", "notes")
    fields.only_keys(entry, ("scheme", "changed", "kept", *objects, *numbers), where)
    fields.text(fields.required(entry, "scheme", where), f"{where}.scheme")
    fields.integer(fields.required(entry, "changed", where), f"{where}.changed")
    for i, each in enumerate(fields.array(fields.required(entry, "kept", where), f"{where}.kept")):
        _texts(each, ("where", "reason"), f"{where}.kept[{i}]")
    for key in objects:
        fields.mapping(entry.get(key, {}), f"{where}.{key}")
    for key, limits in numbers.items():
        if entry.get(key) is not None:
            fields.number(entry[key], f"{where}.{key}", *limits)
    return entry


def _tuning(value: object) -> dict[str, Any]:
    where = _at("tuning")
    entry = fields.mapping(value, where)
    fields.only_keys(entry, ("threads", "spinning", "schedule", "log"), where)
    if entry.get("threads") is not None:
        fields.integer(entry["threads"], f"{where}.threads", minimum=1)
    if not isinstance(entry.get("spinning"), bool | None):
        raise fields.wrong(f"{where}.spinning", entry["spinning"], "true, false or null")
    if entry.get("schedule") is not None:
        keys = ("workers", "threads", "batch_tokens")
        schedule = fields.mapping(entry["schedule"], f"{where}.schedule")
        fields.only_keys(schedule, keys, f"{where}.schedule")
        for key in keys:
            fields.integer(fields.required(schedule, key, f"{where}.schedule"), f"{where}.schedule.{key}", minimum=1)
    if entry.get("log") is not None:
        bare_name(entry["log"], f"{where}.log")
    return {key: entry.get(key) for key in ("threads", "spinning", "schedule", "log")}


def _files(value: object) -> dict[str, dict[str, Any]]:
    where = _at("files")
    files = fields.mapping(value, where)
    for name, entry in files.items():
        bare_name(name, where)
        if name == MANIFEST_NAME:
            raise BundleError(f"{where}: lists {MANIFEST_NAME} itself")
        inner = f'{where}["{name}"]'
        fields.integer(fields.required(fields.mapping(entry, inner), "bytes", inner), f"{inner}.bytes")
        digest = fields.text(fields.required(entry, "sha256", inner), f"{inner}.sha256")
        if not _SHA256.fullmatch(digest):
            raise fields.wrong(f"{inner}.sha256", digest, "64 hexadecimal digits")
    return files
