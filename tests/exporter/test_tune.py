"""``tfx tune``: other graphs of a bundle, the search, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from tfx.cli import main
from tfx.errors import BundleError, InputError, ParityError, SourceError
from tfx.exporter import tune as tune_module
from tfx.exporter import tune_command
from tfx.exporter.export import export
from tfx.exporter.sources import reference
from tfx.exporter.tune import STAGES, Settings, TunePlan, tune
from tfx.exporter.tune_log import LOG_NAME, Verdict
from tfx.exporter.tune_variants import LOWERINGS, Limit, Variants, precisions
from tfx.models.config import EncoderConfig
from tfx.runtime.bench import MODES
from tfx.runtime.bench_race import Turn
from tfx.runtime.bundle import Bundle, sha256_file
from tfx.runtime.parity import verify_bundle
from tfx.runtime.session import Session

CONFIG = EncoderConfig(d_model=64, heads=4, layers=2, d_ff=128, vocab_size=50, max_len=24, pooling="mean")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Bundle:
    return export(lambda: reference(CONFIG, seed=4), tmp_path_factory.mktemp("tune") / "bundle", layout="padded")


@pytest.fixture
def bundle(exported, tmp_path) -> Bundle:
    return Bundle.open(shutil.copytree(exported.path, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def variants(exported, tmp_path_factory) -> Variants:
    return Variants(exported, tmp_path_factory.mktemp("variants"), "exported")


def operators(bundle: Bundle) -> Counter:
    graph = ir.load(bundle.model_path).graph
    return Counter(f"{node.domain}::{node.op_type}" for node in ir.traversal.RecursiveGraphIterator(graph))


# Variants


@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_variant_computes_the_same(variants, layout, lowering):
    made = variants.bundle(layout, lowering, "fp32")
    assert (made.manifest.layout, made.manifest.precision, made.manifest.target) == (layout, "fp32", "cpu")
    found = variants.agreement(layout, lowering, "fp32")
    assert found.max_abs < 1e-5
    assert Limit.of(made.manifest, None).problem(found) is None
    kinds = operators(made)
    assert kinds["com.microsoft::Attention"] == (2 if lowering in ("packed", "skip") and layout == "padded" else 0)
    assert (kinds["com.microsoft::SkipLayerNormalization"] > 0) == (lowering == "skip" and layout == "padded")
    if lowering == "pieces":
        assert made.manifest.model["domains"] == [""]
    # Made once.
    assert variants.bundle(layout, lowering, "fp32") is made


def test_the_bundles_own_graph_is_not_made_again(variants, exported):
    assert variants.bundle("padded", "exported", "fp32") is exported


def test_another_precision(variants, exported):
    made = variants.bundle("padded", "packed", "int8-dynamic")
    assert made.manifest.precision == "int8-dynamic"
    assert made.manifest.quantization["changed"] > 0
    assert made.manifest.tolerance["max_abs"] is None
    kinds = operators(made)
    assert (kinds["com.microsoft::Attention"], kinds["com.microsoft::MatMulIntegerToFloat"]) == (0, 12)
    found = variants.agreement("padded", "packed", "int8-dynamic")
    assert 0.9 < found.min_cosine < 0.99999
    assert Limit.of(exported.manifest, 0.9).problem(found) is None
    assert "smallest cosine on calibration texts is 0." in (Limit.of(exported.manifest, 0.999999).problem(found) or "")
    alone = dataclasses.replace(found, calibrated=None)
    assert "smallest cosine on the golden is 0." in (Limit.of(exported.manifest, 0.999999).problem(alone) or "")
    assert "parity failed" in (Limit.of(exported.manifest, None).problem(found) or "")


def test_precisions_need_a_limit_that_lets_them_in(exported):
    manifest = exported.manifest
    assert precisions(manifest, Limit.of(manifest, None)) == []
    assert precisions(manifest, Limit.of(manifest, 0.99999)) == []
    found = precisions(manifest, Limit.of(manifest, 0.99))
    assert {"int8", "int8-block", "int4"} <= set(found)
    assert "int8-dynamic" not in found  # a vector would change with its company
    assert "fp16" not in found  # not for the CPU


def test_a_ragged_bundle_is_made_padded_from_its_source(variants, exported, tmp_path):
    """The bundle of a reference encoder holds all that its source is made of."""
    base = variants.bundle("ragged", "packed", "fp32")
    ragged = Variants(base, tmp_path, "packed")
    padded = ragged.bundle("padded", "packed", "fp32")
    assert operators(padded)["::Loop"] == 0
    assert ragged.agreement("padded", "packed", "fp32").max_abs < 1e-5
    # Its own graph is enough for what stays ragged.
    assert operators(ragged.bundle("ragged", "pieces", "fp32"))["::Loop"] > 0
    assert ragged.agreement("ragged", "pieces", "fp32").max_abs < 1e-5
    # It has the source's numbers, and its own evidence.
    proven = ragged.proven("padded", "packed", "fp32")
    assert proven.quantization is None
    assert proven.parity is not None
    assert proven.parity["passed"]
    with pytest.raises(SourceError, match="cannot be made again as it was exported"):
        ragged.bundle("ragged", "exported", "fp32")
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="is made again from the bundle itself"):
        Variants(base, tmp_path / "other", "packed", "a/folder").bundle("padded", "packed", "fp32")


@pytest.mark.thorough
def test_other_forms_of_an_int8_bundle_are_int8_and_have_evidence_of_their_own(tmp_path, monkeypatch):
    """The source is float32: another layout has to go the whole way to int8."""
    from tfx.exporter import export as export_module
    from tfx.exporter.precision.variance import Variance

    config = dataclasses.replace(CONFIG, layers=1)
    base = export(lambda: reference(config, seed=4), tmp_path / "bundle", precision="int8")
    assert (base.manifest.layout, base.manifest.precision) == ("ragged", "int8")
    variants = Variants(base, tmp_path, "exported")
    monkeypatch.setattr(export_module, "measure", lambda run, *_, **__: Variance(1e-7, 2e-7))
    for key in (("padded", "packed", "int8"), ("ragged", "split", "int8")):
        manifest = variants.proven(*key)
        assert (manifest.layout, manifest.precision) == (key[0], "int8")
        assert operators(variants.bundle(*key))["com.microsoft::MatMulIntegerToFloat"] > 0
        assert manifest.parity is not None
        assert manifest.parity["passed"]
        found = manifest.quantization
        assert found is not None
        assert (found["batch_variance"], found["padding_variance"]) == (1e-7, 2e-7)
        assert found["changed"] > 0
        assert found["calibration"]["samples"] > 0
    assert variants.proven("ragged", "exported", "int8") is base.manifest


def test_what_moves_with_its_company_is_no_variant(exported, tmp_path, monkeypatch):
    from tfx.exporter import export as export_module
    from tfx.exporter.precision.variance import Variance

    monkeypatch.setattr(export_module, "measure", lambda run, *_, **__: Variance(0.5, 0.5))
    with pytest.raises(ParityError, match=r"moves by 0.5 beside others"):
        Variants(exported, tmp_path, "exported").agreement("padded", "packed", "int8")


# The search


class FakeRace:
    """Takes the time that ``cost`` says of a request's settings, with some noise."""

    cost = staticmethod(lambda request, manifest: 1.0)
    noise = 0.01
    timed: ClassVar[list] = []

    def __init__(self):
        self.requests = {}
        self.random = np.random.default_rng(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def add(self, name, request):
        self.requests[name] = request

    def prepare(self, work, warmup):
        return dict.fromkeys(self.requests, 1.0)

    def turns(self, calls):
        FakeRace.timed.append(self.requests["candidate"])
        ms = {
            name: self.cost(request, Bundle.open(request["bundle"]).manifest) for name, request in self.requests.items()
        }
        return [
            Turn(i, {name: [each * float(np.exp(self.random.normal(0, self.noise)))] for name, each in ms.items()})
            for i in range(10)
        ]


@pytest.fixture
def race(monkeypatch):
    monkeypatch.setattr(tune_module, "Race", FakeRace)
    monkeypatch.setattr(FakeRace, "timed", [])

    def cost(function, noise=0.01):
        monkeypatch.setattr(FakeRace, "cost", staticmethod(function))
        monkeypatch.setattr(FakeRace, "noise", noise)

    return cost


def ragged_on_one_thread(request, manifest):
    return (0.5 if manifest.layout == "ragged" else 1.0) * (0.7 if request["threads"] == 1 else 1.0)


PLAN = TunePlan(lengths="4,20", threads=2)


def test_the_fastest_is_found_and_written(bundle, race):
    race(ragged_on_one_thread)
    said = []
    found = tune(bundle.path, PLAN, progress=said.append)
    assert found["finished"]
    assert found["start"] == Settings("padded", "exported", "fp32", 2).to_json()
    assert found["winner"] == Settings("ragged", "packed", "fp32", 1).to_json()
    assert found["gain"]["gain"] == pytest.approx(1 / 0.35, rel=0.05)
    assert found["gain"]["low"] <= found["gain"]["gain"] <= found["gain"]["high"]
    verdicts = {(each["stage"], each["verdict"]) for each in found["tried"]}
    assert ("layout", Verdict.FASTER) in verdicts
    assert ("threads", Verdict.FASTER) in verdicts
    assert ("lowering", Verdict.FASTER) not in verdicts
    assert not [each for each in found["tried"] if each["stage"] in ("precision", "schedule")]
    assert said[-1] == "writing"

    tuned = Bundle.open(bundle.path)
    assert tuned.manifest.layout == "ragged"
    assert tuned.manifest.tuning == {"threads": 1, "spinning": True, "schedule": None, "log": LOG_NAME}
    assert verify_bundle(tuned).passed
    log = json.loads((tuned.path / LOG_NAME).read_text())
    assert (log["winner"], log["finished"]) == (found["winner"], True)
    assert log["tried"] == found["tried"]
    assert [path.name for path in bundle.path.parent.iterdir()] == ["bundle"]
    # It goes on from there, and has nothing left to do.
    FakeRace.timed.clear()
    again = tune(bundle.path, PLAN)
    assert (again["winner"], again["resumed"]) == (found["winner"], len(found["tried"]))
    assert FakeRace.timed == []


def bundle_cost(bundle: Bundle) -> float:
    """What :func:`by_parts` says of a bundle as it is."""
    tuning = bundle.manifest.tuning
    assert tuning is not None
    return by_parts({"threads": tuning["threads"], "options": {"spinning": tuning["spinning"]}}, bundle.manifest)


def by_parts(request, manifest):
    cost = 0.5 if request["threads"] == 1 else 1.0
    cost *= 1.0 if request["options"]["spinning"] else 0.9
    return cost * (0.8 if "com.microsoft" not in manifest.model["domains"] else 1.0)


@pytest.mark.parametrize(
    "stages",
    [
        ("threads", "spinning"),
        ("lowering", "spinning"),
        pytest.param(("spinning", "threads"), marks=pytest.mark.thorough),
        pytest.param(("lowering", "threads"), marks=pytest.mark.thorough),
    ],
)
def test_stages_one_run_after_the_other_keep_what_was_won(bundle, race, stages):
    race(by_parts)
    costs = []
    found = {}
    for count, stage in enumerate(stages):
        found = tune(bundle.path, dataclasses.replace(PLAN, stages=(stage,)))
        assert found["gain"]["gain"] > 1
        assert bool(found["resumed"]) == bool(count)
        assert {each["verdict"] for each in found["tried"]}.isdisjoint({Verdict.REFUSED})
        costs.append(bundle_cost(Bundle.open(bundle.path)))
    assert costs[1] < costs[0] < 1
    # Neither has anything left to do, whatever was found in between.
    FakeRace.timed.clear()
    again = tune(bundle.path, dataclasses.replace(PLAN, stages=stages))
    assert again["winner"] == found["winner"]
    assert FakeRace.timed == []


def test_the_graph_of_another_target_stays(bundle, race):
    """A bundle for a browser or for any engine would become one for onnxruntime on a CPU."""
    path = bundle.path / "tfx.json"
    path.write_text(path.read_text().replace('"target": "cpu"', '"target": "web"'))
    before = sha256_file(bundle.model_path)
    with pytest.raises(InputError, match=r"found target web, wanted cpu: .* --only threads,spinning,schedule leaves"):
        tune(bundle.path, PLAN)
    race(by_parts)
    found = tune(bundle.path, dataclasses.replace(PLAN, stages=("threads", "spinning")))
    assert found["gain"]["gain"] > 1
    after = Bundle.open(bundle.path)
    assert (after.manifest.target, sha256_file(after.model_path)) == ("web", before)


@pytest.mark.parametrize("change", [{"fresh": True}, {"lengths": "5,19"}])
def test_a_search_from_anew_starts_at_what_the_bundle_has(bundle, race, change):
    race(by_parts)
    tune(bundle.path, dataclasses.replace(PLAN, stages=("threads",)))
    found = tune(bundle.path, dataclasses.replace(PLAN, stages=("spinning",), **change))
    assert found["start"]["threads"] == 1
    assert found["winner"] == {**found["start"], "spinning": False}
    assert bundle_cost(Bundle.open(bundle.path)) == pytest.approx(0.45)


def test_what_is_slower_in_all_is_not_written(bundle, race):
    """Each step looks faster, the whole is slower."""
    race(lambda request, manifest: 0.5 if request["threads"] == 1 else 1.0)
    before = tune(bundle.path, dataclasses.replace(PLAN, stages=("threads",)))
    race(lambda request, manifest: 1.0 if request["options"]["spinning"] else 0.5)
    compare = tune_module._Search.compare
    tune_module._Search.compare = lambda self, winner, start: {"gain": 0.56, "low": 0.5, "high": 0.6}
    try:
        found = tune(bundle.path, dataclasses.replace(PLAN, stages=("spinning",)))
    finally:
        tune_module._Search.compare = compare
    assert found["winner"] == found["start"] == before["winner"]
    assert found["gain"] == {"gain": 1.0, "low": 1.0, "high": 1.0}
    assert (Bundle.open(bundle.path).manifest.tuning or {})["spinning"] is True


def test_a_candidate_of_nan_is_refused_and_the_search_goes_on(bundle, race, one_precision, monkeypatch):
    race(by_parts)
    agreement = Variants.agreement

    def nan(self, *key):
        found = agreement(self, *key)
        if key[2] == "fp32":
            return found
        comparison = dataclasses.replace(found.report.cases[0].comparison, max_abs=float("nan"))
        cases = (dataclasses.replace(found.report.cases[0], comparison=comparison, passed=False),)
        report = dataclasses.replace(found.report, cases=cases)
        return dataclasses.replace(found, max_abs=float("nan"), min_cosine=float("nan"), report=report)

    monkeypatch.setattr(Variants, "agreement", nan)
    plan = dataclasses.replace(PLAN, min_cosine=0.9, stages=("precision", "threads"))
    for _ in range(2):
        found = tune(bundle.path, plan)
        assert found["winner"]["threads"] == 1
        assert (found["tried"][0]["verdict"], found["tried"][0]["max_abs"]) == (Verdict.PARITY, None)
        json.dumps(found, allow_nan=False)


def test_noise_keeps_the_bundle_as_it_is(bundle, race):
    race(lambda request, manifest: 1.0, noise=0.2)
    found = tune(bundle.path, dataclasses.replace(PLAN, stages=("layout", "threads", "spinning")))
    assert found["winner"] == found["start"]
    assert found["gain"] == {"gain": 1.0, "low": 1.0, "high": 1.0}
    assert {each["verdict"] for each in found["tried"]} == {Verdict.SAME}
    tuned = Bundle.open(bundle.path)
    assert tuned.model_path.read_bytes() == (bundle.path / "model.onnx").read_bytes()
    assert tuned.manifest.layout == "padded"
    assert LOG_NAME in tuned.manifest.files


@pytest.fixture
def one_precision(monkeypatch):
    """The quickest to make."""
    monkeypatch.setattr(tune_module, "precisions", lambda manifest, limit: ["int8-dynamic"])


def test_what_is_outside_of_the_limit_is_not_timed(bundle, race, one_precision):
    race(lambda request, manifest: 1.0 if manifest.precision == "fp32" else 0.2)
    plan = TunePlan(lengths="4,20", threads=1, min_cosine=0.999999, stages=("precision",))
    found = tune(bundle.path, plan)
    assert found["winner"] == found["start"]
    (dynamic,) = found["tried"]
    assert dynamic["verdict"] == Verdict.PARITY
    assert "smallest cosine on calibration texts" in dynamic["reason"]
    assert dynamic["turns"] == 0


def test_a_precision_within_the_limit_is_kept(bundle, race, one_precision):
    race(lambda request, manifest: {"int8-dynamic": 0.2}.get(manifest.precision, 1.0))
    found = tune(bundle.path, TunePlan(lengths="4,20", threads=1, min_cosine=0.9, stages=("precision",)))
    assert found["winner"]["precision"] == "int8-dynamic"
    assert found["winner"]["lowering"] == "packed"
    written = Bundle.open(bundle.path).manifest
    assert written.precision == "int8-dynamic"
    assert written.parity is not None
    assert written.parity["passed"]
    assert written.quantization is not None
    assert written.quantization["batch_variance"] > 0


def test_a_kill_loses_one_candidate(bundle, race):
    race(ragged_on_one_thread)
    whole = {path.name: path.read_bytes() for path in bundle.path.iterdir()}

    def killed(what):
        if what.startswith("threads"):
            raise KeyboardInterrupt

    plan = dataclasses.replace(PLAN, stages=("layout", "threads", "spinning"))
    with pytest.raises(KeyboardInterrupt):
        tune(bundle.path, plan, progress=killed)
    assert {path.name: path.read_bytes() for path in bundle.path.iterdir()} == whole
    FakeRace.timed.clear()
    found = tune(bundle.path, plan)
    assert found["winner"] == Settings("ragged", "packed", "fp32", 1).to_json()
    assert found["resumed"] == 1
    assert [each["threads"] for each in FakeRace.timed] == [1, 1, 1]  # threads, spinning, and the whole gain


def test_time_runs_out_and_the_next_run_goes_on(bundle, race, monkeypatch):
    race(ragged_on_one_thread)
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(tune_module.time, "monotonic", lambda: float(next(clock)))
    plan = dataclasses.replace(PLAN, stages=("layout", "threads"))
    found = tune(bundle.path, dataclasses.replace(plan, budget=25.0))
    assert not found["finished"]
    assert [each["stage"] for each in found["tried"]] == ["layout"]
    assert Bundle.open(bundle.path).manifest.layout == "ragged"
    monkeypatch.undo()
    monkeypatch.setattr(tune_module, "Race", FakeRace)
    monkeypatch.setattr(FakeRace, "cost", staticmethod(ragged_on_one_thread))
    again = tune(bundle.path, plan)
    assert again["resumed"] == 1
    assert again["start"] == Settings("ragged", "packed", "fp32", 2).to_json()
    assert again["winner"] == Settings("ragged", "packed", "fp32", 1).to_json()


def test_throughput_tries_schedules(bundle, race):
    race(lambda request, manifest: 1.0 if request["options"]["schedule"]["batch_tokens"] < 4096 else 0.5)
    plan = TunePlan(lengths="4,20", threads=2, mode="throughput", stages=("schedule",))
    found = tune(bundle.path, plan)
    assert found["winner"]["schedule"] == {"workers": 1, "threads": 2, "batch_tokens": 4096}
    tuning = Bundle.open(bundle.path).manifest.tuning or {}
    assert tuning["schedule"] == found["winner"]["schedule"]


def test_what_cannot_be_made_is_refused_with_the_reason(bundle, race, monkeypatch):
    race(lambda request, manifest: 1.0)

    def fail(self, folder, *key):
        raise SourceError("no way")

    monkeypatch.setattr(Variants, "_fill", fail)
    found = tune(bundle.path, TunePlan(lengths="4", threads=1, stages=("layout",)))
    assert [(each["verdict"], each["reason"]) for each in found["tried"]] == [(Verdict.REFUSED, "no way")]
    assert found["winner"] == found["start"]
    monkeypatch.setattr(Variants, "_fill", lambda self, folder, *key: {}["nothing"])
    found = tune(bundle.path, TunePlan(lengths="4", threads=1, stages=("layout",), fresh=True))
    assert found["tried"][0]["reason"] == "unexpected KeyError: 'nothing'"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (TunePlan(stages=("luck",)), 'stage: found "luck", wanted one of layout, lowering'),
        (TunePlan(mode="fast"), 'mode: found "fast"'),
        (TunePlan(min_cosine=2), "min_cosine: found 2"),
        (TunePlan(budget=float("nan")), "budget: found nan"),
        (TunePlan(lengths="4,99"), "lengths: found 99, wanted at most 24"),
    ],
)
def test_a_wrong_plan(exported, plan, message):
    with pytest.raises(InputError, match=message):
        tune(exported.path, plan)
    assert [path.name for path in exported.path.parent.iterdir()] == ["bundle"]


def test_no_bundle(tmp_path):
    with pytest.raises(BundleError, match="found nothing"):
        tune(tmp_path / "nowhere")


# The command, with real processes


def test_the_command_end_to_end(bundle, monkeypatch):
    monkeypatch.setattr(tune_module, "_TURN_MS", 2.0)
    monkeypatch.setattr(tune_module, "_MOST_TURNS", 10)
    arguments = ["tune", str(bundle.path), "--lengths", "uniform:4,24", "--threads", "1", "--only", "spinning"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "spinning │ no spinning" in done.stdout
    assert Path(bundle.path, LOG_NAME).is_file()
    again = CliRunner().invoke(main, [*arguments, "--json"])
    found = json.loads(again.stdout)
    assert found["resumed"] == len(found["tried"]) == 1
    assert verify_bundle(Bundle.open(bundle.path)).passed


def test_the_command_knows_stages_and_modes():
    assert (tune_command._STAGES, tune_command._MODES) == (STAGES, MODES)
    done = CliRunner().invoke(main, ["tune", "--only", "luck"])
    assert done.exit_code == 2
    assert 'found "luck", wanted layout, lowering' in done.stderr


# What a tuned bundle does


def tuned(bundle: Bundle, **tuning) -> Bundle:
    manifest = json.loads((bundle.path / "tfx.json").read_text())
    manifest["tuning"] = {"threads": None, "spinning": None, "schedule": None, "log": None, **tuning}
    (bundle.path / "tfx.json").write_text(json.dumps(manifest))
    return Bundle.open(bundle.path)


def options(monkeypatch, bundle: Bundle, **given) -> dict:
    from tfx.runtime import session as session_module

    seen: list = []
    create = session_module.create_session

    def spy(path, provider, threads, optimize, **more):
        seen.append({"threads": threads, **more})
        return create(path, provider, threads, optimize, **more)

    monkeypatch.setattr(session_module, "create_session", spy)
    monkeypatch.setattr(session_module, "default_threads", lambda: 2)
    Session(bundle, **given)
    return seen[0]


def test_a_session_takes_what_was_tuned(bundle, monkeypatch):
    bundle = tuned(bundle, threads=1, spinning=False)
    found = options(monkeypatch, bundle)
    assert (found["threads"], found["spinning"]) == (1, False)
    found = options(monkeypatch, bundle, threads=2, spinning=True)
    assert (found["threads"], found["spinning"]) == (2, True)


def test_threads_that_this_machine_has_not_are_not_taken(bundle, monkeypatch):
    found = options(monkeypatch, tuned(bundle, threads=16))
    assert (found["threads"], found["spinning"]) == (None, True)


def test_run_many_takes_the_tuned_schedule_within_the_limit(bundle, monkeypatch):
    from tfx.runtime import session as session_module
    from tfx.runtime.schedule import Schedule

    schedule = {"workers": 1, "threads": 1, "batch_tokens": 77}
    session = Session(tuned(bundle, schedule=schedule), threads=1)
    found, _ = session._schedule_for(iter([]), None)
    assert found == Schedule(1, 1, 77)
    two = tuned(bundle, schedule={"workers": 2, "threads": 1, "batch_tokens": 77})
    monkeypatch.setattr(session_module, "default_threads", lambda: 4)
    found, _ = Session(two)._schedule_for(iter([]), None)
    assert found == Schedule(2, 1, 77)
    found, _ = Session(two, threads=1)._schedule_for(iter([]), None)  # the caller's limit
    assert found.workers * found.threads == 1
    many = {"workers": 512, "threads": 2, "batch_tokens": 77}
    session = Session(tuned(bundle, schedule=many), threads=1)
    found, _ = session._schedule_for(iter([]), None)
    assert found != Schedule(512, 2, 77)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"threads": 0}, r"tuning.threads: found 0"),
        ({"spinning": 1}, r"tuning.spinning: found 1, wanted true, false or null"),
        ({"schedule": {"workers": 1}}, r"tuning.schedule.threads: missing"),
        ({"log": "../x"}, r"tuning.log: found"),
        ({"log": "absent.json"}, r'tuning.log: "absent.json" is not among the files'),
        ({"speed": 9}, r"tuning: found"),
    ],
)
def test_a_wrong_tuning_is_refused(bundle, tuning, message):
    with pytest.raises(BundleError, match=message):
        tuned(bundle, **tuning)
