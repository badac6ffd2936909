"""tfx serve on a real port: many clients, a full queue, clients that leave, openai's own client, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import uvicorn
from click.testing import CliRunner

from tfx.cli import main
from tfx.errors import BundleError, InputError, MachineError
from tfx.runtime import serve, serve_command
from tfx.runtime.schedule import Schedule
from tfx.runtime.serve import ServePlan, bind
from tfx.runtime.serve_app import make_app
from tfx.runtime.serve_batch import Batcher
from tfx.runtime.session import Session

try:
    import httpx2 as httpx
except ImportError:  # Python 3.10
    import httpx  # pyright: ignore[reportMissingImports]

TEXTS = ["the cat sat on a mat", "dog", "a dog ran", "the mat", ""]


class Gate:
    """A call that waits inside until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.rows: list[int] = []

    def __call__(self, encodings):
        self.rows.append(len(encodings))
        assert self.open.wait(20)
        return np.ones((len(encodings), 5), np.float32)


@contextlib.contextmanager
def running(service, stop_seconds=5, **changes):
    """Serve in a thread; yields the server and its URL."""
    service = dataclasses.replace(service, **changes)
    listener = bind("127.0.0.1", 0)
    config = serve._config(ServePlan(stop_seconds=stop_seconds), make_app(service))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


def gated(bundle, gate, **changes):
    """A service whose model is a gate; one call at a time, of 8 tokens."""
    plan = ServePlan(bundle.path, **changes)
    service = serve._service(plan, *serve._session(plan), lambda: False)

    def make(watch):
        return Batcher(gate, Schedule(1, 1, 8), padded=False, queue_tokens=plan.queue_tokens, watch=watch)

    return dataclasses.replace(service, make_batcher=make)


def metric(url: str, name: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.rpartition(" ")[0] == name:
            return float(line.rpartition(" ")[2])
    return 0.0


def until(condition) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)


def start(bundle, *options: str) -> tuple[subprocess.Popen[str], dict]:
    """Run the command; returns the process and what it said first."""
    code = "from tfx.cli import main; main(prog_name='tfx')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(bundle.path), "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return process, json.loads(line)


@pytest.fixture(scope="module")
def command(shared_bundle):
    """The command in a process of its own, for everything that ends nothing."""
    process, found = start(shared_bundle, "--model-name", "tiny", "--max-body", "20000")
    yield found
    process.terminate()
    process.communicate(timeout=30)


def test_it_says_where_it_is(command):
    assert command["url"].startswith("http://127.0.0.1:")
    assert (command["model"], command["provider"], command["open"]) == ("tiny", "cpu", False)
    assert Schedule.from_json(command["schedule"]).batch_tokens == 256


def test_many_clients_get_their_own_vectors(command, shared_bundle):
    expected = np.asarray(Session(shared_bundle).encode(TEXTS))

    async def ask(client, i):
        rows = [(i + j) % len(TEXTS) for j in range(1 + i % 3)]
        found = await client.post("/embed", json={"texts": [TEXTS[row] for row in rows]})
        assert found.status_code == 200, found.text
        np.testing.assert_allclose(found.json()["vectors"], expected[rows], rtol=0, atol=1e-6)

    async def all_of_them():
        async with httpx.AsyncClient(base_url=command["url"], timeout=60) as client:
            await asyncio.gather(*(ask(client, i) for i in range(100)))

    asyncio.run(all_of_them())


def test_openai_s_own_client(command, shared_bundle):
    import openai

    expected = np.asarray(Session(shared_bundle).encode(TEXTS[:2]))
    with openai.OpenAI(base_url=f"{command['url']}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        for found in (
            client.embeddings.create(model="tiny", input=TEXTS[:2]),  # asks for base64 by itself
            client.embeddings.create(model="tiny", input=TEXTS[:2], encoding_format="float"),
        ):
            np.testing.assert_allclose([item.embedding for item in found.data], expected, rtol=0, atol=1e-6)
            assert found.usage.total_tokens == 11
        found = client.embeddings.create(model="tiny", input=[[2, 10, 3]], dimensions=5)
        np.testing.assert_allclose(found.data[0].embedding, expected[1], rtol=0, atol=1e-6)
        with pytest.raises(openai.NotFoundError, match='this server has "tiny"'):
            client.embeddings.create(model="text-embedding-3-small", input="a")
        with pytest.raises(openai.BadRequestError, match="this model has 5"):
            client.embeddings.create(model="tiny", input="a", dimensions=3)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_answered_while_it_is_sent(command, chunked):
    body = b"x" * 2_000_000
    content = (body[i : i + 50_000] for i in range(0, len(body), 50_000)) if chunked else body
    found = httpx.post(f"{command['url']}/embed", content=content, headers={"content-type": "application/json"})
    assert found.status_code == 413
    assert "20000 bytes" in found.json()["error"]["message"]
    assert httpx.get(f"{command['url']}/health").status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n{}",
        b"POST /embed HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    ],
)
def test_broken_requests_end_their_connection_alone(command, raw):
    _, _, port = command["url"].rpartition(":")
    with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as connection:
        connection.sendall(raw)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65536):
                answer += chunk
    assert answer.startswith((b"HTTP/1.1 4", b"")), answer
    assert b"Traceback" not in answer
    assert httpx.get(f"{command['url']}/health").status_code == 200


def test_a_full_queue_is_429_with_a_time_to_come_back(shared_bundle):
    gate = Gate()
    with running(gated(shared_bundle, gate, queue_tokens=16)) as (_, url), httpx.Client(base_url=url) as client:

        def ask():
            answers.append(client.post("/embed", json={"text": "the cat sat on a mat"}, timeout=60))

        answers: list = []
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for i, thread in enumerate(threads):  # one in the call, two in the queue
            thread.start()
            until(lambda i=i: len(gate.rows) == 1 and metric(url, "tfx_queue_tokens") == 8.0 * i)
        refused = client.post("/embed", json={"text": "dog"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        gate.open.set()
        for thread in threads:
            thread.join(20)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert client.post("/embed", json={"text": "dog"}).status_code == 200
        assert metric(url, 'tfx_requests_total{route="/embed",status="429"}') == 1


def test_a_client_that_leaves_takes_its_work_along(shared_bundle):
    gate = Gate()
    with running(gated(shared_bundle, gate)) as (_, url):
        body = json.dumps({"texts": ["the cat sat on a mat"] * 20}).encode()
        head = b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        _, _, port = url.rpartition(":")
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            connection.sendall(head % len(body) + body)
            until(lambda: metric(url, "tfx_queue_rows") == 19)
        until(lambda: metric(url, "tfx_queue_rows") == 0)
        assert metric(url, "tfx_queue_tokens") == 0
        gate.open.set()
        assert httpx.post(f"{url}/embed", json={"text": "dog"}).status_code == 200
        assert metric(url, 'tfx_requests_total{route="/embed",status="disconnected"}') == 1
    assert gate.rows == [1, 1]


def test_a_client_that_leaves_while_it_sends(command):
    name = 'tfx_requests_total{route="/embed",status="disconnected"}'
    before = metric(command["url"], name)
    _, _, port = command["url"].rpartition(":")
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.sendall(b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
    until(lambda: metric(command["url"], name) == before + 1)


def test_a_body_that_never_comes_is_408(shared_bundle, monkeypatch):
    monkeypatch.setattr("tfx.runtime.serve_http._BODY_SECONDS", 0.1)
    monkeypatch.setattr("tfx.runtime.serve_http._DRAIN_SECONDS", 0.1)
    with running(gated(shared_bundle, Gate())) as (_, url):
        _, _, port = url.rpartition(":")
        with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as connection:
            connection.sendall(b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_large_bodies_that_do_not_end_turn_no_small_one_away(shared_bundle, monkeypatch):
    monkeypatch.setattr("tfx.runtime.serve_http.BODIES", 1)
    monkeypatch.setattr("tfx.runtime.serve_http._DRAIN_SECONDS", 0.1)
    gate = Gate()
    gate.open.set()
    large = b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: 190000\r\n\r\n" + b" " * 100_000
    with running(gated(shared_bundle, gate), max_body=200_000) as (_, url):
        _, _, port = url.rpartition(":")
        with (
            socket.create_connection(("127.0.0.1", int(port)), timeout=20) as first,
            socket.create_connection(("127.0.0.1", int(port)), timeout=20) as second,
        ):
            first.sendall(large)
            second.sendall(large + b" " * 89_000)
            assert select.select([first, second], [], [], 20)[0][0].recv(65536).startswith(b"HTTP/1.1 429")
            assert httpx.post(f"{url}/embed", json={"text": "dog"}).status_code == 200
        until(lambda: metric(url, 'tfx_requests_total{route="/embed",status="disconnected"}') == 1)
        # What they held is free again.
        assert httpx.post(f"{url}/embed", json={"texts": ["dog " * 40_000]}).status_code == 200


@pytest.mark.parametrize("said", [b"", b"POST /embed HTTP/1.1\r\nhost: a\r\n"])
def test_a_connection_without_a_request_ends(shared_bundle, monkeypatch, said):
    monkeypatch.setattr("tfx.runtime.serve_protocol._HEAD_SECONDS", 0.2)
    with running(gated(shared_bundle, Gate())) as (_, url):
        _, _, port = url.rpartition(":")
        with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as connection:
            connection.sendall(said)
            assert connection.recv(65536) == b""


def test_a_request_that_takes_its_time_is_answered(shared_bundle, monkeypatch):
    monkeypatch.setattr("tfx.runtime.serve_protocol._HEAD_SECONDS", 0.2)
    gate = Gate()
    with running(gated(shared_bundle, gate)) as (_, url), httpx.Client(base_url=url) as client:
        for _ in range(2):  # the second on a connection that was used before
            threading.Timer(0.5, gate.open.set).start()
            assert client.post("/embed", json={"text": "dog"}, timeout=20).status_code == 200
            gate.open.clear()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_a_server_takes_the_descriptors_that_it_may_have():
    code = (
        "import resource as r; from tfx.runtime.serve_protocol import raise_descriptor_limit\n"
        "_, hard = r.getrlimit(r.RLIMIT_NOFILE); r.setrlimit(r.RLIMIT_NOFILE, (64, hard))\n"
        "raise_descriptor_limit(); print(r.getrlimit(r.RLIMIT_NOFILE)[0] > 64)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_what_runs_is_answered_before_the_end_and_nothing_new_is_taken(shared_bundle):
    gate = Gate()
    answers = []
    with running(gated(shared_bundle, gate)) as (server, url):
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/embed", json={"texts": TEXTS}, timeout=60))
        )
        asking.start()
        until(lambda: gate.rows)
        server.should_exit = True
        until(lambda: not server.servers or not server.servers[0].is_serving())
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")
        gate.open.set()
        asking.join(20)
    assert answers[0].status_code == 200
    assert len(answers[0].json()["vectors"]) == len(TEXTS)


def test_the_end_does_not_wait_for_ever(shared_bundle):
    gate = Gate()
    answers = []
    with running(gated(shared_bundle, gate), stop_seconds=1) as (server, url):
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/embed", json={"texts": TEXTS}, timeout=60))
        )
        asking.start()
        until(lambda: gate.rows)
        server.should_exit = True
        asking.join(20)
        gate.open.set()  # the call itself cannot be interrupted
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "the server stops"


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no such signal to a child alone")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_normal_end(shared_bundle, number):
    process, found = start(shared_bundle)
    assert httpx.post(f"{found['url']}/embed", json={"text": "dog"}).status_code == 200
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_port_in_use_is_one_line(shared_bundle):
    with contextlib.closing(bind("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["serve", str(shared_bundle.path), "--port", port])
    assert result.exit_code == MachineError.exit_code
    assert result.stderr.startswith(f"error: port {port} on 127.0.0.1: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_host_that_is_none():
    with pytest.raises(InputError, match=r'host: found "no\.such\.host\.invalid"'):
        bind("no.such.host.invalid", 0)


def test_a_name_is_listened_at_where_every_client_looks():
    with contextlib.closing(bind("localhost", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_other_machines_are_let_in_with_a_notice(shared_bundle):
    process, found = start(shared_bundle, "--host", "0.0.0.0")
    process.terminate()
    assert found["open"]
    assert process.communicate(timeout=30)[1].startswith("notice: whoever reaches 0.0.0.0 can use it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tokenizer": False}, "has no tokenizer"), ({"pooling": False}, "export it with --pooling")],
)
def test_a_bundle_that_gives_texts_no_vector(make_bundle, changes, message):
    with pytest.raises(BundleError, match=message):
        serve.serve(ServePlan(make_bundle(**changes).path, port=0))


def test_options_become_the_schedule(shared_bundle):
    _, schedule = serve._session(ServePlan(shared_bundle.path, threads=3, max_batch_tokens=77))
    assert schedule == Schedule(3, 1, 77)


@pytest.mark.parametrize(
    ("options", "loaded"),
    [({}, [1, 2]), ({"single_copy": True}, [1]), ({"threads": 1}, [1])],
    ids=["", "single copy", "one core"],
)
def test_a_lone_request_has_all_cores(shared_bundle, options, loaded, monkeypatch):
    seen: list[tuple[str, int]] = []
    caller = Session.caller

    def watched(self, schedule):
        call = caller(self, schedule)
        seen.append(("loaded", schedule.threads))

        def run(encodings):
            seen.append(("ran", schedule.threads))
            return call(encodings)

        return run

    monkeypatch.setattr(Session, "caller", watched)
    plan = ServePlan(shared_bundle.path, **{"threads": 2, **options})
    service = serve._service(plan, *serve._session(plan), lambda: False)
    assert [threads for what, threads in seen if what == "loaded"] == loaded
    assert service.copies == len(loaded)
    seen.clear()
    with running(service) as (_, url):
        answer = httpx.post(f"{url}/embed", json={"texts": TEXTS})
    assert seen == [("ran", loaded[-1])]
    wanted = Session(shared_bundle, threads=1).encode(TEXTS)
    assert np.abs(np.array(answer.json()["vectors"]) - wanted).max() < 1e-6


def test_without_memory_for_a_second_copy_it_serves_with_one(shared_bundle, monkeypatch):
    caller = Session.caller

    def scarce(self, schedule):
        if schedule.threads > 1:
            raise MachineError("memory ran out")
        return caller(self, schedule)

    monkeypatch.setattr(Session, "caller", scarce)
    plan = ServePlan(shared_bundle.path, threads=2)
    service = serve._service(plan, *serve._session(plan), lambda: False)
    assert service.copies == 1
    with running(service) as (_, url):
        assert httpx.post(f"{url}/embed", json={"texts": TEXTS}).status_code == 200
    found = {"url": "u", "model": "m", "provider": "cpu", "open": False, "copies": 1}
    found["schedule"] = Schedule(2, 1, 256).to_json()
    monkeypatch.setattr(serve, "serve", lambda plan, started: started(found))
    said = CliRunner().invoke(main, ["serve", str(shared_bundle.path)])
    assert "notice: no memory for the weights twice" in said.stderr
    assert CliRunner().invoke(main, ["serve", str(shared_bundle.path), "--single-copy"]).stderr.count("notice") == 0


def test_a_tuned_bundle_is_served_as_it_was_tuned(make_bundle):
    tuning = {
        "threads": 1,
        "spinning": False,
        "schedule": {"workers": 1, "threads": 1, "batch_tokens": 99},
        "log": None,
    }
    _, schedule = serve._session(ServePlan(make_bundle(tuning=tuning).path))
    assert schedule == Schedule(1, 1, 99)


def test_defaults_are_said_as_they_are():
    defaults = {parameter.name: parameter.default for parameter in serve_command.serve.params}
    plan = ServePlan()
    for name in ("host", "port", "max_wait_ms", "queue_tokens", "max_texts", "max_body", "stop_seconds"):
        assert defaults[name] == getattr(plan, name)


def test_a_missing_extra_is_named():
    block = "import sys; sys.modules['fastapi'] = None\nfrom tfx.cli import main\nmain(prog_name='tfx')"
    done = subprocess.run([sys.executable, "-c", block, "serve", "--port", "0"], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == 'error: fastapi is not installed; install it with: pip install "tfx-onnx[serve]"\n'
