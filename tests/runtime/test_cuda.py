"""Calls in the shapes of a bucket table, with buffers of their own. Recording itself needs a GPU."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from tfx.errors import BundleError, FeedError, InputError, ProviderError
from tfx.runtime import providers
from tfx.runtime.bundle import Bundle
from tfx.runtime.cuda import BucketTable, CudaOptions, GraphSession
from tfx.runtime.session import Session
from tfx.runtime.tensors import make_feeds

TABLE = BucketTable((1, 4), (4, 8, 16))


def _feeds(bundle: Bundle, batch: int, sequence: int, seed: int = 0) -> dict[str, np.ndarray]:
    feeds = make_feeds(bundle.manifest.inputs, batch=batch, sequence=sequence, seed=seed)
    feeds["attention_mask"][:, sequence - sequence // 3 :] = 0
    return feeds


def test_the_smallest_bucket_that_holds_a_call():
    assert TABLE.find(1, 1) == (1, 4)
    assert TABLE.find(2, 8) == (4, 8)
    assert TABLE.find(4, 16) == (4, 16)
    assert TABLE.find(5, 1) is None
    assert TABLE.find(1, 17) is None
    assert TABLE.limited(12).lengths == (4, 8, 12)
    assert TABLE.limited(16) == TABLE.limited(None) == TABLE
    assert TABLE.limited(3).lengths == (3,)


@pytest.mark.parametrize("table", [{"batches": ()}, {"lengths": (8, 8)}, {"lengths": (16, 8)}, {"batches": (0, 1)}])
def test_tables_rise(table: dict[str, Any]):
    with pytest.raises(InputError, match=r"found \[.*\], wanted rising sizes from 1 on"):
        BucketTable(**table)


def test_lengths_are_chosen_where_the_calls_are():
    shapes = [(4, 60)] * 50 + [(4, 120)] * 5 + [(4, 250)] + [(4, 10)] * 30
    table = BucketTable.of(shapes, buckets=3)
    assert (table.batches, table.lengths) == ((4,), (16, 64, 256)), "a bound for the rare length of 120 saves less"
    assert BucketTable.of(shapes, buckets=99).lengths == (16, 64, 120, 256)
    assert BucketTable.of([(3, 9), (5, 9)], buckets=2) == BucketTable((4, 8), (16,))
    with pytest.raises(InputError, match="buckets: found 1, wanted at least 2"):
        BucketTable.of([(3, 9), (5, 9)], buckets=1)


def test_padding_to_a_bucket_changes_no_number(bundle: Bundle):
    session, plain = GraphSession(bundle, buckets=TABLE, provider="cpu"), Session(bundle)
    for batch, sequence in ((1, 1), (3, 5), (4, 16), (1, 3), (3, 5), (5, 6), (2, 20)):
        feeds = _feeds(bundle, batch, sequence, seed=batch)
        found, wanted = session.run(feeds), plain.run(feeds)
        assert list(found) == list(wanted)
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-6)
    assert session.used == {(1, 4): 2, (4, 8): 2, (4, 16): 1, None: 2}
    assert session.report()["buckets"][0] == {"batch": 1, "sequence": 4, "calls": 2}


def test_answers_are_not_overwritten_by_the_next_call(bundle: Bundle):
    session = GraphSession(bundle, buckets=TABLE, provider="cpu")
    first, other = _feeds(bundle, 2, 6, seed=1), _feeds(bundle, 2, 6, seed=2)
    found = session.run(first, ["sentence_embedding"])
    kept = found["sentence_embedding"].copy()
    session.run(other)
    np.testing.assert_array_equal(found["sentence_embedding"], kept)
    assert list(found) == ["sentence_embedding"]


def test_threads_take_turns(bundle: Bundle):
    session, plain = GraphSession(bundle, buckets=TABLE, provider="cpu"), Session(bundle)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(20):
            feeds = _feeds(bundle, 1 + (seed + step) % 4, 1 + (seed * step) % 16, seed)
            found, wanted = session.run(feeds), plain.run(feeds)
            if not np.allclose(found["sentence_embedding"], wanted["sentence_embedding"], atol=1e-6):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(session.used.values()) == 80


def test_feeds_are_checked_and_empty_batches_answered(bundle: Bundle):
    session = GraphSession(bundle, provider="cpu")
    with pytest.raises(FeedError, match=r'outputs: found "nothing", wanted only'):
        session.run(_feeds(bundle, 1, 4), ["nothing"])
    with pytest.raises(FeedError, match="sequence length"):
        session.run(_feeds(bundle, 1, 30))
    empty = session.run({name: array[:0] for name, array in _feeds(bundle, 1, 4).items()})
    assert empty["sentence_embedding"].shape[0] == 0


def test_options_by_onnxruntimes_names():
    assert CudaOptions().provider_options() == {
        "device_id": "0", "enable_cuda_graph": "1", "use_tf32": "0", "sdpa_kernel": "0",
        "enable_skip_layer_norm_strict_mode": "1", "arena_extend_strategy": "kSameAsRequested",
    }  # fmt: skip
    assert CudaOptions(kernels=("flash", "math"), tf32=True, graphs=False).provider_options()["sdpa_kernel"] == "17"
    with pytest.raises(InputError, match='kernels: found "fast", wanted some of flash'):
        CudaOptions(kernels=("fast",)).provider_options()


def test_what_chooses_kernels_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ORT_DISABLE_FLASH_ATTENTION", "1")
    report = CudaOptions().to_json()
    assert report["environment"]["ORT_DISABLE_FLASH_ATTENTION"] == "1"
    assert (report["tf32"], report["kernels"]) == (False, ["onnxruntime's choice"])


def test_float32_products_are_exact_on_cuda_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch, bundle: Bundle):
    """The session itself cannot be made without a GPU; what onnxruntime is told can be seen."""
    import onnxruntime

    told: list[Any] = []

    def remember(*_: Any, providers: list[Any], **__: Any) -> None:
        told.append(providers)
        raise RuntimeError("seen")

    monkeypatch.setattr(providers, "provider_problem", lambda name: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", remember)
    for options in (None, {"use_tf32": "1"}):
        with pytest.raises(BundleError):
            providers.create_session(bundle.model_path, "cuda", provider_options=options)
    assert [chosen[0] for chosen in told] == [
        ("CUDAExecutionProvider", {"use_tf32": "0"}),
        ("CUDAExecutionProvider", {"use_tf32": "1"}),
    ]
    assert [chosen[1:] for chosen in told] == [["CPUExecutionProvider"]] * 2


@pytest.mark.skipif(providers.provider_problem("cuda") is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so(bundle: Bundle):
    with pytest.raises(ProviderError, match="provider cuda"):
        GraphSession(bundle)


@pytest.mark.skipif(providers.provider_problem("cuda") is not None, reason="recording needs a GPU")
def test_recorded_calls_give_the_numbers_of_plain_ones(bundle: Bundle):
    session, plain = GraphSession(bundle, buckets=TABLE), Session(bundle, provider="cuda")
    for seed in range(3):
        for batch, sequence in ((1, 3), (4, 16), (3, 7)):
            feeds = _feeds(bundle, batch, sequence, seed)
            for name, values in plain.run(feeds).items():
                np.testing.assert_allclose(session.run(feeds)[name], values, rtol=0, atol=1e-5)


def test_bundles_that_cannot_be_padded_are_refused(bundle: Bundle):
    inputs = bundle.manifest.inputs
    without = [dataclasses.replace(spec, role="token_type_ids") if "mask" in spec.role else spec for spec in inputs]
    odd = [dataclasses.replace(spec, shape=("batch", 3, 4)) for spec in inputs]
    for specs, why in (
        (without, "has no mask, so calls cannot be padded"),
        (odd, r"input input_ids is \['batch', 3, 4\]"),
    ):
        bundle.manifest = dataclasses.replace(bundle.manifest, inputs=tuple(specs))
        with pytest.raises(InputError, match=why):
            GraphSession(bundle, provider="cpu")
