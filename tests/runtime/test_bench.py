from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any, cast

import numpy as np
import psutil
import pytest

from tfx.errors import CheckError, DependencyError, InputError, MachineError, ParityError, ProviderError
from tfx.runtime import bench as bench_module
from tfx.runtime import bench_race, bench_worker
from tfx.runtime.bench import COMPARED, MODES, BenchPlan, bench, ratio
from tfx.runtime.bench_memory import measure_memory, plateau, varying
from tfx.runtime.bench_race import Race, Work, total_calls
from tfx.runtime.lengths import make_ragged_feeds
from tfx.runtime.providers import provider_problem

KEYS = {
    "engine", "batch", "sequence", "tokens", "texts", "padding", "p50_ms", "p90_ms", "p99_ms", "tokens_per_s",
    "texts_per_s", "peak_rss_mb", "rounds", "cores", "others", "floor_ms", "above_floor",
}  # fmt: skip


def request(bundle, **changes):
    return {"engine": "tfx", "bundle": str(bundle.path), "provider": "cpu", "threads": 1, **changes}


def test_a_bundle_is_timed_in_a_process_of_its_own(shared_bundle):
    seen = []
    plan = BenchPlan(batches=(1, 2), sequences=(4,), threads=2, warmup=1, rounds=7)
    found = bench(shared_bundle, plan, lambda *args: seen.append(args))
    assert (found["provider"], found["threads"], found["mode"]) == ("cpu", 2, "latency")
    engine = found["engines"]["tfx"]
    assert engine["provider"] == "cpu"
    assert engine["max_abs"] < 1e-5
    assert 0 < engine["load_s"] < 10
    assert 0 < engine["first_ms"] < 1000
    assert [(row["batch"], row["sequence"], row["tokens"]) for row in found["results"]] == [(1, 4, 4), (2, 4, 8)]
    for row in found["results"]:
        assert set(row) == KEYS
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["p50_ms"] * 1e3)
        assert row["texts_per_s"] == pytest.approx(row["batch"] / row["p50_ms"] * 1e3)
        assert row["rounds"] == 7
        assert row["padding"] == 0
        # The worker holds numpy and onnxruntime, not what this process holds (torch, pytest, ...).
        assert 20 < row["peak_rss_mb"] < 400
    assert found["ratios"] == []
    assert seen[0] == ("loading tfx", 0, 2)
    assert {("tfx 1x4", 0, 2), ("tfx 2x4", 1, 2)} <= set(seen)
    json.dumps(found, allow_nan=False)


def test_a_tuned_bundle_is_timed_as_it_was_tuned(shared_bundle, make_bundle, monkeypatch):
    fake_race(monkeypatch, lambda name, turn: 1.0)
    monkeypatch.setattr(bench_module, "default_threads", lambda: 4)
    tuning = {"threads": 3, "spinning": None, "schedule": None, "log": None}
    bundle = make_bundle(tuning=tuning)
    for plan, threads in ((BenchPlan(), 3), (BenchPlan(threads=2), 2), (BenchPlan(engines=("torch",)), 4)):
        assert bench(bundle, dataclasses.replace(plan, rounds=1))["threads"] == threads
    assert bench(shared_bundle, BenchPlan(rounds=1))["threads"] == 4


def fake_race(monkeypatch, times):
    """Answer for every engine: ``times(engine, turn)`` is the ms of a call."""

    class Fake:
        def __init__(self, name, request):
            self.name, self.request = name, request

        def ask(self, question):
            if "engine" in question:
                facts = {"provider": "cpu", "threads": question["threads"], "placement": None, "max_abs": 0.0}
                return {**facts, "min_cosine": 1.0, "load_s": 0.1, "first_ms": 1.0}
            if question["do"] == "time":
                ms = [times(self.name, question["first"])] * question["calls"]
                return {"ms": ms, "cpu_s": 0.0, "elapsed_s": 1.0, "all_cpu_s": 0.0}
            return times(self.name, 0)

        def close(self):
            pass

    monkeypatch.setattr(bench_race, "_Worker", Fake)


def test_percentiles_ratios_and_the_floor(shared_bundle, monkeypatch):
    # The machine becomes slower and slower; within a turn all met the same one.
    fake_race(monkeypatch, lambda name, turn: {"tfx": 2, "torch": 6, "floor": 1}[name] * (turn + 1))
    found = bench(shared_bundle, BenchPlan((1,), (4,), threads=1, rounds=9, engines=("torch",), floor=True))
    tfx, torch = found["results"]
    assert (tfx["engine"], torch["engine"]) == ("tfx", "torch")
    assert list(found["engines"]) == ["tfx", "torch"]
    assert (tfx["p50_ms"], tfx["rounds"]) == (10, 9)
    assert tfx["floor_ms"] == 5
    assert tfx["above_floor"]["ratio"] == pytest.approx(2)
    assert torch["above_floor"]["ratio"] == pytest.approx(6)
    (ratios,) = found["ratios"]
    assert (ratios["engine"], ratios["batch"], ratios["sequence"]) == ("torch", 1, 4)
    assert (ratios["ratio"], ratios["low"], ratios["high"]) == (3, 3, 3)


def test_ratios_are_taken_turn_by_turn():
    assert ratio([[2], [2], [6]], [[1], [1], [3]]) == {"ratio": 2, "low": 2, "high": 2}
    assert ratio([[2, 90], [9, 9]], [[1, 1], [3, 3]]) == {"ratio": 24.5, "low": 3, "high": 46}
    assert ratio([[1, 1, 70]], [[1, 1, 1]]) == {"ratio": 1, "low": 1, "high": 1}
    assert ratio([[1, 5]], [[1, 2]], sum) == {"ratio": 2, "low": 2, "high": 2}


def test_how_many_calls():
    assert total_calls(3, 9, 1) == 3
    assert total_calls(None, 2, 10) == 200
    assert total_calls(None, 0, 10) == 5
    assert total_calls(None, 9, 0) == 10_000


class Recorder:
    """A race whose workers only note what they are asked."""

    def __init__(self, monkeypatch, names, cores=1.0):
        self.asked = []
        outer = self

        class Fake:
            def __init__(self, name, request):
                self.name = name

            def ask(self, question):
                if "engine" in question:
                    return {"provider": "cpu", "threads": 1}
                outer.asked.append((self.name, question["first"], question["calls"]))
                ms = [10.0] * question["calls"]
                return {"ms": ms, "cpu_s": 2 * cores, "elapsed_s": 2.0, "all_cpu_s": 2 * cores}

            def close(self):
                pass

        monkeypatch.setattr(bench_race, "_Worker", Fake)
        self.race = Race()
        for name in names:
            self.race.add(name, {"engine": name, "threads": 1})


def test_engines_take_turns_and_each_goes_first(monkeypatch):
    recorder = Recorder(monkeypatch, "abc")
    turns = recorder.race.turns(3)
    assert [name for name, _, _ in recorder.asked] == list("abcbcacab")
    assert [turn.first for turn in turns] == [0, 1, 2]
    assert all(set(turn.ms) == set("abc") for turn in turns)
    recorder.asked.clear()
    recorder.race.turns(23)
    own = [(first, calls) for name, first, calls in recorder.asked if name == "a"]
    assert len(own) == 10
    assert sum(calls for _, calls in own) == 23
    # Every engine takes the same batches: the turns go on where the last one ended.
    assert [first for first, _ in own] == [sum(calls for _, calls in own[:i]) for i in range(10)]
    assert {name: [each[1:] for each in recorder.asked if each[0] == name] for name in "bc"} == {
        "b": own, "c": own
    }  # fmt: skip


@pytest.mark.parametrize(("cores", "refused"), [(1.0, False), (1.3, False), (1.9, True)])
def test_an_engine_with_hidden_threads_is_not_compared(monkeypatch, cores, refused):
    """A28: what an engine was asked to take and what it takes are two things."""
    recorder = Recorder(monkeypatch, "ab", cores)
    if refused:
        with pytest.raises(CheckError, match=r"engine a: used 1.9 cores, wanted at most the 1 threads"):
            recorder.race.turns(5)
    else:
        assert recorder.race.turns(5)[0].cores == {"a": cores, "b": cores}


def test_cores_are_measured(shared_bundle):
    """By the process's own clock, which what other programs take does not move."""
    engine = bench_worker.Engine(request(shared_bundle))

    class Half:
        busy_s = 0.1

        def run(self, feeds):
            until = time.process_time() + self.busy_s
            while time.process_time() < until:
                pass
            time.sleep(0.1)

    engine._runner = cast(Any, Half())
    assert engine.answer({"do": "prepare", "work": {"batches": [[4]], "whole": False}, "warmup": 1}) > 190
    found = engine.answer({"do": "time", "first": 0, "calls": 2, "rest": False})
    assert found["cpu_s"] == pytest.approx(0.2, abs=0.05)
    assert found["elapsed_s"] > 0.39
    assert found["elapsed_s"] * 1e3 == pytest.approx(sum(found["ms"]), rel=0.05)


def test_an_engine_that_never_rests_is_refused(monkeypatch):
    """A28: the threads of one engine spin while the next one is timed."""
    monkeypatch.setattr(bench_worker, "_LONGEST_REST_S", 0.1)
    monkeypatch.setattr(bench_worker.time, "process_time", lambda: 0.0)
    bench_worker._rest()
    monkeypatch.setattr(bench_worker.time, "process_time", time.perf_counter)  # a core is always busy
    with pytest.raises(CheckError, match=r"threads were still busy 0.1 s after a call"):
        bench_worker._rest()


def test_wrong_outputs_are_not_timed(make_bundle, tiny_reference):
    """A fast wrong answer must not become a figure."""
    bundle = make_bundle(expected=lambda feeds: {name: -values for name, values in tiny_reference(feeds).items()})
    with pytest.raises(ParityError, match="parity failed on 32 of 32"):
        bench_worker.Engine(request(bundle))
    with pytest.raises(ParityError, match="parity failed on 32 of 32"):
        bench(bundle, BenchPlan(rounds=1, threads=1))


def test_a_provider_that_does_not_run_gives_an_error_and_no_figure(shared_bundle):
    """A26, through the worker process."""
    if provider_problem("cuda") is None:
        found = bench(shared_bundle, BenchPlan(provider="cuda", rounds=2))
        assert found["provider"] == "cuda"
        assert found["engines"]["tfx"]["placement"]["CUDAExecutionProvider"] > 0
        return
    with pytest.raises(ProviderError, match="provider cuda "):
        bench(shared_bundle, BenchPlan(provider="cuda", rounds=2))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (BenchPlan(batches=(0,)), "batch: found 0, wanted at least 1"),
        (BenchPlan(batches=(0,), lengths="3"), "batch: found 0, wanted at least 1"),
        (BenchPlan(sequences=(-1,)), "sequence: found -1"),
        (BenchPlan(sequences=(25,)), "sequence: found 25, wanted at most 24"),
        (BenchPlan(batches=(1, 2**23), sequences=(2, 3)), f"found {2**23} x 3, wanted at most {2**24} tokens"),
        (BenchPlan(batches=(2**22,), lengths="7"), f"found {2**22} rows of 7, wanted at most {2**24} tokens"),
        (BenchPlan(engines=("tensorrt",)), 'engine: found "tensorrt", wanted one of torch, onnxruntime, openvino'),
        (BenchPlan(engines=("floor",)), 'engine: found "floor"'),
        (BenchPlan(mode="fast"), 'mode: found "fast", wanted one of latency, throughput'),
        (BenchPlan(lengths="4", sequences=(4,)), "lengths and sequences: found both"),
        (BenchPlan(lengths="25"), "lengths: found 25, wanted at most 24"),
        (BenchPlan(source="somewhere"), "source: found somewhere, but no engine to compare with"),
    ],
)
def test_a_wrong_plan(shared_bundle, plan, message):
    with pytest.raises(InputError, match=message):
        bench(shared_bundle, plan)


def test_default_sequences_go_as_far_as_the_model():
    assert BenchPlan().shapes(24) == [(1, 16), (1, 24), (8, 16), (8, 24)]
    assert BenchPlan().shapes(8) == [(1, 8), (8, 8)]
    assert BenchPlan().shapes(None) == [(1, 16), (1, 128), (8, 16), (8, 128)]
    assert BenchPlan(batches=(2, 2), sequences=(5, 5)).shapes(None) == [(2, 5)]
    assert BenchPlan(batches=(2**14,), sequences=(2**10,)).shapes(None) == [(2**14, 2**10)]
    with pytest.raises(InputError, match="found 1 x 99999999999, wanted at most"):
        BenchPlan(batches=(1,), sequences=(99999999999,)).shapes(None)


def test_what_a_histogram_becomes(shared_bundle):
    rows = [3, 9, 4, 4, 2]
    latency = BenchPlan(batches=(1, 2), lengths="x").works(shared_bundle, rows)
    # One latency each; the last row alone would be another one.
    assert [work.batches for work in latency] == [((3,), (9,), (4,), (4,), (2,)), ((3, 9), (4, 4))]
    assert not any(work.whole for work in latency)
    (whole,) = BenchPlan(batches=(2,), lengths="x", mode="throughput").works(shared_bundle, rows)
    assert whole == Work(((3, 9), (4, 4), (2,)), whole=True)
    assert (whole.batch, whole.sequence, whole.tokens(0, 2)) == (2, 9, 44)
    assert [latency[1].tokens(first, calls) for first, calls in ((0, 1), (1, 1), (1, 2), (3, 1))] == [12, 8, 20, 8]
    (fixed,) = BenchPlan(batches=(4,), sequences=(5,), mode="throughput", count=9).works(shared_bundle, None)
    assert fixed == Work(((5,) * 4,) * 2, whole=True)


def test_a_histogram_end_to_end(shared_bundle):
    plan = BenchPlan((2,), None, threads=1, rounds=6, lengths="4,12", count=8)
    found = bench(shared_bundle, plan)
    (row,) = found["results"]
    assert (row["batch"], row["sequence"], row["tokens"], row["rounds"]) == (2, 12, 16, 6)
    assert row["padding"] == pytest.approx(1 - 16 / 24)
    assert (found["lengths"]["count"], found["lengths"]["mean"], found["lengths"]["spec"]) == (8, 8, "4,12")


def test_throughput_end_to_end(shared_bundle):
    found = bench(shared_bundle, BenchPlan((3,), threads=1, rounds=3, lengths="4,12", count=8, mode="throughput"))
    (row,) = found["results"]
    assert (row["tokens"], row["texts"], row["rounds"], found["mode"]) == (64, 8, 3, "throughput")
    assert row["texts_per_s"] == pytest.approx(8 / row["p50_ms"] * 1e3)


def test_all_rows_at_once_are_sorted_unless_the_engine_does_it(shared_bundle):
    engine = bench_worker.Engine(request(shared_bundle))
    seen = []

    class Plain:
        def run(self, feeds):
            seen.append([int(row.sum()) for row in feeds["attention_mask"]])

    engine._runner = cast(Any, Plain())
    work = {"batches": [[3, 9], [4, 4], [2]], "whole": True}
    engine.answer({"do": "prepare", "work": work, "warmup": 1})
    assert seen == [[9, 4], [4, 3], [2]]

    class Own(Plain):
        def run_all(self, encodings):
            seen.append(sorted(len(each) for each in encodings))

    engine._runner = cast(Any, Own())
    seen.clear()
    engine.answer({"do": "prepare", "work": work, "warmup": 1})
    engine.answer({"do": "time", "first": 0, "calls": 2, "rest": False})
    assert seen == [[2, 3, 4, 4, 9]] * 3


def test_the_bundle_runs_rows_under_a_schedule(shared_bundle, monkeypatch):
    schedule = {"workers": 2, "threads": 1, "batch_tokens": 64}
    engine = bench_worker.Engine(request(shared_bundle, options={"schedule": schedule, "spinning": False}))
    seen = []
    session = cast(Any, engine._runner)._session
    monkeypatch.setattr(session, "run_many", lambda items, schedule: seen.append((items, schedule)) or [])
    work = {"batches": [[3, 9], [4, 4], [2]], "whole": True}
    engine.answer({"do": "prepare", "work": work, "warmup": 1})
    ((rows, found),) = seen
    assert found.to_json() == schedule
    assert sorted(len(row) for row in rows) == [2, 3, 4, 4, 9]
    feeds = make_ragged_feeds(shared_bundle.manifest.inputs, [9, 4], pad_id=shared_bundle.manifest.pad_id)
    kept = {(tuple(row.ids), tuple(row.types)) for row in rows}
    for i, length in enumerate((9, 4)):
        assert (tuple(feeds["input_ids"][i, :length]), tuple(feeds["token_type_ids"][i, :length])) in kept


@pytest.mark.parametrize("difference", [{"threads": 4}, {"provider": "cuda"}])
def test_unequal_engines_are_not_compared(difference):
    """A28: other threads, another machine half: no comparison."""
    race = Race()
    race.facts = {"tfx": {"threads": 2, "provider": "cpu"}, "torch": {"threads": 2, "provider": "cpu", **difference}}
    with pytest.raises(CheckError, match=r"engines differ in (threads|provider) \(tfx .*, torch "):
        race.check_equal()


def test_engines_are_found_by_their_module(shared_bundle, monkeypatch):
    monkeypatch.setattr(bench_worker, "ENGINES", {"tfx": "tfx.runtime.bench_worker", "absent": "tfx.runtime.absent"})
    assert bench_worker.Engine(request(shared_bundle)).facts["engine"] == "tfx"
    with pytest.raises(InputError, match='engine: "absent" is not part of this tfx'):
        bench_worker.Engine(request(shared_bundle, engine="absent"))


def test_the_command_knows_every_engine_and_mode():
    from tfx.runtime import bench_command

    assert bench_command._ENGINES == COMPARED
    assert bench_command._MODES == MODES


# Memory


def test_plateau():
    rising = [100 + i for i in range(300)]
    found = plateau(rising)
    assert not found["plateau"]
    assert found["growth"] == pytest.approx(399 / 299 - 1)
    assert (found["runs"], found["first_mb"], found["most_mb"]) == (300, 100, 399)
    assert found["steady_mb"] == np.median(rising[200:])
    assert plateau([100 + min(i, 150) for i in range(300)])["growth"] == 0
    assert plateau([100.0] * 200 + [101.9] * 100)["plateau"]
    assert not plateau([100.0] * 200 + [102.1] * 100)["plateau"]
    assert plateau([200.0] * 200 + [100.0] * 100)["growth"] == 0


def test_varying_shapes():
    shapes = varying(300, 64)
    assert len(shapes) == 300
    assert {len(rows) for rows in shapes} == set(range(1, 17))
    assert all(len(set(rows)) == 1 and 8 <= rows[0] <= 64 for rows in shapes)
    assert shapes == varying(300, 64)
    assert max(max(rows) for rows in varying(300, None)) > 240
    assert {length for rows in varying(50, 64, [3, 5]) for length in rows} == {3, 5}
    assert varying(2, 4)[0][0] == 4


def test_memory_over_varying_shapes(shared_bundle):
    found = measure_memory(request(shared_bundle), 24, runs=30)
    assert found["runs"] == 30
    assert 20 < found["first_mb"] <= found["most_mb"] <= found["peak_mb"] + 1


# The worker's protocol


def serve(*questions):
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in questions)
    return subprocess.run(
        [sys.executable, "-m", "tfx.runtime.bench_worker"], input=text, capture_output=True, text=True, timeout=120
    )


def test_worker_protocol(shared_bundle):
    work = {"batches": [[4, 2], [3, 3]], "whole": False}
    done = serve(
        request(shared_bundle),
        {"do": "prepare", "work": work, "warmup": 2},
        {"do": "time", "first": 1, "calls": 3, "rest": True},
        {"do": "shapes", "batches": [[4], [5, 5]]},
        {"do": "memory"},
        {"do": "dance"},
    )
    facts, prepared, timed, shapes, memory, wrong = (json.loads(line) for line in done.stdout.splitlines())
    assert facts["answer"]["engine"] == "tfx"
    assert prepared["answer"] > 0
    assert len(timed["answer"]["ms"]) == 3
    assert len(shapes["answer"]) == 2
    assert memory["answer"] > 20
    assert wrong["error"]["kind"] == "InputError"
    assert done.stderr == ""


def test_worker_reports_errors_as_json(tmp_path, shared_bundle):
    done = serve({**request(shared_bundle), "bundle": str(tmp_path)})
    answer = json.loads(done.stdout)
    assert answer["error"]["kind"] == "BundleError"
    assert "not a bundle" in answer["error"]["message"]
    assert json.loads(serve("junk").stdout)["error"]["message"].startswith("unexpected JSONDecodeError")


def stub_worker(monkeypatch, code):
    popen = subprocess.Popen

    def start(command, **options):
        return popen([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", start)


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import os; os.abort()", MachineError, "its process ended with status -6: no message"),
        ("import sys; sys.exit('libfoo is missing')", MachineError, "ended with status 1: libfoo is missing"),
        ("", MachineError, "ended with status 0"),
        ('print(\'{"error": {"kind": "DependencyError", "message": "torch"}}\')', DependencyError, "^torch$"),
        ('print(\'{"error": {"kind": "MemoryError", "message": ""}}\')', MachineError, "out of memory"),
    ],
)
def test_a_worker_that_dies_or_fails(shared_bundle, monkeypatch, code, kind, message):
    stub_worker(monkeypatch, f"import sys; sys.stdin.readline()\n{code}")
    with pytest.raises(kind, match=message):
        bench(shared_bundle, BenchPlan(threads=1))


def test_an_interrupt_ends_the_worker(shared_bundle, monkeypatch):
    workers = []
    popen = subprocess.Popen

    def start(command, **options):
        workers.append(popen(command, **options))
        return workers[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    def interrupt(what, done, total):
        if what == "tfx 1x16":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(shared_bundle, BenchPlan(threads=1, seconds=60), interrupt)
    assert workers[0].returncode not in (None, 0)


TERMINATED = """
    import sys
    from tfx.runtime.bench import BenchPlan, bench

    def tell(what, done, total):
        if what == "tfx 1x4":
            print("timing", flush=True)

    bench(sys.argv[1], BenchPlan(batches=(1,), sequences=(4,), threads=1, rounds=10**9), tell)
"""


def test_sigterm_ends_the_worker_too(shared_bundle):
    command = [sys.executable, "-c", textwrap.dedent(TERMINATED), str(shared_bundle.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "timing\n"
        (worker,) = psutil.Process(process.pid).children()
        process.terminate()
        try:
            assert process.wait(timeout=20) == 128 + signal.SIGTERM
            assert psutil.wait_procs([worker], timeout=5)[1] == []
        finally:
            if worker.is_running():
                worker.kill()
