"""``tfx embed``: right vectors in order, one line of error, and the same file after a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from tfx.cli import main
from tfx.errors import FeedError, InputError
from tfx.runtime import embed as module
from tfx.runtime import embed_command, session
from tfx.runtime.embed import EmbedPlan, embed
from tfx.runtime.schedule import Schedule
from tfx.runtime.session import Session

WORDS = ("the", "cat", "sat", "on", "a", "mat", "dog", "ran")


def some_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(0, 8))) for _ in range(count)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return some_texts(300)


@pytest.fixture(scope="module")
def expected(shared_bundle, texts):
    return Session(shared_bundle, threads=1).encode(texts)


@pytest.fixture
def lines(tmp_path, texts) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.fixture
def tfx(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        return CliRunner().invoke(main, ["embed", *(str(argument) for argument in arguments)])

    return call


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 rows, so that few rows are many blocks."""
    monkeypatch.setattr(session, "_BLOCK_ROWS", 16)


def said(result, code=2):
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("ending", [".npy", ".jsonl", ".parquet"])
def test_vectors_of_a_file(tfx, bundle, lines, expected, tmp_path, ending):
    before = names(tmp_path)
    result = tfx("texts.txt", "--out", f"v{ending}")
    assert result.exit_code == 0, result.output
    assert "300 vectors of 5 (float32)" in result.stdout
    if ending == ".npy":
        found = np.load(tmp_path / "v.npy", allow_pickle=False)
    elif ending == ".jsonl":
        found = np.array([json.loads(line)["embedding"] for line in (tmp_path / "v.jsonl").read_text().splitlines()])
    else:
        import pyarrow.parquet as parquet

        found = np.array(parquet.read_table(tmp_path / "v.parquet")["embedding"].to_pylist())
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert names(tmp_path) - before == {f"v{ending}"}


def test_json_says_what_was_done(tfx, bundle, lines):
    found = json.loads(tfx("texts.txt", "--out", "v.npy", "--threads", 3, "--batch-tokens", 99, "--json").stdout)
    assert found["schedule"] == {"workers": 3, "threads": 1, "batch_tokens": 99}
    assert {key: found[key] for key in ("rows", "dimension", "dtype", "out", "resumed_rows", "provider", "tried")} == {
        "rows": 300,
        "dimension": 5,
        "dtype": "float32",
        "out": "v.npy",
        "resumed_rows": 0,
        "provider": "cpu",
        "tried": [],
    }
    assert found["texts_per_s"] > 0


def test_a_schedule_by_name(tfx, bundle, lines, expected, tmp_path):
    found = json.loads(
        tfx("texts.txt", "tfx-model", "--out", "v.npy", "--schedule", "packed", "--threads", 2, "--json").stdout
    )
    assert found["schedule"] == {"workers": 1, "threads": 2, "batch_tokens": 4096}
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-6)
    assert tuple(module.SCHEDULES) == embed_command._SCHEDULES


def test_many_rows_are_measured_first(bundle, lines, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(module, "MEASURED_ROWS", 200)
    found = embed(EmbedPlan(lines, tmp_path / "v.npy", bundle.path, threads=2))
    assert {(each["workers"], each["threads"]) for each in found["tried"]} == {(2, 1), (1, 2)}
    assert Schedule.from_json(found["schedule"]).to_json() in [
        {key: each[key] for key in ("workers", "threads", "batch_tokens")} for each in found["tried"]
    ]
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-6)


def test_progress_is_told_within_a_block(bundle, lines, tmp_path):
    told = []
    plan = EmbedPlan(lines, tmp_path / "v.npy", bundle.path, batch_tokens=40)
    embed(plan, lambda what, done, total: told.append((done, total)))
    assert told[0] == (0, 0)
    done = [rows for rows, _ in told[1:]]
    assert done == sorted(set(done))
    assert done[0] < 10
    assert told[-1] == (300, 300)


# Errors: one line, and nothing is written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no.txt", "--out", "v.npy"), "no.txt: found nothing, wanted a file of texts"),
        (("texts.txt", "--out", "v.npz"), "v.npz: found the ending .npz, wanted one of .npy, .jsonl, .parquet"),
        (("texts.txt", "--out", "no/v.npy"), "does not exist"),
        (("bad.jsonl", "--out", "v.npy"), "bad.jsonl row 250 (line 251): found int, wanted a text"),
        (("bad.jsonl", "--out", "v.npy", "--column", "body"), 'has no "body"; it has text (--column)'),
        (("texts.txt", "--out", "v.npy", "--batch-tokens", "0"), "--batch-tokens"),
        (("texts.txt", "no-model", "--out", "v.npy"), "no-model: found nothing, wanted a bundle folder"),
        (("texts.txt",), "--out"),
    ],
)
def test_errors_before_any_work(tfx, bundle, lines, tmp_path, arguments, message):
    rows = [json.dumps({"text": 7 if i == 250 else "cat"}) for i in range(300)]
    (tmp_path / "bad.jsonl").write_text("\n".join(rows))
    before = names(tmp_path)
    assert message in said(tfx(*arguments))
    assert names(tmp_path) == before


def test_a_bundle_that_cannot(tfx, make_bundle, lines, tmp_path):
    make_bundle("unpooled", pooling=False)
    assert "has no pooling" in said(tfx("texts.txt", "unpooled", "--out", "v.npy"))
    make_bundle("mute", tokenizer=False)
    assert "has no tokenizer" in said(tfx("texts.txt", "mute", "--out", "v.npy"))
    assert not any(name.startswith("v.npy") for name in names(tmp_path))


def test_an_existing_file_is_kept_without_force(tfx, bundle, lines, tmp_path, expected):
    (tmp_path / "v.npy").write_text("mine")
    assert "v.npy: exists; use --force to replace it" in said(tfx("texts.txt", "--out", "v.npy"))
    message = "v.npy: exists with something else, wanted 300 of 5; use --force to replace it"
    assert message in said(tfx("texts.txt", "--out", "v.npy", "--resume"))
    assert (tmp_path / "v.npy").read_text() == "mine"
    assert tfx("texts.txt", "--out", "v.npy", "--force").exit_code == 0
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-6)


# Interrupted and continued


class StopError(Exception):
    pass


def interrupted(plan: EmbedPlan, after: int) -> None:
    """Run until so many blocks, and one more, are written."""
    write, count = module.Spool.write, 0

    def stopping(self, vectors):
        nonlocal count
        write(self, vectors)
        count += 1
        if count > after:
            raise StopError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopError):
        patch.setattr(module.Spool, "write", stopping)
        embed(plan)


@pytest.mark.parametrize("after", [0, 1, 7, 18])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".parquet"])
def test_a_run_that_is_continued_writes_the_same_file(
    bundle, texts, tmp_path, small_blocks, monkeypatch, write_texts, suffix, after
):
    source = write_texts(tmp_path / f"texts{suffix}", texts)
    one, two = tmp_path / "one.npy", tmp_path / "two.npy"
    schedule = {"schedule": "threads", "threads": 2, "batch_tokens": 40}
    embed(EmbedPlan(source, one, bundle.path, **schedule))
    interrupted(EmbedPlan(source, two, bundle.path, **schedule), after)
    assert not two.exists()
    ran = []
    encode = Session._encode_items
    monkeypatch.setattr(
        Session, "_encode_items", lambda self, items, first: ran.append(first) or encode(self, items, first)
    )
    found = embed(EmbedPlan(source, two, bundle.path, resume=True))  # the schedule is that of the first run
    assert found["schedule"] == {"workers": 2, "threads": 1, "batch_tokens": 40}
    assert found["resumed_rows"] == min(300, 16 * (after + 1))
    assert min(ran, default=None) == (16 * (after + 1) if after < 18 else None)  # nothing is done twice
    assert two.read_bytes() == one.read_bytes()


def test_an_unfinished_run_needs_a_word(tfx, bundle, lines, tmp_path, small_blocks, expected):
    interrupted(EmbedPlan(lines, tmp_path / "v.npy", bundle.path), 3)
    line = said(tfx("texts.txt", "--out", "v.npy"))
    assert "v.npy: an unfinished run is there; --resume continues it, --force begins anew" in line
    anew = json.loads(tfx("texts.txt", "--out", "v.npy", "--force", "--json").stdout)
    assert anew["resumed_rows"] == 0
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-6)


def test_only_the_same_run_is_continued(make_bundle, bundle, lines, tmp_path, small_blocks, texts):
    plan = EmbedPlan(lines, tmp_path / "v.npy", bundle.path)
    interrupted(plan, 3)
    other = make_bundle("other", pad_id=9)
    with pytest.raises(InputError, match="the unfinished run has bundle_sha256"):
        embed(EmbedPlan(lines, tmp_path / "v.npy", other.path, resume=True))
    with pytest.raises(InputError, match="the unfinished run has column 'text', this one 'body'"):
        embed(EmbedPlan(lines, tmp_path / "v.npy", bundle.path, column="body", resume=True))
    lines.write_text("".join(f"{text}\n" for text in reversed(texts)))
    with pytest.raises(InputError, match="the unfinished run has input_sha256"):
        embed(EmbedPlan(lines, tmp_path / "v.npy", bundle.path, resume=True))


def test_the_schedule_of_the_first_run_is_kept_and_said(bundle, lines, tmp_path, small_blocks):
    first: dict[str, Any] = {"schedule": "threads", "threads": 2, "batch_tokens": 40}
    tried: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        (first, 0),
        ({"batch_tokens": 40}, 0),
        ({"batch_tokens": 41}, 1),
        ({"schedule": "packed"}, 1),
        ({"threads": 3}, 1),
    ]
    for options, expected in tried:
        interrupted(EmbedPlan(lines, tmp_path / "v.npy", bundle.path, force=True, **first), 3)
        notices = []
        plan = EmbedPlan(lines, tmp_path / "v.npy", bundle.path, resume=True, force=True, **options)
        embed(plan, notice=notices.append)
        assert len(notices) == expected, options
        assert all("is kept, so that the file is the same: 2 calls at once" in notice for notice in notices)


@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
def test_resume_of_what_is_complete_does_nothing(tfx, bundle, lines, tmp_path, suffix):
    out = f"v{suffix}"
    tfx("texts.txt", "--out", out)
    before = (tmp_path / out).stat().st_mtime_ns
    result = tfx("texts.txt", "--out", out, "--resume")
    assert result.exit_code == 0
    assert result.stdout == f"{out} is complete: 300 vectors of 5; --force computes them anew\n"
    found = json.loads(tfx("texts.txt", "--out", out, "--resume", "--json").stdout)
    assert (found["rows"], found["resumed_rows"], found["schedule"]) == (300, 300, None)
    assert (tmp_path / out).stat().st_mtime_ns == before
    with lines.open("a") as file:
        file.write("one more\n")
    message = f"{out}: exists with 300 vectors of 5, wanted 301 of 5; use --force to replace it"
    assert message in said(tfx("texts.txt", "--out", out, "--resume"))


def test_empty_lines_are_texts(tfx, bundle, tmp_path):
    (tmp_path / "gaps.txt").write_text("\nthe cat\n\n")
    assert json.loads(tfx("gaps.txt", "--out", "v.npy", "--json").stdout)["rows"] == 3
    assert "an empty line is a text" in " ".join(CliRunner().invoke(main, ["embed", "--help"]).stdout.split())


def test_resume_begins_where_nothing_was_begun(tfx, bundle, lines):
    assert json.loads(tfx("texts.txt", "--out", "v.npy", "--resume", "--json").stdout)["resumed_rows"] == 0


def test_a_row_that_fails_late_is_named_and_what_was_done_stays(bundle, lines, tmp_path, small_blocks, monkeypatch):
    encode = Session._encode_items

    def fail(self, items, first):
        if first == 160:
            raise FeedError(f"items[{first + 3}]: has no tokens")
        return encode(self, items, first)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_encode_items", fail)
        with pytest.raises(FeedError, match=r"texts\.txt row 163: has no tokens"):
            embed(EmbedPlan(lines, tmp_path / "v.npy", bundle.path))
    assert embed(EmbedPlan(lines, tmp_path / "v.npy", bundle.path, resume=True))["resumed_rows"] == 160


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    code = "from tfx.cli import main; main(prog_name='tfx')"
    arguments = ["embed", "many.txt", "--out", "v.npy", "--threads", "2", *options]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def blocks_done(folder: Path) -> int:
    try:
        return (folder / "v.npy.journal").read_bytes().count(b'"crc32"')
    except FileNotFoundError:
        return 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX ones")
def test_processes_that_are_killed_at_random_moments(bundle, tmp_path):
    """SIGKILL twice, SIGTERM once, then to the end: the same bytes, and no block is computed twice."""
    (tmp_path / "many.txt").write_text("".join(f"{text}\n" for text in some_texts(30_000)))
    schedule = ("--schedule", "threads", "--batch-tokens", "64")
    draw = random.Random(os.getpid())
    done = 0
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = start(tmp_path, *schedule, "--resume")
        limit = time.monotonic() + 60
        while blocks_done(tmp_path) < done + 2 and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(draw.random() / 20)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGTERM), errors
        assert b"Traceback" not in errors
        assert (b"what is done is kept: --resume" in errors) == (number == signal.SIGTERM)
        assert blocks_done(tmp_path) >= done + 2
        done = blocks_done(tmp_path)
        assert not (tmp_path / "v.npy").exists()
    assert done < 29, "it was done before it was killed: more rows are needed"
    found = embed(EmbedPlan(tmp_path / "many.txt", tmp_path / "v.npy", bundle.path, resume=True))
    assert found["resumed_rows"] >= 1024 * (done - 1)
    whole = EmbedPlan(
        tmp_path / "many.txt", tmp_path / "w.npy", bundle.path, threads=2, schedule="threads", batch_tokens=64
    )
    embed(whole)
    assert (tmp_path / "v.npy").read_bytes() == (tmp_path / "w.npy").read_bytes()


def test_memory_stays_the_same_however_many_rows(bundle, tmp_path):
    """The second half of many rows adds nothing to what the first held."""
    path = tmp_path / "many.txt"
    with path.open("w") as file:
        for _ in range(20):
            file.writelines(f"{text}\n" for text in some_texts(1000))
    held = []
    embed(
        EmbedPlan(path, tmp_path / "v.npy", bundle.path, threads=2),
        lambda what, done, total: held.append(psutil.Process().memory_info().rss),
    )
    assert max(held[12:]) < max(held[4:12]) + (4 << 20)
