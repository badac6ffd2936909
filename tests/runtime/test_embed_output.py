"""A file that appears whole, whatever happened to the processes that wrote it."""

from __future__ import annotations

import builtins
import errno
import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tfx.errors import DependencyError, InputError
from tfx.runtime import embed_output
from tfx.runtime.embed_output import Spool, check_out

ROWS, WIDTH = 23, 4
IDENTITY = {"input_sha256": "a", "rows": ROWS, "dimension": WIDTH, "dtype": "float32", "schedule": {"workers": 1}}
ASKED = {key: value for key, value in IDENTITY.items() if key != "schedule"}
BLOCKS = ((0, 10), (10, 20), (20, 23))
ENDINGS = (".npy", ".jsonl", ".parquet")


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.standard_normal((ROWS, WIDTH)) * 10.0 ** random.integers(-30, 30, (ROWS, WIDTH))).astype(np.float32)


def write(spool: Spool, vectors: np.ndarray, blocks=BLOCKS) -> None:
    for start, end in blocks:
        if spool.done == start:
            spool.write(vectors[start:end])


def whole(folder: Path, vectors: np.ndarray, ending: str) -> bytes:
    """What an uninterrupted run writes."""
    out = folder / f"whole{ending}"
    spool = Spool.begin(out, IDENTITY, force=False)
    write(spool, vectors)
    spool.finish()
    return out.read_bytes()


def resumed(out: Path, *, force: bool = False) -> Spool:
    spool = Spool.resume(out, ASKED, force=force)
    assert spool is not None
    return spool


def files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("whole"))


def read(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["row"] for line in lines] == list(range(len(lines)))
        return np.array([line["embedding"] for line in lines], np.float32)
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    assert table.column_names == ["embedding"]
    return np.array(table["embedding"].to_pylist(), np.float32)


@pytest.mark.parametrize("ending", ENDINGS)
def test_vectors_are_read_back_bit_for_bit_and_nothing_else_is_left(tmp_path, vectors, ending):
    whole(tmp_path, vectors, ending)
    np.testing.assert_array_equal(read(tmp_path / f"whole{ending}"), vectors)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"whole{ending}"]


def test_a_npy_can_be_mapped(tmp_path, vectors):
    whole(tmp_path, vectors, ".npy")
    found = np.load(tmp_path / "whole.npy", mmap_mode="r")
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found[7:9], vectors[7:9])


def test_many_rows_make_row_groups(tmp_path):
    import pyarrow.parquet as parquet

    rows = 20_000
    values = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    spool = Spool.begin(tmp_path / "v.parquet", {**IDENTITY, "rows": rows, "dimension": 2}, force=False)
    spool.write(values)
    spool.finish()
    np.testing.assert_array_equal(read(tmp_path / "v.parquet"), values)
    assert parquet.ParquetFile(tmp_path / "v.parquet").num_row_groups == 3


def test_json_has_null_where_a_number_is_none(tmp_path):
    spool = Spool.begin(tmp_path / "v.jsonl", {**IDENTITY, "rows": 1, "dimension": 3}, force=False)
    spool.write(np.array([[1.5, np.nan, np.inf]], np.float32))
    spool.finish()
    assert (tmp_path / "v.jsonl").read_text() == '{"row": 0, "embedding": [1.5, null, null]}\n'


@pytest.mark.parametrize("done", [0, 1, 2, 3])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_goes_on_after_its_last_block(tmp_path, vectors, ending, done):
    out = tmp_path / f"v{ending}"
    first = Spool.begin(out, IDENTITY, force=False)
    write(first, vectors, BLOCKS[:done])
    first.close()
    assert not out.exists()
    second = resumed(out)
    assert second.done == (0, 10, 20, 23)[done]
    assert second.identity["schedule"] == {"workers": 1}
    write(second, vectors)
    second.finish()
    assert out.read_bytes() == whole(tmp_path, vectors, ending)
    assert files(tmp_path) == [out.name]


def test_a_journal_that_was_cut_at_any_byte(tmp_path, vectors):
    """What a kill in the middle of a write leaves; the first line appears whole, by a rename."""
    expected = whole(tmp_path, vectors, ".npy")
    first = Spool.begin(tmp_path / "v.npy", IDENTITY, force=False)
    write(first, vectors)
    first.close()
    journal, partial = (tmp_path / f"v.npy.{name}" for name in ("journal", "partial"))
    text, data = journal.read_bytes(), partial.read_bytes()
    seen = set()
    for length in range(text.index(b"\n") + 1, len(text) + 1):
        journal.write_bytes(text[:length])
        partial.write_bytes(data)
        second = resumed(tmp_path / "v.npy")
        assert second.done == {0: 0, 1: 10, 2: 20, 3: 23}[text[:length].count(b"\n") - 1]
        seen.add(second.done)
        write(second, vectors)
        second.finish()
        assert (tmp_path / "v.npy").read_bytes() == expected
        (tmp_path / "v.npy").unlink()
    assert seen == {0, 10, 20, 23}


@pytest.mark.parametrize(("row", "kept"), [(0, 0), (9, 0), (10, 10), (22, 20)])
def test_what_a_power_cut_took_is_computed_again(tmp_path, vectors, row, kept):
    expected = whole(tmp_path, vectors, ".npy")
    first = Spool.begin(tmp_path / "v.npy", IDENTITY, force=False)
    write(first, vectors)
    first.close()
    partial = tmp_path / "v.npy.partial"
    data = bytearray(partial.read_bytes())
    place = len(data) - (ROWS - row) * WIDTH * 4
    data[place : place + 4] = b"\0\0\0\0"
    partial.write_bytes(data)
    second = resumed(tmp_path / "v.npy")
    assert second.done == kept
    write(second, vectors)
    second.close()
    third = resumed(tmp_path / "v.npy")  # the journal must not hold the old lines beside the new ones
    assert third.done == ROWS
    third.finish()
    assert (tmp_path / "v.npy").read_bytes() == expected


class Killed(BaseException):
    """Stands for SIGKILL: nobody catches it."""


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("force", [False, True])
def test_a_kill_before_any_step_of_the_end(tmp_path, vectors, monkeypatch, ending, force):
    expected = whole(tmp_path, vectors, ending)
    out = tmp_path / f"v{ending}"
    steps = 0
    for step in range(1, 50):
        if force:
            out.write_bytes(b"an older file")
        spool = Spool.begin(out, IDENTITY, force=force)
        write(spool, vectors)
        count = 0

        def counted(what, step=step):
            def call(*arguments, **named):
                nonlocal count
                count += 1
                if count == step:
                    raise Killed
                return what(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "open"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            patch.setattr(embed_output, "flush_entry", counted(embed_output.flush_entry))
            patch.setattr(embed_output.os, "fsync", counted(embed_output.os.fsync))
            patch.setattr(embed_output, "_line", counted(embed_output._line))
            try:
                spool.finish()
                spool.close()
                assert count < step
            except Killed:
                pass
        spool.close()
        assert not out.exists() or out.read_bytes() in (expected, *([b"an older file"] if force else []))
        second = Spool.resume(out, ASKED, force=False)
        if second is not None:
            assert second.done == ROWS
            second.finish()
            second.close()
        assert out.read_bytes() == expected
        assert files(tmp_path) == [out.name]
        out.unlink()
        steps = step
        if count < step:
            break
    assert 4 < steps < 49


def test_a_run_of_something_else_is_not_continued(tmp_path, vectors):
    first = Spool.begin(tmp_path / "v.npy", IDENTITY, force=False)
    write(first, vectors, BLOCKS[:1])
    first.close()
    with pytest.raises(InputError, match="the unfinished run has input_sha256 'a', this one 'b'"):
        Spool.resume(tmp_path / "v.npy", {**ASKED, "input_sha256": "b"}, force=False)
    assert resumed(tmp_path / "v.npy").done == 10


def test_there_may_be_nothing_to_continue(tmp_path):
    assert Spool.resume(tmp_path / "v.npy", ASKED, force=False) is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"tfx_embed": 2}\n', b"\xff\xfe\n", b"[1]\n"])
def test_a_journal_of_something_else(tmp_path, content):
    (tmp_path / "v.npy.journal").write_bytes(content)
    with pytest.raises(InputError, match=r"v\.npy\.journal: is no journal of tfx embed"):
        Spool.resume(tmp_path / "v.npy", ASKED, force=False)


def test_a_partial_file_that_is_gone(tmp_path, vectors):
    first = Spool.begin(tmp_path / "v.npy", IDENTITY, force=False)
    write(first, vectors)
    first.close()
    (tmp_path / "v.npy.partial").unlink()
    with pytest.raises(InputError, match=r"v\.npy\.partial: damaged"):
        Spool.resume(tmp_path / "v.npy", ASKED, force=False)


@pytest.mark.skipif(sys.platform == "win32", reason="the lock is a POSIX one")
def test_two_processes_do_not_write_the_same_file(tmp_path, vectors):
    first = Spool.begin(tmp_path / "v.npy", IDENTITY, force=False)
    write(first, vectors, BLOCKS[:1])
    with pytest.raises(InputError, match="another tfx embed is writing it"):
        Spool.resume(tmp_path / "v.npy", ASKED, force=False)
    with pytest.raises(InputError, match="another tfx embed is writing it"):
        Spool.begin(tmp_path / "v.npy", IDENTITY, force=True)
    write(first, vectors)
    first.finish()
    np.testing.assert_array_equal(read(tmp_path / "v.npy"), vectors)


def test_a_file_that_appeared_meanwhile_is_kept(tmp_path, vectors):
    first = Spool.begin(tmp_path / "v.npy", IDENTITY, force=False)
    write(first, vectors)
    first.close()
    (tmp_path / "v.npy").write_text("mine")
    with pytest.raises(InputError, match="exists beside an unfinished run"):
        Spool.resume(tmp_path / "v.npy", ASKED, force=False)
    assert (tmp_path / "v.npy").read_text() == "mine"
    resumed(tmp_path / "v.npy", force=True).finish()
    np.testing.assert_array_equal(read(tmp_path / "v.npy"), vectors)


def test_a_disk_that_is_too_small_is_known_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=495))
    with pytest.raises(InputError, match=r"v\.npy: 23 rows need 496 bytes, and 495 are free there"):
        Spool.begin(tmp_path / "v.npy", IDENTITY, force=False)
    assert files(tmp_path) == []


def test_a_disk_that_fills_up_is_no_loss(tmp_path, vectors, monkeypatch):
    spool = Spool.begin(tmp_path / "v.npy", IDENTITY, force=False)
    write(spool, vectors, BLOCKS[:1])

    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool, "_partial", Full())
        with pytest.raises(InputError, match=r"v\.npy: cannot be written: No space left on device"):
            spool.write(vectors[10:20])
    spool._partial.close()
    spool.close()
    second = resumed(tmp_path / "v.npy")
    assert second.done == 10
    write(second, vectors)
    second.finish()
    np.testing.assert_array_equal(read(tmp_path / "v.npy"), vectors)


# Before any work


def test_the_ending_and_the_folder_are_checked(tmp_path):
    with pytest.raises(InputError, match=r"found the ending \.txt, wanted one of \.npy, \.jsonl, \.parquet"):
        check_out(tmp_path / "v.txt", resume=False, force=False)
    with pytest.raises(InputError, match="does not exist"):
        check_out(tmp_path / "no" / "v.npy", resume=False, force=False)
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(InputError, match="is no file"):
        check_out(tmp_path / "folder.npy", resume=False, force=True)


@pytest.mark.parametrize(
    ("exists", "unfinished", "resume", "force", "message"),
    [
        (False, False, False, False, None),
        (False, False, True, False, None),
        (True, False, False, False, "exists; use --force"),
        (True, False, True, False, None),  # complete, or refused later
        (True, False, False, True, None),
        (False, True, False, False, "an unfinished run is there; --resume continues it, --force begins anew"),
        (False, True, True, False, None),
        (False, True, False, True, None),
        (True, True, True, False, None),  # killed at the very end, or refused later
    ],
)
def test_what_is_there_already(tmp_path, exists, unfinished, resume, force, message):
    if exists:
        (tmp_path / "v.npy").touch()
    if unfinished:
        (tmp_path / "v.npy.journal").touch()
    if message is None:
        check_out(tmp_path / "v.npy", resume=resume, force=force)
        return
    with pytest.raises(InputError, match=message):
        check_out(tmp_path / "v.npy", resume=resume, force=force)


def test_parquet_without_pyarrow_says_the_pip_line(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **named):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError) as caught:
        check_out(tmp_path / "v.parquet", resume=False, force=False)
    assert str(DependencyError.from_import(caught.value)) == (
        'pyarrow is not installed; install it with: pip install "tfx-onnx[parquet]"'
    )
