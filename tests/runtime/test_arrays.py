from __future__ import annotations

import json
import struct
import zipfile

import numpy as np
import pytest

from tfx.errors import InputError, MachineError
from tfx.runtime.arrays import check_target, excerpt, nested, read_npz, write


@pytest.fixture
def outputs():
    random = np.random.default_rng(0)
    return {"file": random.standard_normal((2, 3)).astype(np.float32), "ids": np.array([[1, 2]])}


def test_npz_round_trip(tmp_path, outputs):
    path = tmp_path / "out.npz"
    write(path, outputs)
    found = read_npz(path)
    assert list(found) == ["file", "ids"]
    for name, values in outputs.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == values.dtype


def test_json_gives_the_same_float32_back(tmp_path, outputs):
    path = tmp_path / "out.json"
    write(path, outputs)
    found = json.loads(path.read_text())["outputs"]
    np.testing.assert_array_equal(np.array(found["file"], np.float32), outputs["file"])
    assert found["ids"] == [[1, 2]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_json_has_no_nan():
    assert nested(np.array([[1.5, np.nan], [np.inf, 0.1]], np.float32)) == [[1.5, None], [None, 0.1]]
    assert nested(np.float32(0.1).reshape(())) == 0.1


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 broken"])
def test_files_that_are_no_npz(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.npz: not an \.npz of plain arrays"):
        read_npz(path)


def test_pickles_single_arrays_and_missing_files_are_refused(tmp_path):
    np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
    with pytest.raises(InputError, match=r"not an \.npz of plain arrays: .*allow_pickle"):
        read_npz(tmp_path / "objects.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match="found a single array"):
        read_npz(tmp_path / "one.npy")
    with pytest.raises(InputError, match="No such file"):
        read_npz(tmp_path / "absent.npz")


def npz_of(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def npy(header):
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3",  # tokenize.TokenError
        "{'descr': '<f4' 'fortran_order': False, 'shape': (3,)}",  # SyntaxError
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': ('<f4', 3, 4), 'fortran_order': False, 'shape': (3,)}",
        "3",
        "",
    ],
)
def test_a_bad_npy_header(tmp_path, header):
    npz_of(tmp_path / "x.npz", a=npy(header))
    with pytest.raises(InputError, match=r"x\.npz: not an \.npz of plain arrays") as caught:
        read_npz(tmp_path / "x.npz")
    assert "\n" not in str(caught.value)


def test_a_header_that_asks_for_more_memory_than_there_is(tmp_path):
    npz_of(tmp_path / "x.npz", a=npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**60},)}}"))
    with pytest.raises(MachineError, match=r"x\.npz: its arrays do not fit into memory"):
        read_npz(tmp_path / "x.npz")


def test_bad_deflate_data_and_encrypted_members(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.arange(600).reshape(20, 30))
    content = bytearray(path.read_bytes())
    start = (
        zipfile.ZipFile(path).infolist()[0].header_offset + 30 + len("a.npy") + struct.unpack("<H", content[28:30])[0]
    )
    damaged = content.copy()
    damaged[start] = 0xFF  # no such block type
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"not an \.npz of plain arrays: Error -3 while decompressing"):
        read_npz(path)
    encrypted = content.copy()
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        encrypted[encrypted.index(magic) + flags] |= 1
    path.write_bytes(encrypted)
    with pytest.raises(InputError, match=r"not an \.npz of plain arrays: .*encrypted"):
        read_npz(path)


def test_other_members_are_no_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(InputError, match=r"notes\.txt is no array"):
        read_npz(tmp_path / "x.npz")


def test_targets_are_checked_before_the_work(tmp_path):
    check_target(tmp_path / "new.json", force=False)
    (tmp_path / "old.npz").write_text("x")
    check_target(tmp_path / "old.npz", force=True)
    (tmp_path / "folder.json").mkdir()
    for name, force, message in (
        ("out.txt", False, r"found the ending \.txt"),
        ("out", False, "found the ending none"),
        ("old.npz", False, "exists; use --force"),
        ("folder.json", True, "is no file"),
        ("absent/out.npz", False, "the folder .*absent does not exist"),
        ("old.npz/out.npz", False, r"old\.npz is not a folder"),
    ):
        with pytest.raises(InputError, match=message):
            check_target(tmp_path / name, force)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.npz"
    path.write_text("old")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(InputError, match="cannot be written: No space left"):
        write(path, {"a": np.zeros(1)})
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_excerpt_shows_small_arrays_whole_and_large_ones_in_part():
    assert excerpt(np.array([[1.0, 0.5], [2.0, 3.0]])) == ["[1, 0.5]", "[2, 3]"]
    assert excerpt(np.zeros((10, 2)))[-1] == "... 2 more rows"
    assert len(excerpt(np.zeros((100, 100)))) == 1
    assert excerpt(np.array(7)) == ["[7]"]
    assert excerpt(np.zeros((0, 3))) == []
