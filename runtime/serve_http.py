"""What stands between the network and the routes: sizes of bodies, clients that leave, and the shape of errors.

An error is ``{"error": {"message", "type", "param", "code"}}``, as OpenAI's clients read it, on every route.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .serve_metrics import Metrics

__all__ = ["BODIES", "Guard", "RefusedError", "error_body"]

BODIES = 16
"""Largest bodies that a server holds at the same time; what comes on top is refused."""

_SMALL = 65_536  # bytes; bodies up to this are counted by themselves, so that large ones turn no small one away

_BODY_SECONDS = 30.0  # a client that sends slower than this holds memory for nothing
_DRAIN_SECONDS = 2.0
_LONGEST_MESSAGE = 500  # characters; a message may quote what a client sent
_GONE = "disconnected"  # in place of a status, in metrics


class RefusedError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        message: one line for the client.
        param: the key that is wrong, None where it is not one.
        headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return the JSON of an error; what cannot be UTF-8 in the message becomes a question mark."""
    line = " ".join(message.split())[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode()
    kind = "invalid_request_error" if status < 500 and status != 429 else "rate_limit_error"
    if status >= 500:
        kind = "server_error"
    return json.dumps({"error": {"message": line, "type": kind, "param": param, "code": None}}).encode()


class Guard:
    """ASGI middleware: reads a body, at most so large, before the application sees it, and ends work nobody waits for.

    Args:
        app: the application.
        max_body: largest body in bytes; all bodies that are held together have at most ``BODIES`` times that.
        metrics: told of every request.
        routes: paths that are counted by name; every other one is counted as "other".
        policies: the Content-Security-Policy of what is answered at a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body: int,
        metrics: Metrics,
        routes: frozenset[str],
        policies: Mapping[str, str],
    ) -> None:
        self._app = app
        self._max_body = max_body
        self._metrics = metrics
        self._routes = routes
        self._policies = policies
        self._held = {False: 0, True: 0}  # bytes of bodies, by whether they are large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = _GONE
        started = False

        async def sending(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = str(message["status"]), True
                if scope["path"] in self._policies:
                    policy = self._policies[scope["path"]].encode()
                    message["headers"] = [*message["headers"], (b"content-security-policy", policy)]
            await send(message)

        body = _Body()
        try:
            if await self._whole(scope, receive, body):
                await self._run(scope, receive, sending, bytes(body.data))
        except RefusedError as error:
            await self._answer(sending, error, receive)
        except asyncio.CancelledError:  # the time for a graceful stop is over
            if not started:
                await self._answer(sending, RefusedError(503, "the server stops"))
        finally:
            self._held[len(body.data) > _SMALL] -= len(body.data)
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.requests.labels(route, status).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - start)

    async def _whole(self, scope: Scope, receive: Receive, body: _Body) -> bool:
        """Read a body; False when the client has left.

        Raises:
            RefusedError: it is too large, takes too long, or too much is held already.
        """
        length = dict(scope["headers"]).get(b"content-length", b"0")
        self._check(int(length) if length.isdigit() else 0)
        try:
            return await asyncio.wait_for(self._read(receive, body), _BODY_SECONDS)
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            raise RefusedError(408, f"the body did not come within {_BODY_SECONDS:.0f} s") from None

    async def _read(self, receive: Receive, body: _Body) -> bool:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            chunk = message.get("body", b"")
            before, size = len(body.data), len(body.data) + len(chunk)
            self._check(size)
            was, large = before > _SMALL, size > _SMALL
            if self._held[large] + size - (before if was == large else 0) > BODIES * self._max_body:
                raise RefusedError(429, "too many requests are being read at once", headers={"retry-after": "1"})
            body.data += chunk
            self._held[was] -= before
            self._held[large] += size
            more = message.get("more_body", False)
        return True

    def _check(self, size: int) -> None:
        if size > self._max_body:
            raise RefusedError(413, f"body: found more than {self._max_body} bytes, which is the most (--max-body)")

    async def _answer(self, send: Send, error: RefusedError, unread: Receive | None = None) -> None:
        """Answer with an error and end the connection, after what is still unread of the request."""
        body = error_body(error.status, error.message, error.param)
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": encoded})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if unread is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_drain(unread, BODIES * self._max_body), _DRAIN_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Run the application, and cancel it when the client leaves before its answer is complete."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # whoever waits for more is cancelled below
            raise AssertionError

        async def leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        app = asyncio.ensure_future(self._app(scope, replay, send))
        gone = asyncio.create_task(leaves())
        try:
            await asyncio.wait({app, gone}, return_when=asyncio.FIRST_COMPLETED)
            if app.done():
                await app  # raises what it raised
        finally:
            for task in (app, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await app


class _Body:
    """Bytes of a body as far as they have come."""

    def __init__(self) -> None:
        self.data = bytearray()


async def _drain(receive: Receive, most: int) -> None:
    """Read on and throw away: a client that is still sending would not see an answer on a connection that is closed."""
    while most > 0:
        message = await receive()
        most -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return
