"""Projects of tfx app as they are written: names, copies, what may be replaced. tests/apps builds and runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tfx.cli import main
from tfx.errors import BundleError, InputError
from tfx.runtime import app as apps
from tfx.runtime import app_command
from tfx.runtime.app import APPS, LANGUAGES, RECORD_NAME, app_name, sources, write_app
from tfx.runtime.bundle import Bundle


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["app", *map(str, arguments)], prog_name="tfx")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture
def written(bundle: Bundle, tmp_path: Path) -> Path:
    return write_app(bundle, "c", tmp_path / "Embed.It")


def test_the_command_offers_every_language():
    assert tuple(LANGUAGES) == app_command.LANGUAGES


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_project_is_its_sources_a_licence_and_the_bundle(bundle: Bundle, tmp_path: Path, lang: str):
    folder = write_app(bundle, lang, tmp_path / "out", name="my-app")
    assert folder == tmp_path / "out"
    found = contents(folder)
    assert b"BSD Zero Clause" in found["LICENSE"]
    assert {"LICENSE", "README.md", RECORD_NAME, "bundle/tfx.json", "bundle/model.onnx"} <= set(found)
    assert {name for name in found if name.startswith("bundle/")} == {
        f"bundle/{path.name}" for path in bundle.path.iterdir()
    }
    assert set(json.loads(found[RECORD_NAME])["files"]) == set(found) - {RECORD_NAME}
    own = {name: content for name, content in found.items() if not name.startswith("bundle/")}
    assert not any(word in content for content in own.values() for word in (b"@TFX_NAME@", b"@TFX_BUNDLE@"))
    assert "my-app" in (folder / "README.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tfx-model"]
    assert Bundle.open(folder / "bundle").manifest == bundle.manifest


@pytest.mark.parametrize("lang", LANGUAGES)
def test_only_names_and_the_place_of_the_bundle_are_filled_in(lang: str):
    words = {name: set(re.findall(rb"@TFX_\w*@?", path.read_bytes())) for name, path in sources(lang)}
    templated = {name for name, found in words.items() if found}
    assert set.union(*words.values()) == {b"@TFX_NAME@", b"@TFX_BUNDLE@"}
    documents = {"CMakeLists.txt", "package.json", "README.md"}
    assert len(templated - documents) <= 1


def test_what_a_project_takes_does_not_change_with_the_original(bundle: Bundle, written: Path):
    before = (written / "bundle" / "model.onnx").read_bytes()
    with (bundle.path / "model.onnx").open("r+b") as file:
        file.write(b"\0\0\0\0")
    assert (written / "bundle" / "model.onnx").read_bytes() == before
    assert not (written / "bundle" / "model.onnx").samefile(bundle.path / "model.onnx")


def test_without_a_copy_the_place_is_absolute(bundle: Bundle, tmp_path: Path):
    folder = write_app(bundle, "node", tmp_path / "out", copy=False)
    assert not (folder / "bundle").exists()
    assert json.loads((folder / RECORD_NAME).read_text())["bundle"] == str(bundle.path)
    assert any(str(bundle.path) in path.read_text() for path in folder.glob("*.mjs"))


def test_a_page_needs_the_copy(bundle: Bundle, tmp_path: Path):
    with pytest.raises(InputError, match="a page reads files of its own folder only"):
        write_app(bundle, "web", tmp_path / "out", copy=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ['a"b', "a'b", "a\\b", "a$b", "a;b", "a`b", "a\nb", "a@b"])
def test_a_place_that_source_code_cannot_hold_is_refused(bundle: Bundle, tmp_path: Path, place: str):
    odd = tmp_path / place
    shutil.copytree(bundle.path, odd)
    with pytest.raises(InputError, match="cannot stand in source code"):
        write_app(Bundle.open(odd), "c", tmp_path / "out", copy=False)
    assert write_app(Bundle.open(odd), "c", tmp_path / "out").is_dir()


@pytest.mark.parametrize("name", ["a", "my-app_2", "z" * 64])
def test_names(name: str):
    assert app_name("anything", name) == name


@pytest.mark.parametrize(
    "name", ["", "A", "2a", "-a", "_a", ".a", "a b", "a/b", "../a", "a.b", "é", "a" * 65, "a;b", "a\n"]
)
def test_names_that_no_build_tool_takes(name: str):
    with pytest.raises(InputError, match=r"^name: found"):
        app_name("anything", name)


@pytest.mark.parametrize("name", ["all", "test", "clean", "node_modules", "onnxruntime-node", "tfx"])
def test_names_that_are_taken(name: str):
    with pytest.raises(InputError, match="is taken by a build tool"):
        app_name("anything", name)
    assert app_name(f"some/{name}") == "tfx-app"


@pytest.mark.parametrize(
    ("out", "name"),
    [("embedder", "embedder"), ("/x/My App.v2/", "my-app-v2"), ("..a..", "a"), ("日本", "tfx-app"), ("1", "tfx-app")],
)
def test_a_name_is_made_of_the_folders(out: str, name: str):
    assert app_name(out) == name


def test_an_existing_folder_is_kept(bundle: Bundle, written: Path):
    before = contents(written)
    with pytest.raises(BundleError, match="exists; use --force"):
        write_app(bundle, "c", written)
    assert contents(written) == before


def test_force_replaces_a_project_as_it_was_written_and_built(bundle: Bundle, written: Path):
    (written / "build").mkdir()
    (written / "build" / "CMakeCache.txt").write_text("CMake's")
    (written / "build" / "embed-it").write_text("a program")
    write_app(bundle, "node", written, force=True)
    assert json.loads((written / RECORD_NAME).read_text())["lang"] == "node"
    assert not (written / "build").exists()
    (written / "node_modules").symlink_to(bundle.path)
    (written / "package-lock.json").write_text("committed")
    write_app(bundle, "web", written, force=True)
    assert (written / "package-lock.json").read_text() == "committed"
    assert not os.path.lexists(written / "node_modules")
    assert bundle.path.is_dir()
    with pytest.raises(BundleError, match=r"holds package-lock\.json, which a project in c does not have"):
        write_app(bundle, "c", written, force=True)


def test_force_replaces_a_page_with_what_its_script_copied(bundle: Bundle, tmp_path: Path):
    page = write_app(bundle, "web", tmp_path / "page")
    names = ["ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm", "tokenizers.min.mjs", "tokenizers-LICENSE"]
    (page / "vendor").mkdir()
    for name in names:
        (page / "vendor" / name).write_text("a library")
    write_app(bundle, "web", page, force=True)
    assert not (page / "vendor").exists()


@pytest.mark.parametrize(
    ("lang", "name"),
    [
        ("c", "build/notes.txt"),
        ("c", "vendor/mylib.c"),
        ("c", "node_modules/mine.js"),
        ("c", "package-lock.json"),
        ("node", "build/CMakeCache.txt"),
        ("node", "vendor/tokenizers.min.mjs"),
        ("web", "vendor/mine.mjs"),
        ("web", "build/notes.txt"),
    ],
)
def test_force_keeps_what_no_step_of_the_project_makes(bundle: Bundle, tmp_path: Path, lang: str, name: str):
    folder = write_app(bundle, lang, tmp_path / "out")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    with pytest.raises(BundleError, match=f"holds {name}, which"):
        write_app(bundle, "node" if lang == "node" else "web", folder, force=True)
    assert (folder / name).read_text() == "mine"


def test_a_project_can_be_written_anew_from_its_own_bundle(written: Path):
    write_app(Bundle.open(written / "bundle"), "c", written, force=True)
    assert Bundle.open(written / "bundle")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "notes.txt").write_text("mine"), "holds notes.txt, which tfx did not write"),
        (lambda folder: (folder / "README.md").write_text("mine"), "README.md was changed since tfx wrote it"),
        (lambda folder: (folder / "bundle" / "model.onnx").write_bytes(b""), "bundle/model.onnx was changed"),
        (lambda folder: (folder / RECORD_NAME).unlink(), "is no project of tfx app"),
        (lambda folder: (folder / RECORD_NAME).write_text("[" * 10**5), "is no project of tfx app"),
        (lambda folder: (folder / RECORD_NAME).write_text('{"files": {"a": 1}}'), "which tfx did not write"),
    ],
)
def test_force_keeps_what_somebody_else_wrote(bundle: Bundle, written: Path, change, message: str):
    change(written)
    before = contents(written)
    with pytest.raises(BundleError, match=message):
        write_app(bundle, "c", written, force=True)
    assert contents(written) == before


def test_force_replaces_no_bundle_no_file_and_no_link(bundle: Bundle, tmp_path: Path, written: Path):
    with pytest.raises(BundleError, match="is no project of tfx app"):
        write_app(bundle, "c", bundle.path, force=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(written)
    for name in ("file", "link"):
        with pytest.raises(BundleError, match="is no folder; --force only replaces projects"):
            write_app(bundle, "c", tmp_path / name, force=True)


def test_a_failure_leaves_nothing(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(apps.shutil, "copyfile", full)
    with pytest.raises(BundleError, match="out: cannot be written: No space left on device"):
        write_app(bundle, "c", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tfx-model"]


def test_a_bundle_that_changes_meanwhile_is_no_copy(bundle: Bundle, tmp_path: Path):
    tokenizer = bundle.path / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1] + b" ")
    with pytest.raises(BundleError, match=r"tokenizer\.json: was changed while it was copied"):
        write_app(bundle, "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_to_type_next(bundle: Bundle, tmp_path: Path):
    out = tmp_path / "my app"
    done = call(bundle.path, "--lang", "c", "--out", out)
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines == [
        f"written to {out}; next:",
        f"cd '{out}'",
        "cmake -S . -B build",
        "cmake --build build",
        "build/my-app --self-check",
    ]
    assert done.stderr == ""


def test_the_command_in_json(bundle: Bundle, tmp_path: Path):
    done = call(bundle.path, "--lang", "web", "--out", tmp_path / "page", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["app"] == str(tmp_path / "page")
    assert (found["lang"], found["name"]) == ("web", "page")
    assert found["next"][0] == f"cd {tmp_path / 'page'}"
    assert found["notes"] == ["the bundle is for target cpu; tfx export --target web writes what browsers run best"]


def test_notes_on_what_a_bundle_cannot_do(make_bundle, tmp_path: Path):
    done = call(make_bundle("mute", tokenizer=False).path, "--lang", "c", "--out", tmp_path / "a")
    assert "note: the bundle has no tokenizer" in done.stderr
    done = call(make_bundle("tokens", pooling=False).path, "--lang", "c", "--out", tmp_path / "b")
    assert "note: the bundle has no pooling" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent", "--lang", "c", "--out", "out"), "absent: found nothing, wanted a bundle folder"),
        (("{bundle}", "--lang", "c", "--out", "{bundle}"), "exists; use --force"),
        (("{bundle}", "--lang", "c", "--out", "no/where"), "no does not exist"),
        (("{bundle}", "--lang", "c", "--out", "out", "--name", "A b"), 'name: found "A b"'),
        (("{bundle}", "--lang", "perl", "--out", "out"), "'perl' is not one of 'c', 'cpp', 'node', 'web'"),
        (("{bundle}", "--out", "out"), "Missing option '--lang'"),
    ],
)
def test_errors_are_one_line(bundle: Bundle, tmp_path: Path, monkeypatch, arguments, message: str):
    monkeypatch.chdir(tmp_path)
    done = call(*(str(bundle.path) if each == "{bundle}" else each for each in arguments))
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_sources_hold_nothing_that_a_build_made():
    for lang in LANGUAGES:
        names = [name for name, _ in sources(lang)]
        assert len(names) == len(set(names))
        assert not [name for name in names if name.split("/")[0] in ("build", "node_modules", "vendor", "bundle")]
        assert not [name for name in names if os.path.basename(name).startswith(".")]  # noqa: PTH119
    assert not list(APPS.rglob("*.py"))
