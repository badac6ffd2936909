from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tfx.errors import BundleError, FeedError, InputError
from tfx.runtime.parity import verify_bundle
from tfx.runtime.session import Session
from tfx.runtime.tensors import TensorSpec, make_feeds


@pytest.fixture
def session(bundle):
    return Session(bundle, threads=1)


@pytest.fixture(scope="module")
def shared_session(shared_bundle):
    return Session(shared_bundle, threads=1)


@pytest.fixture
def feeds(bundle):
    return make_feeds(bundle.manifest.inputs, batch=3, sequence=6, pattern="holes")


@pytest.mark.parametrize("optimize", [True, False])
def test_outputs_equal_numpy(bundle, feeds, tiny_reference, optimize):
    found = Session(bundle, optimize=optimize).run(feeds)
    for name, expected in tiny_reference(feeds).items():
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


def test_chosen_outputs(session, feeds):
    assert list(session.run(feeds, ["sentence_embedding"])) == ["sentence_embedding"]
    with pytest.raises(FeedError, match='found "pooler", wanted only last_hidden_state, sentence_embedding'):
        session.run(feeds, ["pooler"])


def test_it_says_where_it_runs(session):
    assert session.provider == "cpu"
    if hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        assert list(session.placement) == ["CPUExecutionProvider"]
        assert session.placement["CPUExecutionProvider"] > 0
    else:  # before 1.24
        assert session.placement is None


# A27: lossless integer casts, everything else refused


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "uint64"])
def test_integers_are_cast(session, feeds, tiny_reference, dtype):
    cast = {name: value.astype(dtype) for name, value in feeds.items()}
    np.testing.assert_allclose(
        session.run(cast)["last_hidden_state"], tiny_reference(feeds)["last_hidden_state"], atol=1e-6
    )


def test_a_boolean_mask_and_lists_are_taken(session, feeds, tiny_reference):
    mixed = {name: value.tolist() for name, value in feeds.items()}
    mixed["attention_mask"] = feeds["attention_mask"].astype(bool)
    np.testing.assert_allclose(
        session.run(mixed)["last_hidden_state"], tiny_reference(feeds)["last_hidden_state"], atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_ids", np.zeros((3, 6), np.float32), "input_ids: found float32, wanted int64"),
        ("input_ids", [[0.5] * 6] * 3, "input_ids: found float32, wanted int64"),
        ("input_ids", np.full((3, 6), 2**63, np.uint64), "input_ids: found 9223372036854775808 (uint64), wanted int64"),
        ("input_ids", np.full((3, 6), 12), "input_ids: found 12, wanted values of 0 to 11"),
        ("input_ids", np.full((3, 6), -1), "input_ids: found -1, wanted values of 0 to 11"),
        ("input_ids", np.zeros(6, int), "input_ids: found shape (6,), wanted (batch, sequence)"),
        ("input_ids", np.zeros((3, 6, 1), int), "input_ids: found shape (3, 6, 1), wanted (batch, sequence)"),
        ("input_ids", [[1, 2], [3]], "input_ids: rows differ in length"),
        ("input_ids", [["cat"] * 6] * 3, "input_ids: found <U3, wanted int64"),
        ("input_ids", [[2**70]], "input_ids: found objects, wanted numbers"),
        ("input_ids", None, "input_ids: found objects, wanted numbers"),
        ("input_ids", np.zeros((3, 6), complex), "input_ids: found complex128, wanted int64"),
        ("attention_mask", np.full((3, 6), 2), "attention_mask: found 2, wanted 0 or 1"),
        ("attention_mask", np.ones((3, 5), int), "attention_mask: found sequence 5, wanted 6 as in input_ids"),
        ("attention_mask", np.ones((1, 6), int), "attention_mask: found batch 1, wanted 3 as in input_ids"),
        ("token_type_ids", np.full((3, 6), 2), "token_type_ids: found 2, wanted values of 0 to 1"),
        ("mask", np.ones((3, 6)), 'feeds: found "mask", wanted only input_ids, attention_mask, token_type_ids'),
    ],
)
def test_wrong_feeds_name_input_found_and_wanted(session, feeds, name, value, message):
    with pytest.raises(FeedError) as caught:
        session.run({**feeds, name: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_input_is_named(session, feeds):
    del feeds["input_ids"]
    with pytest.raises(FeedError, match="input_ids: missing"):
        session.run(feeds)
    with pytest.raises(FeedError, match="input_ids: missing"):
        session.run({})


def test_missing_mask_attends_everywhere_and_missing_segments_are_zero(session, feeds):
    ids = np.maximum(feeds["input_ids"], 1)  # not the padding id: such rows need a mask
    whole = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    np.testing.assert_array_equal(
        session.run({"input_ids": ids})["last_hidden_state"], session.run(whole)["last_hidden_state"]
    )


# A24 (the bundle's side): longer input is refused before it runs


def test_the_longest_sequence_runs_and_one_more_does_not(session):
    longest = session.bundle.manifest.max_length
    assert session.run({"input_ids": np.ones((1, longest), int)})["last_hidden_state"].shape == (1, longest, 5)
    with pytest.raises(FeedError, match="input_ids: found sequence length 25, wanted at most 24"):
        session.run({"input_ids": np.ones((1, longest + 1), int)})


def test_empty_batch_gives_empty_outputs_and_zero_length_is_an_error(session):
    found = session.run({"input_ids": np.zeros((0, 4), np.int64)})
    assert found["last_hidden_state"].shape == (0, 4, 5)
    assert found["sentence_embedding"].shape == (0, 5)
    assert found["sentence_embedding"].dtype == np.float32
    with pytest.raises(FeedError, match="input_ids: found sequence length 0, wanted at least 1"):
        session.run({"input_ids": np.zeros((2, 0), np.int64)})
    with pytest.raises(FeedError, match="input_ids: found shape"):
        session.run({"input_ids": []})


# A06: surplus tokenizer fields


def test_surplus_tokenizer_fields_are_dropped_with_one_notice(make_bundle, caplog):
    session = Session(make_bundle(segments=False))
    surplus = {"input_ids": [[2, 5, 3]], "token_type_ids": [[0, 0, 0]], "special_tokens_mask": [[1, 0, 1]]}
    with caplog.at_level(logging.WARNING, logger="tfx"):
        for _ in range(3):
            session.run(surplus)
    assert [record.getMessage() for record in caplog.records] == [
        "the model takes no token_type_ids; it is ignored",
        "the model takes no special_tokens_mask; it is ignored",
    ]


def test_a_typing_mistake_is_not_a_surplus_field(make_bundle):
    session = Session(make_bundle(segments=False))
    with pytest.raises(FeedError, match='found "token_type_id", wanted only input_ids, attention_mask'):
        session.run({"input_ids": [[2]], "token_type_id": [[0]]})


def test_a_mask_that_matters_is_never_dropped(tiny_manifest):
    from tfx.runtime.feeds import FeedChecker

    check = FeedChecker([spec for spec in tiny_manifest().inputs if spec.name == "input_ids"], None)
    check({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]})
    with pytest.raises(FeedError, match="attention_mask: the model takes none, wanted one of all ones"):
        check({"input_ids": [[1, 2]], "attention_mask": [[1, 0]]})


# Masks that mark what to ignore


@pytest.fixture
def padding_bundle(make_bundle, tiny_graph, tiny_manifest, tiny_reference):
    """The tiny model with a mask of the other sense."""
    model = tiny_graph(segments=False)
    model.graph.input[1].name = "padding_mask"
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.BOOL
    model.graph.node.insert(0, helper.make_node("Not", ["padding_mask"], ["attention_mask"]))
    pad = TensorSpec("padding_mask", "bool", ("batch", "sequence"), "padding_mask", 2)
    return make_bundle(
        "padding",
        segments=False,
        model=model,
        inputs=(tiny_manifest().inputs[0], pad),
        expected=lambda feeds: tiny_reference({**feeds, "attention_mask": ~feeds["padding_mask"]}),
    )


def test_a_padding_mask_is_verified_filled_in_and_made_of_text(padding_bundle):
    assert verify_bundle(padding_bundle).passed
    assert {case.pattern for case in padding_bundle.golden()} == {"full", "right", "left", "holes"}
    session = Session(padding_bundle, threads=1)
    ids = np.array([[2, 5, 3, 4]])
    pad = np.array([[False, False, False, True]])
    whole = session.run({"input_ids": ids})["sentence_embedding"]
    np.testing.assert_array_equal(whole, session.run({"input_ids": ids, "padding_mask": 0 * ids})["sentence_embedding"])
    cut = session.run({"input_ids": ids, "padding_mask": pad})["sentence_embedding"]
    np.testing.assert_allclose(cut, session.run({"input_ids": ids[:, :3]})["sentence_embedding"], atol=1e-6)
    assert not np.allclose(cut, whole)
    texts = ["the cat sat on a mat", "dog"]
    one_by_one = np.concatenate([np.asarray(session.encode([text])) for text in texts])
    np.testing.assert_allclose(np.asarray(session.encode(texts)), one_by_one, atol=1e-6)
    with pytest.raises(FeedError, match="padding_mask: found 2"):
        session.run({"input_ids": ids, "padding_mask": np.full_like(ids, 2)})


# float inputs


def test_float_features_take_what_is_lossless(tiny_manifest):
    from tfx.runtime.feeds import FeedChecker

    check = FeedChecker([TensorSpec("x", "float32", ("batch", 2), "features")], None)
    for fine in ([[0.1, 2]], np.ones((1, 2), np.float16), np.array([[1, 2]]), [[1, 2]]):
        assert check({"x": fine})[0]["x"].dtype == np.float32
    for wrong in (np.ones((1, 2), np.float64), np.array([[2**24 + 1, 0]])):
        with pytest.raises(FeedError, match=r"x: found (float64|int64), wanted float32"):
            check({"x": wrong})
    with pytest.raises(FeedError, match=r"x: found shape \(1, 3\), wanted \(batch, 2\)"):
        check({"x": np.ones((1, 3), np.float32)})


# The graph and the manifest must be of one mind


def test_a_manifest_of_another_model(make_bundle, tiny_graph):
    bundle = make_bundle(model=tiny_graph(segments=False))
    with pytest.raises(BundleError, match=r"found inputs input_ids int64, attention_mask int64, tfx\.json says"):
        Session(bundle)


@pytest.mark.parametrize(("option", "message"), [({"provider": "tpu"}, 'found "tpu"'), ({"threads": 0}, "found 0")])
def test_wrong_options(bundle, option, message):
    with pytest.raises(InputError, match=message):
        Session(bundle, **option)


def test_threads_share_a_session(session, bundle, tiny_reference):
    many = [make_feeds(bundle.manifest.inputs, batch=2, sequence=1 + i % 20, seed=i) for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        for feeds, found in zip(many, pool.map(session.run, many), strict=True):
            np.testing.assert_allclose(
                found["last_hidden_state"], tiny_reference(feeds)["last_hidden_state"], atol=1e-6
            )


# Text


def test_tokenize_pads_with_the_pad_id_and_a_zero_mask(session):
    feeds = session.tokenize(["the cat", "a dog ran on the mat"])
    np.testing.assert_array_equal(feeds["input_ids"], [[2, 4, 5, 3, 0, 0, 0, 0], [2, 8, 10, 11, 7, 4, 9, 3]])
    np.testing.assert_array_equal(feeds["attention_mask"], [[1] * 4 + [0] * 4, [1] * 8])
    assert set(feeds) == {"input_ids", "attention_mask", "token_type_ids"}


def test_the_manifest_s_pad_id_is_used(make_bundle):
    feeds = Session(make_bundle(pad_id=9)).tokenize(["the", "the cat"])
    assert feeds["input_ids"][0, -1] == 9


def test_long_texts_are_cut_to_the_tokenizer_s_length(session):
    assert session.tokenize(["cat " * 50])["input_ids"].shape == (1, 8)


def test_encode_equals_singles_in_the_order_given(session):
    texts = ["a dog ran", "the cat sat on the mat", "mat", "dog", "the dog sat on a cat"] * 3
    batch = session.encode(texts, batch_size=4)
    assert batch.shape == (15, 5)
    singles = np.concatenate([session.encode([text]) for text in texts])
    np.testing.assert_allclose(batch, singles, atol=1e-6)


def test_encode_without_pooling_returns_every_output(make_bundle, tiny_reference):
    session = Session(make_bundle(pooling=False))
    texts = ["mat", "the cat sat on", "a dog"]
    found = session.encode(texts, batch_size=2)
    expected = tiny_reference(session.tokenize(texts))
    for name in ("last_hidden_state", "sentence_embedding"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=5))
def test_any_text_becomes_finite_vectors(shared_session, texts):
    try:
        vectors = shared_session.encode(texts)
    except FeedError as error:
        assert "Unicode" in str(error)
        return
    assert np.isfinite(vectors).all()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "found an empty list, wanted at least one text"),
        ("cat", "found one string, wanted a list"),
        (["cat", None], r"texts\[1\]: found NoneType, wanted a string"),
        (["\ud800"], "no valid Unicode"),
    ],
)
def test_wrong_texts(session, texts, message):
    with pytest.raises(FeedError, match=message):
        session.encode(texts)
    with pytest.raises(FeedError, match=message):
        session.tokenize(texts)


def test_wrong_batch_size(session):
    with pytest.raises(FeedError, match="batch_size: found 0"):
        session.encode(["cat"], batch_size=0)


def test_text_without_a_tokenizer(make_bundle):
    with pytest.raises(BundleError, match="has no tokenizer"):
        Session(make_bundle(tokenizer=False)).tokenize(["cat"])


def test_a_damaged_tokenizer(bundle):
    from tfx.runtime.text import TextEncoder

    path = bundle.path / "broken.json"
    path.write_text("{}")
    with pytest.raises(BundleError, match=r"broken\.json: not a tokenizer"):
        TextEncoder(path, bundle.manifest.inputs, 0, 8)
