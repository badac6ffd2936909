"""``tfx bench --compare``: the engines beside the bundle, in this process and end to end."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner

from tfx.cli import main
from tfx.errors import InputError, ParityError, ProviderError
from tfx.exporter import bench_onnxruntime, bench_torch
from tfx.exporter.export import export
from tfx.exporter.sources import reference
from tfx.models.config import EncoderConfig
from tfx.runtime import bench as bench_module
from tfx.runtime import bench_worker
from tfx.runtime.bench import BenchPlan, bench
from tfx.runtime.bundle import Bundle, write_bundle
from tfx.runtime.golden import GOLDEN_NAME, GoldenCase, save_golden
from tfx.runtime.tensors import make_feeds

CONFIG = EncoderConfig(d_model=16, heads=2, layers=2, d_ff=32, vocab_size=40, max_len=20, pooling="mean")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return export(lambda: reference(CONFIG, seed=4), tmp_path_factory.mktemp("bench") / "bundle")


@pytest.fixture
def threads():
    """Restore what an engine sets for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(monkeypatch):
    """Let the plain export run in this process, which saves the start of another one."""
    monkeypatch.setattr(bench_onnxruntime, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))


def test_torch_is_the_live_module(bundle, threads):
    runner = bench_torch.make_runner(bundle, "cpu", 1)
    assert (runner.provider, runner.threads, runner.placement) == ("cpu", 1, None)
    feeds = make_feeds(bundle.manifest.inputs, batch=2, sequence=5, pattern="left")
    found = runner.run(feeds)
    with torch.no_grad():
        wanted = reference(CONFIG, seed=4).module(**{name: torch.from_numpy(array) for name, array in feeds.items()})
    assert list(found) == ["last_hidden_state", "sentence_embedding"]
    for name, values in found.items():
        np.testing.assert_array_equal(values, wanted[name].numpy())


def test_torch_without_a_gpu_gives_no_figure(bundle, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProviderError, match=r"provider cuda does not run here: torch .* finds no GPU"):
        bench_torch.make_runner(bundle, "cuda", 1)


def test_the_plain_export_is_torchs_own(bundle, tmp_path):
    path = tmp_path / "plain.onnx"
    bench_onnxruntime.plain_export(bundle.path, path)
    model = onnx.load(path)
    ops = {node.op_type for node in model.graph.node}
    assert {node.domain for node in model.graph.node} == {""}
    # As written by hand in the encoder: nothing of tfx has touched it.
    assert "Softmax" in ops
    assert not ops & {"Attention", "BiasGelu"}
    assert [output.name for output in model.graph.output] == ["last_hidden_state", "sentence_embedding"]


def test_onnxruntime_keeps_all_of_its_optimizers(bundle, monkeypatch, here):
    calls = []
    create = bench_onnxruntime.create_session
    monkeypatch.setattr(
        bench_onnxruntime, "create_session", lambda *args, **options: calls.append(options) or create(*args, **options)
    )
    runner = bench_onnxruntime.make_runner(bundle, "cpu", 1)
    assert calls == [{"disabled_optimizers": ()}]
    for case in bundle.golden():
        for name, values in runner.run(case.inputs).items():
            if name == "sentence_embedding":
                np.testing.assert_allclose(values, case.outputs[name], atol=1e-5)


def test_all_engines_end_to_end(bundle):
    done = CliRunner().invoke(
        main,
        [
            "bench", str(bundle.path), "--compare", "torch", "--compare", "onnxruntime", "--batch", "1,2", "--seq", "8",
            "--rounds", "3", "--threads", "1", "--json",
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    engines = ["tfx", "torch", "onnxruntime"]
    assert list(found["engines"]) == engines
    assert all(each["max_abs"] < 1e-5 and each["provider"] == "cpu" for each in found["engines"].values())
    assert [(row["engine"], row["batch"], row["sequence"]) for row in found["results"]] == [
        (engine, batch, 8) for engine in engines for batch in (1, 2)
    ]


def test_an_engine_that_differs_from_the_golden_is_not_timed(bundle, tmp_path, monkeypatch, threads, here):
    def fill(folder: Path):
        (folder / "model.onnx").write_bytes(bundle.model_path.read_bytes())
        wrong = [
            GoldenCase(c.id, c.batch, c.sequence, c.pattern, c.inputs, {n: v + 1e-2 for n, v in c.outputs.items()})
            for c in bundle.golden()
        ]
        save_golden(folder / GOLDEN_NAME, wrong)
        return bundle.manifest

    planted = write_bundle(tmp_path / "planted", fill)
    monkeypatch.setattr(bench_worker, "_time", lambda *args: pytest.fail("timed"))
    request = {"bundle": planted.path, "provider": "cpu", "threads": 1, "shapes": [(1, 4)]}
    for engine in ("torch", "onnxruntime"):
        with pytest.raises(ParityError, match=r"parity failed on 32 of 32 outputs: max abs 0\.01"):
            bench_worker.measure({**request, "engine": engine})


def test_a_source_goes_to_the_engines_that_need_it(bundle, monkeypatch):
    plan = BenchPlan(sequences=(4,), rounds=1, threads=1, source="somewhere")
    with pytest.raises(InputError, match="source: found somewhere, but no engine to compare with"):
        bench(bundle, plan)
    requests = []

    def worker(request, progress):
        requests.append(request)
        raise InputError("seen")

    monkeypatch.setattr(bench_module, "_run_worker", worker)
    done = CliRunner().invoke(main, ["bench", str(bundle.path), "--compare", "torch", "--source", "somewhere"])
    assert (done.exit_code, done.stderr) == (2, "error: seen\n")
    assert requests[0]["source"] == "somewhere"
    with pytest.raises(InputError, match="source: found somewhere, but encoder-d16-h2-l2 is made again"):
        bench_worker.measure({**requests[0], "engine": "torch"})
