"""Signals that end a process, made to unwind the stack so that nothing is left behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

__all__ = ["sigterm_raises"]


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise SystemExit inside the block, so that ``finally`` removes files and ends child processes.

    The exit status is 143 (128 + the signal's number), as a shell reports a process that SIGTERM ended. A handler
    that somebody else has set is kept; outside the main thread, which alone may set one, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: object) -> None:
        del frame
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
