from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from tfx.runtime.signals import sigterm_raises

UNWOUND = """
    import os, signal
    from tfx.runtime.signals import sigterm_raises

    try:
        with sigterm_raises():
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
    finally:
        print("unwound", flush=True)
"""


def test_sigterm_unwinds_the_stack_and_keeps_its_status():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(UNWOUND)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "unwound\n", "")


def test_the_default_is_back_afterwards():
    with sigterm_raises():
        with pytest.raises(SystemExit), sigterm_raises():  # the inner one finds a handler and keeps it
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_other_handlers_and_other_threads_are_left_alone():
    def handler(number, frame):
        pass

    found = []

    def look():
        with sigterm_raises():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with sigterm_raises():
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
