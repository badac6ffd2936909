"""Texts that tokenizers disagree about, recorded so that an app in another language can be held to the same ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import FeedError
from ..runtime.feeds import FeedChecker
from ..runtime.tensors import MASK_ROLES, Case, TensorSpec
from ..runtime.text import TextEncoder

__all__ = ["LONG", "TEXTS", "text_feeds"]

# Escaped where an editor could compose, reorder or hide a character. None is newer than Unicode 8: what a newer one is
# depends on the tables of whoever asks.
TEXTS = (
    "The cat sat on the mat.",
    "a",
    "",
    "   ",
    "  leading, trailing and  double  spaces  ",
    "MiXeD cAsE, UPPER, lower; don't, WE'LL, it's 's",
    # composed, decomposed, marks in another order, alone and many
    "\u00c9migr\u00e9 na\u00efve CAF\u00c9 \u0141\u00f3d\u017a Ti\u1ebfng Vi\u1ec7t",
    "E\u0301migre\u0301 nai\u0308ve CAFE\u0301 Lo\u0301dz\u0301 Tie\u0302\u0301ng Vie\u0323\u0302t",
    "a\u0301\u0323 a\u0323\u0301 \u0301 x\u0308\u0308\u0308",
    # Turkish dotted I and dotless i, sharp s, letters that are more than one, Greek final sigma
    "\u0130stanbul \u0131\u011fd\u0131r ISPARTA i\u0307",
    "Stra\u00dfe STRASSE \u1e9e \u0149 \u01c4 \u01c5 \u01c6",
    "ΣΊΣΥΦΟΣ \u1f48δυσσεύς ς Σ",
    "Достопримечательность ёж \u0419 \u0438\u0306",
    # CJK without spaces; extension A and B, compatibility; kana and Hangul composed and decomposed; fullwidth
    "東京で食べる 大阪語ABC中文1。",
    "\U00020000\U00020bb7野家 \u3400 \uf900 \U0002f81a",
    "カタカナ \uff76\uff9e \u304b\u3099 한국어 \u1112\u1161\u11ab",
    "Ｆｕｌｌ ＷＩＤＴＨ １２３！ \ufb01 \u00bd \u2460 \u212b \u2126",
    # a family joined, a skin tone, a flag, a heart in colour, a keycap
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd "
    "\U0001f1e9\U0001f1ea \u2764\ufe0f 1\ufe0f\u20e3",
    # Arabic and Hebrew with marks, and with what turns directions
    "\u0645\u064f\u062d\u064e\u0645\u0651\u064e\u062f\u064c \ufdfa "
    "\u0627\u0644\u0633\u0651\u064e\u0644\u0627\u0645\u064f \u061f",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05dc\u05d9\u05db\u05dd abc \u202bxyz\u202c \u200f!",
    # Devanagari, with nukta both ways, and Thai
    "नमस्ते दुनिया \u0958 \u0915\u093c",
    "สวัสดีชาวโลก ท\u0e33",
    # spaces, what has no width, control characters
    # (not U+0085 and U+FEFF, which JavaScript's \s takes the other way round: Node and the page would refuse every
    # byte-level bundle by them)
    "tab\tnew\nline\r\nfeed\v\fnbsp\u00a0wide\u3000thin\u2009line\u2028end",
    "zero\u200bwidth\u200cnon\u200djoin\u2060mark soft\u00adhyphen \u180e",
    "bell\aone\x01unit\x1fdelete\x7fgone\ufffd private\ue000",
    # punctuation, symbols, numbers, code
    "!!!???... ,,;;:: --- ___ *** ### @@ [x] {y} (z) \"q\" 'r'",
    "\u201cquotes\u201d \u2018x\u2019 «» \u2014 \u2013 … 、。 \u00b7 ¿¡ €£$^`~|+=<> ° § → ∞",
    "3.14159 1,000,000 -1e-10 0x1F 12:30 \u0663\u0664\u0665 x² \u2167 2024-01-31",
    'def f(x: int) -> str: return f"{x!r}"  # ok && y != 0 <br/> http://a.b/c?d=e&f=%20',
    "name.surname@example.com #tag @user C:\\path\\file.txt snake_case camelCase x86_64",
    # words of 100 characters, the longest that WordPiece cuts up, of one more, and of more bytes than that
    "internationalization" * 5,
    "internationalization" * 5 + "s",
    "до" * 26,
)

LONG = " ".join(
    f"Sentence {i}: the quick brown fox jumps over {i * 37} lazy dogs, caf\u00e9 {chr(0x4E00 + i)}." for i in range(45)
)
"""More than 512 tokens, words or characters, and another end than beginning: a cut at the wrong side shows."""

_SPECIAL = 8  # a tokenizer can have hundreds of added tokens


def text_feeds(
    encoder: TextEncoder, inputs: Sequence[TensorSpec], max_length: int | None
) -> list[tuple[Case, dict[str, np.ndarray], tuple[str, ...]]]:
    """Tokenize hard texts for a model.

    Texts without any token are left out, and so are those whose ids the model does not have.

    Args:
        encoder: The tokenizer, which cuts and pads for the model.
        inputs: Of the model.
        max_length: Longest sequence, ``None`` without a limit.

    Returns:
        The cases ``texts`` (short ones in one batch, right padded) and ``text-long`` (one, cut if need be) with their
        feeds and texts; a case without any text is missing. Without a mask among the inputs, padding would count, and
        there is ``text-long`` alone; inputs that texts do not give have no cases.
    """
    check = FeedChecker(inputs, max_length)

    def runs(text: str) -> bool:
        try:
            check(encoder.feeds(encoder.encode([text])))
        except FeedError:
            return False
        return True

    groups = {"texts": [*TEXTS, *_literal(encoder.special_tokens)], "text-long": [LONG]}
    if not any(spec.role in MASK_ROLES for spec in inputs):
        del groups["texts"]
    cases = []
    for id_, wanted in groups.items():
        texts = tuple(text for text in wanted if runs(text))
        if texts:
            encodings = encoder.encode(texts)
            longest = max(map(len, encodings))
            pattern = "full" if min(map(len, encodings)) == longest else "right"
            cases.append((Case(id_, len(texts), longest, pattern), encoder.feeds(encodings), texts))
    return cases


def _literal(tokens: Sequence[str]) -> Iterator[str]:
    """Texts that hold special tokens as a user may type them: apart, glued to words, and in the other case.

    None holds the padding token: a model has not learned it, so its vectors say nothing about a precision.
    """
    some = [token for token in tokens if token and "\0" not in token][:_SPECIAL]
    if some:
        yield " ".join(some)
        yield "x" + "y".join(some) + "z"
        yield "".join(some).swapcase()
