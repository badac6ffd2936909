"""Texts out of files; a bad row is named."""

from __future__ import annotations

import csv

import pytest

from tfx.errors import InputError
from tfx.runtime.embed_rows import SUFFIXES, count_texts, read_texts

TEXTS = ["the cat", "", 'says "hi", twice', "two\nlines", "grüße 🎉", " spaces ", "x" * 200_000]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("start", [0, 1, 3, 5, 7])
def test_every_text_in_order_from_any_row(tmp_path, write_texts, suffix, start):
    texts = [text for text in TEXTS if suffix != ".txt" or "\n" not in text]
    path = write_texts(tmp_path / f"t{suffix}", texts)
    assert list(read_texts(path, start=start)) == texts[start:]
    assert count_texts(path) == len(texts)


def test_limits_of_csv_stay_as_they_were(tmp_path, write_texts):
    before = csv.field_size_limit()
    assert count_texts(write_texts(tmp_path / "t.csv", TEXTS)) == len(TEXTS)
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("end", ["", "\n"])
def test_lines_end_as_on_any_system(tmp_path, end):
    (tmp_path / "t.txt").write_bytes(f"\ufeffone\r\ntwo\n\nfour{end}".encode())
    assert list(read_texts(tmp_path / "t.txt")) == ["one", "two", "", "four"]


def test_json_lines_may_be_strings(tmp_path):
    (tmp_path / "t.jsonl").write_text('"one"\n"two"\n{"body": "three"}')
    assert list(read_texts(tmp_path / "t.jsonl", "body")) == ["one", "two", "three"]


def test_another_column(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,one\n2,two\n")
    assert list(read_texts(tmp_path / "t.csv", "b")) == ["one", "two"]


BAD = {
    "no.txt": (None, "found nothing, wanted a file"),
    "t.docx": (b"", r"found the ending \.docx, wanted one of \.txt, \.jsonl"),
    "empty.txt": (b"", "holds no rows"),
    "header.csv": (b"text\n", "holds no rows"),
    "nothing.csv": (b"", "holds no rows"),
    "latin.txt": (b"one\ntwo\ngr\xfc\xdfe\n", r"latin\.txt line 3: not UTF-8"),
    "null.jsonl": (b'"a"\n{"text": null}\n', r"null\.jsonl row 1 \(line 2\): found nothing, wanted a text"),
    "number.jsonl": (b'"a"\n"b"\n{"text": 7}\n', r"row 2 \(line 3\): found int, wanted a text"),
    "list.jsonl": (b'["a"]\n', r"row 0 \(line 1\): found list, wanted a text"),
    "key.jsonl": (b'{"body": "a", "id": 1}\n', r'row 0 \(line 1\): has no "text"; it has body, id'),
    "broken.jsonl": (b'"a"\n{"text": "b"\n', r"row 1 \(line 2\): found no JSON"),
    "blank.jsonl": (b'"a"\n\n"b"\n', r"row 1 \(line 2\): found an empty line"),
    "deep.jsonl": (b"[" * 200_000 + b"\n", r"row 0 \(line 1\): found no JSON"),
    "surrogate.jsonl": (b'"a"\n"\\ud800"\n', r"row 1 \(line 2\): no valid Unicode"),
    "column.csv": (b"id,body\n1,a\n", r'column\.csv: has no column "text"; it has id, body'),
    "short.csv": (b'id,text\n1,"a\nb"\n2\n', r"row 1 \(line 4\): found 1 fields, wanted 2"),
    "quote.csv": (b'text\n"a\n', r"quote\.csv line 2: no CSV: unexpected end of data"),
    "broken.parquet": (b"PAR1 and so on", r"broken\.parquet: no Parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(tmp_path, name):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        count_texts(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None], r"row 1: found nothing, wanted a text"),
        ([1, 2], r"row 0: found int, wanted a text"),
    ],
)
def test_wrong_values_of_parquet(tmp_path, write_texts, values, message):
    with pytest.raises(InputError, match=message):
        count_texts(write_texts(tmp_path / "t.parquet", values))
    with pytest.raises(InputError, match='has no column "body"; it has id, text'):
        count_texts(write_texts(tmp_path / "t.parquet", ["a"]), "body")


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match="found no file"):
        count_texts(tmp_path / "folder.txt")
