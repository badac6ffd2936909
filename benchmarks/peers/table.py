"""Markdown tables out of what ``run.py`` wrote: ``python table.py FILE.json... [--goals] [--into README.md]``.

Several files are one result where they hold different workloads; a ratio is always taken inside one, round by round.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from engines import BASELINE
from workloads import BATCHES, CORPUS

from tfx.errors import InputError, TfxError

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"

_CORPUS_BASELINE = "sentence-torch"
_TITLES = {"1x16": "1 x 16", "1x128": "1 x 128", "8x128": "8 x 128", "mixed": "16 x 256, 30 % attended"}

Entry = Mapping[str, Any]


def merged(files: Iterable[Path]) -> dict[str, Any]:
    """Return the workloads of several results, each with the precision of its engines, and where they were measured.

    Raises:
        InputError: a file is no result, two hold the same workload, or they are of different machines or threads.
    """
    workloads: dict[str, Any] = {}
    places: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            where = {"cpu": found["environment"]["cpu"], "threads": found["threads"]}
            for name, each in found["workloads"].items():
                if name in workloads:
                    raise InputError(f"{file}: holds {name}, which another file holds too")
                facts = found["engines"][CORPUS if name == CORPUS else "encoder"]
                engines = {engine: {**facts[engine], **figures} for engine, figures in each["engines"].items()}
                workloads[name] = {**each, "engines": engines}
            places[str(file)] = {**where, "environment": found["environment"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: not written by run.py: {error!r}") from error
    kinds = {json.dumps({k: v for k, v in place.items() if k != "environment"}) for place in places.values()}
    if len(kinds) != 1:
        raise InputError(f"files: found results of {' and '.join(sorted(kinds))}, wanted one machine")
    return {"workloads": workloads, **next(iter(places.values()))}


def ratios(above: Entry, below: Entry) -> list[float]:
    """Divide the times of two engines round by round."""
    return [a / b for a, b in zip(above["rounds_ms"], below["rounds_ms"], strict=False)]


def _speed(engines: Mapping[str, Entry], name: str, baseline: str) -> str:
    if baseline not in engines or name == baseline:
        return "1" if name == baseline else ""
    each = ratios(engines[baseline], engines[name])
    return f"{statistics.median(each):.2f} ({min(each):.2f} - {max(each):.2f})"


def speeds(found: Mapping[str, Any]) -> list[str]:
    """Return the tables: one for the batches, one for the corpus where there is one."""
    workloads = found["workloads"]
    names = [name for name in BATCHES if name in workloads]
    lines: list[str] = []
    if names:
        order = {engine: None for name in names for engine in workloads[name]["engines"]}
        head = [f"{_TITLES.get(name, name)}, ms (times as fast)" for name in names]
        lines += [*_head(["engine", "precision", *head]), *(_row(workloads, names, engine) for engine in order), ""]
    if CORPUS in workloads:
        engines = workloads[CORPUS]["engines"]
        columns = ["engine", "precision", "s", f"times as fast as {_CORPUS_BASELINE}", "worst cosine"]
        lines += _head([*columns, "alone or beside others", "peak MB"])
        for name, each in engines.items():
            speed = _speed(engines, name, _CORPUS_BASELINE)
            cells = [name, each["precision"], f"{each['ms'] / 1e3:.2f}", speed, _cosine(each), _variance(each)]
            lines.append(_line([*cells, f"{each['peak_mb']:.0f}"]))
        lines.append("")
    return lines


def _row(workloads: Mapping[str, Any], names: Sequence[str], engine: str) -> str:
    cells = [engine]
    precision = ""
    for name in names:
        engines = workloads[name]["engines"]
        if engine not in engines:
            cells.append("")
            continue
        precision = engines[engine]["precision"]
        speed = ""
        if BASELINE in engines:
            speed = f" ({statistics.median(ratios(engines[BASELINE], engines[engine])):.2f})"
        cells.append(f"{_ms(engines[engine]['ms'])}{speed}")
    return _line([cells[0], precision, *cells[1:]])


def details(found: Mapping[str, Any], name: str) -> list[str]:
    """Return the table of one batch: spread, memory, and how right the answers are."""
    engines = found["workloads"][name]["engines"]
    columns = ["engine", "precision", "ms", f"times as fast as {BASELINE}", "peak MB", "largest difference"]
    lines = _head([*columns, "worst cosine", "alone or beside others"])
    for engine, each in engines.items():
        cells = [
            engine,
            each["precision"],
            _ms(each["ms"]),
            _speed(engines, engine, BASELINE),
            f"{each['peak_mb']:.0f}",
        ]
        off = f"{each['max_abs']:.1e}" if "max_abs" in each else ""
        lines.append(_line([*cells, off, _cosine(each), _variance(each)]))
    return [*lines, ""]


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _cosine(each: Entry) -> str:
    return f"{each['min_cosine']:.5f}" if "min_cosine" in each else ""


def _variance(each: Entry) -> str:
    off = (each.get("variance") or {}).get("max_abs")
    return "" if off is None else "0" if off == 0 else f"{off:.0e}"


def _head(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Goal:
    """Something to be reached.

    Attributes:
        workload: where.
        precision: of tfx's engine.
        against: names of the engines of which the best one counts.
        least: how many times as fast, or None.
        most: how many times its time or memory at most, or None.
        what: ``ms`` or ``peak_mb``.
    """

    workload: str
    precision: str
    against: Callable[[str, Entry], bool]
    text: str
    least: float | None = None
    most: float | None = None
    what: str = "ms"


def _named(*names: str) -> Callable[[str, Entry], bool]:
    return lambda name, _: name in names


def _peers(precision: str) -> Callable[[str, Entry], bool]:
    return lambda name, each: not name.startswith(("tfx-", "floor-")) and each["precision"] == precision


_ORT_INT8 = _named("onnxruntime-int8", "onnxruntime-optimizer-int8")

GOALS = (
    Goal("mixed", "fp32", _named(BASELINE), "onnxruntime", least=3.8),
    Goal("mixed", "fp32", _peers("fp32"), "best fp32 peer", least=2.9),
    Goal("mixed", "fp32", _named("floor-fp32"), "matrix floor", most=1.2),
    Goal("mixed", "int8", _named(BASELINE), "onnxruntime fp32", least=8.5),
    Goal("mixed", "int8", _peers("int8"), "best int8 peer", least=2.0),
    Goal("8x128", "fp32", _peers("fp32"), "best fp32 peer", least=1.0),
    Goal("8x128", "int8", _ORT_INT8, "onnxruntime's best int8", least=1.1),
    Goal("8x128", "int8", _named("openvino-int8"), "OpenVINO int8", least=0.0),
    Goal("1x16", "fp32", _named(BASELINE), "onnxruntime", least=1.0),
    Goal("1x128", "fp32", _named(BASELINE), "onnxruntime", least=1.0),
    Goal("1x16", "int8", _ORT_INT8, "onnxruntime's best int8", least=1.0),
    Goal("1x128", "int8", _ORT_INT8, "onnxruntime's best int8", least=1.0),
    Goal(CORPUS, "fp32", _peers("fp32"), "sentence-transformers' best fp32", least=1.5),
    Goal(CORPUS, "int8", _named("sentence-int8"), "its int8 (ONNX)", least=1.6),
    Goal(CORPUS, "int8", _peers("int8"), "its best int8", least=0.0),
    Goal("mixed", "fp32", _named(BASELINE), "onnxruntime", most=0.7, what="peak_mb"),
    Goal("mixed", "int8", _named("onnxruntime-int8"), "onnxruntime int8", most=0.5, what="peak_mb"),
)


def right(each: Entry) -> bool:
    """Return whether an engine of tfx answers as it has to: fp32 within 2e-5, int8 cosine 0.995 and 0 beside others."""
    if each["precision"] == "fp32":
        return each["max_abs"] <= 2e-5
    alone = (each.get("variance") or {"max_abs": 0.0})["max_abs"]
    return each["min_cosine"] >= 0.995 and alone == 0


def goals(found: Mapping[str, Any]) -> list[str]:
    """Return the table of goals. A ratio is tfx's advantage (speed) or its share (floor, memory), with its spread."""
    lines = _head(["workload", "tfx", "against", "wanted", "found", "reached"])
    for goal in GOALS:
        if goal.workload not in found["workloads"]:
            continue
        engines = found["workloads"][goal.workload]["engines"]
        own = {n: e for n, e in engines.items() if n.startswith("tfx-") and e["precision"] == goal.precision}
        others = {n: e for n, e in engines.items() if goal.against(n, e)}
        wanted = f">= {goal.least:g}" if goal.least is not None else f"<= {goal.most:g}"
        what = {"ms": "time", "peak_mb": "memory"}[goal.what]
        if not own or not others:
            lines.append(_line([goal.workload, goal.precision, goal.text, f"{what} {wanted}", "not measured", "?"]))
            continue
        sound = {n: e for n, e in own.items() if right(e)} or own
        mine = min(sound, key=lambda n: sound[n][goal.what])
        peer = min(others, key=lambda n: others[n][goal.what])
        each = (
            ratios(others[peer], sound[mine])
            if goal.least is not None
            else ratios(sound[mine], others[peer])
            if goal.what == "ms"
            else [sound[mine]["peak_mb"] / others[peer]["peak_mb"]]
        )
        value = statistics.median(each)
        reached = value >= goal.least if goal.least is not None else value <= (goal.most or math.nan)
        answers = "" if right(sound[mine]) else " but its answers are off"
        spread = f" ({min(each):.2f} - {max(each):.2f})" if len(each) > 1 else ""
        verdict = "reported" if goal.least == 0 else "yes" if reached and not answers else "no"
        cells = [goal.workload, mine.removeprefix("tfx-"), f"{goal.text} ({peer})", f"{what} {wanted}"]
        lines.append(_line([*cells, f"{value:.2f}{spread}{answers}", verdict]))
    return [*lines, ""]


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--goals", "show_goals", is_flag=True, help="Add what was to be reached.")
@click.option("--details", "show_details", is_flag=True, help="Add a table for each batch: spread, memory, answers.")
@click.option("--into", type=click.Path(path_type=Path), help=f"Replace what stands between {BEGIN} and {END} there.")
def main(files: Sequence[Path], show_goals: bool, show_details: bool, into: Path | None) -> None:
    """Print the tables of a result."""
    found = merged(files)
    features = " ".join(found["environment"].get("cpu_features", ()))
    lines = [f"{found['threads']} threads each, {found['cpu']} ({features}).", "", *speeds(found)]
    if show_details:
        for name in (name for name in BATCHES if name in found["workloads"]):
            lines += [f"{_TITLES.get(name, name)}:", "", *details(found, name)]
    if show_goals:
        lines += goals(found)
    if into is None:
        click.echo("\n".join(lines))
        return
    try:
        text = into.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{into}: cannot be read: {error.strerror}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InputError(f"{into}: wanted {BEGIN} and {END}, once each")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    into.write_text(before + "\n".join([BEGIN, "", *lines]) + END + after, encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except TfxError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
