"""Every encoder of the zoo by one exporter, two of them by all; `make zoo` does the whole matrix."""

from __future__ import annotations

import importlib
import sys
from itertools import cycle
from pathlib import Path

import pytest

import tfx

sys.path.insert(0, str(Path(tfx.__file__).parent / "benchmarks"))
try:
    zoo = importlib.import_module("zoo")
    judging = importlib.import_module("judging")
    routes = importlib.import_module("routes")
finally:
    sys.path.pop(0)

ALL = (judging.CAPTURE, *routes.FOREIGN)
# TorchScript's opset 13 is for eager attention only. It exports ten times faster than dynamo, and so comes more often.
EAGER = cycle((judging.CAPTURE, "torchscript 13", "torchscript 17", "dynamo 18", "torchscript 17, onnxruntime basic"))
SDPA = cycle(("torchscript 17", "dynamo 23", "torchscript 17, onnxruntime basic", judging.CAPTURE,
              "dynamo 20", "torchscript 17", "dynamo 18, onnxruntime basic"))  # fmt: skip
OTHER = cycle(("cuda", "web", "portable"))
BY_ALL = ("reference post", "BERT eager")


def _by_hand(row) -> bool:
    """Whether the row's own code computes the softmax, as opset 13 needs."""
    return row.name.endswith("eager") or row.name in ("MPNet", "DeBERTa-v2", "DeBERTa-v3", "reference pre")


SLICE = [
    (row, next(EAGER if _by_hand(row) else SDPA), ("cpu", next(OTHER))) for row in zoo.ZOO if row.name not in BY_ALL
]
SLICE += [(row, route, ("cpu", next(OTHER))) for row in zoo.ZOO if row.name in BY_ALL for route in ALL]


def test_the_slice_takes_every_route_twice():
    for route in ALL:
        assert sum(each == route for _, each, _ in SLICE) > 2, route


@pytest.mark.parametrize(("row", "route", "targets"), [
    pytest.param(*each, id=f"{each[0].name} | {each[1]} | {each[2][1]}") for each in SLICE
])  # fmt: skip
def test_raised_whole_and_right(row, route, targets, tmp_path):
    judged = judging.Judge(row, tmp_path).judge(route, targets)
    assert judged.not_offered is None
    assert judged.wrong == [], judged.refusals
    assert set(judged.max_abs) == set(targets)
    assert judged.found["attention"] == row.counts["attention"] > 0
    assert max(judged.max_abs.values()) <= judging.LIMIT
