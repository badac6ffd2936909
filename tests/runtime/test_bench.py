from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap

import numpy as np
import psutil
import pytest

from tfx.errors import CheckError, DependencyError, InputError, MachineError, ParityError, ProviderError
from tfx.runtime import bench as bench_module
from tfx.runtime import bench_worker
from tfx.runtime.bench import BenchPlan, bench
from tfx.runtime.providers import provider_problem

KEYS = {
    "engine", "batch", "sequence", "tokens", "p50_ms", "p90_ms", "p99_ms", "tokens_per_s", "peak_rss_mb", "rounds",
}  # fmt: skip


def request(bundle, **changes):
    values = {
        "engine": "tfx",
        "bundle": str(bundle.path),
        "provider": "cpu",
        "threads": 1,
        "shapes": [[1, 4], [2, 8]],
        "warmup": 1,
        "rounds": 20,
        "seconds": 0,
    }
    return {**values, **changes}


def test_a_bundle_is_timed_in_a_process_of_its_own(shared_bundle):
    seen = []
    plan = BenchPlan(batches=(1, 2), sequences=(4,), threads=2, warmup=1, rounds=7)
    found = bench(shared_bundle, plan, lambda *args: seen.append(args))
    assert found["provider"] == "cpu"
    assert found["threads"] == 2
    assert found["engines"]["tfx"]["provider"] == "cpu"
    assert found["engines"]["tfx"]["max_abs"] < 1e-5
    assert [(row["batch"], row["sequence"], row["tokens"]) for row in found["results"]] == [(1, 4, 4), (2, 4, 8)]
    for row in found["results"]:
        assert set(row) == KEYS
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["p50_ms"] * 1e3)
        assert row["rounds"] == 7
        # The worker holds numpy and onnxruntime, not what this process holds (torch, pytest, ...).
        assert 20 < row["peak_rss_mb"] < 400
    assert seen == [("tfx", (1, 4), 0, 2), ("tfx", (2, 4), 1, 2)]
    json.dumps(found, allow_nan=False)


def test_percentiles_are_of_the_measured_times(shared_bundle, monkeypatch):
    times = [float(i) for i in range(1, 101)]
    monkeypatch.setattr(bench_worker, "_time", lambda call, request: times)
    row = bench_worker.measure(request(shared_bundle))["results"][0]
    assert (row["p50_ms"], row["p90_ms"], row["p99_ms"]) == tuple(np.percentile(times, (50, 90, 99)))


def test_rounds_and_seconds():
    calls = []
    assert len(bench_worker._time(lambda: calls.append(0), {"warmup": 3, "rounds": 4, "seconds": 9})) == 4
    assert len(calls) == 7
    assert len(bench_worker._time(lambda: None, {"warmup": 0, "rounds": None, "seconds": 0})) == 5


def test_wrong_outputs_are_not_timed(make_bundle, tiny_reference, monkeypatch):
    """A fast wrong answer must not become a figure."""
    bundle = make_bundle(expected=lambda feeds: {name: -values for name, values in tiny_reference(feeds).items()})
    monkeypatch.setattr(bench_worker, "_time", lambda *args: pytest.fail("timed"))
    with pytest.raises(ParityError, match="parity failed on 32 of 32"):
        bench_worker.measure(request(bundle))
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
        (BenchPlan(sequences=(-1,)), "sequence: found -1"),
        (BenchPlan(sequences=(25,)), "sequence: found 25, wanted at most 24"),
        (BenchPlan(batches=(1, 2**23), sequences=(2, 3)), f"found {2**23} x 3, wanted at most {2**24} tokens"),
        (BenchPlan(engines=("tensorrt",)), 'engine: found "tensorrt", wanted one of tfx, torch, onnxruntime'),
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


def result(engine, **changes):
    values = {"engine": engine, "provider": "cpu", "threads": 2, "placement": None, "max_abs": 0.0, "min_cosine": 1.0}
    return {**values, "results": [], **changes}


@pytest.mark.parametrize("difference", [{"threads": 4}, {"provider": "cuda"}])
def test_unequal_engines_are_not_compared(shared_bundle, monkeypatch, difference):
    """A28: other threads, another machine half: no comparison."""
    answers = iter([result("tfx"), result("torch", **difference)])
    monkeypatch.setattr(bench_module, "_run_worker", lambda request, progress: next(answers))
    with pytest.raises(CheckError, match=r"engines differ in (threads|provider) \(tfx .*, torch "):
        bench(shared_bundle, BenchPlan(engines=("torch",), threads=2))


def test_engines_are_found_by_their_module(shared_bundle, monkeypatch):
    monkeypatch.setattr(bench_worker, "ENGINES", {"tfx": "tfx.runtime.bench_worker", "absent": "tfx.runtime.absent"})
    assert bench_worker.measure(request(shared_bundle))["engine"] == "tfx"
    with pytest.raises(InputError, match='engine: "absent" is not part of this tfx'):
        bench_worker.measure(request(shared_bundle, engine="absent"))


# The worker's protocol


def serve(text):
    return subprocess.run(
        [sys.executable, "-m", "tfx.runtime.bench_worker"], input=text, capture_output=True, text=True, timeout=120
    )


def test_worker_protocol(shared_bundle):
    done = serve(json.dumps(request(shared_bundle, rounds=2)))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[:2] == [{"progress": [1, 4]}, {"progress": [2, 8]}]
    assert set(lines[2]["result"]["results"][0]) == KEYS
    assert done.stderr == ""


def test_worker_reports_errors_as_json(tmp_path, shared_bundle):
    done = serve(json.dumps({**request(shared_bundle), "bundle": str(tmp_path)}))
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
        ("print('{\"progress\": [1, 2]}')", MachineError, "ended with status 0"),
        ('print(\'{"error": {"kind": "DependencyError", "message": "torch"}}\')', DependencyError, "^torch$"),
        ('print(\'{"error": {"kind": "MemoryError", "message": ""}}\')', MachineError, "out of memory"),
    ],
)
def test_a_worker_that_dies_or_fails(shared_bundle, monkeypatch, code, kind, message):
    stub_worker(monkeypatch, f"import sys; sys.stdin.read()\n{code}")
    with pytest.raises(kind, match=message):
        bench(shared_bundle, BenchPlan(threads=1))


def test_an_interrupt_ends_the_worker(shared_bundle, monkeypatch):
    workers = []
    popen = subprocess.Popen

    def start(command, **options):
        workers.append(popen(command, **options))
        return workers[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    def interrupt(*args):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(shared_bundle, BenchPlan(threads=1, seconds=60), interrupt)
    assert workers[0].returncode not in (None, 0)


TERMINATED = """
    import sys
    from tfx.runtime.bench import BenchPlan, bench

    def tell(engine, shape, done, total):
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
