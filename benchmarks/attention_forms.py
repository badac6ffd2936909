"""How should one layer's attention run over packed tokens? Every form that was tried, checked and timed in turns.

All take (tokens, 3 d) and the lengths of the rows, and return (tokens, d). See README.md in this folder.

Example:
    python benchmarks/attention_forms.py --json attention-forms.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from rounds import load, ratio, run, surroundings, write_json

from tfx.errors import CheckError
from tfx.runtime.doctor import default_threads
from tfx.runtime.lengths import parse_lengths

HEADS, SIZE = 12, 64
D = HEADS * SIZE
CONTRIB = "com.microsoft"
SHAPES: dict[str, list[int]] = {
    "mixed": parse_lengths("lognormal:60,256", count=16, seed=0),
    "(8, 128)": [128] * 8,
    "(64, 16)": [16] * 64,
    "(1, 128)": [128],
}
_node = helper.make_node
Nodes = list[onnx.NodeProto]


def _constant(name: str, values: object, kind: type = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, kind), name)


_CONSTANTS = [
    _constant("zero", 0), _constant("axis0", [0]), _constant("axis1", [1]), _constant("axes", [0, 1]),
    _constant("true", 1, np.bool_), _constant("thirds", [D] * 3), _constant("cut0", [0]), _constant("cut1", [D]),
    _constant("cut2", [2 * D]), _constant("cut3", [3 * D]), _constant("heads", [0, HEADS, SIZE]),
    _constant("merged", [0, D]), _constant("scale", SIZE**-0.5, np.float32), _constant("one", [1]),
    _constant("minus", [-1]),
]  # fmt: skip


def _attention(kernel: str) -> Nodes:
    """(1, length, d) three times -> (1, length, d)."""
    if kernel == "MultiHeadAttention":
        return [_node(kernel, ["bq", "bk", "bv"], ["by"], num_heads=HEADS, domain="com.microsoft")]
    if kernel == "Attention":
        return [_node(kernel, ["bq", "bk", "bv"], ["by"], q_num_heads=HEADS, kv_num_heads=HEADS)]
    nodes: Nodes = []
    for side in "qkv":
        nodes += [
            _node("Reshape", [f"r{side}", "heads"], [f"h{side}"]),
            _node("Transpose", [f"h{side}"], [f"t{side}"], perm=[1, 2, 0] if side == "k" else [1, 0, 2]),
        ]
    return [
        *nodes,
        _node("MatMul", ["tq", "tk"], ["scores"]),
        _node("Mul", ["scores", "scale"], ["scaled"]),
        _node("Softmax", ["scaled"], ["weights"], axis=-1),
        _node("MatMul", ["weights", "tv"], ["context"]),
        _node("Transpose", ["context"], ["rows"], perm=[1, 0, 2]),
        _node("Reshape", ["rows", "merged"], ["ry"]),
    ]


def _loop(cut: str, kernel: str) -> Nodes:
    """Row by row: ``cut`` says how a row's q, k and v come out of the whole."""
    before: Nodes = [
        _node("CumSum", ["lengths", "zero"], ["ends"]),
        _node("Sub", ["ends", "lengths"], ["starts"]),
        _node("Size", ["lengths"], ["count"]),
    ]
    body: Nodes = [
        _node("Unsqueeze", ["i", "axis0"], ["i1"]),
        _node("Gather", ["starts", "i1"], ["start"]),
        _node("Gather", ["ends", "i1"], ["end"]),
    ]
    if cut == "sequence":
        before.append(_node("SplitToSequence", ["qkv", "lengths"], ["sequence"], axis=0))
        body = [_node("SequenceAt", ["sequence", "i"], ["row"])]
    if cut == "row":
        body.append(_node("Slice", ["qkv", "start", "end", "axis0"], ["row"]))
    if cut in ("sequence", "row"):
        body.append(_node("Split", ["row", "thirds"], ["rq", "rk", "rv"], axis=1))
    elif cut == "thirds":
        before.append(_node("Split", ["qkv", "thirds"], ["q", "k", "v"], axis=1))
        body += [_node("Slice", [side, "start", "end", "axis0"], [f"r{side}"]) for side in "qkv"]
    elif cut == "both axes":
        for side, (low, high) in zip("qkv", (("cut0", "cut1"), ("cut1", "cut2"), ("cut2", "cut3")), strict=True):
            body += [
                _node("Concat", ["start", low], [f"s{side}"], axis=0),
                _node("Concat", ["end", high], [f"e{side}"], axis=0),
                _node("Slice", ["qkv", f"s{side}", f"e{side}", "axes"], [f"r{side}"]),
            ]
    if kernel != "products":
        body += [_node("Unsqueeze", [f"r{side}", "axis0"], [f"b{side}"]) for side in "qkv"]
    body += _attention(kernel)
    if kernel != "products":
        body.append(_node("Squeeze", ["by", "axis0"], ["ry"]))
    body += [_node("SequenceInsert", ["parts", "ry"], ["longer"]), _node("Identity", ["go"], ["on"])]
    tensor, sequence = helper.make_tensor_value_info, helper.make_tensor_sequence_value_info
    graph = helper.make_graph(
        body,
        "row",
        [
            tensor("i", TensorProto.INT64, []),
            tensor("go", TensorProto.BOOL, []),
            sequence("parts", TensorProto.FLOAT, None),
        ],
        [tensor("on", TensorProto.BOOL, []), sequence("longer", TensorProto.FLOAT, None)],
    )
    return [
        *before,
        _node("SequenceEmpty", [], ["none"]),
        _node("Loop", ["count", "true", "none"], ["all"], body=graph),
        _node("ConcatFromSequence", ["all"], ["y"], axis=0),
    ]


def _padded() -> Nodes:
    """Scattered to (rows, longest, 3 d), attended with a mask, gathered again."""
    return [
        _node("ReduceMax", ["lengths"], ["longest"], keepdims=1),
        _node("Squeeze", ["longest", "axis0"], ["most"]),
        _node("Range", ["zero", "most", "step"], ["places"]),
        _node("Unsqueeze", ["lengths", "axis1"], ["column"]),
        _node("Less", ["places", "column"], ["attended"]),
        _node("Cast", ["attended"], ["number"], to=TensorProto.FLOAT),
        _node("Reshape", ["number", "minus"], ["flat"]),
        _node("NonZero", ["flat"], ["found"]),
        _node("Squeeze", ["found", "axis0"], ["index"]),
        _node("Unsqueeze", ["index", "axis1"], ["indices"]),
        _node("Shape", ["flat"], ["size"]),
        _node("Concat", ["size", "cut3"], ["blank_shape"], axis=0),
        _node("ConstantOfShape", ["blank_shape"], ["blank"]),
        _node("ScatterND", ["blank", "indices", "qkv"], ["scattered"]),
        _node("Concat", ["minus", "longest", "cut3"], ["batch_shape"], axis=0),
        _node("Reshape", ["scattered", "batch_shape"], ["batch"]),
        _node("Split", ["batch", "thirds"], ["bq", "bk", "bv"], axis=2),
        _node("Sub", ["number", "unit"], ["negative"]),
        _node("Mul", ["negative", "large"], ["penalty"]),
        _node("Unsqueeze", ["penalty", "middle"], ["narrow"]),
        _node("Concat", ["one", "one", "longest", "one"], ["spread"], axis=0),
        _node("Expand", ["narrow", "spread"], ["bias"]),
        _node("MultiHeadAttention", ["bq", "bk", "bv", "", "", "bias"], ["by"], num_heads=HEADS, domain=CONTRIB),
        _node("Reshape", ["by", "rows_of_d"], ["out"]),
        _node("Gather", ["out", "index"], ["y"], axis=0),
    ]  # fmt: skip


def _together() -> Nodes:
    """All rows as one sequence, with a mask that keeps them apart: (tokens, tokens) scores."""
    return [
        _node("CumSum", ["lengths", "zero"], ["ends"]),
        _node("Unsqueeze", ["ends", "axis1"], ["borders"]),
        _node("Shape", ["qkv"], ["size"], start=0, end=1),
        _node("Squeeze", ["size", "axis0"], ["total"]),
        _node("Range", ["zero", "total", "step"], ["places"]),
        _node("GreaterOrEqual", ["places", "borders"], ["behind"]),
        _node("Cast", ["behind"], ["ones"], to=TensorProto.INT64),
        _node("ReduceSum", ["ones", "axis0"], ["row"], keepdims=0),
        _node("Unsqueeze", ["row", "axis1"], ["column"]),
        _node("Equal", ["row", "column"], ["same"]),
        _node("Where", ["same", "nothing", "masked"], ["square"]),
        _node("Unsqueeze", ["square", "axes"], ["bias"]),
        _node("Unsqueeze", ["qkv", "axis0"], ["batch"]),
        _node("Split", ["batch", "thirds"], ["bq", "bk", "bv"], axis=2),
        _node("MultiHeadAttention", ["bq", "bk", "bv", "", "", "bias"], ["by"], num_heads=HEADS, domain=CONTRIB),
        _node("Squeeze", ["by", "axis0"], ["y"]),
    ]  # fmt: skip


FORMS: dict[str, Callable[[], Nodes]] = {
    "loop, three slices, MultiHeadAttention": lambda: _loop("thirds", "MultiHeadAttention"),
    "loop, three slices, Attention": lambda: _loop("thirds", "Attention"),
    "loop, three slices, products": lambda: _loop("thirds", "products"),
    "loop, slices of both axes": lambda: _loop("both axes", "MultiHeadAttention"),
    "loop, one slice and a split": lambda: _loop("row", "MultiHeadAttention"),
    "loop, SplitToSequence": lambda: _loop("sequence", "MultiHeadAttention"),
    "padded for attention alone": _padded,
    "one sequence with a mask": _together,
}


def _model(form: str) -> bytes:
    more = [
        _constant("step", 1), _constant("unit", 1, np.float32), _constant("large", 1e9, np.float32),
        _constant("middle", [1, 2]), _constant("rows_of_d", [-1, D]), _constant("nothing", 0, np.float32),
        _constant("masked", -1e9, np.float32),
    ]  # fmt: skip
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        FORMS[form](),
        "attention",
        [tensor("qkv", TensorProto.FLOAT, ["tokens", 3 * D]), tensor("lengths", TensorProto.INT64, ["rows"])],
        [tensor("y", TensorProto.FLOAT, ["tokens", D])],
        [*_CONSTANTS, *more],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _expected(qkv: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    rows, start = [], 0
    for length in lengths:
        q, k, v = (part.reshape(length, HEADS, SIZE).swapaxes(0, 1)
                   for part in np.split(qkv[start : start + length].astype(np.float64), 3, axis=1))  # fmt: skip
        scores = q @ k.swapaxes(1, 2) * SIZE**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        rows.append(((weights / weights.sum(-1, keepdims=True)) @ v).swapaxes(0, 1).reshape(length, D))
        start += length
    return np.concatenate(rows)


def _serve(form: str, threads: int) -> None:
    """Answers each line ``shape calls`` with the milliseconds of each call and the largest error."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(_model(form), options, providers=["CPUExecutionProvider"])  # noqa: TID251
    for line in sys.stdin:
        shape, calls = json.loads(line)
        lengths = SHAPES[shape]
        qkv = np.random.default_rng(0).standard_normal((sum(lengths), 3 * D)).astype(np.float32)
        feeds = {"qkv": qkv, "lengths": np.array(lengths, np.int64)}
        error = float(np.abs(np.asarray(session.run(None, feeds)[0]) - _expected(qkv, lengths)).max())
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            session.run(None, feeds)
            times.append((time.perf_counter() - start) * 1e3)
        print(json.dumps([times, error]), flush=True)


@click.command()
@click.option("--rounds", default=8, show_default=True)
@click.option("--threads", type=int, default=default_threads, show_default="physical cores")
@click.option("--serve", hidden=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(rounds: int, threads: int, serve: str | None, json_path: Path | None) -> None:
    """Time every form of attention over packed tokens."""
    if serve is not None:
        _serve(serve, threads)
        return
    before = load()
    with tempfile.TemporaryFile() as noise:
        workers = {
            form: subprocess.Popen(
                [sys.executable, __file__, "--serve", form, "--threads", str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=noise, text=True,
            )
            for form in FORMS
        }  # fmt: skip
        results = []
        for shape in SHAPES:
            times: dict[str, list[float]] = {form: [] for form in FORMS}
            for turn in range(rounds):
                names = list(FORMS)
                for form in names[turn % len(names) :] + names[: turn % len(names)]:
                    worker = workers[form]
                    assert worker.stdin is not None and worker.stdout is not None
                    print(json.dumps([shape, 3]), file=worker.stdin, flush=True)
                    found, error = json.loads(worker.stdout.readline())
                    if not error < 1e-5:
                        raise CheckError(f"{form} on {shape}: off by {error:.2g}, wanted below 1e-5")
                    times[form].append(sorted(found)[1])
            first = next(iter(FORMS))
            for form in FORMS:
                row = {"shape": shape, "form": form, "ms": float(np.median(times[form])),
                       "ratio": ratio(times[form], times[first])}  # fmt: skip
                results.append(row)
                click.echo(f"{shape:>9}  {form:40} {row['ms']:8.2f} ms  x{row['ratio']['median']:.2f}")
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
            worker.wait()
    write_json(json_path, {**surroundings(threads, before), "results": results})


if __name__ == "__main__":
    run(main)
