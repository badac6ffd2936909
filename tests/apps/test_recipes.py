"""The pages for other languages: there, linked, marked as untested, and truthful about what a bundle holds."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import tfx
from tfx.runtime import manifest, providers, session, text
from tfx.runtime.tensors import TensorSpec

FOLDER = Path(tfx.__file__).parent / "runtime" / "apps" / "recipes"
CONTRACT = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = {"java.md": "java", "rust.md": "rust", "go.md": "go", "csharp.md": "csharp"}
ROLES = {"token_ids", "attention_mask", "padding_mask", "token_type_ids", "position_ids"}


def page(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def program(name: str) -> str:
    (found,) = re.findall(rf"```{PAGES[name]}\n(.*?)```", page(name), re.DOTALL)
    return found


def bare(words: str) -> str:
    """Field names as they come in every language: ``max_length``, ``maxLength`` and ``MaxLength`` are one."""
    return words.replace("_", "").lower()


def test_every_page_is_linked_from_the_contract_and_links_back():
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES, "README.md"}
    for name in PAGES:
        assert f"]({name})" in CONTRACT
        assert "](README.md)" in page(name)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_that_it_is_untested_before_anything_else(name):
    assert page(name).split("\n\n")[1].startswith("**Untested**")


def test_the_contract_names_fields_that_a_manifest_has():
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.*) \|$", CONTRACT.split("**Text to tokens.**")[0], re.MULTILINE)
    assert len(rows) > 10
    fields = {"format", *manifest.Manifest.__dataclass_fields__}
    for field, meaning in rows:
        assert field.partition(".")[0] in fields, field
        for inner in re.findall(r"`[\[{]+([a-z_, ]+)[}\]]*`?", meaning):
            for key in inner.split(", "):
                # Each is said in the manifest's own description, which is held to what is read.
                assert re.search(rf"\b{key}\b", inspect.getdoc(manifest) or ""), key


def test_the_contract_names_the_roles_that_texts_give():
    rows = re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| [^|]+ \|$", CONTRACT.split("By `role`:")[1], re.MULTILINE)
    assert set(rows) == ROLES
    given = re.findall(r'^        "([a-z_]+)":', inspect.getsource(text.pad), re.MULTILINE)
    assert set(given) == ROLES
    for role in (*ROLES, "features"):
        TensorSpec("x", "int64" if role != "features" else "float32", ("batch", "sequence"), role)


@pytest.mark.parametrize("name", PAGES)
def test_a_program_uses_every_field_that_matters(name):
    found = bare(program(name))
    wanted = "format files bytes sha256 model file inputs name dtype role pooling output tokenizer max_length pad_id"
    checked = "tolerance max_abs min_cosine tuning threads spinning golden.safetensors __metadata__ cases texts"
    for word in [*wanted.split(), *checked.split()]:
        if (name, word) in {("rust.md", "__metadata__")}:  # its crate reads the header
            continue
        assert bare(word) in found, word
    for role in ROLES:
        assert f'"{role}"' in program(name), role


@pytest.mark.parametrize("name", PAGES)
def test_a_program_sets_sessions_as_tfx_does(name):
    source = inspect.getsource(providers)
    for entry in ("session.intra_op.allow_spinning",):
        assert entry in source
        assert entry in program(name)
        assert entry in CONTRACT
    for optimizer in providers._SLOWER_OPTIMIZERS["cpu"]:
        assert optimizer in program(name)
        assert optimizer in CONTRACT
    assert re.search(
        r"interopnumthreads\(1\)|interopnumthreads=1|interthreads\(1\)", bare(program(name)).replace(" ", "")
    )
    assert re.search(r"mem(ory)?pattern(optimization)?(\(|=)false", bare(program(name)).replace(" ", ""))


@pytest.mark.parametrize("name", PAGES)
def test_a_program_batches_as_a_session_does(name):
    default = inspect.signature(session.Session.encode).parameters["batch_size"].default
    assert re.search(rf"batch(rows)?(:usize|int)?={default};?\b", bare(program(name)).replace(" ", ""))
