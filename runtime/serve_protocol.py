"""Connections of ``tfx serve`` end when no request comes on them. Needs uvicorn.

uvicorn itself counts the time between requests only: a client that connects and says nothing, or sends a head byte by
byte, would keep its descriptor for ever, and a few such clients would take all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["Protocol", "raise_descriptor_limit"]

_HEAD_SECONDS = 30.0
_DESCRIPTORS = 65_536


class Protocol(AutoHTTPProtocol):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass] - one of two
    """A connection that is closed when the head of a request takes too long."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read on; a head that is not complete has the time that is left."""
        super().data_received(data)
        if self._idle():
            self._watch()
        else:
            self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unwatch()
        super().connection_lost(exc)

    def _idle(self) -> bool:
        """Whether no request is being read or answered."""
        cycle: Any = self.cycle  # pyright: ignore[reportAttributeAccessIssue]
        return cycle is None or cycle.response_complete

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_HEAD_SECONDS, self._late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        transport: asyncio.Transport = self.transport  # pyright: ignore[reportAttributeAccessIssue]
        if self._idle() and not transport.is_closing():
            transport.close()


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may: each connection takes one, and the usual limit is 1,024."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
