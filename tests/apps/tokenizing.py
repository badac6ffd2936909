"""The C tokenizer behind a pipe, tokenizers for it to be held against, and texts."""

from __future__ import annotations

import random
import subprocess
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

POINTS = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]

HARD = [
    "",
    " ",
    "\n\t \u3000",
    "plain words, with punctuation; and it's what they'd've said!",
    "Héllo WÖRLD ÅÄÖ ǅ İstanbul ΑΣΣ ΟΔΟΣ ß ẞ ﬁ ﬀ Ⅷ ①",
    "e\u0301 e\u0323\u0301 e\u0301\u0323 a\u0315\u0300\u05ae\u0062 \u0344 \u1e9b\u0323",
    "日本語のテキスト 中文字符 한국어 \ud55c\u1100\u1161\u11a8 𠀀𪜀𫠠 \U0002b81f\U0002b820 \U0002f800",
    "🙂 👩‍🚀 🇩🇪 ❤️ 1️⃣ \U0001fae8",
    "שלום עולם مرحبا بالعالم \u200f\u200e\u202b",
    "\u00ad\u200b\ufeff\u2060 \ufffd \u0000 \u0085 \u180e \u2028 \u2029",
    "[CLS] [SEP] [MASK]x[PAD] [unk] <s> </s> <mask>  <mask>",
    "x" * 101 + " " + "é" * 100 + " " + "ab" * 50,
    "don't DON'T we'll we'LL 's ' s ''s",
    "a  b   c    \n\n d \t e\r\n f ",
    "1 23 456 ½ ² ٣٤٥ 一二 Ⅻ",
    "a_b-c.d@e.f http://x.y/z?q=1&r=2#t $5 50% C++ C#",
    "ｆｕｌｌ ｗｉｄｔｈ １２３ ㌔ ﷺ ﷻ",
    "क्षि ไทย ພາສາ ကို বাংলা தமிழ் ཱོ",
    "\U000e0041\U000e007f \U0010ffff \ue000 \uffff",
]


class Driver:
    """The C tokenizer with one tokenizer.json.

    Args:
        program: the built tokenizer_driver.c.
        path: the tokenizer.json.
        max_length: -1 cuts nothing.
    """

    def __init__(self, program: Path, path: Path, max_length: int = -1) -> None:
        command = [str(program), str(path), str(max_length)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __call__(self, text: str | bytes) -> tuple[list[int], list[int], int] | str:
        """Return ids, types and how many tokens were dropped, or the error."""
        data = text.encode() if isinstance(text, str) else text
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin and stdout and stderr
        try:
            stdin.write(b"%d\n%b" % (len(data), data))
            stdin.flush()
        except BrokenPipeError:
            pass
        line = stdout.readline().decode().rstrip("\n")
        if not line:
            raise AssertionError(f"exit code {self._process.wait()}: {stderr.read().decode(errors='replace')}")
        if line.startswith("error: "):
            return line
        said, types, dropped = line.split("|")
        ids = list(map(int, said.split()))
        return ids, list(map(int, types.split())) or [0] * len(ids), int(dropped)

    def close(self) -> None:
        """End it; what a sanitizer has found fails."""
        _, said = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, said.decode(errors="replace")

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._process.kill()
            self._process.communicate()


def refusal(program: Path, path: Path, max_length: int = -1) -> str:
    """Return what the C tokenizer says to a tokenizer.json that it does not take, which is one line."""
    command = [str(program), str(path), str(max_length)]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False)
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 2, f"exit code {done.returncode}: {said}"
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said.removeprefix("error: ").rstrip("\n")


def agree(driver: Driver, tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Check that ids and types are those of `tokenizers`, and return how many texts that were."""
    texts = list(texts)
    for text, wanted in zip(texts, tokenizer.encode_batch_fast(texts), strict=True):
        found = driver(text)
        if found[:2] != (wanted.ids, wanted.type_ids):
            raise AssertionError(f"{text!a}: found {found}, wanted {wanted.ids} {wanted.type_ids}")
    return len(texts)


def in_context(points: Sequence[int], together: int = 64) -> Iterator[str]:
    """Yield every code point between letters, many words to a text."""
    for start in range(0, len(points), together):
        yield " ".join(f"a{chr(point)}b" for point in points[start : start + together])


def telling_points() -> list[int]:
    """Code points of which a table may well be wrong: those at the ends of ranges, and those that change."""
    found = set(range(0x300))
    before = ""
    for point in POINTS:
        c = chr(point)
        kind = unicodedata.category(c)
        changes = c.lower() != c or (unicodedata.decomposition(c) and not 0xAC00 < point < 0xD7A3)
        if kind != before or changes or kind.startswith("M"):
            found |= {point - 1, point}
        before = kind
    return sorted(found & set(POINTS))


def random_marks(count: int) -> Iterator[str]:
    """Yield texts of letters, marks of all classes, jamo, composites and what composes in other ways."""
    chance = random.Random(0)
    marks = [c for c in map(chr, POINTS) if unicodedata.combining(c)]
    whole = [c for c in map(chr, POINTS) if unicodedata.normalize("NFKD", c) != c and not "가" <= c <= "힣"]
    jamo = [*map(chr, range(0x1100, 0x1200)), *"가각힣"]
    parts = [c for text in whole for c in unicodedata.normalize("NFD", text)]
    kinds = [marks, marks, parts, whole, jamo, list("aeAEο ")]
    for _ in range(count):
        yield "".join(chance.choice(chance.choice(kinds)) for _ in range(chance.randint(1, 12)))


def transparent(normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """A tokenizer whose ids are the bytes of the normalized text, and whose pieces each start with a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.pre_tokenizer = bytes_ if pre_tokenizer is None else pre_tokenizers.Sequence([pre_tokenizer, bytes_])
    return tokenizer


def byte_level(texts: Iterable[str], size: int = 3000) -> Tokenizer:
    """Train a tokenizer of RoBERTa's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return tokenizer


def word_piece(texts: Iterable[str], size: int = 3000) -> Tokenizer:
    """Train a tokenizer of the cased BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer
