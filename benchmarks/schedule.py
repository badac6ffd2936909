"""What does running many texts at once bring, under which schedule, and what does memory do meanwhile?

``schedules``
    Texts to vectors on all cores: small calls of one thread each, large calls on all threads, and
    ``Session.encode`` (batches of 32 on all threads). All vectors are compared with those of the texts alone.
``memory``
    300 calls of ever other shapes in a process of its own for each way of ``runtime/providers.py: MEMORY``: what is
    held after 100, 200 and 300 calls, and the CPU time that they took.
``kill``
    ``tfx embed`` on generated rows, ended by SIGKILL at random moments until it is done, against a run that was left
    alone: the same bytes?

See README.md in this folder.

Example:
    python benchmarks/schedule.py --json schedule.json
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from latency import minilm
from rounds import load, run, surroundings, write_json

from tfx.errors import CheckError, InputError
from tfx.exporter.calibration import docstrings
from tfx.exporter.export import export
from tfx.runtime.bench_memory import RUNS, plateau, varying
from tfx.runtime.bundle import Bundle
from tfx.runtime.doctor import default_threads
from tfx.runtime.providers import MEMORY
from tfx.runtime.schedule import Schedule, by_threads, packed
from tfx.runtime.session import Session
from tfx.runtime.show import print_table

PARTS = ("schedules", "memory", "kill")

_MAX_ABS = 2e-5
_MOST_KILLS = 20

_WATCH = """
import json, resource, sys
import numpy as np, psutil
from tfx.runtime.doctor import peak_rss_mb
from tfx.runtime.session import Session
from tfx.runtime.tensors import make_feeds

session = Session(sys.argv[1], threads=int(sys.argv[2]), memory=sys.argv[3])
inputs = session.bundle.manifest.inputs
held, start = [], resource.getrusage(resource.RUSAGE_SELF)
for i, lengths in enumerate(json.loads(sys.stdin.read())):
    session.run(make_feeds(inputs, batch=len(lengths), sequence=lengths[0], pattern="right", seed=i))
    held.append(psutil.Process().memory_info().rss / 1e6)
end = resource.getrusage(resource.RUSAGE_SELF)
cpu = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
print(json.dumps({"held": held, "peak_mb": peak_rss_mb(), "cpu_s": cpu, "faults": end.ru_minflt - start.ru_minflt}))
"""


def schedules(bundle: Bundle, count: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Time schedules on the same texts, in turns.

    Returns:
        A row per way: texts and tokens per second (median round), and how many times as fast as ``encode`` it is, with
        the smallest and largest of the rounds.

    Raises:
        CheckError: vectors differ from those of the texts alone.
    """
    texts = list(docstrings(count))
    session = Session(bundle, threads=threads)
    tokens = sum(len(item) for item in session._encode_items(texts, 0))
    tried = [*(by_threads(threads, n) for n in (1, 256, 512, 1024)), *(packed(threads, n) for n in (1024, 4096, 16384))]

    def many(schedule: Schedule) -> Callable[[], np.ndarray]:
        return lambda: np.stack(list(session.run_many(texts, schedule=schedule)))

    ways: dict[str, Callable[[], np.ndarray]] = {"encode, batches of 32": lambda: np.asarray(session.encode(texts))}
    ways |= {str(schedule): many(schedule) for schedule in tried}
    few = texts[:: max(1, len(texts) // 50)]
    alone = np.concatenate([np.asarray(session.encode([text])) for text in few])
    for name, way in ways.items():
        found = way()[:: max(1, len(texts) // 50)]
        worst = float(np.abs(found - alone).max())
        if worst > (_MAX_ABS if bundle.manifest.precision == "fp32" else 1e-2):
            raise CheckError(f"{name}: differs by {worst:.2e} from the texts alone")
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - start)
    first = times[names[0]]
    rows = []
    for name, seconds in times.items():
        ratios = [base / own for base, own in zip(first, seconds, strict=True)]
        middle = statistics.median(seconds)
        rows.append(
            {
                "way": name,
                "texts_per_s": count / middle,
                "tokens_per_s": tokens / middle,
                "faster": statistics.median(ratios),
                "faster_min": min(ratios),
                "faster_max": max(ratios),
            }
        )
    print_table(
        ("way", "texts/s", "tokens/s", "to encode"),
        (
            (
                row["way"],
                f"{row['texts_per_s']:.1f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['faster']:.2f} ({row['faster_min']:.2f} - {row['faster_max']:.2f})",
            )
            for row in rows
        ),
        left=("way",),
    )
    return rows


def memory(bundle: Bundle, threads: int, runs: int) -> list[dict[str, Any]]:
    """Watch each way of holding memory over the same shapes, each in a process of its own."""
    shapes = json.dumps(varying(runs, bundle.manifest.max_length))
    rows = []
    for name in MEMORY:
        done = subprocess.run(
            [sys.executable, "-c", _WATCH, str(bundle.path), str(threads), name],
            input=shapes,
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout)
        held = found.pop("held")
        thirds = [held[len(held) * i // 3 - 1] for i in (1, 2, 3)]
        rows.append({"memory": name, "thirds_mb": thirds, **found, **plateau(held)})
    print_table(
        ("memory", "after 1/3, 2/3, all, MB", "peak MB", "growth", "plateau", "CPU s", "page faults"),
        (
            (
                row["memory"],
                ", ".join(f"{each:.0f}" for each in row["thirds_mb"]),
                f"{row['peak_mb']:.0f}",
                f"{row['growth']:.1%}",
                "yes" if row["plateau"] else "no",
                f"{row['cpu_s']:.1f}",
                str(row["faults"]),
            )
            for row in rows
        ),
        left=("memory",),
    )
    return rows


def kill(bundle: Bundle, rows: int, seed: int, folder: Path) -> dict[str, Any]:
    """End ``tfx embed`` at random moments until it is done.

    Raises:
        CheckError: the file differs from that of a run that was left alone.
    """
    draw = random.Random(seed)
    words = (
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "dog",
        "ran",
        "and",
        "then",
        "some",
        "other",
        "animal",
        "came",
        "by",
    )
    source = folder / "rows.jsonl"
    with source.open("w") as file:
        for i in range(rows):
            file.write(json.dumps({"id": i, "text": " ".join(draw.choices(words, k=draw.randint(1, 12)))}) + "\n")

    def start(out: str, *options: str) -> subprocess.Popen[bytes]:
        code = "from tfx.cli import main; main(prog_name='tfx')"
        arguments = [
            "embed",
            str(source),
            str(bundle.path),
            "--out",
            str(folder / out),
            "--schedule",
            "threads",
            *options,
        ]
        return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)

    begin = time.perf_counter()
    if start("whole.npy").wait() != 0:
        raise CheckError("tfx embed failed")
    whole_s = time.perf_counter() - begin
    kills = 0
    while not (folder / "killed.npy").exists():
        process = start("killed.npy", "--resume")
        try:
            process.wait(timeout=draw.uniform(0.2, 1.0) * whole_s if kills < _MOST_KILLS else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    if (folder / "killed.npy.journal").exists():  # killed between its last two steps
        start("killed.npy", "--resume").wait()
    same = (folder / "whole.npy").read_bytes() == (folder / "killed.npy").read_bytes()
    if not same:
        raise CheckError(f"{rows} rows, {kills} kills: the files differ")
    print(f"{rows} rows, {kills} kills with SIGKILL: the same file; left alone it takes {whole_s:.1f} s")
    return {"rows": rows, "kills": kills, "same": same, "whole_s": whole_s}


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), help="A bundle that pools. [default: all-MiniLM-L6-v2]")
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Measure this alone; repeat the option for more.")
@click.option("--texts", type=click.IntRange(min=8), default=1500, show_default=True, help="Docstrings to run.")
@click.option(
    "--rows", type=click.IntRange(min=100), default=100_000, show_default=True, help="Rows to embed and kill."
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of every schedule.")
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use. [default: physical cores]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the moments at which is killed.")
@click.option("--quick", is_flag=True, help="Few texts and rows: does it work?")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write everything to this file.")
def main(
    bundle: Path | None,
    only: tuple[str, ...],
    texts: int,
    rows: int,
    rounds: int,
    threads: int | None,
    seed: int,
    quick: bool,
    file: Path | None,
) -> None:
    """Measure schedules, memory, and whether a run that is killed goes on."""
    cores = threads or default_threads()
    parts = only or PARTS
    found: dict[str, Any] = {}
    before = load()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        opened = export(minilm().make, folder / "b") if bundle is None else Bundle.open(bundle)
        if opened.manifest.tokenizer is None and set(parts) - {"memory"}:
            if only:
                raise InputError(f"{opened.path}: has no tokenizer: only --only memory can be measured")
            parts = ("memory",)
        if quick:
            texts, rows, rounds = min(texts, 40), min(rows, 2000), 1
        if "schedules" in parts:
            found["schedules"] = schedules(opened, texts, cores, rounds)
        if "memory" in parts:
            found["memory"] = memory(opened, cores, 30 if quick else RUNS)
        if "kill" in parts:
            found["kill"] = kill(opened, rows, seed, folder)
    write_json(file, {**found, **surroundings(cores, before)})


if __name__ == "__main__":
    run(main)
