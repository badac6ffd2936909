"""Opening: every file is checked. Writing: whole or not at all, and an older bundle survives every failure."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import onnx
import pytest

from tfx.errors import BundleError
from tfx.runtime.bundle import Bundle, ensure_free, sha256_file, write_bundle
from tfx.runtime.session import Session

FEEDS = {"input_ids": [[2, 5, 3]], "token_type_ids": [[0, 1, 1]]}


def snapshot(folder):
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def edit_manifest(bundle, change):
    path = bundle.path / "tfx.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_what_was_written_is_read(make_bundle, tiny_manifest):
    bundle = make_bundle()
    assert set(bundle.manifest.files) == {"model.onnx", "golden.safetensors", "tokenizer.json"}
    assert {entry.name for entry in bundle.path.iterdir()} == {*bundle.manifest.files, "tfx.json"}
    assert len(bundle.golden()) == 16
    assert bundle.manifest.inputs == tiny_manifest().inputs


def test_moved_pair_works_from_another_folder(make_bundle, tmp_path, monkeypatch):
    """A21: external data is found beside the model wherever the pair goes."""
    bundle = make_bundle(external=True)
    assert "model.onnx.data" in bundle.manifest.files
    before = Session(bundle).run(FEEDS)
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    shutil.move(bundle.path, moved)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    after = Session("../elsewhere/renamed").run(FEEDS)
    np.testing.assert_array_equal(before["last_hidden_state"], after["last_hidden_state"])


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "golden.safetensors", "tokenizer.json"])
def test_missing_truncated_and_altered_files(make_bundle, name):
    bundle = make_bundle(external=True)
    path = bundle.path / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(BundleError, match=rf"{name}: found {len(content) - 1} bytes, wanted {len(content)}"):
        Bundle.open(bundle.path, check_hashes=False)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleError, match=rf"{name}: altered"):
        Bundle.open(bundle.path)
    path.unlink()
    with pytest.raises(BundleError, match=rf"{name}: found nothing, wanted {len(content)} bytes"):
        Bundle.open(bundle.path)


def test_a_folder_in_place_of_a_file(bundle):
    path = bundle.path / "model.onnx"
    path.unlink()
    path.mkdir()
    with pytest.raises(BundleError, match="found no file"):
        Bundle.open(bundle.path)


def test_a_link_out_of_the_folder_is_refused(bundle, tmp_path):
    path = bundle.path / "model.onnx"
    path.rename(tmp_path / "outside.onnx")
    path.symlink_to(tmp_path / "outside.onnx")
    with pytest.raises(BundleError, match="link that leaves the bundle"):
        Bundle.open(bundle.path)


def test_links_inside_the_folder_and_to_it_are_followed(bundle, tmp_path):
    """Kubernetes mounts a volume's files as links to a folder inside it."""
    inner = bundle.path / "..data"
    inner.mkdir()
    (bundle.path / "model.onnx").rename(inner / "model.onnx")
    (bundle.path / "model.onnx").symlink_to("..data/model.onnx")
    (tmp_path / "link").symlink_to(bundle.path)
    assert Bundle.open(tmp_path / "link").manifest == bundle.manifest


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "sub/model.onnx", "..", "c:\\model.onnx"])
def test_names_that_leave_the_folder(bundle, name):
    def change(value):
        value["files"][name] = value["files"].pop("model.onnx")
        value["model"]["file"] = name

    edit_manifest(bundle, change)
    with pytest.raises(BundleError, match="wanted a bare file name inside the bundle"):
        Bundle.open(bundle.path)


def test_a_model_that_the_manifest_does_not_list(bundle):
    edit_manifest(bundle, lambda value: value["files"].clear())
    with pytest.raises(BundleError, match=r'"model\.onnx" is not among the files'):
        Bundle.open(bundle.path)


@pytest.mark.parametrize("location", ["../outside.data", "ABSOLUTE", "link.data", "other.data"])
def test_external_data_that_is_none_of_the_files(make_bundle, tiny_graph, tmp_path, location):
    """Everything that is read was hashed; nothing outside the folder is."""
    model = tiny_graph()
    words = onnx.numpy_helper.to_array(model.graph.initializer[0])
    (tmp_path / "outside.data").write_bytes(words.tobytes())
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(
        key="location", value=str(tmp_path / "outside.data") if location == "ABSOLUTE" else location
    )
    bundle = make_bundle()
    model_path = bundle.path / "model.onnx"
    model_path.write_bytes(model.SerializeToString())
    if location == "link.data":
        (bundle.path / location).symlink_to("../outside.data")
    if location == "other.data":
        (bundle.path / location).write_bytes(words.tobytes())
    entry = {"bytes": model_path.stat().st_size, "sha256": sha256_file(model_path)}
    edit_manifest(bundle, lambda value: value["files"].update({"model.onnx": entry}))
    with pytest.raises(BundleError, match=r'external data ".*" is not among the files'):
        Session(bundle.path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 64])
def test_a_model_that_is_not_onnx(tmp_path, content):
    from tfx.runtime.providers import create_session

    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.onnx: (not an ONNX file|onnxruntime refuses it)"):
        create_session(path)


def test_a_folder_that_is_no_bundle(tmp_path):
    with pytest.raises(BundleError, match="found nothing, wanted a bundle folder"):
        Bundle.open(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"not a bundle: it has no tfx\.json"):
        Bundle.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="found a file"):
        Bundle.open(tmp_path / "file")


def test_no_golden(bundle):
    (bundle.path / "golden.safetensors").unlink()
    edit_manifest(bundle, lambda value: value["files"].pop("golden.safetensors"))
    with pytest.raises(BundleError, match=r"has no golden\.safetensors"):
        Bundle.open(bundle.path).golden()


# Writing


def test_an_existing_destination_is_refused_before_any_work(make_bundle):
    bundle = make_bundle()
    before = snapshot(bundle.path)
    with pytest.raises(BundleError, match="exists; use --force"):
        write_bundle(bundle.path, lambda folder: pytest.fail("work was done"))
    assert snapshot(bundle.path) == before


def test_force_replaces_a_bundle_and_an_empty_folder(make_bundle, tmp_path):
    make_bundle()
    assert make_bundle(force=True, pad_id=1).manifest.pad_id == 1
    (tmp_path / "empty").mkdir()
    make_bundle("empty", force=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "tfx-model"]


def test_force_replaces_a_damaged_or_newer_bundle(make_bundle, bundle):
    edit_manifest(bundle, lambda value: value.update(format=9))
    (bundle.path / "model.onnx").write_bytes(b"")
    make_bundle(force=True)
    Bundle.open(bundle.path)


def test_force_never_removes_what_is_not_a_bundle(make_bundle, tmp_path):
    keep = tmp_path / "thesis"
    keep.mkdir()
    (keep / "chapter1.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(keep)
    bundle = make_bundle()
    (bundle.path / "notes.txt").write_text("mine")
    for name, message in (
        ("thesis", "is not a bundle"),
        ("file", "is a file"),
        ("link", "is a link"),
        ("tfx-model", r"holds notes\.txt, which is no part of the bundle"),
    ):
        with pytest.raises(BundleError, match=message):
            ensure_free(tmp_path / name, force=True)
    assert (keep / "chapter1.txt").read_text() == "years of work"


def test_a_destination_that_cannot_be_made(tmp_path, monkeypatch):
    with pytest.raises(BundleError, match=f"{os.devnull} is not a folder"):
        ensure_free(f"{os.devnull}/out")
    with pytest.raises(BundleError, match="does not exist"):
        ensure_free(tmp_path / "absent" / "tfx-model")
    with pytest.raises(BundleError, match="no folder that can be made"):
        ensure_free("/")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(BundleError, match="is not writable"):
        ensure_free(tmp_path / "tfx-model")


@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(1), MemoryError()])
@pytest.mark.parametrize("old", [False, True])
def test_a_failure_leaves_nothing_and_keeps_the_old(make_bundle, tmp_path, failure, old):
    before = snapshot(make_bundle().path) if old else None

    def fill(folder):
        (folder / "model.onnx").write_bytes(b"half")
        raise failure

    with pytest.raises(type(failure)):
        write_bundle(tmp_path / "tfx-model", fill, force=True)
    assert [entry.name for entry in tmp_path.iterdir()] == (["tfx-model"] if old else [])
    if old:
        assert snapshot(tmp_path / "tfx-model") == before


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("4096 requested and 0 written")]
)
def test_a_full_disk(make_bundle, tmp_path, error):
    before = snapshot(make_bundle().path)

    def fill(folder):
        raise error

    with pytest.raises(BundleError, match=r"cannot be written: (No space left|4096 requested)"):
        write_bundle(tmp_path / "tfx-model", fill, force=True)
    assert snapshot(tmp_path / "tfx-model") == before
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_of_the_source_is_not_blamed_on_the_destination(tmp_path):
    def fill(folder):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "weights"))

    with pytest.raises(FileNotFoundError):
        write_bundle(tmp_path / "tfx-model", fill)


def test_a_failed_swap_puts_the_old_back(make_bundle, tmp_path, monkeypatch):
    from pathlib import Path

    before = snapshot(make_bundle().path)
    rename = Path.rename

    def fail_on_new(self, target):
        if self.name.endswith(".new"):
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_on_new)
    with pytest.raises(BundleError, match="cannot be written: Input/output error"):
        make_bundle(force=True, pad_id=1)
    monkeypatch.undo()
    assert snapshot(tmp_path / "tfx-model") == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_manifest_that_could_not_be_read_is_not_written(make_bundle, tiny_manifest, tmp_path):
    with pytest.raises(BundleError, match=r"tfx\.json: layout"):
        make_bundle(layout="loose")
    with pytest.raises(BundleError, match=r'model\.file: "other.onnx" is not among the files'):
        write_bundle(tmp_path / "x", lambda folder: fill_other(folder, tiny_manifest))
    assert not list(tmp_path.iterdir())


def fill_other(folder, tiny_manifest):
    (folder / "model.onnx").write_bytes(b"")
    model = {"file": "other.onnx", "opset": 17, "ir_version": 8, "domains": []}
    return tiny_manifest(tokenizer=False, model=model)


KILLED = """
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
    from tfx.runtime.bundle import write_bundle

    def fill(folder):
        (folder / "model.onnx").write_bytes(b"half")
        os.kill(os.getpid(), int(sys.argv[2]))
        signal.pause()

    write_bundle(sys.argv[1], fill, force=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_writer(make_bundle, tmp_path, number):
    before = snapshot(make_bundle().path)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "tfx-model"), str(int(number))]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode != 0
    assert snapshot(tmp_path / "tfx-model") == before
    if number == signal.SIGKILL:  # nobody can clean up after it but the next writer
        make_bundle(force=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tfx-model"]


def test_killed_between_the_two_renames(make_bundle, tmp_path):
    """The next writer puts the old bundle back before it does anything else."""
    bundle = make_bundle()
    before = snapshot(bundle.path)
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    from tfx.runtime.swap import _prefix

    bundle.path.rename(tmp_path / f"{_prefix(bundle.path)}{int(process.stdout)}-01234567.old")
    with pytest.raises(BundleError, match="exists; use --force"):
        make_bundle()
    assert snapshot(bundle.path) == before


def test_permissions_follow_the_umask(make_bundle):
    umask = os.umask(0o022)
    try:
        assert make_bundle().path.stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(umask)
