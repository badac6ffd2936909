"""Every encoder of the zoo by TorchScript, one by every exporter; `make zoo` does the whole matrix."""

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
BY_ALL = "BERT eager"
# TorchScript exports ten times faster than dynamo. Its opset 13 is for eager attention only.
FAST = cycle(("torchscript 17", "torchscript 17, onnxruntime basic"))
FAST_EAGER = cycle(("torchscript 13", "torchscript 17", "torchscript 17, onnxruntime basic"))
OTHER = cycle(("cuda", "web", "portable"))

SLICE = [
    (row, next(FAST_EAGER if row.name.endswith("eager") else FAST), ("cpu", next(OTHER)))
    for row in zoo.ZOO
    if row.name != BY_ALL
]
SLICE += [(row, route, ("cpu", next(OTHER))) for row in zoo.ZOO if row.name == BY_ALL for route in ALL]


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
