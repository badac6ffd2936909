"""A web server for a page, a browser that opens it, and what a person does there."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from playwright.sync_api import Browser, Page, Playwright, expect

__all__ = [
    "ARGUMENTS",
    "GPU_ARGUMENTS",
    "Server",
    "embed",
    "launch",
    "numbers",
    "offline",
    "ready",
    "self_check",
    "serving",
]

ARGUMENTS = (
    *("--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP page.test 127.0.0.1",  # an address that is no secure context
)
GPU_ARGUMENTS = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")

TIMEOUT = 120_000
"""Milliseconds for anything a person waits for: a model that loads beside other tests."""


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder on a free port of loopback.

    Attributes:
        folders: other folders by the path that they are served below, such as ``{"/other/": path}``.
        asked: the paths of all requests, in order.
        reports: the bodies of what was posted.
        answers: cleared, requests are taken and not answered until it is set again.
        installs: cleared, what a service worker asks for while it installs itself is not answered until it is set.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
        self.folders: dict[str, Path] = {}
        self.asked: list[str] = []
        self.reports: list[dict[str, Any]] = []
        self.posted = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.installs = threading.Event()
        self.installs.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a page that is left breaks off what it was loading."""

    @property
    def url(self) -> str:
        """The page."""
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.answers.wait(TIMEOUT / 1000)
        if self.path == "/index.html":  # the page's own address is "/"
            self.server.installs.wait(TIMEOUT / 1000)
        super().do_GET()

    def translate_path(self, path: str) -> str:
        plain = unquote(urlsplit(path).path)
        self.server.asked.append(plain)
        for prefix, folder in self.server.folders.items():
            if plain.startswith(prefix):
                return str(folder / plain.removeprefix(prefix))
        return super().translate_path(path)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.reports.append(json.loads(body))
        self.send_response(204)
        self.end_headers()
        self.server.posted.set()

    def log_message(self, *args: Any) -> None:
        del args


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def launch(playwright: Playwright, chromium: str, *arguments: str) -> Browser:
    """Start the machine's own Chromium."""
    return playwright.chromium.launch(executable_path=chromium, args=[*ARGUMENTS, *(arguments or ("--disable-gpu",))])


def ready(page: Page) -> None:
    """Wait until texts can be embedded."""
    settled = page.locator("#state:is([data-state=ready], [data-state=doubt], [data-state=bad])")
    expect(settled).to_be_visible(timeout=TIMEOUT)
    assert page.get_by_role("button", name="Embed", exact=True).is_enabled(), page.get_by_role("alert").inner_text()


def offline(page: Page) -> None:
    """Wait until the page says that it works offline."""
    expect(page.locator("#offline").get_by_text("Works offline")).to_be_visible(timeout=TIMEOUT)


def embed(page: Page, texts: list[str]) -> None:
    """Type texts, press Embed and wait for the result."""
    page.get_by_role("textbox", name="Texts").fill("\n".join(texts))
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.locator("#vectors > li")).to_have_count(min(len(texts), 200), timeout=TIMEOUT)
    ready(page)


def numbers(page: Page) -> np.ndarray:
    """Download the vectors (texts, d)."""
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download JSON").click()
    rows = json.loads(waiting.value.path().read_text(encoding="utf-8"))
    return np.array([row["vector"] for row in rows])


def self_check(page: Page) -> str:
    """Press the button; return what is shown."""
    page.get_by_role("button", name="Run self-check").click()
    report = page.locator("#report")
    expect(report).to_be_visible(timeout=TIMEOUT)
    return report.inner_text()
