"""Write the Unicode tables of the apps, by asking the package `tokenizers` about every code point.

The C tokenizer reads them, and the JavaScript one is guarded by them: what is a letter changes with the machine's own
Unicode version, and what `tokenizers` takes for one does not.

Example:
    python benchmarks/make_unicode.py          # writes the tables under runtime/apps
    python benchmarks/make_unicode.py --check  # writes nothing, exit code 1 when a file is not as it would be written
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import click
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

APPS = Path(__file__).resolve().parent.parent / "runtime" / "apps"
POINTS = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
HANGUL = range(0xAC00, 0xD7A4)
CHUNK = 4096

Ranges = list[tuple[int, int]]
"""First and last code point of each, ascending."""


def mapped(normalize: Callable[[str], str], separator: str) -> dict[int, str]:
    """What a normalizer makes of each code point by itself, where that is another string.

    Args:
        normalize: takes and returns a string.
        separator: a character that it leaves alone, starts with, and makes of no other.
    """
    found = {}
    for start in range(0, len(POINTS), CHUNK):
        points = [point for point in POINTS[start : start + CHUNK] if point != ord(separator)]
        parts = normalize(separator.join(map(chr, points))).split(separator)
        if len(parts) != len(points):
            raise click.ClickException(f"U+{points[0]:04X} and on: found {len(parts)} answers, wanted {len(points)}")
        found.update({point: part for point, part in zip(points, parts, strict=True) if part != chr(point)})
    return found


def split_off(pre_tokenizer: pre_tokenizers.PreTokenizer, beside: str, gone: bool = False) -> set[int]:
    """Code points that a pre-tokenizer makes pieces of their own.

    Args:
        pre_tokenizer: the one asked.
        beside: a letter that is kept together with what is not split off.
        gone: those that it leaves out instead.
    """
    found = set()
    for start in range(0, len(POINTS), CHUNK):
        points = POINTS[start : start + CHUNK]
        text = beside + beside.join(map(chr, points)) + beside
        pieces = [offsets for _, offsets in pre_tokenizer.pre_tokenize_str(text)]
        if gone:
            places = {end for (_, end), (start, _) in itertools.pairwise(pieces) if end < start}
        else:
            places = {start for start, end in pieces if end == start + 1}
        found.update(points[place // 2] for place in places if place % 2)  # the others are `beside`
    return found


def combining_ranks(decomposed: dict[int, str]) -> dict[int, int]:
    """Rank the canonical combining classes of all marks: 1 and up, in the classes' order. Starters are left out.

    Nothing tells the class itself, but every algorithm only compares them, and two marks are swapped by NFD when
    the first one's class is the greater.
    """
    nfd = normalizers.NFD().normalize_str

    @functools.cache
    def greater(one: str, other: str) -> bool:
        return nfd("a" + one + other) == "a" + other + one and one != other

    low, high = "\u0334", "\u0345"  # classes 1 and 240, the lowest and the highest there are
    alone = [chr(point) for point in POINTS if point not in decomposed]
    marks = []
    for start in range(0, len(alone), CHUNK):
        chunk = alone[start : start + CHUNK]
        lower = nfd("".join("a" + high + mark for mark in chunk))[1::3]  # moved before the high one
        higher = nfd("".join("a" + mark + low for mark in chunk))[2::3]  # moved behind the low one
        marks += [mark for mark, *moved in zip(chunk, lower, higher, strict=True) if mark in moved]
    classes: list[str] = []  # one mark of each, ascending
    members: dict[str, list[str]] = {}
    for mark in marks:
        key = functools.cmp_to_key(lambda one, other: greater(one, other) - greater(other, one))
        at = bisect.bisect_left(classes, key(mark), key=key)
        if at == len(classes) or greater(classes[at], mark) or greater(mark, classes[at]):
            classes.insert(at, mark)
        members.setdefault(classes[at], []).append(mark)
    return {ord(mark): rank for rank, first in enumerate(classes, 1) for mark in members[first]}


@functools.cache
def ask() -> tuple[dict[str, set[int]], dict[str, dict[int, str]], dict[int, int]]:
    """Return the classes, the mappings (`lower`, `nfd`, `nfkd`) and the ranks of the combining marks."""
    off = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}

    def bert(part: str) -> dict[int, str]:
        return mapped(normalizers.BertNormalizer(**{**off, part: True}).normalize_str, "|")

    clean, wide, bare = bert("clean_text"), bert("handle_chinese_chars"), bert("strip_accents")
    maps = {
        "lower": mapped(normalizers.Lowercase().normalize_str, "|"),
        "nfd": mapped(normalizers.NFD().normalize_str, "|"),
        "nfkd": mapped(normalizers.NFKD().normalize_str, "\ue000"),
    }

    def matched(pattern: str, beside: str) -> set[int]:
        return split_off(pre_tokenizers.Split(Regex(pattern), "isolated"), beside)

    white = split_off(pre_tokenizers.WhitespaceSplit(), "a", gone=True)
    # Between dots: a word character is a piece of its own, a space is left out, and all else joins the dots.
    word = split_off(pre_tokenizers.Whitespace(), ".")
    classes = {
        "control": {point for point, made in clean.items() if made == ""},
        "white": white,
        "punctuation": split_off(pre_tokenizers.Punctuation(), "a"),
        "cjk": {point for point, made in wide.items() if made == f" {chr(point)} "},
        "nonspacing": {point for point, made in bare.items() if made == "" and point not in maps["nfd"]},
        "combining": set(mapped(normalizers.StripAccents().normalize_str, "|")),
        "numeric": split_off(pre_tokenizers.Digits(individual_digits=True), "a"),
        "word": word,
        "letter": matched(r"\p{L}", "."),
        "number": matched(r"\p{N}", "."),
        "space": matched(r"\s", "."),
    }
    # What is taken for granted elsewhere is asked too.
    if split_off(pre_tokenizers.Whitespace(), ".", gone=True) != white:
        raise click.ClickException("Whitespace: its spaces are not those of WhitespaceSplit")
    spaces = {point for point, made in clean.items() if made == " "}
    if spaces != (white - classes["control"]) - {0x20}:
        raise click.ClickException("BertNormalizer: its spaces are not those of WhitespaceSplit")
    if set(wide) != classes["cjk"] or any(len(made) != 1 for made in maps["lower"].values() if made != "i\u0307"):
        raise click.ClickException("tokenizers: a mapping that the tables have no room for")
    return classes, maps, combining_ranks(maps["nfd"])


def ranges(points: Iterable[int]) -> Ranges:
    """Join code points that follow each other."""
    found: Ranges = []
    for point in sorted(points):
        if found and found[-1][1] == point - 1:
            found[-1] = (found[-1][0], point)
        else:
            found.append((point, point))
    return found


def lower_runs(lower: dict[int, str]) -> list[tuple[int, int, int, int]]:
    """First and last code point, step between them, and what is added to each to make it lowercase.

    The one code point that gives two, U+0130, is left to the reader.
    """
    found: list[tuple[int, int, int, int]] = []
    for point in sorted(lower):
        if len(lower[point]) != 1:
            continue
        added = ord(lower[point]) - point
        if found:
            first, last, step, run = found[-1]
            if run == added and (point - last in (1, 2) if first == last else point - last == step):
                found[-1] = (first, point, point - last, run)
                continue
        found.append((point, point, 1, added))
    return found


def base36(number: int) -> str:
    """Write a number as JavaScript's parseInt(text, 36) reads it."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    text = ""
    rest = abs(number)
    while rest or not text:
        rest, digit = divmod(rest, 36)
        text = digits[digit] + text
    return "-" + text if number < 0 else text


def numbers_36(numbers: Iterable[int]) -> str:
    """Write numbers as lines of one JavaScript string."""
    words = " ".join(map(base36, numbers)).split(" ")
    lines, line = [], ""
    for word in words:
        if line and len(line) + len(word) + 1 > 108:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    lines.append(line)
    return " +\n".join(f'    "{text} "' for text in lines[:-1]) + (" +\n" if lines[1:] else "") + f'    "{lines[-1]}"'


JS_HEAD = """\
// Made by benchmarks/make_unicode.py from the Python package tokenizers {version}; not edited by hand.
//
// What the Rust `tokenizers` takes a code point for. A JavaScript engine's own Unicode tables are newer, and change
// with the engine; a text is tokenized alike only where both agree.
//
//   has(name, point)  is the code point in the class?
//     control      removed by BertNormalizer's clean_text (U+0000 and U+FFFD among them)
//     white        char::is_whitespace: BertNormalizer (after `control`), BertPreTokenizer, WhitespaceSplit, Strip, and
//                  the \\\\s of Whitespace and of added tokens' lstrip and rstrip
//     punctuation  BertPreTokenizer, Punctuation
//     cjk          handle_chinese_chars
//     nonspacing   removed by strip_accents, asked after NFD: of the code points in `nfd` it says nothing
//     combining    removed by StripAccents
//     numeric      Digits
//     word         \\\\w of Whitespace and of added tokens' single_word
//     letter, number, space   \\\\p{{L}} \\\\p{{N}} \\\\s of ByteLevel's and Split's patterns
//     nfd, nfkd    NFD or NFKD changes it. Unicode never changes how an assigned code point decomposes, so where an
//                  engine too changes it, it does so in the same way.
//     mark         its canonical combining class is not 0. Likewise.
//   lower(point)      the string that Lowercase makes of it, whatever stands around it. (JavaScript's toLowerCase makes
//                     a final sigma of U+03A3 at the end of a word; Rust's never does.)
//
// Format: numbers in base 36 with one space between. A class is ranges of code points, each as two numbers: how far
// it starts behind the end of the one before, and how many it has. `lower` is runs of four numbers: how far the first
// is behind the first of the run before, how many, step between them, and what is added to each to make it lowercase.
"""

JS_TAIL = """\

/** @param {string} text */
const numbers = (text) => text.split(" ").map((word) => parseInt(word, 36));

/**
 * First and last code point of each range, flat.
 *
 * @param {string} text
 */
function unpackRanges(text) {
  const packed = numbers(text);
  const flat = new Uint32Array(packed.length);
  let end = 0;
  for (let i = 0; i < packed.length; i += 2) {
    flat[i] = end + packed[i];
    end = flat[i] + packed[i + 1];
    flat[i + 1] = end - 1;
  }
  return flat;
}

/** @param {string} text */
function unpackLower(text) {
  const packed = numbers(text);
  const found = new Map([[0x130, "i\\u0307"]]);
  let first = 0;
  for (let i = 0; i < packed.length; i += 4) {
    first += packed[i];
    for (let k = 0; k < packed[i + 1]; k++) {
      const point = first + k * packed[i + 2];
      found.set(point, String.fromCodePoint(point + packed[i + 3]));
    }
  }
  return found;
}

const classes = new Map(Object.entries(CLASSES).map(([name, text]) => [name, unpackRanges(text)]));
const lowercase = unpackLower(LOWER);

/**
 * Is the code point in the class?
 *
 * @param {string} name
 * @param {number} point
 * @returns {boolean}
 */
export function has(name, point) {
  const flat = classes.get(name) ?? new Uint32Array();
  let low = 0;
  let high = flat.length / 2;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (flat[2 * middle + 1] < point) low = middle + 1;
    else high = middle;
  }
  return low < flat.length / 2 && flat[2 * low] <= point;
}

/**
 * The lowercase of a code point, as a string.
 *
 * @param {number} point
 * @returns {string}
 */
export function lower(point) {
  return lowercase.get(point) ?? String.fromCodePoint(point);
}
"""


def javascript() -> str:
    """Return the text of unicode_data.mjs."""
    classes, maps, ranks = ask()
    named = {**classes, "nfd": maps["nfd"], "nfkd": maps["nfkd"], "mark": ranks}
    text = JS_HEAD.format(version=tokenizers.__version__).replace("\\\\", "\\")
    text += "\nconst CLASSES = {\n"
    for name, points in named.items():
        packed, end = [], 0
        for first, last in ranges(points):
            packed += [first - end, last + 1 - first]
            end = last + 1
        text += f"  {name}:\n{numbers_36(packed)},\n"
    text += "};\n\nconst LOWER =\n"
    packed, start = [], 0
    for first, last, step, added in lower_runs(maps["lower"]):
        packed += [first - start, (last - first) // step + 1, step, added]
        start = first
    return text + numbers_36(packed) + ";\n" + JS_TAIL


def compositions(decomposed: dict[int, str]) -> list[tuple[int, int, int]]:
    """Ask which two code points NFC makes one of: first, second, composite. Hangul syllables are left out.

    Args:
        decomposed: what NFD makes of each code point.
    """
    nfc = normalizers.NFC().normalize_str
    apart = {made for point, made in decomposed.items() if point not in HANGUL}
    firsts = {nfc(made[:size]) for made in apart for size in range(1, len(made) + 1)}
    seconds = {mark for made in apart for mark in made[1:]}
    found = []
    for first in sorted(firsts):
        for second in sorted(seconds):
            if len(first) == 1 and len(made := nfc(first + second)) == 1:
                found.append((ord(first), ord(second), ord(made)))
    return found


def decomposition_runs(decomposed: dict[int, str]) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Join decompositions of one length whose code points follow each other.

    Returns:
        First and last code point of each run, code points that each of them becomes, and where in the pool the first
        one's begin; the pool.
    """
    runs: list[tuple[int, int, int, int]] = []
    pool: list[int] = []
    for point, made in sorted(decomposed.items()):
        if runs and runs[-1][1] == point - 1 and runs[-1][2] == len(made):
            runs[-1] = (runs[-1][0], point, *runs[-1][2:])
        else:
            runs.append((point, point, len(made), len(pool)))
        pool += map(ord, made)
    return runs, pool


C_HEAD = """\
/*
 * Made by benchmarks/make_unicode.py from the Python package tokenizers {version}; not edited by hand.
 *
 * What the Rust `tokenizers` takes a code point for; unicode.c reads the tables, unicode.h says what they mean.
 */
#ifndef TFX_UNICODE_DATA_H
#define TFX_UNICODE_DATA_H

#include <stddef.h>
#include <stdint.h>

/* clang-format off */
"""


def c_table(name: str, rows: Iterable[Iterable[int]], columns: int) -> str:
    """Write `static const uint32_t NAME[][columns]`, or a flat one for a single column."""
    words = [",".join(str(number) for number in row) for row in rows]
    if columns > 1:
        words = ["{" + word + "}" for word in words]
    lines, line = [], ""
    for word in words:
        if len(line) + len(word) + 1 > 118:
            lines.append(line)
            line = ""
        line += word + ","
    size = f"[][{columns}]" if columns > 1 else "[]"
    return f"static const uint32_t {name}{size} = {{\n" + "\n".join([*lines, line]) + "\n};\n"


def c_header() -> str:
    """Return the text of unicode_data.h."""
    classes, maps, ranks = ask()
    canonical = {point: made for point, made in maps["nfd"].items() if point not in HANGUL}
    compatible = {point: made for point, made in maps["nfkd"].items() if maps["nfd"].get(point) != made}
    text = C_HEAD.format(version=tokenizers.__version__)
    text += "\n/* Classes: first and last code point of each range. */\n"
    for name, points in classes.items():
        text += c_table(f"TFX_{name.upper()}", ranges(points), 2)
    text += "\n/* The same for code points below 128, as bits; rows in the order of tfx_class. */\n"
    text += f"static const uint64_t TFX_ASCII[{len(classes)}][2] = {{\n"
    for points in classes.values():
        low, high = (sum(1 << (point - start) for point in points if start <= point < start + 64) for start in (0, 64))
        text += f"{{0x{low:016x}, 0x{high:016x}}},\n"
    text += "};\n\n/* The tables of the classes, likewise. */\n"
    text += f"static const struct {{ const uint32_t (*ranges)[2]; size_t count; }} TFX_CLASSES[{len(classes)}] = {{\n"
    for name in map(str.upper, classes):
        text += f"{{TFX_{name}, sizeof TFX_{name} / sizeof *TFX_{name}}},\n"
    text += "};\n"
    text += "\n/* Lowercase: first and last, step between them, and what is added to each (modulo 2^32). */\n"
    lower = [(first, last, step, added % 2**32) for first, last, step, added in lower_runs(maps["lower"])]
    text += c_table("TFX_LOWER", lower, 4)
    text += "\n/* Ranks of canonical combining classes other than 0: first, last, rank. */\n"
    ranked: list[tuple[int, int, int]] = []
    for point, rank in sorted(ranks.items()):
        if ranked and ranked[-1][1:] == (point - 1, rank):
            ranked[-1] = (ranked[-1][0], point, rank)
        else:
            ranked.append((point, point, rank))
    text += f"#define TFX_MOST_RANK {max(ranks.values())}\n" + c_table("TFX_RANK", ranked, 3)
    for name, about, decomposed in (
        ("CANONICAL", "NFD without Hangul syllables", canonical),
        ("COMPATIBLE", "NFKD, where it is not NFD", compatible),
    ):
        runs, pool = decomposition_runs(decomposed)
        text += f"\n/* {about}: first, last, how many each becomes, and where the first's begin. */\n"
        text += c_table(f"TFX_{name}", runs, 4) + c_table(f"TFX_{name}_POOL", [(point,) for point in pool], 1)
    text += "\n/* Composition without Hangul syllables: first, second, composite. */\n"
    text += c_table("TFX_COMPOSED", compositions(maps["nfd"]), 3)
    return text + "\n/* clang-format on */\n#endif\n"


FILES = {APPS / "js" / "unicode_data.mjs": javascript, APPS / "c" / "src" / "unicode_data.h": c_header}


@click.command(help=(__doc__ or "").split("\n", 1)[0])
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 when a file differs.")
def main(check: bool) -> None:
    """Write the files, or compare them."""
    for path, make in FILES.items():
        text = make()
        if not check:
            path.write_text(text, encoding="utf-8")
            click.echo(f"{path.name}: {len(text.encode())} bytes")
        elif not path.is_file() or tables(path.read_text(encoding="utf-8")) != tables(text):
            raise click.ClickException(f"{path}: is not what tokenizers {tokenizers.__version__} gives")


def tables(text: str) -> str:
    """Return a file without the version that made it: a later one that says the same is right too."""
    return re.sub(r"package tokenizers \S+;", "", text)


if __name__ == "__main__":
    main()
