"""What the operators of an 8 bit product cost and leave, beside float32 and onnxruntime's dynamic scheme.

Every way is a graph of one product with what is before it (a norm, a GELU, or a Tanh in an attention's place), as
:mod:`tfx.exporter.precision` writes it. They are run in turns on one thread and timed by the process's own CPU clock,
which other programs on the machine disturb least. Printed are ratios to float32 and the error of the result, which
must be small.

    python benchmarks/precision.py
    python benchmarks/precision.py --tokens 256 --rounds 20
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import onnx
import onnx_ir as ir

from tfx.exporter.precision import apply_precision
from tfx.exporter.precision.int8 import plan
from tfx.exporter.precision.products import find_products, units
from tfx.exporter.precision.running import observe
from tfx.exporter.save import save
from tfx.exporter.targets import get
from tfx.runtime.providers import StrictSession, create_session

BEFORE = {"norm": "LayerNormalization", "gelu": "Gelu", "other": "Tanh"}
SHAPES = (("norm", 768, 2304), ("other", 768, 768), ("norm", 768, 3072), ("gelu", 3072, 768), ("norm", 384, 1536))
WORST = {"int8": 0.05, "int8-dynamic": 0.2}
"""Largest relative error of a product that is timed."""


def model_of(before: str, inner: int, outer: int) -> ir.Model:
    """``y = f(x) @ w + b``, (tokens, inner) to (tokens, outer), with one large channel as real encoders have."""
    random = np.random.default_rng(0)
    gain = np.ones(inner, np.float32)
    gain[7] = 10
    values = {
        "w": (random.standard_normal((inner, outer)) / np.sqrt(inner)).astype(np.float32),
        "b": random.standard_normal(outer).astype(np.float32),
        "g": gain,
    }
    tensor = onnx.TensorProto.FLOAT
    names = ["x", "g"] if before == "norm" else ["x"]
    first = onnx.helper.make_node(BEFORE[before], names, ["h"], domain="com.microsoft" if before == "gelu" else "")
    nodes = [first, onnx.helper.make_node("MatMul", ["h", "w"], ["p"]), onnx.helper.make_node("Add", ["p", "b"], ["y"])]
    graph = onnx.helper.make_graph(
        nodes,
        "product",
        [onnx.helper.make_tensor_value_info("x", tensor, ["tokens", inner])],
        [onnx.helper.make_tensor_value_info("y", tensor, ["tokens", outer])],
        [
            onnx.numpy_helper.from_array(array, name)
            for name, array in values.items()
            if name != "g" or before == "norm"
        ],
        value_info=[onnx.helper.make_tensor_value_info("h", tensor, ["tokens", inner])],
    )
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=imports, ir_version=8))


def session_of(model: ir.Model) -> StrictSession:
    """One thread, as a scheduler of one text a thread has it."""
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model.onnx")
        return create_session(Path(folder) / "model.onnx", threads=1)


def measured(before: str, inner: int, outer: int, tokens: int, rounds: int) -> dict:
    """Ratios to float32, and errors, of each precision."""
    random = np.random.default_rng(1)
    feeds = {"x": random.standard_normal((tokens, inner)).astype(np.float32) * 2}
    samples = [{"x": random.standard_normal((32, inner)).astype(np.float32) * 2} for _ in range(8)]
    exact = model_of(before, inner, outer)
    (unit,) = units(find_products(exact))
    found: dict = {"before": before, "inner": inner, "outer": outer, "tokens": tokens}
    found["scheme"] = plan(unit, observe(exact, unit.inputs, samples)[0]).scheme.kind
    sessions = {"fp32": session_of(exact)}
    for precision, worst in WORST.items():
        model = exact.clone()
        apply_precision(model, precision, samples, target=get("cpu"))
        sessions[precision] = session_of(model)
        wanted, given = (sessions[name].run(feeds)["y"] for name in ("fp32", precision))
        error = float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))
        if not error <= worst:
            raise SystemExit(f"{precision} of {before} {inner} x {outer}: error {error:.3g}, wanted {worst} at most")
        found[f"{precision} error"] = error
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, session in sessions.items():
            started = time.process_time()
            session.run(feeds)
            times[name].append(time.process_time() - started)
    found["fp32 ms"] = 1e3 * statistics.median(times["fp32"])
    for name in WORST:
        pairs = [mine / whole for mine, whole in zip(times[name], times["fp32"], strict=True)]
        found[f"{name} / fp32"] = statistics.median(pairs)
    return found


@click.command()
@click.option("--tokens", type=int, default=1024, show_default=True)
@click.option("--rounds", type=int, default=15, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file to write.")
def main(tokens: int, rounds: int, out: Path | None) -> None:
    """Time 8 bit products and print ratios."""
    results = [measured(before, inner, outer, tokens, rounds) for before, inner, outer in SHAPES]
    for each in results:
        ratios = "  ".join(f"{name} {each[f'{name} / fp32']:.3f} (error {each[f'{name} error']:.4f})" for name in WORST)
        print(f"{each['before']:<5} {each['inner']:>4} x {each['outer']:<4} {each['scheme']:<8} {ratios}")
    if out is not None:
        out.write_text(json.dumps({"results": results}, indent=2))


if __name__ == "__main__":
    main()
