"""The page of ``tfx app --lang web`` in a headless browser, without a driver: the page posts its report by itself."""

from __future__ import annotations

import json
import mimetypes
import queue
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import MachineError

__all__ = ["BROWSERS", "PageServer", "find_browser", "report_of_page"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
"""Commands that are tried, in order."""

_MINUTES = 10
_BUNDLE = "/checked"
_LARGEST = 1 << 20  # bytes of a report

_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
)


def find_browser() -> str:
    """Return the command of a browser.

    Raises:
        MachineError: there is none of ``BROWSERS``.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise MachineError(
            f"no browser: found none of {', '.join(BROWSERS)} on the PATH (on Debian: apt-get install chromium)"
        )
    return found


class _Handler(SimpleHTTPRequestHandler):
    """Serves a page's folder, a bundle under ``/checked/``, and takes one report."""

    def __init__(self, *arguments: Any, bundle: Path, reports: queue.Queue[Any], **named: Any) -> None:
        self._bundle = bundle
        self._reports = reports
        super().__init__(*arguments, **named)

    def translate_path(self, path: str) -> str:
        """Return the file of an address; the base class keeps ``..`` inside of the folder that it is given."""
        plain = path.partition("?")[0]
        if plain.startswith(f"{_BUNDLE}/"):
            own, self.directory = self.directory, str(self._bundle)
            try:
                return super().translate_path(plain.removeprefix(_BUNDLE))
            finally:
                self.directory = own
        return super().translate_path(path)

    def end_headers(self) -> None:
        """Add what lets a page share memory between threads, where that is asked for."""
        if self.server.isolated:  # pyright: ignore[reportAttributeAccessIssue] - PageServer sets it
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def list_directory(self, path: Any) -> None:
        """Show no folder."""
        self.send_error(404)

    def do_POST(self) -> None:
        """Take the report."""
        length = int(self.headers.get("Content-Length", "0"))
        if self.path != self.server.report or not 0 < length <= _LARGEST:  # pyright: ignore[reportAttributeAccessIssue]
            self.send_error(404)
            return
        try:
            self._reports.put(json.loads(self.rfile.read(length)))
        except ValueError:
            self.send_error(400)
            return
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


class PageServer:
    """A server on a free loopback port for as long as the block lasts.

    Args:
        page: the folder of the page.
        bundle: the folder that the page is told to open.
        isolated: send the headers that give a page threads. The page itself gets them from its service worker, with
            which any server will do.

    Attributes:
        url: of the page's folder, with ``/`` at the end.
        bundle: the address of the bundle there.
        report: the address that takes reports; only who was told can post there, and say that a check has passed.
        reports: what pages have posted.
    """

    def __init__(self, page: Path, bundle: Path, isolated: bool = False) -> None:
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        # What a page is made of has to be called by its right type, whatever this machine's tables say.
        types = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm"}
        handler = type("Handler", (_Handler,), {"extensions_map": {**mimetypes.types_map, **types}})
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(handler, directory=str(page), bundle=bundle, reports=self.reports)
        )
        self._server.isolated = isolated  # pyright: ignore[reportAttributeAccessIssue]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self.bundle = f"{_BUNDLE}/"
        self.report = f"/report/{secrets.token_urlsafe(16)}"
        self._server.report = self.report  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> PageServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def report_of_page(page: Path, bundle: Path, threads: int | None = None) -> dict[str, Any]:
    """Open the page in a browser and wait for what it says of a bundle.

    Args:
        page: the folder of a built page.
        bundle: the folder to check.
        threads: of WebAssembly, None leaves it to the page.

    Returns:
        The report, with ``exit_code`` in it.

    Raises:
        MachineError: there is no browser, it ends, or the page gives no report in time.
    """
    browser = find_browser()
    with (
        PageServer(page, bundle) as server,
        # The browser's own processes may still write there when it has been ended.
        tempfile.TemporaryDirectory(prefix="tfx-browser-", ignore_cleanup_errors=True) as profile,
    ):
        address = f"{server.url}index.html?bundle={quote(server.bundle)}&report={quote(server.report)}"
        if threads is not None:
            address += f"&threads={threads}"
        # The sandbox needs rights that containers and root do not have; only files of this machine are opened here.
        command = [browser, *_FLAGS, "--no-sandbox", f"--user-data-dir={profile}", address]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            return _wait(server, process, browser)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(server: PageServer, process: subprocess.Popen[bytes], browser: str) -> dict[str, Any]:
    end = time.monotonic() + _MINUTES * 60
    while time.monotonic() < end:
        try:
            report = server.reports.get(timeout=1)
        except queue.Empty:
            if process.poll() is not None:
                raise MachineError(
                    f"{browser}: ended with status {process.returncode} before the page was done"
                ) from None
            continue
        if not isinstance(report, dict) or not {"passed", "problem", "stages"} <= set(report):
            raise MachineError("runtime web: the page posted something that is no report")
        return report
    raise MachineError(f"runtime web: the page gave no report within {_MINUTES} minutes")
