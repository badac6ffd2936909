"""A bundle behind HTTP: ``tfx serve``. Needs the extra ``serve``."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from .bundle import DEFAULT_BUNDLE, Bundle
from .doctor import default_threads
from .schedule import Call, Schedule, candidates, tuned
from .session import Session
from .text import Encoding, text_encoder, vector_output

if TYPE_CHECKING:
    import uvicorn

    from .serve_app import Service

__all__ = ["MAX_BODY", "MAX_TEXTS", "QUEUE_TOKENS", "ServePlan", "bind", "serve"]

QUEUE_TOKENS = 131_072
"""Tokens that may wait, unless told otherwise: seconds of work, and little memory."""
MAX_TEXTS = 2048
"""Texts in one request, unless told otherwise; as many as OpenAI's API takes."""
MAX_BODY = 4 << 20
"""Bytes in one request, unless told otherwise."""

_KEEP_ALIVE = 30  # seconds; longer than clients' pause between requests of a connection that they keep
_WARM_UP = 8  # tokens


@dataclass(frozen=True)
class ServePlan:
    """What ``tfx serve`` is asked for.

    Attributes:
        bundle: the folder; it must have a tokenizer and pooling.
        host: address or name to listen at.
        port: 0 takes a free one.
        provider: where to run.
        threads: cores to use, None for the physical ones.
        max_batch_tokens: tokens in one call, None for what the bundle was tuned to, else 256 per core in use.
        single_copy: keep the weights in memory once; a call that has the machine to itself then has one core, too.
        max_wait_ms: how long a text may wait for others to fill its call although a core is free.
        queue_tokens: tokens that may wait.
        max_texts: texts in one request.
        max_body: bytes in one request.
        refuse_long: answer texts that are too long with an error in place of cutting them.
        model_name: what clients call the model, None for the folder's name.
        stop_seconds: how long a stop waits for requests that run.
        access_log: write a line for each request to stderr; texts are never written.
    """

    bundle: Path = Path(DEFAULT_BUNDLE)
    host: str = "127.0.0.1"
    port: int = 8080
    provider: str = "cpu"
    threads: int | None = None
    max_batch_tokens: int | None = None
    single_copy: bool = False
    max_wait_ms: float = 0.0
    queue_tokens: int = QUEUE_TOKENS
    max_texts: int = MAX_TEXTS
    max_body: int = MAX_BODY
    refuse_long: bool = False
    model_name: str | None = None
    stop_seconds: int = 30
    access_log: bool = False


def serve(plan: ServePlan, started: Callable[[dict[str, Any]], None] = lambda found: None) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests that run and return.

    Args:
        plan: what is asked for.
        started: told once the server can be reached: url, model, provider, schedule, how often the weights are in
            memory (copies), and whether other machines can reach it (open).

    Raises:
        InputError: a host that is none.
        BundleError: the bundle is damaged, or has no tokenizer or no pooling.
        MachineError: the port is taken, the provider does not run here, or memory ran out.
        ImportError: the extra ``serve`` is not installed.
    """
    import uvicorn

    from .serve_app import make_app
    from .serve_protocol import raise_descriptor_limit

    raise_descriptor_limit()
    with contextlib.closing(bind(plan.host, plan.port)) as listener:
        session, schedule = _session(plan)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

        class Server(uvicorn.Server):
            """Says where it is as soon as it can be reached."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if not self.should_exit:
                    started(
                        {
                            "url": url,
                            "model": service.name,
                            "provider": session.provider,
                            "schedule": schedule.to_json(),
                            "copies": service.copies,
                            "open": not ipaddress.ip_address(host).is_loopback,
                        }
                    )

        service = _service(plan, session, schedule, lambda: server.should_exit)
        server = Server(_config(plan, make_app(service)))
        with _signals_end_it():
            server.run([listener])


def bind(host: str, port: int) -> socket.socket:
    """Take a port, before anything slow is done.

    Raises:
        InputError: no such host.
        MachineError: the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(f'host: found "{host}", wanted an address or name of this machine ({error})') from error
    # IPv4 first, where a name has both: that is what clients try that know only one.
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # where it would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may be bound to a port where neither listens: the second is refused only here.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise MachineError(f"port {port} on {host}: {error.strerror}; --port 0 takes a free one") from error
    return listener


def _session(plan: ServePlan) -> tuple[Session, Schedule]:
    """Load a model and return it with how it is to be run."""
    bundle = Bundle.open(plan.bundle)
    text_encoder(bundle)  # both are needed, and are known before the model is loaded
    vector_output(bundle)
    cores = plan.threads or default_threads()
    tuning = bundle.manifest.tuning if plan.provider == "cpu" else None
    schedule = tuned(tuning, cores) or candidates(cores, plan.provider)[0]
    if plan.max_batch_tokens is not None:
        schedule = replace(schedule, batch_tokens=plan.max_batch_tokens)
    return Session(bundle, provider=plan.provider, threads=schedule.threads), schedule


def _service(plan: ServePlan, session: Session, schedule: Schedule, stopping: Callable[[], bool]) -> Service:
    from .serve_app import Service
    from .serve_batch import Batcher

    bundle, manifest = session.bundle, session.bundle.manifest
    call, lone = session.caller(schedule), _lone(plan, session, schedule)
    _warm_up(call)

    def make_batcher(watch: Callable[[int, int, float], None]) -> Batcher:
        return Batcher(
            call,
            schedule,
            padded=manifest.layout == "padded",
            queue_tokens=plan.queue_tokens,
            max_wait=plan.max_wait_ms / 1e3,
            watch=watch,
            lone=lone,
        )

    return Service(
        name=plan.model_name or bundle.path.resolve().name,
        encoder=text_encoder(bundle),
        inputs=manifest.inputs,
        max_length=manifest.max_length,
        dimension=int(vector_output(bundle).shape[1]),
        make_batcher=make_batcher,
        copies=1 if lone is None else 2,
        queue_tokens=plan.queue_tokens,
        max_texts=plan.max_texts,
        max_body=plan.max_body,
        refuse_long=plan.refuse_long,
        stopping=stopping,
    )


def _lone(plan: ServePlan, session: Session, schedule: Schedule) -> Call | None:
    """Load the model once more, for calls on all threads: onnxruntime fixes those of an operator when it loads.

    Returns:
        What runs such calls; None where one copy is wanted, does the same, or is all that fits into memory.
    """
    if plan.single_copy or schedule.workers == 1 or session.provider != "cpu":
        return None
    try:
        call = session.caller(replace(schedule, workers=1, threads=schedule.workers * schedule.threads))
        _warm_up(call)
    except MachineError:
        return None
    return call


def _warm_up(call: Call) -> None:
    """Run once, so that the first request finds its memory allocated."""
    list(call([Encoding([0] * _WARM_UP, [0] * _WARM_UP)]))


def _config(plan: ServePlan, app: Any) -> uvicorn.Config:
    import uvicorn

    from .serve_protocol import Protocol

    return uvicorn.Config(
        app,
        http=Protocol,
        lifespan="on",
        ws="none",
        log_level="info" if plan.access_log else "warning",
        access_log=plan.access_log,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=plan.stop_seconds,
    )


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Let a stop by signal be the normal end: uvicorn raises the signal again once it has stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
