"""One GPU, one reference encoder (d 768, 12 layers), every engine in a process of its own, in turns.

    python benchmarks/gpu.py --device cuda --out gpu.json        benchmarks/gpu.sh does this
    python benchmarks/gpu.py --device cpu --quick --out cpu.json what can be tried without a GPU

Engines: torch eager as the source is written (float32 without tf32), with scaled_dot_product_attention (float32,
float16), and that compiled; onnxruntime on torch's own export; tfx in float32 and float16, called plainly and through
recorded shapes. Feeds and outputs are numpy arrays in all of them, so each pays for its own copies. Outputs are
compared with torch float32 on attended positions before anything is timed. What does not run, or does not fit into the
time, is in the JSON with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from workloads import feeds, mixed_lengths  # pyright: ignore[reportMissingImports]

ENGINES = (
    "torch-fp32", "torch-sdpa-fp32", "torch-sdpa-fp16", "torch-compile-sdpa-fp16", "onnxruntime-fp32", "tfx-fp32",
    "tfx-fp32-graphs", "tfx-fp16", "tfx-fp16-graphs",
)  # fmt: skip
BATCHES = {"1x16": [16], "1x128": [128], "8x128": [128] * 8, "32x256": [256] * 32, "mixed": mixed_lengths()}
QUICK = {"1x16": [16], "mixed": mixed_lengths(4, 32, 0.5)}
SIZES: dict[str, Any] = {"d_model": 768, "heads": 12, "layers": 12, "d_ff": 3072, "vocab_size": 30522, "max_len": 512}
SMALL: dict[str, Any] = {"d_model": 64, "heads": 4, "layers": 2, "d_ff": 128, "vocab_size": 1000, "max_len": 64}
COSINES = {"fp32": 0.99999, "fp16": 0.999}

Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a small model, two batches")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each engine on each batch")
    parser.add_argument("--seconds", type=float, default=420, help="when to stop starting anything")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.engines.split(",")) - set(ENGINES)
    if unknown:
        parser.error(f"engines: found {', '.join(sorted(unknown))}, wanted some of {', '.join(ENGINES)}")
    if options.serve:
        serve(options.serve, options.folder, options.device)
        return
    with tempfile.TemporaryDirectory(prefix="tfx-gpu-") as folder:
        found = compare(Path(folder), options)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(found)))


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make the models, start the engines one after the other, let them take turns."""
    ends = time.monotonic() + options.seconds
    batches = QUICK if options.quick else BATCHES
    notes = make(folder, SMALL if options.quick else SIZES, options.engines.split(","))
    wanted = reference(folder, batches)
    found: dict[str, Any] = {"device": options.device, "made": notes, "engines": {}, "results": {}}
    with contextlib.ExitStack() as stack:
        ready: dict[str, Engine] = {}
        for name in options.engines.split(","):
            if time.monotonic() > ends:
                found["engines"][name] = {"left_out": "no time left"}
                continue
            engine = stack.enter_context(Engine(name, folder, options.device, ends + 20))
            try:
                found["engines"][name] = {"about": engine.ask({"load": True}), "outputs": {}}
                for batch in batches:
                    judged = judge(name, engine.ask({"batch": batch, "answer": True}), wanted[batch], folder, batch)
                    found["engines"][name]["outputs"][batch] = judged
                ready[name] = engine
            except EngineError as error:
                found["engines"][name] = {"left_out": str(error)}
        for batch, lengths in batches.items():
            times: dict[str, list[float]] = {name: [] for name in ready}
            for _ in range(options.rounds):
                for name, engine in list(ready.items()):
                    if time.monotonic() > ends:
                        continue
                    try:
                        times[name].append(engine.ask({"batch": batch, "calls": 10})["ms"])
                    except EngineError as error:
                        found["engines"][name]["left_out"] = f"{batch}: {error}"
                        del ready[name]
            found["results"][batch] = {
                name: {
                    "p50_ms": statistics.median(values),
                    "rounds_ms": values,
                    "tokens_per_s": sum(lengths) / statistics.median(values) * 1e3,
                }
                for name, values in times.items()
                if values
            }
        for name, engine in ready.items():  # Once more: how often each bucket ran.
            found["engines"][name]["about"] = engine.ask({"about": True})
    return found


def make(folder: Path, sizes: dict[str, Any], engines: Sequence[str]) -> dict[str, Any]:
    """Write the bundles and the plain export that the engines need."""
    import tfx
    from tfx.exporter.bench_onnxruntime import plain_export
    from tfx.exporter.sources import reference as source

    config = tfx.EncoderConfig(**sizes)
    notes: dict[str, Any] = {"sizes": dict(sizes)}
    for precision in sorted({"fp16" if name.startswith("tfx-fp16") else "fp32" for name in engines}):
        bundle = tfx.export(source(config), folder / precision, target="cuda", precision=precision)
        notes[precision] = {"parity": bundle.manifest.parity, "bytes": bundle.model_path.stat().st_size}
    if "onnxruntime-fp32" in engines:
        plain_export(folder / "fp32", folder / "plain.onnx")
    return notes


def reference(folder: Path, batches: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    """Torch in float32 on the CPU; the feeds are written for the engines."""
    run, _ = torch_engine(folder, "cpu", half=False, fused=False, compiled=False)
    vocabulary = json.loads(next(folder.glob("*/tfx.json")).read_text())["inputs"][0]["limit"]
    wanted = {}
    for name, lengths in batches.items():
        batch = feeds(lengths, vocabulary)
        np.savez(folder / f"{name}.npz", **batch)  # pyright: ignore[reportArgumentType]
        wanted[name] = run(batch)
    return wanted


def _read(path: Path) -> Any:
    return np.load(path, allow_pickle=False)  # noqa: TID251


def judge(engine: str, answer: Mapping[str, Any], wanted: np.ndarray, folder: Path, batch: str) -> dict[str, float]:
    """Compare an engine's answer with torch's, and leave it out when it is wrong."""
    found, seen = _read(Path(answer["file"])), _read(folder / f"{batch}.npz")["attention_mask"] != 0
    a, b = found[seen].astype(np.float64), wanted[seen].astype(np.float64)
    cosines = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    least = COSINES["fp16" if "fp16" in engine else "fp32"]
    if not cosines.min() >= least:  # NaN is not
        raise EngineError(f"{batch}: cosine {cosines.min():.6f}, wanted at least {least}")
    return {"max_abs": float(np.abs(a - b).max()), "min_cosine": float(cosines.min())}


class EngineError(Exception):
    """An engine does not run, or is wrong."""


class Engine:
    """A process that answers requests, until a point in time by ``time.monotonic``."""

    def __init__(self, name: str, folder: Path, device: str, ends: float) -> None:
        self._ends = ends
        self._noise = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--folder", str(folder), "--device", device, "--out", "-"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._noise, text=True,
        )  # fmt: skip

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._noise.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        # One request, one line: nothing is left in Python's buffer that select would not see.
        if not select.select([self._process.stdout], [], [], max(1.0, self._ends - time.monotonic()))[0]:
            raise EngineError("no answer in time")
        line = self._process.stdout.readline()
        if not line:
            self._noise.seek(0)
            last = (self._noise.read().strip().splitlines() or ["no message"])[-1]
            raise EngineError(f"its process ended: {last[:300]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer


def serve(name: str, folder: Path, device: str) -> None:
    """Be an engine: one JSON object a line in, one out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    run: Run | None = None
    about: Callable[[], dict[str, Any]] = dict
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if run is None:
                run, about = load(name, folder, device)
            answer = about() if "batch" not in request else _answer(run, request, folder, name)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this engine's answer
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(run: Run, request: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    batch = dict(_read(folder / f"{request['batch']}.npz"))
    if "answer" in request:
        path = folder / f"{name}-{request['batch']}.npy"
        np.save(path, run(batch))
        return {"file": str(path)}
    for _ in range(3):
        run(batch)
    start = time.perf_counter()
    for _ in range(request["calls"]):
        run(batch)
    return {"ms": (time.perf_counter() - start) / request["calls"] * 1e3}


def load(name: str, folder: Path, device: str) -> tuple[Run, Callable[[], dict[str, Any]]]:
    """Return an engine by its name, and what it says about itself."""
    if name.startswith("torch"):
        return torch_engine(folder, device, half="fp16" in name, fused="sdpa" in name, compiled="compile" in name)
    if name == "onnxruntime-fp32":
        from tfx.runtime.providers import create_session

        plain = create_session(folder / "plain.onnx", device, disabled_optimizers=())
        said = {"provider": plain.provider, "placement": plain.placement, "tf32": False}
        return lambda batch: plain.run(batch)[plain.output_names[0]], lambda: said
    bundle = folder / ("fp16" if "fp16" in name else "fp32")
    if name.endswith("graphs"):
        from tfx.runtime.cuda import BucketTable, GraphSession

        shapes = [_read(path)["input_ids"].shape for path in sorted(folder.glob("*.npz"))]
        recorded = GraphSession(bundle, buckets=BucketTable.of(shapes), provider=device)
        return lambda batch: recorded.run(batch)["last_hidden_state"], recorded.report
    from tfx import Session

    session = Session(bundle, provider=device)
    told = {"provider": session.provider, "placement": dict(session.placement or {}), "tf32": False}
    return lambda batch: session.run(batch)["last_hidden_state"], lambda: told


def torch_engine(
    folder: Path, device: str, *, half: bool, fused: bool, compiled: bool
) -> tuple[Run, Callable[[], dict[str, Any]]]:
    """The source itself, or with torch's own attention kernel in the place of the textbook's formula."""
    import torch
    import torch.nn.functional as functional

    from tfx.exporter.rebuild import rebuild
    from tfx.models import encoder
    from tfx.runtime.bundle import Bundle

    def attention(q: Any, k: Any, v: Any, mask: Any, dropout: Any) -> Any:
        del dropout  # Off when a model is evaluated.
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask != 0)

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if fused:
        encoder.attention = attention
    source = rebuild(Bundle.open(next(folder.glob("*/tfx.json")).parent).manifest, None)
    source.module.eval().to(device)
    if half:
        source.module.half()
    if compiled:
        source.module.compile()

    def run(batch: Mapping[str, np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
            return source.call(tensors)["last_hidden_state"].float().cpu().numpy()

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    said = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "tf32": False}
    return run, lambda: said


def table(found: Mapping[str, Any]) -> list[str]:
    """The figures in Markdown."""
    batches = list(found["results"])
    lines = ["| ms | " + " | ".join(batches) + " |", "|---|" + "---|" * len(batches)]
    for name, engine in found["engines"].items():
        cells = [found["results"][batch].get(name, {}).get("p50_ms") for batch in batches]
        shown = [engine.get("left_out", "-")[:60] if cell is None else f"{cell:.2f}" for cell in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


if __name__ == "__main__":
    main()
