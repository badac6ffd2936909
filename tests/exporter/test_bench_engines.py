"""``tfx bench --compare``: the engines beside the bundle, in this process and end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner

from tfx.cli import main
from tfx.errors import InputError, ParityError, ProviderError
from tfx.exporter import bench_floor, bench_onnxruntime, bench_openvino, bench_sentence_transformers, bench_torch
from tfx.exporter.export import export
from tfx.exporter.save import save
from tfx.exporter.sources import reference
from tfx.models.config import EncoderConfig
from tfx.runtime import bench_race, bench_worker
from tfx.runtime.bench import BenchPlan, bench
from tfx.runtime.bundle import Bundle, write_bundle
from tfx.runtime.golden import GOLDEN_NAME, GoldenCase, save_golden
from tfx.runtime.providers import create_session
from tfx.runtime.tensors import make_feeds

CONFIG = EncoderConfig(d_model=16, heads=2, layers=2, d_ff=32, vocab_size=40, max_len=20, pooling="mean")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return export(lambda: reference(CONFIG, seed=4), tmp_path_factory.mktemp("bench") / "bundle", layout="padded")


@pytest.fixture
def threads():
    """Restore what an engine sets for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain(bundle, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.onnx"
    bench_onnxruntime.plain_export(bundle.path, path)
    return path


@pytest.fixture
def here(monkeypatch, plain):
    """Take the one plain export: each takes seconds."""
    for module in (bench_onnxruntime, bench_openvino):
        monkeypatch.setattr(module, "PlainExport", lambda bundle, source: SimpleNamespace(path=plain))


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


def test_the_plain_export_is_torchs_own(plain):
    model = onnx.load(plain)
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


@pytest.mark.thorough
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
    request = {"bundle": planted.path, "provider": "cpu", "threads": 1}
    for engine in ("torch", "onnxruntime"):
        with pytest.raises(ParityError, match=r"parity failed on 32 of 32 outputs: max abs 0\.01"):
            bench_worker.Engine({**request, "engine": engine})


def test_a_source_goes_to_the_engines_that_need_it(bundle, monkeypatch):
    plan = BenchPlan(sequences=(4,), rounds=1, threads=1, source="somewhere")
    with pytest.raises(InputError, match="source: found somewhere, but no engine to compare with"):
        bench(bundle, plan)
    requests = []

    def add(self, name, request):
        requests.append(request)
        raise InputError("seen")

    monkeypatch.setattr(bench_race.Race, "add", add)
    done = CliRunner().invoke(main, ["bench", str(bundle.path), "--compare", "torch", "--source", "somewhere"])
    assert (done.exit_code, done.stderr) == (2, "error: seen\n")
    assert requests[0]["source"] == "somewhere"
    with pytest.raises(InputError, match="source: found somewhere, but encoder-d16-h2-l2 is made again"):
        bench_worker.Engine({**requests[0], "engine": "torch"})


def test_names_of_engines():
    done = CliRunner().invoke(main, ["bench", "--compare", "torch,tensorrt"])
    assert done.exit_code == 2
    assert 'found "tensorrt", wanted torch, onnxruntime, openvino, sentence-transformers' in done.stderr


@pytest.mark.parametrize("package", ["openvino", "sentence_transformers"])
def test_a_package_that_is_missing_is_named(bundle, monkeypatch, package, here):
    name = package.replace("_", "-")
    monkeypatch.setitem(sys.modules, package, None)
    request = {"bundle": bundle.path, "provider": "cpu", "threads": 1, "engine": name, "source": "folder"}
    monkeypatch.setattr(bench_sentence_transformers, "_check_bundle", lambda *args: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        bench_worker.Engine(request)
    answer = bench_worker.error_to_json(caught.value)
    assert answer == {
        "kind": "DependencyError",
        "message": f'{package} is not installed; install it with: pip install "{name}"',
    }


def test_sentence_transformers_wants_a_checkpoint(bundle):
    with pytest.raises(InputError, match="sentence-transformers: wanted a bundle of a checkpoint that gives one"):
        bench_sentence_transformers.make_runner(bundle, "cpu", 1, "folder")


def test_openvino_with_a_stand_in(bundle, monkeypatch, here):
    """OpenVINO is not among the packages of the tests: its calls, on onnxruntime, in its own words."""
    seen = {}

    class Compiled:
        def __init__(self, path):
            self.session = create_session(path)

        def create_infer_request(self):
            return self

        def output(self, name):
            return f"port of {name}"

        def get_property(self, name):
            return seen["settings"][name]

        def infer(self, feeds, share_outputs):
            return {f"port of {name}": values for name, values in self.session.run(feeds).items()}

    class Core:
        def read_model(self, path):
            return path

        def compile_model(self, model, device, settings):
            seen.update(device=device, settings=settings)
            return Compiled(model)

    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=Core))
    request = {"bundle": bundle.path, "provider": "cpu", "threads": 1, "engine": "openvino"}
    facts = bench_worker.Engine(request).facts
    assert (facts["provider"], facts["threads"]) == ("cpu", 1)
    assert facts["max_abs"] < 1e-5
    # Its default, bfloat16, would be another model.
    assert seen["settings"]["INFERENCE_PRECISION_HINT"] == "f32"
    with pytest.raises(ProviderError, match="provider cuda is none of OpenVINO's"):
        bench_worker.Engine({**request, "provider": "cuda"})


# The floor


def test_products_of_the_reference_encoder(bundle):
    found = bench_floor.products(ir.load(bundle.model_path))
    # Per layer Q, K and V in one, the output, and up and down the feed-forward part.
    layer = [(16, 48), (16, 16), (16, 32), (32, 16)]
    assert [(each.inner, each.outer) for each in found] == layer * 2
    assert {(each.dtype, each.per_row) for each in found} == {("float32", False)}


def products_of(text: str, weights: dict[str, np.ndarray]):
    model = ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n{text}')
    for name, array in weights.items():
        value = next(v for node in model.graph for v in node.inputs if v is not None and v.name == name)
        value.const_value = ir.tensor(array)
    return [(each.inner, each.outer, each.dtype, each.per_row) for each in bench_floor.products(model)]


def test_products_of_other_operators():
    f, i = np.zeros((4, 6), np.float32), np.zeros((4, 6), np.int8)
    text = """g (float[batch, 4] p, float[n, 4] x, uint8[n, 4] u) => (float[n, 6] a) {
        a = Gemm(p, w)
        b = Gemm <transB = 1> (x, wt)
        c = MatMul(x, x)
        d = MatMulInteger(u, wi)
        e = com.microsoft.MatMulNBits <K = 64, N = 32, accuracy_level = 4> (x)
        f = com.microsoft.MatMulNBits <K = 64, N = 32> (x)
        h = com.microsoft.DynamicQuantizeMatMul(x, wi)
    }"""
    assert products_of(text, {"w": f, "wt": f.T, "wi": i}) == [
        (4, 6, "float32", True),
        (4, 6, "float32", False),
        (4, 6, "int8", False),
        (64, 32, "int8", False),
        (64, 32, "float32", False),
        (4, 6, "int8", False),
    ]


def test_the_floor_makes_its_products_on_the_attended_tokens(bundle, monkeypatch):
    runner = bench_floor.make_runner(bundle, "cpu", 1)
    feeds = make_feeds(bundle.manifest.inputs, batch=3, sequence=8, pattern="right")
    attended = int(feeds["attention_mask"].sum())
    assert attended < 24
    seen = []
    monkeypatch.setattr(runner._session, "run", seen.append)
    runner.run(feeds)
    assert {name: array.shape for name, array in seen[0].items()} == {"float32_16": (attended, 16)}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_nothing_of_the_floor_is_left_out(dtype, tmp_path):
    """Every product ends in an output, and its numbers are those of numpy."""
    wanted = [bench_floor.Product(8, 24, dtype), bench_floor.Product(8, 8, dtype), bench_floor.Product(8, 4, dtype)]
    model = bench_floor.floor_model(wanted)
    save(model, tmp_path / "floor.onnx")
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    x = np.clip(x * 30 + 128, 0, 255).astype(np.uint8) if dtype == "int8" else x
    found = create_session(tmp_path / "floor.onnx", optimize=False).run({f"{dtype}_8": x})
    tensors = [model.graph.initializers[f"w{i}"].const_value for i in range(3)]
    w = [tensor.numpy().astype(np.float64) for tensor in tensors if tensor is not None]
    # The chain goes on with the latest value of a width; integers begin anew.
    inputs = [x, x, x @ w[1] if dtype == "float32" else x]
    for values, left, right in zip(found.values(), inputs, w, strict=True):
        np.testing.assert_allclose(values, (left.astype(np.float64) @ right)[:1, :1], rtol=1e-4, atol=1e-4)


def test_a_bundle_with_its_floor_end_to_end(bundle):
    done = CliRunner().invoke(
        main, ["bench", str(bundle.path), "--floor", "--batch", "2", "--seq", "8", "--rounds", "3", "--threads", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "times floor" in done.stdout
