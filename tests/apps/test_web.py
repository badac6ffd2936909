"""The page in a real browser, driven as a person would, on bundles of every kind and with faults planted.

Pictures of what was seen are written to build/pictures.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Playwright, ViewportSize, expect, sync_playwright
from tokenizers import Tokenizer

from tfx.runtime.app import APPS
from tfx.runtime.session import Session

from . import toolchain
from .browser import (
    ARGUMENTS,
    GPU_ARGUMENTS,
    TIMEOUT,
    Server,
    embed,
    launch,
    numbers,
    offline,
    ready,
    self_check,
    serving,
)
from .bundles import planted
from .faults import change_recorded, change_weights
from .programs import Program

PICTURES = toolchain.FOLDER.parent.parent / "build" / "pictures"
TEXTS = [
    "A cat is sleeping on the warm windowsill.",
    "The kitten naps in the sun.",
    "Quarterly revenue grew by nine percent.",
    "über naïve café déjà vu",
    "日本語 中文 한국어 🙂 [SEP]",
]
PHONE: ViewportSize = {"width": 360, "height": 740}
DESKTOP: ViewportSize = {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright: Playwright, chromium: str) -> Iterator[Browser]:
    started = launch(playwright, chromium)
    yield started
    started.close()


@pytest.fixture(scope="module")
def app(built: Callable[..., Program]) -> Path:
    """The page with its vendor files; its bundle is ``tiny()``."""
    return built("web").folder


@pytest.fixture
def server(app: Path) -> Iterator[Server]:
    with serving(app) as started:
        yield started


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Callable[..., Page]]:
    """A function that opens the page as a new visitor; at the end, no page may have asked another server."""
    contexts, asked, problems = [], [], []

    def open_page(address: str = "", **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url + address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    strangers = [
        url for url in asked if not url.startswith((server.url, "data:", "blob:", "file:", "http://page.test:"))
    ]
    assert strangers == []
    assert problems == []


def picture(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def wanted(bundle: Path, texts: list[str]) -> np.ndarray:
    vectors = Session(bundle, threads=1).encode(texts)
    assert isinstance(vectors, np.ndarray)
    return vectors


# ---------------------------------------------------------------- what a person does


def test_a_person_types_texts_and_reads_vectors_similarities_and_timing(visit: Callable[..., Page], app: Path) -> None:
    page = visit(viewport=DESKTOP)
    ready(page)
    picture(page, "desktop-start")
    embed(page, TEXTS)
    assert "5 texts embedded" in page.get_by_role("status").last.inner_text()
    expected = wanted(app / "bundle", TEXTS)
    found = numbers(page)
    assert np.abs(found - expected).max() < 1e-5
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    cells = page.get_by_role("table").locator("tbody td").all_inner_texts()
    shown = [float(re.match(r"−?[\d.]+", cell)[0].replace("−", "-")) for cell in cells]  # pyright: ignore
    assert np.abs(np.reshape(shown, (5, 5)) - unit @ unit.T).max() < 0.006
    assert sum("nearest" in cell for cell in cells) >= 5
    timing = page.locator("#timing").inner_text().replace("\n", " ")
    assert re.search(r"Texts 5 Tokens \d+ Tokenizing .*ms Model .*ms Per text .*ms", timing)
    assert re.fullmatch(r"Ready · WebAssembly, \d threads?", page.locator("#state").inner_text())
    picture(page, "desktop-result")


def test_csv_reads_back_as_the_same_floats(visit: Callable[..., Page]) -> None:
    page = visit()
    ready(page)
    texts = ['she said "no", twice', "=1+1"]
    embed(page, texts)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download CSV").click()
    rows = list(csv.reader(io.StringIO(waiting.value.path().read_text(encoding="utf-8"))))
    assert [row[0] for row in rows] == ["text", *texts]
    values = np.array([row[1:] for row in rows[1:]], np.float64)
    assert np.array_equal(values, numbers(page))
    assert np.array_equal(values.astype(np.float32).astype(np.float64), values)


def test_vectors_are_copied(visit: Callable[..., Page]) -> None:
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    ready(page)
    embed(page, TEXTS)
    page.get_by_role("button", name="Copy the values of text 2").click()
    expect(page.get_by_role("status").last).to_have_text("Copied")
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert np.array_equal(copied, numbers(page)[1])


def test_no_text_and_a_long_text_are_said(visit: Callable[..., Page]) -> None:
    page = visit()
    ready(page)
    box = page.get_by_role("textbox", name="Texts")
    box.fill(" \n\n")
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.get_by_role("alert")).to_have_text("Texts: found none, wanted at least one line")
    expect(box).to_be_focused()
    embed(page, ["word " * 500])
    assert re.search(r"64 tokens, \d+ tokens cut off", page.locator("#vectors").inner_text())
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_character_that_this_browser_sees_in_another_way_is_refused_by_name(visit: Callable[..., Page]) -> None:
    page = visit()
    ready(page)
    # A mark of Unicode 16 or newer, which the tokenizer's older tables do not have.
    page.get_by_role("textbox", name="Texts").fill("good\nbad \U00010d69")
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("U+10D69")
    assert "1" in page.get_by_role("alert").inner_text()
    ready(page)  # and the next text works


def test_a_long_run_is_stopped(visit: Callable[..., Page]) -> None:
    page = visit()
    ready(page)
    # Not typed: the browser takes longer to insert so much than the page to embed it.
    page.get_by_role("textbox", name="Texts").evaluate(
        "(box, text) => { box.value = text; box.dispatchEvent(new Event('input', { bubbles: true })); }",
        "word word word word word word word word\n" * 3000,
    )
    page.get_by_role("button", name="Embed", exact=True).click()
    page.get_by_role("button", name="Stop").click()
    ready(page)
    expect(page.locator("#results")).to_be_hidden()
    expect(page.get_by_role("alert")).to_be_hidden()
    embed(page, TEXTS)


# ---------------------------------------------------------------- bundles of every kind


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int8"},
        {"target": "portable"},
        {"target": "web"},
        {"target": "web", "precision": "int8"},
        {"tokenizer": "bpe"},
        {"external": True},
        {"layout": "padded"},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_vectors_and_self_check_of(
    visit: Callable[..., Page], server: Server, tiny: Callable[..., Path], options: dict[str, Any]
) -> None:
    bundle = tiny(**options)
    server.folders["/other/"] = bundle
    page = visit("?bundle=other")
    ready(page)
    embed(page, TEXTS)
    found, expected = numbers(page), wanted(bundle, TEXTS)
    if options.get("precision") == "int8":
        cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() > 0.99
    else:
        assert np.abs(found - expected).max() < 1e-5
    text = self_check(page)
    assert "Passed" in text, text
    assert "onnxruntime 1.30.0" in text
    assert "wasm" in text


def test_a_bundle_without_pooling_shows_raw_outputs(
    visit: Callable[..., Page], server: Server, tiny: Callable[..., Path]
) -> None:
    server.folders["/other/"] = tiny(pooling="none")
    page = visit("?bundle=other")
    ready(page)
    embed(page, TEXTS)
    expect(page.get_by_role("table")).to_be_hidden()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download JSON").click()
    rows = json.loads(waiting.value.path().read_text(encoding="utf-8"))
    expected = Session(server.folders["/other/"], threads=1).encode(TEXTS)
    assert isinstance(expected, dict)
    for row, values in zip(rows, expected["last_hidden_state"], strict=True):
        found = np.array(row["outputs"]["last_hidden_state"])
        assert np.abs(found - values[: len(found)]).max() < 1e-5


def test_a_bundle_without_tokenizer_checks_itself(
    visit: Callable[..., Page], server: Server, tiny: Callable[..., Path]
) -> None:
    server.folders["/other/"] = tiny(tokenizer=None)
    page = visit("?bundle=other")
    ready(page)
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("tokenizer")
    assert "Passed" in self_check(page)


def test_minilm(visit: Callable[..., Page], server: Server, minilm: Callable[..., Path]) -> None:
    """test_minilm.py has its self-check in both precisions."""
    bundle = minilm("fp32")
    server.folders["/minilm/"] = bundle
    page = visit("?bundle=minilm&threads=2", viewport=DESKTOP)
    ready(page)
    embed(page, TEXTS)
    assert np.abs(numbers(page) - wanted(bundle, TEXTS)).max() < 1e-5
    picture(page, "desktop-minilm")


def test_a_folder_is_chosen_and_another_dropped(
    visit: Callable[..., Page], tiny: Callable[..., Path], app: Path, tmp_path: Path
) -> None:
    page = visit(viewport=DESKTOP)
    ready(page)
    chosen = tiny(tokenizer="bpe")
    page.locator("#folder").set_input_files(chosen)
    expect(page.locator("#facts")).to_contain_text("made", timeout=TIMEOUT)
    ready(page)
    embed(page, TEXTS)
    assert np.abs(numbers(page) - wanted(chosen, TEXTS)).max() < 1e-5

    outer = tmp_path / "download"
    shutil.copytree(tiny(external=True), outer / "with-weights-beside")
    box = page.locator("#drop").bounding_box()
    assert box is not None
    place = {"x": box["x"] + 20, "y": box["y"] + 10}
    drag = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(outer)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        drag.send("Input.dispatchDragEvent", {"type": kind, **place, "data": data})
    expect(page.locator("#facts")).to_contain_text("with-weights-beside", timeout=TIMEOUT)
    ready(page)
    embed(page, TEXTS)
    assert np.abs(numbers(page) - wanted(outer / "with-weights-beside", TEXTS)).max() < 1e-5

    page.get_by_role("button", name="Back to the page's own bundle").click()
    ready(page)
    embed(page, TEXTS)
    assert np.abs(numbers(page) - wanted(app / "bundle", TEXTS)).max() < 1e-5


def test_a_folder_without_a_bundle_is_said(visit: Callable[..., Page], tmp_path: Path) -> None:
    page = visit()
    ready(page)
    (tmp_path / "holiday.txt").write_text("sun")
    page.locator("#folder").set_input_files(tmp_path)
    expect(page.get_by_role("alert")).to_contain_text("found 1 file and no tfx.json")
    ready(page)


# ---------------------------------------------------------------- threads, offline, what is kept


def test_threads_on_a_server_without_isolation_headers(visit: Callable[..., Page]) -> None:
    page = visit("?threads=2")
    ready(page)
    assert page.evaluate("crossOriginIsolated")
    expect(page.locator("#state")).to_have_text("Ready · WebAssembly, 2 threads")
    embed(page, TEXTS)


def test_one_thread_without_a_service_worker(visit: Callable[..., Page]) -> None:
    page = visit("?threads=2", service_workers="block")
    ready(page)
    expect(page.locator("#state")).to_have_text("Ready · WebAssembly, 1 thread")
    expect(page.locator("#provider-hint")).to_contain_text("One thread:")
    embed(page, TEXTS)


def test_the_page_works_when_its_server_is_gone(app: Path, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    with serving(app) as server:
        page.goto(server.url)
        ready(page)
        offline(page)
    page.reload()
    ready(page)
    embed(page, TEXTS)
    assert np.abs(numbers(page) - wanted(app / "bundle", TEXTS)).max() < 1e-5
    assert "Passed" in self_check(page)
    context.close()


def test_offline_is_promised_once_the_page_itself_is_kept(app: Path, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    with serving(app) as server:
        server.installs.clear()  # the service worker is not there in time: the page goes on without
        page.goto(server.url)
        ready(page)
        expect(page.locator("#state")).to_have_text("Ready · WebAssembly, 1 thread")
        expect(page.locator("#offline")).to_be_hidden()
        server.installs.set()
        offline(page)
    page.reload()
    ready(page)
    embed(page, TEXTS)
    context.close()


def test_a_second_visit_loads_no_bundle_and_a_new_bundle_replaces_the_old(
    visit: Callable[..., Page], server: Server, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    page = visit()
    ready(page)
    offline(page)
    server.asked.clear()
    page.reload()
    ready(page)
    assert [path for path in server.asked if path.startswith("/bundle/")] == ["/bundle/tfx.json"]
    keys = "caches.open('tfx-bundles-1').then((c) => c.keys()).then((k) => k.map((r) => r.url))"
    before = page.evaluate(keys)

    # Older than what it replaces, as after a step back: this server's answer to a question by date is "unchanged".
    newer = tmp_path / "newer"
    shutil.copytree(tiny(target="portable"), newer)
    for file in newer.iterdir():
        os.utime(file, (1e9, 1e9))
    server.folders["/bundle/"] = newer
    for _ in range(3):  # a server that is slow to answer has its answer shown at the next visit
        page.reload()
        ready(page)
        if "portable" in page.locator("#model").inner_text():
            break
    expect(page.locator("#model")).to_contain_text("portable")
    offline(page)
    after = page.evaluate(keys)
    assert len(after) == len(before)
    assert [url for url in before if "model.onnx" in url] != [url for url in after if "model.onnx" in url]

    page.get_by_role("button", name="Remove").click()
    expect(page.locator("#offline")).to_be_hidden()
    assert page.evaluate(keys) == []


def test_kept_files_that_were_damaged_are_loaded_again(visit: Callable[..., Page]) -> None:
    page = visit()
    ready(page)
    offline(page)
    page.evaluate(
        """async () => {
          const cache = await caches.open("tfx-bundles-1");
          const [model] = (await cache.keys()).filter((key) => key.url.includes("model.onnx"));
          await cache.put(model, new Response("no"));
        }"""
    )
    page.reload()
    ready(page)
    embed(page, TEXTS)


def test_what_is_kept_stays_where_another_file_cannot_be_had(app: Path, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    with serving(app) as server:
        page.goto(server.url)
        ready(page)
        offline(page)
    keys = "caches.open('tfx-bundles-1').then((c) => c.keys()).then((k) => k.map((r) => r.url))"
    page.evaluate(
        """async () => {
          const cache = await caches.open("tfx-bundles-1");
          for (const key of await cache.keys()) if (key.url.includes("golden")) await cache.delete(key);
        }"""
    )
    before = page.evaluate(keys)
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("golden.safetensors: cannot be reached", timeout=TIMEOUT)
    assert page.evaluate(keys) == before and any("model.onnx" in url for url in before)
    context.close()


def test_a_new_bundle_that_cannot_be_had_leaves_the_old_one(
    visit: Callable[..., Page], server: Server, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    page = visit()
    ready(page)
    offline(page)
    broken = tmp_path / "broken"
    shutil.copytree(tiny(target="portable"), broken)
    (broken / "model.onnx").unlink()
    server.folders["/bundle/"] = broken
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("model.onnx", timeout=TIMEOUT)
    server.shutdown()
    server.server_close()
    page.reload()
    ready(page)
    embed(page, TEXTS)


def test_a_server_that_does_not_answer_does_not_hold_what_is_kept(app: Path, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    with serving(app) as server:
        page.goto(server.url)
        ready(page)
        offline(page)
        server.answers.clear()
        try:
            page.reload(timeout=TIMEOUT)
            ready(page)
            embed(page, TEXTS)
        finally:
            server.answers.set()
    context.close()


# ---------------------------------------------------------------- faults


def _swap_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    vocab = tokenizer["model"]["vocab"]
    # Two tokens that the recorded texts have.
    used = Tokenizer.from_file(str(path)).encode("the a of and in to is").tokens
    one, other = [token for token in dict.fromkeys(used) if not token.startswith(("[", "##"))][:2]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def _flip_byte(folder: Path) -> None:
    path = folder / "model.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def _rewrite_weights(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    import onnx
    from onnx import numpy_helper

    path = folder / "model.onnx"
    model = onnx.load(path)
    largest = max(model.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
    largest.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(largest)), largest.name))
    onnx.save(model, path)


def _move_weights(folder: Path) -> None:
    _rewrite_weights(folder, lambda values: values * np.float32(1.01))


def _poison_weights(folder: Path) -> None:
    _rewrite_weights(folder, lambda values: np.full_like(values, np.nan))


@pytest.mark.parametrize(
    ("change", "seal", "stage", "why", "opens"),
    [
        (lambda folder: (folder / "model.onnx").unlink(), False, "Files", "model.onnx", False),
        (_flip_byte, False, "Files", "model.onnx: altered", False),
        (lambda folder: (folder / "model.onnx").write_bytes(b"short"), False, "Files", "found 5 bytes", False),
        (lambda folder: (folder / "model.onnx").write_bytes(b"short"), True, "Runtime", "model.onnx", False),
        (_swap_tokens, True, "Tokens", "", True),
        (_move_weights, True, "Outputs", "", True),
        (_poison_weights, True, "Outputs", "NaN", True),
    ],
    ids=["missing", "altered", "short", "no model", "token", "weights", "NaN"],
)
def test_a_fault_is_red_with_its_stage(
    visit: Callable[..., Page],
    server: Server,
    tiny: Callable[..., Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    change: Callable[[Path], None],
    seal: bool,
    stage: str,
    why: str,
    opens: bool,
) -> None:
    bad = planted(tiny(), tmp_path / "bad", change, seal=seal)
    server.folders["/bad/"] = bad
    page = visit("?bundle=bad", viewport=DESKTOP)
    if opens:
        ready(page)
    else:
        expect(page.get_by_role("alert")).to_contain_text(why, timeout=TIMEOUT)
        if not (bad / "model.onnx").exists():
            expect(page.get_by_role("alert")).to_contain_text(f"{server.url}bad/model.onnx")
            picture(page, "desktop-missing-file")
    text = self_check(page)
    assert f"Failed at: {stage}" in text, text
    expect(page.locator("#state")).to_have_text("Self-check failed" if opens else "Not loaded")
    assert why in text
    assert page.locator("#report li.bad").count() == 1
    picture(page, f"desktop-fault-{request.node.callspec.id.replace(' ', '-')}")
    if stage == "Files" and not (bad / "model.onnx").exists():
        assert f"{server.url}bad/model.onnx" in text


def test_no_bundle_no_server_and_no_vendor_files_are_named(
    visit: Callable[..., Page], server: Server, app: Path, tmp_path: Path
) -> None:
    page = visit("?bundle=nothing/there")
    expect(page.get_by_role("alert")).to_contain_text(f"{server.url}nothing/there/tfx.json", timeout=TIMEOUT)

    server.folders["/vendor/"] = tmp_path
    page = visit()
    expect(page.get_by_role("alert")).to_contain_text("npm run setup", timeout=TIMEOUT)
    assert "Failed at: Runtime" in self_check(page)


def test_an_address_of_another_server_is_refused(visit: Callable[..., Page]) -> None:
    page = visit("?bundle=https://example.com/bundle")
    expect(page.get_by_role("alert")).to_contain_text("found another server", timeout=TIMEOUT)
    assert page.evaluate("fetch('https://example.com/').then(() => 'asked', () => 'refused')") == "refused"


def test_an_address_without_https_says_so(visit: Callable[..., Page], server: Server) -> None:
    page = visit()
    page.goto(f"http://page.test:{server.server_port}/")
    expect(page.get_by_role("alert")).to_contain_text("use https:// or http://localhost")


def test_a_browser_without_simd_says_so(visit: Callable[..., Page]) -> None:
    page = visit()
    page.add_init_script("WebAssembly.validate = () => false")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("no SIMD", timeout=TIMEOUT)


def test_opened_as_a_file_the_page_says_what_to_do(browser: Browser, app: Path) -> None:
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    page.goto((app / "index.html").as_uri())
    expect(page.get_by_text("npm start")).to_be_visible(timeout=10_000)
    picture(page, "phone-as-a-file")
    context.close()


# ---------------------------------------------------------------- for programs


def test_what_is_checked_is_what_the_server_has_now(
    visit: Callable[..., Page], server: Server, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    server.folders["/bundle/"] = tiny()
    page = visit()
    ready(page)

    def change(values: np.ndarray) -> None:
        values *= -1

    server.folders["/bundle/"] = planted(tiny(), tmp_path / "b", lambda folder: change_weights(folder, change))
    assert "Failed at: Outputs" in self_check(page)


def test_a_report_is_posted(visit: Callable[..., Page], server: Server) -> None:
    visit("?report=/done")
    assert server.posted.wait(TIMEOUT / 1000)
    asked = [path for path in server.asked if path.startswith("/bundle/")]
    assert len(asked) == len(set(asked)) == 4  # each file once
    report = server.reports[0]
    assert report["passed"] is True, report
    assert report["exit_code"] == 0
    assert (report["app"], report["provider"], report["runtime"]) == ("web", "wasm", "onnxruntime 1.30.0")
    assert [stage["stage"] for stage in report["stages"]] == ["files", "runtime", "tokens", "outputs", "vectors"]
    assert 0 < report["max_abs"] < 1e-4


def test_a_report_of_a_failure_is_posted(
    visit: Callable[..., Page], server: Server, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    server.folders["/bad/"] = planted(tiny(), tmp_path / "bad", _flip_byte, seal=False)
    visit("?bundle=bad&report=/done")
    assert server.posted.wait(TIMEOUT / 1000)
    assert (server.reports[0]["stage"], server.reports[0]["exit_code"]) == ("files", 1)
    server.posted.clear()
    visit("?bundle=none&report=/done")
    assert server.posted.wait(TIMEOUT / 1000)
    assert (server.reports[1]["passed"], server.reports[1]["exit_code"]) == (False, 2)
    assert "none/tfx.json" in server.reports[1]["problem"]


def test_a_program_is_told_that_the_page_cannot_start(visit: Callable[..., Page], server: Server) -> None:
    visit("?provider=webgpu&report=/done")
    assert server.posted.wait(TIMEOUT / 1000)
    assert (server.reports[0]["passed"], server.reports[0]["exit_code"]) == (False, 3)
    assert "WebGPU" in server.reports[0]["problem"]


# ---------------------------------------------------------------- for everybody


def test_a_phone_has_nothing_beside_the_screen(visit: Callable[..., Page]) -> None:
    page = visit(viewport=PHONE, has_touch=True, is_mobile=True)
    ready(page)
    page.screenshot(path=PICTURES / "phone-start.png")
    embed(page, [*TEXTS, "x" * 300, "https://example.com/" + "path/" * 60])
    assert "Passed" in self_check(page)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        beside = page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter((e) => {
                 const box = e.getBoundingClientRect();
                 return box.width > 0 && box.right > innerWidth + 1 && !e.closest(".scroll, .hidden");
               }).map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert beside == []
        small = page.evaluate(
            """() => [...document.querySelectorAll("button, .button, textarea")].filter((e) => {
                 const box = e.getBoundingClientRect();
                 return box.width > 0 && (box.height < 44 || box.width < 44);
               }).map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert small == []
        picture(page, f"phone-{scheme}-result")


def test_a_keyboard_is_enough(visit: Callable[..., Page]) -> None:
    page = visit(viewport=DESKTOP)
    ready(page)

    def tab_to(name: str) -> None:
        """Press Tab until an element has the focus; every one on the way shows that it has it."""
        for _ in range(30):
            page.keyboard.press("Tab")
            focused, shown = page.evaluate(
                """() => {
                     const e = document.activeElement;
                     const style = getComputedStyle(e.matches(".hidden") ? e.previousElementSibling : e);
                     return [e.id || e.className || e.tagName, style.outlineStyle !== "none" && style.outlineWidth];
                   }"""
            )
            assert shown or focused == "BODY", f"{focused} has the focus and does not show it"
            if focused == name:
                return
        raise AssertionError(f"{name} is not reached by Tab")

    tab_to("skip")
    page.keyboard.press("Enter")
    tab_to("embed")  # the next one behind the texts
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("first text\nsecond text")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#vectors > li")).to_have_count(2, timeout=TIMEOUT)
    ready(page)
    tab_to("matrix")
    tab_to("save-json")
    tab_to("check")
    page.keyboard.press("Space")
    expect(page.locator("#report .verdict")).to_be_focused(timeout=TIMEOUT)
    tab_to("folder")


@pytest.fixture(scope="module")
def axe(node_modules: Path) -> str:
    return (node_modules / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def test_axe_finds_nothing(visit: Callable[..., Page], axe: str) -> None:
    def check(page: Page) -> None:
        for scheme in ("light", "dark"):
            for viewport in (DESKTOP, PHONE):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size(viewport)
                found = page.evaluate("axe.run({ resultTypes: ['violations', 'incomplete'] })")
                assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
                unsure = [(each["id"], node["html"]) for each in found["incomplete"] for node in each["nodes"]]
                assert [each for each in unsure if each[0] != "color-contrast"] == []

    page = visit()
    ready(page)
    page.evaluate(axe)  # not by a script element, which the page's policy forbids
    check(page)
    embed(page, [*TEXTS, "word " * 500])
    assert "Passed" in self_check(page)
    check(page)
    page = visit("?bundle=nothing")
    expect(page.get_by_role("alert")).to_be_visible(timeout=TIMEOUT)
    page.evaluate(axe)
    check(page)


def test_who_wants_less_motion_has_none(visit: Callable[..., Page]) -> None:
    page = visit(reduced_motion="reduce")
    ready(page)
    page.evaluate("document.querySelector('#progress').hidden = false")
    assert page.locator("#progress").evaluate("(e) => getComputedStyle(e).animationName") == "none"


# ---------------------------------------------------------------- WebGPU


@pytest.fixture(scope="module")
def gpu_browser(playwright: Playwright, chromium: str) -> Iterator[Browser]:
    started = launch(playwright, chromium, *GPU_ARGUMENTS)
    yield started
    started.close()


def _keep_few_cases(folder: Path) -> None:
    """A software adapter takes a second for each new shape."""

    def change(tensors: dict[str, np.ndarray], entries: list[dict[str, Any]]) -> None:
        entries[:] = [each for each in entries if each.get("texts") or each["id"].endswith(("-s64-left", "-s64-holes"))]
        assert len(entries) > 2
        kept = {each["id"] for each in entries}
        for name in [name for name in tensors if name.partition("/")[0] not in kept]:
            del tensors[name]

    change_recorded(folder, change)


# In Chromium's software adapter onnxruntime-web 1.30's MultiHeadAttention is wrong from 32 positions on.
@pytest.mark.parametrize("layout", ["ragged", pytest.param("padded", marks=pytest.mark.thorough)])
def test_webgpu_gives_the_numbers(
    gpu_browser: Browser, server: Server, tiny: Callable[..., Path], layout: str, tmp_path: Path
) -> None:
    bundle = planted(tiny(target="web", layout=layout), tmp_path / "few", _keep_few_cases)
    server.folders[f"/{layout}/"] = bundle
    context = gpu_browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.goto(f"{server.url}?bundle={layout}&provider=webgpu")
    ready(page)
    expect(page.locator("#state")).to_have_text("Ready · WebGPU")
    report = page.locator("#report").inner_text()
    assert "Passed" in report  # without being asked
    assert "webgpu" in report
    embed(page, TEXTS)
    assert np.abs(numbers(page) - wanted(bundle, TEXTS)).max() < 1e-5
    picture(page, "desktop-webgpu")
    context.close()


def test_wrong_numbers_on_webgpu_are_refused(
    gpu_browser: Browser, server: Server, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    few = planted(tiny(target="portable"), tmp_path / "few", _keep_few_cases)
    server.folders["/bad/"] = planted(few, tmp_path / "bad", _move_weights)
    context = gpu_browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.goto(f"{server.url}?bundle=bad&provider=webgpu")
    expect(page.get_by_role("alert")).to_contain_text("WebGPU does not give this bundle's numbers", timeout=TIMEOUT)
    expect(page.get_by_role("button", name="Embed", exact=True)).to_be_disabled()
    picture(page, "desktop-webgpu-refused")
    page.get_by_role("button", name="Use WebAssembly").click()
    ready(page)
    expect(page.get_by_role("radio", name="WebAssembly")).to_be_checked()
    context.close()


def test_without_an_adapter_webgpu_is_not_offered(visit: Callable[..., Page]) -> None:
    page = visit()
    ready(page)
    expect(page.get_by_role("radio", name="WebGPU")).to_be_disabled()
    page = visit("?provider=webgpu")
    expect(page.get_by_role("alert")).to_contain_text("WebGPU", timeout=TIMEOUT)


# ---------------------------------------------------------------- the sources


def test_the_service_worker_knows_the_page_s_files() -> None:
    source = (APPS / "web" / "sw.js").read_text(encoding="utf-8")
    listed = json.loads(re.search(r"const PAGE = (\[.*?\]);", source, re.DOTALL)[1].replace(",\n]", "\n]"))  # pyright: ignore
    files = {path.name for path in (APPS / "web").iterdir() if path.suffix in (".html", ".css", ".mjs")}
    core = {f"core/{path.name}" for path in (APPS / "js").glob("*.mjs")}
    assert sorted(listed) == sorted({"./", *files - {"vendor.mjs"}, *core})


def test_what_the_page_needs_of_vendor_is_what_is_copied_there() -> None:
    """The page has these files kept before it says that it works offline."""
    worker = (APPS / "web" / "worker.mjs").read_text(encoding="utf-8")
    copied = re.findall(r'"dist/([^"]+)"', (APPS / "web" / "vendor.mjs").read_text(encoding="utf-8"))
    assert sorted(re.findall(r'"vendor/([^"]+)"', worker)) == sorted(copied)


def test_an_unknown_provider_is_said(visit: Callable[..., Page]) -> None:
    page = visit("?provider=tpu")
    expect(page.get_by_role("alert")).to_contain_text("?provider=tpu: wanted wasm or webgpu", timeout=TIMEOUT)


def test_both_policies_are_the_same() -> None:
    in_page = re.search(r'content="(default-src[^"]*)"', (APPS / "web" / "index.html").read_text(encoding="utf-8"))
    in_worker = re.search(r'"(default-src[^"]*)"', (APPS / "web" / "sw.js").read_text(encoding="utf-8"))
    assert in_page is not None
    assert in_worker is not None
    assert in_worker[1] == in_page[1] + "; frame-ancestors 'self'"


def test_the_tested_versions_are_those_that_are_installed() -> None:
    own = json.loads((APPS / "web" / "package.json").read_bytes())["dependencies"]
    tested = json.loads((toolchain.FOLDER / "package.json").read_bytes())["dependencies"]
    assert own == {name: tested[name] for name in own}


def test_the_browser_is_asked_for_nothing_of_its_own() -> None:
    assert "--disable-background-networking" in ARGUMENTS
