"""The routes of tfx serve: answers, errors in one shape, limits, OpenAI's clients, metrics and the schema."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.testclient import TestClient

from tfx.runtime import serve, serve_http
from tfx.runtime.serve import ServePlan
from tfx.runtime.serve_app import make_app
from tfx.runtime.serve_schemas import EmbedRequest, OpenAIRequest
from tfx.runtime.session import Session

TEXTS = ["the cat sat on a mat", "dog", "a dog ran", "the the the the the the the the the"]


def make_client(bundle, **plan) -> TestClient:
    chosen = ServePlan(bundle.path, **plan)
    session, schedule = serve._session(chosen)
    return TestClient(make_app(serve._service(chosen, session, schedule, lambda: False)), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(shared_bundle):
    with make_client(shared_bundle, model_name="tiny", max_texts=10, max_body=4000, queue_tokens=60) as client:
        yield client


def vectors_of(bundle, texts) -> np.ndarray:
    """What a session says."""
    return np.asarray(Session(bundle).encode(texts))


def problem(response, status=400) -> str:
    """The message of an error, whose shape is always the same."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "Traceback" not in response.text
    return error["message"]


def test_vectors_are_those_of_a_session(client, shared_bundle):
    found = client.post("/embed", json={"texts": TEXTS}).json()
    expected = vectors_of(shared_bundle, TEXTS)
    np.testing.assert_allclose(np.array(found["vectors"], np.float32), expected, rtol=0, atol=1e-6)
    assert found["tokens"] == [8, 3, 5, 8]
    assert found["cut"] == [False, False, False, True]
    assert found["model"] == "tiny"


def test_float32_comes_back_bit_by_bit(client, shared_bundle):
    (vector,) = client.post("/embed", json={"text": "a dog ran"}).json()["vectors"]
    np.testing.assert_array_equal(np.array(vector, np.float32), vectors_of(shared_bundle, ["a dog ran"])[0])


def test_an_empty_text_and_unknown_characters_are_texts(client):
    found = client.post("/embed", json={"texts": ["", "日本 🐈 \u0000 \u202eabc"]}).json()
    assert found["tokens"][0] == 2
    assert all(len(vector) == 5 for vector in found["vectors"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: found null, wanted a JSON object"),
        (b"{", "body: not JSON: Expecting property name enclosed in double quotes at character 1"),
        (b"[]", "body: found an array, wanted a JSON object"),
        (b'"text"', "body: found a string, wanted a JSON object"),
        (b"null", "body: found null, wanted a JSON object"),
        (b"{}", 'body: wanted either "texts" or "text"'),
        (b'{"text": "a", "texts": ["b"]}', 'body: wanted either "texts" or "text"'),
        (b'{"texts": []}', "^texts: found an empty array, wanted at least one text$"),
        (b'{"texts": "a"}', "texts: found a string; wanted a valid list"),
        (b'{"texts": null}', "texts: found null; wanted a valid list"),
        (b'{"texts": ["a", 7]}', r"texts\[1\]: found a number; wanted a valid string"),
        (b'{"texts": ["a", ["b"]]}', r"texts\[1\]: found an array; wanted a valid string"),
        (b'{"texts": ["a", "\\ud800"]}', r"^texts\[1\]: no valid Unicode \(a lone surrogate\)$"),
        (b'{"text": "\\ud800"}', r"^text: no valid Unicode \(a lone surrogate\)$"),
        (b'{"text": true}', "text: found true; wanted a valid string"),
        (b'{"text": NaN}', "text: found a number; wanted a valid string"),
        (b'{"text": "a", "words": 3}', "words: not known here"),
        (b'{"text": "a", "\\ud800": 3}', "body: a key is no valid Unicode"),
        (b'{"text": "\xff"}', "There was an error|not JSON|UTF-8"),
        (b"[" * 3000, "There was an error|not JSON"),
        (json.dumps({"texts": ["a"] * 11}).encode(), "found 11 texts, wanted at most 10"),
    ],
)
def test_a_wrong_body_is_one_clear_line(client, body, message):
    response = client.post("/embed", content=body, headers={"content-type": "application/json"})
    assert re.search(message, problem(response))


def test_another_content_type(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = client.post("/embed", content=b'{"text": "a"}', headers={"content-type": kind})
        assert problem(response) == "body: found another content type, wanted application/json"


def test_unknown_routes_and_methods(client):
    assert problem(client.get("/nothing"), 404) == "GET /nothing: Not Found"
    assert problem(client.get("/embed"), 405) == "GET /embed: Method Not Allowed"


def test_bodies_are_limited_by_what_they_say_and_by_what_they_are(client):
    body = json.dumps({"texts": ["a" * 4000]}).encode()
    assert "4000 bytes" in problem(client.post("/embed", content=body), 413)

    def chunks():
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    assert "4000 bytes" in problem(client.post("/embed", content=chunks()), 413)


def test_more_tokens_than_the_queue_holds(client):
    texts = ["the cat sat on a mat"] * 10
    assert problem(client.post("/embed", json={"texts": texts}), 413) == "found 80 tokens, wanted at most 60 (--queue)"


def test_long_texts_can_be_refused(shared_bundle):
    with make_client(shared_bundle, refuse_long=True) as client:
        message = problem(client.post("/embed", json={"texts": [TEXTS[3]]}))
        assert message == "texts[0]: is longer than 8 tokens, the most there can be"
        assert client.post("/embed", json={"texts": TEXTS[:3]}).status_code == 200


def test_openai_texts_and_token_ids(client, shared_bundle):
    expected = vectors_of(shared_bundle, ["a dog ran", "the cat"])
    for value, rows in (
        ("a dog ran", [0]),
        (["a dog ran", "the cat"], [0, 1]),
        ([2, 8, 10, 11, 3], [0]),
        ([2, 8.0, 10, 11, 3], [0]),
        ([[2, 8, 10, 11, 3], [2, 4, 5, 3]], [0, 1]),
    ):
        found = client.post("/v1/embeddings", json={"model": "tiny", "input": value}).json()
        assert found["object"] == "list"
        assert [item["index"] for item in found["data"]] == list(range(len(rows)))
        vectors = np.array([item["embedding"] for item in found["data"]], np.float32)
        np.testing.assert_allclose(vectors, expected[rows], rtol=0, atol=1e-6)
        tokens = sum((5, 4)[row] for row in rows)
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_base64_is_little_endian_float32(client, shared_bundle):
    body = {"model": "tiny", "input": "a dog ran", "encoding_format": "base64", "dimensions": 5, "user": "me"}
    (item,) = client.post("/v1/embeddings", json=body).json()["data"]
    vector = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, vectors_of(shared_bundle, ["a dog ran"])[0])


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (EmbedRequest, {"texts": [1] * 1000}),
        (EmbedRequest, {str(i): 1 for i in range(1000)} | {"text": "a"}),
        (OpenAIRequest, {"model": "m", "input": [-1] * 1000}),
        (OpenAIRequest, {"model": "m", "input": ["a", *[1] * 1000]}),
        (OpenAIRequest, {"model": "m", "input": [[]] * 1000}),
        (OpenAIRequest, {"model": "m", "input": [[1, *["a"] * 1000]] * 1000}),
        (OpenAIRequest, {"model": "m", "input": "a"} | {str(i): 1 for i in range(1000)}),
    ],
)
def test_a_body_is_read_up_to_its_first_error(schema, body):
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"input": []}, 400, "input: wanted a text"),
        ({"input": [[]]}, 400, "input: wanted a text"),
        ({"input": ["a", 1]}, 400, "input: wanted a text"),
        ({"input": [1.5]}, 400, "input: wanted a text"),
        ({"input": {"a": 1}}, 400, "input: wanted a text"),
        ({"input": [2, 12]}, 400, r"input\[0\]: found the token id 12, wanted ids of 0 to 11"),
        ({"input": [[2], [12]]}, 400, r"input\[1\]: found the token id 12"),
        ({"input": [2, -1]}, 400, "input: wanted a text"),
        ({"input": [[2] * 25]}, 400, r"input\[0\]: found 25 tokens, wanted 1 to 24"),
        ({"input": [True]}, 400, "input: wanted a text"),
        ({"input": [10**30]}, 400, "input: wanted a text"),
        ({"model": "other"}, 404, 'model: found "other", this server has "tiny"'),
        ({"model": None}, 400, "model: found null"),
        ({"input": "\ud800"}, 400, r"^input\[0\]: no valid Unicode"),
        ({"input": ["a", "\ud800"]}, 400, r"^input\[1\]: no valid Unicode"),
        ({"dimensions": 3}, 400, "dimensions: found 3, this model has 5"),
        ({"dimensions": 1e300}, 400, "^dimensions: found a number; wanted less than 2147483648$"),
        ({"encoding_format": "hex"}, 400, "encoding_format: found a string; wanted 'float' or 'base64'"),
    ],
)
def test_openai_errors(client, change, status, message):
    body = json.dumps({"model": "tiny", "input": "a", **change})  # a lone surrogate is \\ud800 here
    response = client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
    assert re.search(message, problem(response, status))
    assert response.json()["error"]["param"] == next(iter(change))


def test_a_model_that_gives_nan_is_an_error_and_no_json_that_cannot_be_read(shared_bundle, monkeypatch):
    monkeypatch.setattr(serve.Session, "caller", lambda self, schedule: lambda rows: np.full((len(rows), 5), np.nan))
    with make_client(shared_bundle) as client:
        message = problem(client.post("/embed", json={"text": "a"}), 500)
    assert message == "text 0: the model gave NaN or infinity"


def test_what_nobody_thought_of_is_an_error_without_a_traceback(shared_bundle, monkeypatch):
    with make_client(shared_bundle) as client:
        monkeypatch.setattr("tfx.runtime.serve_batch.Batcher.run", lambda self, encodings: 1 / 0)
        assert problem(client.post("/embed", json={"text": "a"}), 500) == "unexpected ZeroDivisionError"


def test_no_memory_is_503(shared_bundle, monkeypatch):
    def call(rows):
        raise MemoryError("too large")

    monkeypatch.setattr(serve, "_warm_up", lambda call: None)
    monkeypatch.setattr(serve.Session, "caller", lambda self, schedule: call)
    with make_client(shared_bundle) as client:
        assert problem(client.post("/embed", json={"text": "a"}), 503) == "text 0: too large"


def test_health_readiness_and_the_model(client, shared_bundle):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    chosen = ServePlan(shared_bundle.path)
    service = serve._service(chosen, *serve._session(chosen), lambda: True)
    with TestClient(make_app(service)) as stopping:
        assert problem(stopping.get("/ready"), 503) == "the server stops"
        assert [model["id"] for model in stopping.get("/v1/models").json()["data"]] == ["tfx-model"]


def test_metrics_count_what_happened(shared_bundle):
    with make_client(shared_bundle, queue_tokens=60) as client:
        client.post("/embed", json={"texts": TEXTS[:3]})
        client.post("/embed", json={"texts": []})
        client.get("/anything")
        client.get("/whatever")
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert found['tfx_requests_total{route="/embed",status="200"}'] == "1.0"
    assert found['tfx_requests_total{route="/embed",status="400"}'] == "1.0"
    assert found['tfx_requests_total{route="other",status="404"}'] == "2.0"  # a path of one's own makes no new series
    assert found['tfx_request_seconds_count{route="/embed"}'] == "2.0"
    assert found["tfx_texts_total"] == "3.0"
    assert found["tfx_tokens_total"] == "16.0"
    assert found["tfx_batch_rows_sum"] == "3.0"
    assert found["tfx_batch_tokens_sum"] == "16.0"
    assert (found["tfx_queue_tokens"], found["tfx_queue_rows"], found["tfx_queue_limit_tokens"]) == (
        "0.0",
        "0.0",
        "60.0",
    )


def test_the_documentation_asks_no_other_machine(client):
    page = client.get("/docs")
    assert page.status_code == 200
    places = re.findall(r"""(?:src|href|url)\s*[=:]\s*["']([^"']+)""", page.text)
    assert places
    assert all(place.startswith("/") for place in places)
    assert '"validatorUrl": null' in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for place in places:
        assert client.get(place).status_code == 200
    assert client.get("/", follow_redirects=False).headers["location"] == "/docs"


def test_the_schema_says_what_is_taken_and_given(client):
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/embed", "/v1/embeddings", "/v1/models", "/health", "/ready", "/metrics"}
    answers = schema["paths"]["/embed"]["post"]["responses"]
    assert set(answers) == {"200", "4XX", "5XX"}
    properties = schema["components"]["schemas"]["EmbedResponse"]["properties"]
    assert set(properties) == set(client.post("/embed", json={"text": "a"}).json())


def test_the_schema_says_this_server_s_limits(client):
    models = client.get("/openapi.json").json()["components"]["schemas"]
    assert models["EmbedRequest"]["properties"]["texts"]["maxItems"] == 10
    wanted = models["OpenAIRequest"]["properties"]
    assert wanted["model"]["const"] == "tiny"
    _, texts, ids, rows = wanted["input"]["oneOf"]
    assert (texts["maxItems"], rows["maxItems"]) == (10, 10)
    for row in (ids, rows["items"]):
        assert (row["maxItems"], row["items"]["minimum"], row["items"]["exclusiveMaximum"]) == (24, 0, 12)


def test_a_message_is_short_whatever_was_sent(client):
    response = client.post("/embed", json={"text": "a", "k" * 3000: 1})
    assert len(problem(response)) <= 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
keys = st.sampled_from(["text", "texts", "input", "model", "encoding_format", "dimensions", "user", "x"])
bodies = (
    st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(keys, json_values, max_size=4).map(lambda value: json.dumps(value).encode())
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies, path=st.sampled_from(["/embed", "/v1/embeddings"]))
def test_any_body_is_answered(client, body, path):
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    if response.status_code == 200:
        json.loads(response.text, parse_constant=lambda name: pytest.fail(name))
    else:
        assert response.status_code in (400, 404, 413)
        problem(response, response.status_code)


@pytest.mark.parametrize("text", ["a", "a" * 100_000])
def test_bodies_that_are_held_at_once_are_limited(shared_bundle, monkeypatch, text):
    monkeypatch.setattr(serve_http, "BODIES", 0)
    with make_client(shared_bundle) as client:
        response = client.post("/embed", json={"text": text})
    assert problem(response, 429) == "too many requests are being read at once"
    assert response.headers["retry-after"] == "1"
