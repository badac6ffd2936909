"""benchmarks/passes.py works, and gives no figure for a wrong answer or for nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tfx
from tfx.errors import CheckError, ParityError
from tfx.exporter.lowering import RULES

SCRIPT = Path(tfx.__file__).parent / "benchmarks" / "passes.py"
TINY = {"d_model": 16, "heads": 2, "layers": 1, "d_ff": 32, "vocab_size": 40, "max_len": 128}


@pytest.fixture
def passes(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("passes")


@pytest.mark.thorough
def test_quick(tmp_path):
    file = tmp_path / "passes.json"
    command = [sys.executable, SCRIPT, "--quick", "--only", "PackedAttention", "--only", "layer norm", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    variants = {"PackedAttention": ["off", "on"]}
    variants["layer norm"] = ["Add, LayerNormalization", "SkipLayerNormalization", "fused at load"]
    assert [(row["question"], row["batch"], row["sequence"], row["variant"]) for row in results] == [
        (question, *shape, variant)
        for question, names in variants.items()
        for shape in ((1, 16), (1, 128), (8, 128))
        for variant in names
    ]
    for row in results:
        assert row["max_abs"] < 1e-5
        assert row["ms"] > 0
        if row["variant"] == row["baseline"]:
            assert row["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert "PackedAttention" in done.stdout


def test_every_lowering_of_the_cpu_target_is_measured(passes):
    names = [question.name for question in passes.QUESTIONS]
    assert {rule.__name__ for rule in RULES["cpu"]} <= set(names)
    assert "SkipLayerNorm" in names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("question", ["attention", "gelu", "gelu tanh", "layer norm"])
@pytest.mark.thorough
def test_every_variant_is_another_graph_or_session(passes, question, tmp_path):
    """Else two names would be timed for one thing."""
    asked = next(each for each in passes.QUESTIONS if each.name == question)
    bench = passes.Bench(TINY, tmp_path)
    engines = [bench.engine(asked, name, 1) for name in asked.variants]
    assert len({(Path(e["model"]).read_bytes(), e["disabled_optimizers"]) for e in engines}) == len(engines)
    assert list(RULES) == [name for name in RULES if name != "trial"]


def test_a_planted_wrong_output_is_refused(passes, monkeypatch):
    record = passes.record

    def wrong(*args):
        cases = record(*args)
        cases[-1].outputs["last_hidden_state"][0, 0, 0] += 0.1
        return cases

    monkeypatch.setattr(passes, "record", wrong)
    with pytest.raises(ParityError, match=r"parity failed on 1 of 16 outputs: max abs 0\.1"):
        passes.measure(passes.QUESTIONS[:1], TINY, threads=1, rounds=1, seconds=0)


def test_a_rule_that_does_not_fire_is_not_compared(passes):
    question = passes.Question(
        "tanh on erf",
        {"off": passes.Variant((passes.AttentionMask,)), "on": passes.Variant((passes.FastGelu, passes.AttentionMask))},
        fires=passes.FastGelu,
    )
    with pytest.raises(CheckError, match="tanh on erf: fast_gelu did not fire, so there is nothing to compare"):
        passes.measure([question], TINY, threads=1, rounds=1, seconds=0)
