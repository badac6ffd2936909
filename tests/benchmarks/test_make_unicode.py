"""benchmarks/make_unicode.py: the apps' Unicode tables are what `tokenizers` answers, and say what they are said to."""

from __future__ import annotations

import importlib
import unicodedata
from pathlib import Path

import pytest

import tfx

SCRIPT = Path(tfx.__file__).parent / "benchmarks" / "make_unicode.py"


@pytest.fixture(scope="module")
def make_unicode():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("make_unicode")


def test_the_files_are_what_the_installed_tokenizers_gives(make_unicode):
    for path, make in make_unicode.FILES.items():
        found, wanted = path.read_text(encoding="utf-8"), make()
        assert make_unicode.tables(found) == make_unicode.tables(wanted), f"run make_unicode.py: {path.name} is old"


def test_small(make_unicode):
    sizes = {path.name: path.stat().st_size for path in make_unicode.FILES}
    assert sizes["unicode_data.h"] < 150_000
    assert sizes["unicode_data.mjs"] < 30_000


def test_the_answers_are_those_of_unicode(make_unicode):
    """Where Python's own tables, of another version, know better than that a rule of thumb may be checked."""
    classes, maps, ranks = make_unicode.ask()
    assert {ord(c) for c in "aéß中ა"} <= classes["letter"]
    assert {ord(c) for c in "\t\n \u00a0\u3000"} <= classes["white"] & classes["space"]
    assert {0, 0xFFFD, 0x200B, 0xE000} <= classes["control"]
    assert classes["cjk"] & set(range(0x3400, 0x5000)) == {*range(0x3400, 0x4DC0), *range(0x4E00, 0x5000)}
    assert maps["lower"][0x130] == "i\u0307"
    assert maps["lower"][0x3A3] == "\u03c3"
    for point, made in maps["nfd"].items():
        assert made == unicodedata.normalize("NFD", chr(point))
    for point, made in maps["nfkd"].items():
        assert made == unicodedata.normalize("NFKD", chr(point))
    in_order = sorted(ranks, key=ranks.__getitem__)
    known = [unicodedata.combining(chr(point)) for point in in_order]
    assert known == sorted(known)
    assert len(set(known)) == max(ranks.values())
    for first, second, made in make_unicode.compositions(maps["nfd"]):
        assert unicodedata.normalize("NFC", chr(first) + chr(second)) == chr(made)
