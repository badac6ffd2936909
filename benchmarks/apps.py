"""How do the apps of ``tfx app`` compare with Python on the same bundle: start-up, one text at a time, memory?

Every app, and Python, is a process that takes a text per line and answers with its vector as JSON, on equally many
threads of the same kind of session. First all answer the same texts, and a vector that differs from Python's ends the
script. Then

``start``
    from starting the process to its first vector, over and over, in turns. Files are in the system's cache; every app
    checks the sha256 of all of them, as it does for its users.
``latency``
    from writing a line to reading the answer, for a short and for a long text. All processes stay loaded, one computes
    at a time, in turns; a ratio is taken within a round.
``memory``
    the most that the process has held by the end.

The page runs in Chromium, driven by playwright where that is installed: ``start`` begins when its address is opened in
a browser that runs already, ``latency`` is what the page sees of its worker, and ``memory`` is that of the page's own
process, without the browser around it.

``--into README.md`` replaces the table there. See README.md in this folder.

Example:
    python benchmarks/apps.py --bundle my-model --json apps.json
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from latency import minilm
from rounds import load, ratio, run, surroundings, write_json

from tfx.errors import CheckError, InputError, MachineError, TfxError
from tfx.exporter.calibration import docstrings
from tfx.exporter.export import export
from tfx.runtime.app_browser import PageServer, find_browser
from tfx.runtime.app_verify import command_of, prepared
from tfx.runtime.bundle import Bundle
from tfx.runtime.doctor import default_threads
from tfx.runtime.session import Session
from tfx.runtime.show import print_table

PYTHON = "python"
APPS = (PYTHON, "c", "cpp", "node", "web")

BEGIN, END = "<!-- apps: begin -->", "<!-- apps: end -->"

_MAX_ABS = 1e-5
"""Largest difference from Python's vectors in fp32; in other precisions a cosine of 0.99 is wanted."""
_MIN_COSINE = 0.99

_HEADERS = Path(__file__).resolve().parent.parent / "build" / "tools" / "onnxruntime-headers"

_LENGTHS = {"short": 16, "long": 128}  # tokens
_REST_S, _REST_SHARE, _LONGEST_REST_S = 0.02, 0.1, 5.0
_QUIET = 0.05  # share of all cores that other programs may take
_SPARE_CORES = 0.35  # what an engine may use above its threads, as tfx bench allows


# Python's engine: what a user of tfx.Session writes. It imports nothing of this file, which needs the exporter.
_WORKER = """
import json, sys
from tfx.runtime.session import Session

options = dict(zip(sys.argv[1:-1:2], sys.argv[2:-1:2]))
session = Session(options["--bundle"], threads=int(options["--threads"]))
for line in sys.stdin.buffer:
    vector = session.encode([line.decode().rstrip("\\n")])[0]
    print(json.dumps(vector.tolist()), flush=True)
"""


class Engine(ABC):
    """Something that answers texts with vectors, one at a time; a context manager that ends it."""

    @abstractmethod
    def embed(self, text: str) -> np.ndarray:
        """Return the vector of a text, float32 (d,)."""

    @abstractmethod
    def block(self, text: str, calls: int) -> list[float]:
        """Return the ms of each of ``calls`` calls, after one that does not count."""

    @abstractmethod
    def process(self) -> psutil.Process:
        """Return the process that computes."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rest(self) -> None:
        """Wait until its process uses no CPU any more: thread pools spin for a while after a call."""
        process = self.process()
        start = time.perf_counter()
        while time.perf_counter() - start < _LONGEST_REST_S:
            before = _cpu_s(process)
            time.sleep(_REST_S)
            if _cpu_s(process) - before <= _REST_S * _REST_SHARE:
                return

    def peak_mb(self) -> float | None:
        """Return the most memory that its process has held, in MB, None where it is unknown."""
        try:
            status = Path(f"/proc/{self.process().pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(found[1]) * 1024 / 1e6 if found else None


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class LinesEngine(Engine):
    """A process of the lines protocol.

    Args:
        name: of the engine, for errors.
        command: starts it.
        threads: also of the pools that no option reaches.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self._name = name
        pools = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **pools, "TOKENIZERS_PARALLELISM": "false"},
        )

    def _answer(self, text: str) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # why it ended is read below
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()
            raise MachineError(f"engine {self._name}: ended with status {status}: {(said or ['no word'])[-1]}")
        return line

    def embed(self, text: str) -> np.ndarray:
        """Return the vector of a text."""
        return np.array(json.loads(self._answer(text)), np.float32)

    def block(self, text: str, calls: int) -> list[float]:
        """Time calls from the near end of the pipes."""
        self._answer(text)
        times = []
        for _ in range(calls):
            before = time.perf_counter()
            self._answer(text)
            times.append((time.perf_counter() - before) * 1e3)
        return times

    def process(self) -> psutil.Process:
        """Return the process."""
        return psutil.Process(self._process.pid)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()


_OPEN = """async ([bundle, threads]) => {
  const { Client } = await import("./client.mjs");
  window.engine = new Client(() => {});
  const opened = await window.engine.ask("open", { source: { folder: bundle }, provider: "wasm", threads });
  return opened.threads;
}"""

_EMBED = """async (text) => Array.from((await window.engine.ask("embed", { texts: [text] })).vectors[0])"""

_BLOCK = """async ([text, calls]) => {
  const times = [];
  for (let i = 0; i <= calls; i++) {
    const before = performance.now();
    await window.engine.ask("embed", { texts: [text] });
    times.push(performance.now() - before);
  }
  return times.slice(1);
}"""


_ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


class PageEngine(Engine):
    """The worker of the page, in a page that shows nothing; of one browser that other starts share."""

    def __init__(self, browser: Any, server: PageServer, threads: int) -> None:
        before = _renderers()
        # A context of its own keeps nothing of earlier visits, so the bundle is read and checked anew.
        self._context = browser.new_context()
        self._page = self._context.new_page()
        self._page.set_default_timeout(300_000)
        self._page.route("**/blank", lambda route: route.fulfill(content_type="text/html", headers=_ISOLATED, body=""))
        self._page.goto(f"{server.url}blank")
        found = self._page.evaluate(_OPEN, [server.bundle, threads])
        if found != threads:
            raise MachineError(f"engine web: found {found} threads, wanted {threads}")
        fresh = [each for each in _renderers() if each not in before]
        self._renderer = max(fresh, key=lambda each: each.memory_info().rss)

    def embed(self, text: str) -> np.ndarray:
        """Return the vector of a text."""
        return np.array(self._page.evaluate(_EMBED, text), np.float32)

    def block(self, text: str, calls: int) -> list[float]:
        """Time calls in the page."""
        return self._page.evaluate(_BLOCK, [text, calls])

    def process(self) -> psutil.Process:
        """Return the page's own process."""
        return self._renderer

    def close(self) -> None:
        """Close the page."""
        self._context.close()


def _renderers() -> list[psutil.Process]:
    """Return the processes of pages of our browser."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--type=renderer" in process.cmdline():
                found.append(process)
    return found


class Starter:
    """Starts engines; a context manager, for what several of them share.

    Args:
        bundle: to run.
        threads: of each.
        names: of ``APPS``.

    Attributes:
        names: those that can be started.
        skipped: {name: why not}.
    """

    def __init__(self, bundle: Bundle, threads: int, names: Sequence[str]) -> None:
        self._bundle = bundle
        self._threads = threads
        self._stack = contextlib.ExitStack()
        self._commands: dict[str, list[str]] = {}
        self._page: Any = None
        self.skipped: dict[str, str] = {}
        for name in names:
            try:
                self._prepare(name)
            except TfxError as error:
                if name == PYTHON:
                    raise
                self.skipped[name] = str(error)
        self.names = [name for name in names if name not in self.skipped]

    def _prepare(self, name: str) -> None:
        if _HEADERS.is_dir():  # what `make apps` has fetched
            os.environ.setdefault("ONNXRUNTIME_INCLUDE_DIR", str(_HEADERS))
        if name == PYTHON:
            self._commands[name] = [sys.executable, "-c", _WORKER]
        elif name == "web":
            folder = prepared(name)
            try:
                from playwright.sync_api import sync_playwright
            except ImportError:
                raise MachineError("playwright is not installed; install it with: pip install playwright") from None
            browser = find_browser()
            server = self._stack.enter_context(PageServer(folder, self._bundle.path, isolated=True))
            playwright = self._stack.enter_context(sync_playwright())
            options = ["--no-sandbox", "--disable-gpu"]
            self._page = (playwright.chromium.launch(executable_path=browser, args=options), server)
            self._stack.callback(self._page[0].close)
        else:
            self._commands[name] = command_of(name, prepared(name))

    def start(self, name: str) -> Engine:
        """Start an engine; it loads while the caller goes on."""
        if name == "web":
            browser, server = self._page
            return PageEngine(browser, server, self._threads)
        options = ["--bundle", str(self._bundle.path), "--threads", str(self._threads), "-"]
        return LinesEngine(name, [*self._commands[name], *options], self._threads)

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def texts_of(bundle: Bundle) -> dict[str, str]:
    """Return a text of about 16 and one of about 128 tokens, without line breaks.

    Raises:
        InputError: the bundle takes no texts or gives no vectors.
    """
    if bundle.manifest.tokenizer is None or bundle.manifest.pooling is None:
        raise InputError(f"{bundle.path}: has no tokenizer or no pooling; every app gives a text's vector here")
    session = Session(bundle, threads=1)
    words = " ".join(" ".join(docstrings(40)).split()).split(" ")
    found = {}
    for name, length in _LENGTHS.items():
        count = next(n for n in range(1, len(words)) if _tokens(session, words[:n]) >= min(length, _most(bundle)))
        found[name] = " ".join(words[:count])
    return found


def _tokens(session: Session, words: Sequence[str]) -> int:
    return len(session._encode_items([" ".join(words)], 0)[0])


def _most(bundle: Bundle) -> int:
    limits = [bundle.manifest.max_length, (bundle.manifest.tokenizer or {})["max_length"]]
    return min((limit for limit in limits if limit is not None), default=1 << 30)


def check(name: str, found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], precision: str) -> dict[str, float]:
    """Compare an engine's vectors with Python's.

    Returns:
        ``max_abs`` and ``min_cosine``.

    Raises:
        CheckError: they differ.
    """
    for i, (own, other) in enumerate(zip(found, wanted, strict=True)):
        if own.shape != other.shape or not np.isfinite(own).all():
            raise CheckError(
                f"{name}: text {i}: found {own.shape} with {own.size} numbers, wanted {other.shape}, finite"
            )
    pairs = [(own.astype(float), other.astype(float)) for own, other in zip(found, wanted, strict=True)]
    off = max(float(np.abs(own - other).max()) for own, other in pairs)
    cosine = min(float(own @ other / np.linalg.norm(own) / np.linalg.norm(other)) for own, other in pairs)
    if (precision == "fp32" and off > _MAX_ABS) or not cosine >= _MIN_COSINE:
        raise CheckError(f"{name}: vectors differ from Python's by {off:.1e} (cosine {cosine:.6f}); nothing was timed")
    return {"max_abs": off, "min_cosine": cosine}


def measure(
    starter: Starter,
    texts: Mapping[str, str],
    precision: str,
    *,
    threads: int,
    starts: int,
    rounds: int,
    seconds: float,
) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """Check and time the engines.

    Returns:
        {engine: {max_abs, min_cosine, start_ms: [...], latency_ms: {text: [one figure a round]}, cores, peak_mb}}, and
        the share of all cores that other programs took in each round of latencies.
    """
    others: list[float] = []
    names = starter.names
    found: dict[str, dict[str, Any]] = {}
    wanted: list[np.ndarray] = []
    for name in [PYTHON, *(name for name in names if name != PYTHON)]:
        with starter.start(name) as engine:
            vectors = [engine.embed(text) for text in texts.values()]
        wanted = wanted or vectors
        found[name] = {**check(name, vectors, wanted, precision), "start_ms": [], "latency_ms": {t: [] for t in texts}}
    first = next(iter(texts.values()))
    for turn in range(starts):
        for name in _turned(names, turn):
            before = time.perf_counter()
            with starter.start(name) as engine:
                engine.embed(first)
                found[name]["start_ms"].append((time.perf_counter() - before) * 1e3)
                engine.rest()
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(starter.start(name)) for name in names}
        for text_name, text in texts.items():
            slowest = max(statistics.median(engine.block(text, 3)) for engine in engines.values())
            calls = max(3, min(1000, int(seconds * 1e3 / slowest)))
            for turn in range(rounds):
                busy, own, begun = _busy_s(), _own_s(), time.perf_counter()
                for name in _turned(names, turn):
                    times, cores = _timed(engines[name], text, calls)
                    found[name]["latency_ms"][text_name].append(statistics.median(times))
                    if name != "web":  # the page's process also does what a browser does
                        _check_cores(name, cores, threads)
                    found[name]["cores"] = max(found[name].get("cores", 0.0), cores or 0.0)
                elapsed = (time.perf_counter() - begun) * (psutil.cpu_count() or 1)
                others.append(min(1.0, max(0.0, (_busy_s() - busy - _own_s() + own) / elapsed)))
        for name, engine in engines.items():
            found[name]["peak_mb"] = engine.peak_mb()
    return found, others


def _own_s() -> float:
    """Return the CPU time of this process and of all that it has started, in s."""
    used = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            used += _cpu_s(process)
    return used


def _busy_s() -> float:
    """Return how long all cores together have been busy since the machine started, in s."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _turned(names: Sequence[str], turn: int) -> list[str]:
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def _timed(engine: Engine, text: str, calls: int) -> tuple[list[float], float | None]:
    process = engine.process()
    used, start = _cpu_s(process), time.perf_counter()
    times = engine.block(text, calls)
    elapsed = time.perf_counter() - start
    used = _cpu_s(process) - used
    engine.rest()
    return times, used / elapsed if used > 0.5 else None  # less is noise of the clocks


def _check_cores(name: str, cores: float | None, threads: int) -> None:
    if cores is not None and cores > threads + _SPARE_CORES:
        raise CheckError(f"{name}: used {cores:.1f} cores, wanted at most the {threads} threads that every engine gets")


def table(found: Mapping[str, Any]) -> list[str]:
    """Return the Markdown table of a result."""
    engines, texts = found["engines"], found["texts"]
    base = engines[PYTHON]
    head = ["app", "start to first vector, ms", *(f"{name} ({count} tokens), ms" for name, count in texts.items())]
    lines = [_line([*head, "peak MB"]), "|" + "---|" * (len(head) + 1)]
    for name, each in engines.items():
        cells = [name, _cell(each["start_ms"], base["start_ms"], name)]
        cells += [_cell(each["latency_ms"][text], base["latency_ms"][text], name) for text in texts]
        peak = each["peak_mb"]
        cells.append("" if peak is None else f"{peak:.0f}")
        lines.append(_line(cells))
    return lines


def _cell(own: Sequence[float], base: Sequence[float], name: str) -> str:
    middle = statistics.median(own)
    shown = f"{middle:.0f}" if middle >= 100 else f"{middle:.2f}" if middle < 10 else f"{middle:.1f}"
    if name == PYTHON:
        return shown
    each = ratio(own, base)
    return f"{shown} ({each['median']:.2f}; {each['min']:.2f} - {each['max']:.2f})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def heading(found: Mapping[str, Any]) -> str:
    """Return the line above the table: the machine, the threads, and how to read it."""
    features = " ".join(found["environment"].get("cpu_features", ()))
    return (
        f"{found['bundle']}, {found['precision']}, {found['threads']} threads each, {found['environment']['cpu']} "
        f"({features}). In brackets the time as a share of Python's: median, smallest and largest of the rounds."
    )


def write_into(path: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the marks in a file.

    Raises:
        InputError: it cannot be read, or does not have the marks once each.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InputError(f"{path}: wanted {BEGIN} and {END}, once each")
    before, _, rest = text.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


@contextlib.contextmanager
def _opened(bundle: Path | None) -> Iterator[Bundle]:
    with tempfile.TemporaryDirectory() as temporary:
        yield export(minilm().make, Path(temporary) / "all-MiniLM-L6-v2") if bundle is None else Bundle.open(bundle)


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), help="A bundle that pools. [default: all-MiniLM-L6-v2]")
@click.option("--apps", "names", default=",".join(APPS), show_default=True, help="Which, with commas between.")
@click.option("--threads", type=click.IntRange(min=1), help="Of each. [default: physical cores]")
@click.option("--starts", type=click.IntRange(min=1), default=7, show_default=True, help="Starts of each.")
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True, help="Turns of each.")
@click.option("--seconds", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Of a turn, about.")
@click.option("--quick", is_flag=True, help="One start and one short turn: does it work?")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write everything to this file.")
@click.option("--into", type=click.Path(path_type=Path), help=f"Replace what stands between {BEGIN} and {END} there.")
def main(
    bundle: Path | None,
    names: str,
    threads: int | None,
    starts: int,
    rounds: int,
    seconds: float,
    quick: bool,
    file: Path | None,
    into: Path | None,
) -> None:
    """Measure apps beside Python on the same bundle."""
    chosen = [name for name in APPS if name in names.split(",") or name == PYTHON]
    unknown = set(names.split(",")) - set(APPS)
    if unknown:
        raise InputError(f"apps: found {', '.join(sorted(unknown))}, wanted some of {', '.join(APPS)}")
    if quick:
        starts, rounds, seconds = 1, 1, 0.0
    threads = threads or default_threads()
    before = load()
    with _opened(bundle) as opened, Starter(opened, threads, chosen) as starter:
        for name, why in starter.skipped.items():
            click.echo(f"{name} is left out: {why}", err=True)
        texts = texts_of(opened)
        session = Session(opened, threads=1)
        counts = {name: _tokens(session, [text]) for name, text in texts.items()}
        engines, others = measure(
            starter, texts, opened.manifest.precision, threads=threads, starts=starts, rounds=rounds, seconds=seconds
        )
        found = {
            "bundle": opened.path.name,
            "precision": opened.manifest.precision,
            "texts": counts,
            "engines": engines,
            "others": others,
            "skipped": starter.skipped,
            **surroundings(threads, before),
        }
    write_json(file, found)
    lines = [heading(found), "", *table(found)]
    if into is not None:
        write_into(into, lines)
    click.echo(heading(found))
    if (taken := statistics.median(others)) > _QUIET:
        click.echo(f"other programs took {taken:.0%} of the cores: measure again when they are done", err=True)
    print_table(*_plain(found), left=("app",))


def _plain(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(found)]
    return head, rows


if __name__ == "__main__":
    run(main)
