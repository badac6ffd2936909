"""What does sharing calls between requests bring, how long do clients wait, and does the server's memory come to rest?

Three servers of the same bundle on loopback, each in a process of its own, with clients in a fourth:

``tfx serve``
    as it is by default.
``no sharing``
    ``tfx serve --max-batch-tokens 1``: as many texts at once as there are threads, each in a call of its own.
``one by one``
    ``serve_naive.py``: the same framework, one text after the other, each on all threads.

Requests hold one text each: whole docstrings, as documents are, and first lines of others, as queries are. The servers
take turns; a ratio is taken within a turn. An answer in eight is compared with the vector that a session gives, and any
status but 200 and 429 ends the run. At the end ``tfx serve`` alone is under the most clients for as long as ``--hold``
says, and its memory is watched.

See README.md in this folder.

Example:
    python benchmarks/serve.py --json serve.json
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from rounds import load, ratio, run, surroundings, write_json

from tfx.errors import CheckError, MachineError
from tfx.exporter.calibration import docstrings
from tfx.runtime.bench_memory import plateau
from tfx.runtime.bundle import Bundle
from tfx.runtime.doctor import default_threads
from tfx.runtime.options import numbers
from tfx.runtime.session import Session
from tfx.runtime.show import print_table

SERVE, ALONE, NAIVE = "tfx serve", "no sharing", "one by one"

_FOLDER = Path(__file__).parent
_TFX = [sys.executable, "-c", "from tfx.cli import main; main(prog_name='tfx')", "serve"]
_MAX_ABS = {"fp32": 2e-5}
_WARM_UP_S = 1.0
_SAMPLE_S = 0.25


def mixed(count: int) -> list[str]:
    """Texts of mixed lengths: whole docstrings and, every other one, the first line alone."""
    return [text.strip().splitlines()[0] if i % 2 else text for i, text in enumerate(docstrings(count))]


def commands(bundle: Path, threads: int) -> dict[str, list[str]]:
    """How each server is started."""
    options = [str(bundle), "--port", "0", "--json", "--threads", str(threads)]
    return {
        SERVE: [*_TFX, *options],
        ALONE: [*_TFX, *options, "--max-batch-tokens", "1"],
        NAIVE: [sys.executable, str(_FOLDER / "serve_naive.py"), str(bundle), "--threads", str(threads)],
    }


@contextlib.contextmanager
def servers(commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, tuple[str, psutil.Process]]]:
    """Run servers, which start at the same time; yields the URL and the process of each."""
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, command in commands.items():
            started[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        found = {}
        for name, process in started.items():
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise MachineError(f"{name}: its process ended with status {process.wait()}")
            found[name] = json.loads(line)["url"], psutil.Process(process.pid)
        yield found
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            with process:
                process.wait(60)


def under_load(name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Let clients ask a server, and check what they were answered.

    Raises:
        CheckError: a vector was wrong, or a status other than 200 and 429.
    """
    command = [sys.executable, str(_FOLDER / "serve_load.py")]
    done = subprocess.run(command, input=json.dumps(dict(asked)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(f"{name}, {asked['clients']} clients: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout)
    other = {status: count for status, count in found["statuses"].items() if status not in ("200", "429")}
    if other or not found["answers"]:
        raise CheckError(f"{name}, {asked['clients']} clients: found statuses {found['statuses']}, wanted 200 or 429")
    if found["max_abs"] > asked["max_abs"]:
        raise CheckError(f"{name}, {asked['clients']} clients: a vector differs by {found['max_abs']:.2e}")
    return found


def race(
    running: Mapping[str, tuple[str, psutil.Process]],
    asked: Mapping[str, Any],
    clients: Sequence[int],
    seconds: float,
    rounds: int,
) -> list[dict[str, Any]]:
    """Put the servers under load in turns, and print a table.

    Returns:
        A row for each number of clients and server: medians, and the ratio to ``one by one`` within a turn.
    """
    names = list(running)
    rows = []
    for count in clients:
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                url, process = running[name]
                question = {**asked, "url": url, "clients": count, "seconds": seconds, "seed": turn}
                used = _cpu_s(process)
                found = under_load(name, question)
                turns[name].append({**found, "cpu_ms": (_cpu_s(process) - used) * 1e3 / found["answers"]})
        base = [turn["texts_per_s"] for turn in turns[NAIVE]]
        for name in names:
            rates = [turn["texts_per_s"] for turn in turns[name]]
            rows.append(
                {
                    "clients": count,
                    "server": name,
                    "texts_per_s": statistics.median(rates),
                    "p50_ms": statistics.median(turn["p50_ms"] for turn in turns[name]),
                    "p99_ms": statistics.median(turn["p99_ms"] for turn in turns[name]),
                    "ratio": ratio(rates, base),
                    "cpu_ms": statistics.median(turn["cpu_ms"] for turn in turns[name]),
                    "refused": sum(turn["statuses"].get("429", 0) for turn in turns[name]),
                    "checked": sum(turn["checked"] for turn in turns[name]),
                    "max_abs": max(turn["max_abs"] for turn in turns[name]),
                }
            )
    print_table(
        ("clients", "server", "texts/s", "to one by one", "p50 ms", "p99 ms", "CPU ms a text", "429"),
        (
            (
                str(row["clients"]),
                row["server"],
                f"{row['texts_per_s']:.0f}",
                "{median:.2f} ({min:.2f} - {max:.2f})".format(**row["ratio"]),
                f"{row['p50_ms']:.0f}",
                f"{row['p99_ms']:.0f}",
                f"{row['cpu_ms']:.1f}",
                str(row["refused"]),
            )
            for row in rows
        ),
        left=("server",),
    )
    return rows


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def hold(url: str, process: psutil.Process, asked: Mapping[str, Any], clients: int, seconds: float) -> dict[str, Any]:
    """Keep a server under load, and watch its memory."""
    held: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            held.append(process.memory_info().rss / 1e6)
            over.wait(_SAMPLE_S)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        found = under_load(SERVE, {**asked, "url": url, "clients": clients, "seconds": seconds})
    finally:
        over.set()
        watching.join()
    memory = plateau(held)
    print(
        f"{clients} clients for {seconds:.0f} s: {found['answers']} answers, "
        f"{found['statuses'].get('429', 0)} times 429, no other error; {found['texts_per_s']:.0f} texts/s, "
        f"p50 {found['p50_ms']:.0f} ms, p99 {found['p99_ms']:.0f} ms; memory {memory['first_mb']:.0f} MB at first, "
        f"{memory['steady_mb']:.0f} MB at the end, the last third adds {memory['growth']:.1%}"
    )
    return {**found, "clients": clients, "seconds": seconds, "memory": memory}


def _exported(folder: Path) -> Bundle:
    """Export all-MiniLM-L6-v2; only this needs torch."""
    from latency import minilm

    from tfx.exporter.export import export

    return export(minilm().make, folder)


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), help="A bundle that pools. [default: all-MiniLM-L6-v2]")
@click.option("--texts", type=click.IntRange(min=8), default=1000, show_default=True, help="Texts to ask for.")
@click.option("--clients", callback=numbers, default="1,8,32,200", show_default=True, help="Clients at once.")
@click.option("--seconds", type=float, default=10, show_default=True, help="Of each server in each turn.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of every server.")
@click.option("--hold", "hold_s", type=float, default=60, show_default=True, help="Seconds under the most clients.")
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use. [default: physical cores]")
@click.option("--quick", is_flag=True, help="Few clients, for a moment: does it work?")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write everything to this file.")
def main(
    bundle: Path | None,
    texts: int,
    clients: tuple[int, ...],
    seconds: float,
    rounds: int,
    hold_s: float,
    threads: int | None,
    quick: bool,
    file: Path | None,
) -> None:
    """Measure servers under load."""
    cores = threads or default_threads()
    if quick:
        texts, clients, seconds, rounds, hold_s = min(texts, 40), (1, 8), 0.5, 1, 1.0
    before = load()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        opened = _exported(folder / "b") if bundle is None else Bundle.open(bundle)
        chosen = mixed(texts)
        vectors = np.asarray(Session(opened, threads=cores).encode(chosen))
        np.save(folder / "vectors.npy", vectors)
        asked = {
            "texts": chosen,
            "vectors": str(folder / "vectors.npy"),
            "max_abs": _MAX_ABS.get(opened.manifest.precision, 1e-2),
            "seed": 0,
        }
        found = stack.enter_context(servers(commands(opened.path, cores)))
        if not quick:
            for name, (url, _) in found.items():
                under_load(name, {**asked, "url": url, "clients": 4, "seconds": _WARM_UP_S})
        rows = race(found, asked, clients, seconds, rounds)
        time.sleep(0 if quick else 1)
        held = hold(*found[SERVE], asked, max(clients), hold_s)
    write_json(file, {"race": rows, "hold": held, "texts": len(chosen), **surroundings(cores, before)})


if __name__ == "__main__":
    run(main)
