"""Which encoders are raised whole, by which exporter, and is every result right? The peers' columns beside it.

Every row of the zoo goes by every route through tfx for every target, and is held against the live torch module on all
masks. Exits with 1 when a count or a number is not what it has to be.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from judging import CAPTURE, LIMIT, Judge, Judged, distance, file_name, kept_cases
from peers.environments import ensure
from rounds import run, write_json
from routes import FOREIGN
from zoo import ZOO, Row

from tfx.errors import CheckError, InputError
from tfx.exporter.quiet import quiet
from tfx.runtime.doctor import environment
from tfx.runtime.show import print_table

HERE = Path(__file__).parent
ROUTES = (CAPTURE, *FOREIGN)
TARGETS = ("cpu", "cuda", "web", "portable")
PEERS = ("onnxruntime", "onnxscript")
PEER_ROUTES = ("dynamo 18", "torchscript 17")
KINDS = {
    "ViT": "vit", "DINOv2": "vit", "SigLIP": "vit", "CLIP": "clip", "T5": "t5", "Whisper": "bart", "ALBERT": "bert",
}  # fmt: skip
"""onnxruntime's model types by the first word of a row; "bert" for all others."""

KNOWN_LIMITS: dict[str, str] = {}
"""Rows that cannot be raised soundly and why, at most two. They have to be right all the same."""


def _matching(names: Sequence[str], wanted: str | None, what: str) -> list[str]:
    """The names that are asked for, in their order: exact ones, and for a row those that begin so."""
    if not wanted:
        return list(names)
    asked = [each.strip() for each in wanted.split(";" if ";" in wanted or what == "routes" else ",")]
    for each in asked:
        if not any(_is(name, each, what) for name in names):
            raise InputError(f'{what}: found "{each}", wanted some of {"; ".join(names)}')
    return [name for name in names if any(_is(name, each, what) for each in asked)]


def _is(name: str, asked: str, what: str) -> bool:
    return name == asked or (what == "rows" and name.startswith(f"{asked} "))


def judge_row(row: Row, routes: Sequence[str], targets: Sequence[str], peers: bool) -> list[Judged]:
    """One row by several routes, in a folder of its own that is gone afterwards."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tfx-coverage-") as folder, quiet():
        judge = Judge(row, Path(folder))
        found = [judge.judge(route, targets) for route in routes]
        if peers:
            _ask_peers(judge, found)
    return found


def _ask_peers(judge: Judge, found: Iterable[Judged]) -> None:
    """Lets the peers fuse the files that were made, in their environment, and judges their answers as ours."""
    folder = judge.folder / "peers"
    folder.mkdir()
    arrays: Any = {f"{case.name}/{name}": array for case in judge.cases for name, array in case.inputs.items()}
    np.savez(folder / "inputs.npz", **arrays)
    kind = KINDS.get(judge.row.name.partition(" ")[0], "bert")
    asked = [each for each in found if each.route in PEER_ROUTES and each.not_offered is None]
    jobs = [
        {
            "tool": tool,
            "model": str(judge.file(each.route)),
            "kind": kind,
            "inputs": str(folder / "inputs.npz"),
            "out": str(folder / f"{tool}-{Path(file_name(each.route)).stem}"),
        }
        for each in asked
        for tool in PEERS
    ]
    left = jobs
    while left:
        (folder / "jobs.json").write_text(json.dumps(left))
        subprocess.run(
            [_python(), HERE / "peers" / "fusions.py", folder / "jobs.json"], capture_output=True, check=False
        )
        done = [job for job in left if Path(job["out"] + ".json").exists()]
        rest = left[len(done) :]
        if rest:  # the first one took the process with it
            text = json.dumps({"fused": 0, "errors": {"tool": "the process died"}})
            Path(rest[0]["out"] + ".json").write_text(text)
        left = rest[1:]
    each_job = iter(jobs)
    for each in asked:
        original, _ = judge.original(judge.file(each.route))
        kept = kept_cases(judge.cases, original)
        for tool in PEERS:
            out = next(each_job)["out"]
            told = json.loads(Path(out + ".json").read_text())
            answers: dict[str, np.ndarray] = {}
            if Path(out + ".npz").exists():
                with np.load(out + ".npz", allow_pickle=False) as arrays:  # noqa: TID251 - of our own
                    answers = {name: arrays[name] for name in arrays.files}
            off = [
                distance(case, answers[case.name], original.get(case.name)) if case.name in answers else math.inf
                for case in kept
            ]
            worst = max(range(len(kept)), key=lambda i: off[i])
            each.peers[tool] = {
                "fused": told["fused"],
                "max_abs": off[worst],
                "right": off[worst] <= LIMIT,
                "worst_case": kept[worst].name,
                "error": next(iter(told["errors"].values()), None),
            }


def _python() -> Path:
    """The interpreter of the peers' environment, which is made where it is missing."""
    return ensure("onnxruntime", step=lambda what: click.echo(what, err=True))


def _all(
    rows: Sequence[Row], routes: Sequence[str], targets: Sequence[str], peers: bool, jobs: int
) -> Iterator[list[Judged]]:
    if jobs == 1:
        for row in rows:
            yield judge_row(row, routes, targets, peers)
        return
    # Rows hold functions, which do not travel to another process; their places do.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        places = [ZOO.index(row) for row in rows]
        for future in [pool.submit(_at, place, routes, targets, peers) for place in places]:
            yield future.result()


def _at(place: int, routes: Sequence[str], targets: Sequence[str], peers: bool) -> list[Judged]:
    return judge_row(ZOO[place], routes, targets, peers)


def _cell(judged: Judged) -> str:
    """Kinds found of those wanted, and the worst difference; a mark where something is wrong."""
    if judged.not_offered is not None:
        return "not offered"
    off = max(judged.max_abs.values(), default=math.inf)
    if judged.wrong:
        missing = " ".join(
            f"{name} {judged.found.get(name, 0)}/{wanted}"
            for name, wanted in judged.wanted.items()
            if judged.found.get(name, 0) != wanted
        )
        return f"WRONG {missing or 'counts right'} {off:.0e}"
    odd = "".join(
        f" {letter}" for text, letter in (("differs", "d"), ("traced", "t")) if any(text in n for n in judged.notes)
    )
    folded = " f" if judged.found != judged.wanted else ""
    return f"{off:.0e}{odd}{folded}"


def _show(found: Sequence[Judged], routes: Sequence[str], peers: bool) -> None:
    rows: dict[str, dict[str, Judged]] = {}
    for judged in found:
        rows.setdefault(judged.row, {})[judged.route] = judged
    lines: list[list[str]] = []
    for name, by_route in rows.items():
        wanted = next(iter(by_route.values())).wanted
        counts = "/".join(str(wanted[kind]) for kind in wanted)
        lines.append([name, counts, *(_cell(by_route[route]) for route in routes)])
    kinds = "/".join(next(iter(found)).wanted) if found else ""
    shown = [route.replace(", onnxruntime basic", "+ort").replace("torchscript", "ts") for route in routes]
    print_table(("model", "has", *shown), lines, left=("model", "has"))
    click.echo(
        f"has: {kinds}. In cells: largest difference to torch; all counts right unless WRONG. "
        "d: file differs from torch, t: it holds its traced length, f: the exporter folded norms of constants"
    )
    for judged in found:
        for line in (*judged.wrong, *judged.notes):
            click.echo(f"{judged.row} | {judged.route}: {line}")
        if judged.wrong:
            for line in judged.refusals[:4]:
                click.echo(f"{judged.row} | {judged.route}:   {line}")
    for reason, names in _not_offered(found).items():
        click.echo(f"not offered ({len(names)}): {', '.join(names)}: {reason}")
    if peers:
        _show_peers(found)


def _not_offered(found: Iterable[Judged]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for judged in found:
        if judged.not_offered is not None:
            reasons.setdefault(judged.not_offered[:160], []).append(f"{judged.row} by {judged.route}")
    return reasons


def _show_peers(found: Iterable[Judged]) -> None:
    lines: list[list[str]] = []
    for judged in found:
        if judged.peers:
            wanted = judged.wanted["attention"]
            ours = [f"{judged.found.get('attention', 0)}/{wanted}", "no" if _numbers_wrong(judged) else "yes"]
            theirs = [
                text
                for tool in PEERS
                for text in (f"{judged.peers[tool]['fused']}/{wanted}", "yes" if judged.peers[tool]["right"] else "no")
            ]
            lines.append([judged.row, judged.route, *ours, *theirs])
    columns = [text for tool in ("tfx", *PEERS) for text in (f"{tool} fused", "right")]
    print_table(("model", "route", *columns), lines, left=("model", "route"))


def _numbers_wrong(judged: Judged) -> bool:
    return not judged.max_abs or max(judged.max_abs.values()) > LIMIT


def summary(found: Sequence[Judged]) -> dict[str, Any]:
    """Totals of a run, and for every tool: attention fused fully in how many files, and how many of these are right."""
    offered = [judged for judged in found if judged.not_offered is None]
    totals: dict[str, Any] = {
        "files": len(offered),
        "right": sum(not judged.wrong for judged in offered),
        "not_offered": len(found) - len(offered),
    }
    compared = [judged for judged in offered if judged.peers]
    if compared:
        full = {"tfx": [each for each in compared if each.found.get("attention") == each.wanted["attention"]]}
        tools: dict[str, Any] = {
            "tfx": {"fused": len(full["tfx"]), "right": sum(not _numbers_wrong(each) for each in full["tfx"])}
        }
        for tool in PEERS:
            fused = [each for each in compared if each.peers[tool]["fused"] == each.wanted["attention"]]
            tools[tool] = {"fused": len(fused), "right": sum(each.peers[tool]["right"] for each in fused)}
        totals["peers"] = {"files": len(compared), **tools}
    return totals


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@click.command()
@click.option("--rows", help='Names, or how they begin: "BERT" is both BERT rows; several with commas. [default: all]')
@click.option("--routes", help=f"Separated by semicolons, out of: {'; '.join(ROUTES)}. [default: all]")
@click.option("--targets", default=",".join(TARGETS), show_default=True)
@click.option("--peers/--no-peers", default=True, help="The other tools' fusions beside ours.", show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes, one core each.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything to this file.")
def main(rows: str | None, routes: str | None, targets: str, peers: bool, jobs: int, json_file: Path | None) -> None:
    """Raise, lower and check every encoder by every exporter."""
    names = _matching([row.name for row in ZOO], rows, "rows")
    asked = _matching(ROUTES, routes, "routes")
    wanted = _matching(TARGETS, targets, "targets")
    if peers:
        _python()
    start = time.perf_counter()
    found: list[Judged] = []
    chosen = [row for row in ZOO if row.name in names]
    for judged in _all(chosen, asked, wanted, peers, jobs):
        wrong = sum(bool(each.wrong) for each in judged)
        seconds = sum(each.seconds for each in judged)
        click.echo(f"{judged[0].row}: {wrong} of {len(judged)} wrong, {seconds:.0f} s", err=True)
        found += judged
    _show(found, asked, peers)
    totals = summary(found)
    seconds = time.perf_counter() - start
    click.echo(
        f"{totals['right']} of {totals['files']} files right, {totals['not_offered']} not offered, {seconds:.0f} s"
    )
    if "peers" in totals:
        for tool in ("tfx", *PEERS):
            each = totals["peers"][tool]
            click.echo(f"{tool}: attention fused fully in {each['fused']} of {totals['peers']['files']}, "
                       f"of these right {each['right']}")  # fmt: skip
    results = [_finite(dataclasses.asdict(judged)) for judged in found]
    write_json(json_file, {
        "environment": environment(), "limit": LIMIT, "known_limits": KNOWN_LIMITS, "seconds": seconds,
        "summary": totals, "results": results,
    })  # fmt: skip
    failed = [judged for judged in found if judged.wrong and not (_known(judged))]
    if failed:
        raise CheckError(f"{len(failed)} of {totals['files']} files are not raised whole or not right")


def _known(judged: Judged) -> bool:
    return judged.row in KNOWN_LIMITS and not _numbers_wrong(judged)


if __name__ == "__main__":
    run(main)
