"""The JavaScript core beside Python: the same tokens, manifests, files and verdicts, or an error that says why not."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tfx.errors import BundleError
from tfx.runtime.golden import load_golden
from tfx.runtime.manifest import Manifest
from tfx.runtime.parity import Tolerance, compare

from .bundles import save_tokenizer
from .javascript import evaluate
from .programs import Program

POINTS = [
    point
    for points in (range(1, 0x32400), range(0xE0000, 0xE1000), range(0x32400, 0x110000, 61))
    for point in points
    if not 0xD800 <= point < 0xE000
]
"""Every code point of the planes and blocks where characters are, and some of the empty and private ones."""

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HARD = [
    "",
    " ",
    "  leading and trailing  ",
    "ΟΔΟΣ ΣΑΣ Σ ΑΣ, ὈΔΥΣΣΕΎΣ",
    "İstanbul ıI ǅ ß ﬁ ẞ",
    "e\u0301\u0323 e\u0323\u0301 \u1e69 s\u0323\u0307 각 한국어 \u1100\u1161\u11a8",
    "𠀀𪜶丽 中文。日本",
    "don't won't I'LL 'S 's ''s 12345 1,234.5",
    "line\nbreak\r\nand\ttab\u00a0nbsp\u3000wide\u2028sep",
    "[CLS] [SEP] [MASK] [UNK] <s> </s><mask> <mask>  <mask>",
    "zero\u200bwidth\u200djoin\u00adsoft",
    "a" * 300,
    "🙂👩‍🚀🇩🇪 ☃️ ½ ² Ⅷ ٣",
    "x<y && z>=3; {a:b} 50%€£ __init__",
]


@pytest.fixture(scope="module")
def app(built: Callable[..., Program]) -> Program:
    return built("node")


# ---- tokens ----


def wordpiece(**options: Any) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        save_tokenizer(path, "wordpiece")
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.normalizer = normalizers.BertNormalizer(**options)
        tokenizer.save(str(path))

    return save


def normalized(*steps: normalizers.Normalizer) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        save_tokenizer(path, "wordpiece")
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(list(steps))
        tokenizer.save(str(path))

    return save


def byte_level(
    normalizer: normalizers.Normalizer | None = None, split: str | None = None, prefix: bool = False
) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
        tokenizer.pre_tokenizer = (
            bytes_
            if split is None
            else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), bytes_])
        )
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<s>", "<pad>", "</s>", AddedToken("<mask>", lstrip=True)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(
            [json.__doc__ or "", random.__doc__ or "", "über naïve 日本語 12345", *HARD], trainer
        )
        if split is None:
            tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        else:
            template = processors.TemplateProcessing(
                single="<s> $A:1 </s>:1", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 2)]
            )
            tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
        tokenizer.save(str(path))

    return save


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "bert-uncased": wordpiece(lowercase=True),
    "bert-cased": wordpiece(lowercase=False),
    "bert-plain": wordpiece(lowercase=False, clean_text=False, handle_chinese_chars=False, strip_accents=True),
    "bert-sequence": normalized(normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()),
    "bert-nfkc": normalized(normalizers.NFKC()),
    "roberta": byte_level(),
    "roberta-nfc": byte_level(normalizers.NFC(), prefix=True),
    "gpt4": byte_level(normalizers.NFC(), split=GPT4),
}

ENCODE = """
import { Tokenizer } from "@/node_modules/@huggingface/tokenizers/dist/tokenizers.mjs";
import { TextTokenizer } from "@/core/text.mjs";
const tokenizer = new TextTokenizer(fs.readFileSync(input.path), Tokenizer, input.length ?? null);
"""


def loaded(path: Path, length: int | None = None) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    if length is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(length, direction=(tokenizer.truncation or {}).get("direction", "right"))
    return tokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
def test_hard_texts_have_the_ids_of_python(name: str, app: Program, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    TOKENIZERS[name](path)
    texts = [*HARD, *(f"{one} {other}" for one in HARD for other in HARD)]
    code = f'{ENCODE}answer(await Promise.all(input.texts.map((text) => attempt(() => tokenizer.encode(text, "t")))));'
    found = evaluate(app, code, {"path": str(path), "texts": texts})
    wanted = loaded(path).encode_batch(texts)
    for text, each, encoding in zip(texts, found, wanted, strict=True):
        assert each.get("value") == {"ids": encoding.ids, "types": encoding.type_ids, "cut": 0}, text


@pytest.mark.parametrize("name", ["bert-uncased", pytest.param("gpt4", marks=pytest.mark.thorough)])
def test_every_character_is_tokenized_alike_or_refused_by_name(name: str, app: Program, tmp_path: Path):
    """Each between letters, alone, and behind an accent; many to a text, without those that are refused."""
    path = tmp_path / "tokenizer.json"
    TOKENIZERS[name](path)
    chunks = [POINTS[first : first + 48] for first in range(0, len(POINTS), 48)]
    code = """
    const textOf = (points) =>
      points.map((point) => String.fromCodePoint(point)).map((c) => `a${c}b ${c} e\\u0301${c}`).join(" ");
    const refused = new Set();
    const ids = input.chunks.map((chunk) => {
      for (let points = chunk; ; ) {
        try {
          return tokenizer.encode(textOf(points), "t").ids;
        } catch (error) {
          const point = parseInt(/^t: U\\+([0-9A-F]+) is not treated here/.exec(error.message)[1], 16);
          if (!points.includes(point)) throw error;
          refused.add(point);
          points = points.filter((each) => each !== point);
        }
      }
    });
    answer({ refused: [...refused], ids });
    """
    found = evaluate(app, ENCODE + code, {"path": str(path), "chunks": chunks}, timeout=580)
    refused = set(found["refused"])
    assert len(refused) < 1000
    assert not refused & {0x378, 0x3A3, 0x4E00, 0x20000, 0x1F642}
    kept = [[chr(point) for point in chunk if point not in refused] for chunk in chunks]
    texts = [" ".join(f"a{c}b {c} e\u0301{c}" for c in chunk) for chunk in kept]
    wanted = [encoding.ids for encoding in loaded(path).encode_batch(texts)]
    different = [text for text, one, other in zip(texts, found["ids"], wanted, strict=True) if one != other]
    assert not different


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("name", ["bert-uncased", "gpt4"])
def test_long_texts_are_cut_as_python_cuts_them(direction: str, name: str, app: Program, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    TOKENIZERS[name](path)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(9, direction=direction)
    tokenizer.save(str(path))
    texts = ["one two three four five six seven eight nine ten eleven", "short", ""]
    for length in (2, 3, 7):
        found = evaluate(
            app, ENCODE + 'answer(input.texts.map((text) => tokenizer.encode(text, "t")));',
            {"path": str(path), "texts": texts, "length": length},
        )  # fmt: skip
        whole = loaded(path).encode_batch(texts)
        for each, encoding, all_ in zip(found, loaded(path, length).encode_batch(texts), whole, strict=True):
            cut = len(all_.ids) - len(encoding.ids)
            assert each == {"ids": encoding.ids, "types": encoding.type_ids, "cut": cut}


def change_unigram(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}


UNSUPPORTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    'the model "Unigram"': change_unigram,
    'the normalizer "Precompiled"': lambda each: each.update(normalizer={"type": "Precompiled"}),
    'the normalizer "Strip"': lambda each: each.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Strip", "strip_left": True, "strip_right": True}]}
    ),
    'the pre-tokenizer "Whitespace"': lambda each: each.update(pre_tokenizer={"type": "Whitespace"}),
    "the pre-tokenizer null": lambda each: each.update(pre_tokenizer=None),
    'the split {"Regex"': lambda each: each.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "\\w+"}, "behavior": "Isolated", "invert": False}
    ),
    'the post-processor "Other"': lambda each: each.update(post_processor={"type": "Other"}),
    "is single_word": lambda each: each["added_tokens"][0].update(single_word=True),
    "unk_token": lambda each: each["model"].update(unk_token="[NONE]"),
    "has no model": lambda each: each.pop("model"),
}


def test_a_tokenizer_that_is_not_known_to_be_exact_is_an_error(app: Program, tmp_path: Path):
    save_tokenizer(tmp_path / "tokenizer.json", "wordpiece")
    sound = json.loads((tmp_path / "tokenizer.json").read_text())
    files = []
    for change in UNSUPPORTED.values():
        changed = copy.deepcopy(sound)
        change(changed)
        files.append(json.dumps(changed))
    code = """
    import { Tokenizer } from "@/node_modules/@huggingface/tokenizers/dist/tokenizers.mjs";
    import { TextTokenizer } from "@/core/text.mjs";
    const open = (text) => new TextTokenizer(new TextEncoder().encode(text), Tokenizer, null);
    answer(await Promise.all(input.map((text) => attempt(() => open(text)))));
    """
    found = evaluate(app, code, [*files, "not json", "[]"])
    for each, said in zip(found, [*UNSUPPORTED, "not JSON", "has no model"], strict=True):
        assert each["code"] == 2, each
        assert each["error"].startswith("tokenizer.json: ")
        assert said in each["error"]


# ---- manifests ----


def mutations(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in mutations(each, (*path, key)))]


def field_of(message: str) -> str:
    return message.split(" found ")[0].split(" missing")[0]


def test_manifests_are_accepted_and_refused_as_python_does(app: Program, tiny: Callable[..., Path]):
    sound = json.loads((tiny() / "tfx.json").read_text())
    sound["quantization"] = {"scheme": "x", "changed": 1, "kept": [{"where": "a", "reason": "b"}], "batch_variance": 0}
    sound["tuning"] = {
        "threads": 2, "spinning": False, "schedule": {"workers": 1, "threads": 2, "batch_tokens": 64}, "log": None,
    }  # fmt: skip
    values: list[Any] = [None, 0, -1, 1.5, "", "x", "a/b", [], {}, True, ["x"], {"x": 1}, 2**40]
    cases: list[Any] = [sound]
    for path in mutations(sound):
        if path and path[0] in ("refusals", "versions", "source") and len(path) > 2:
            continue  # anything goes there
        for value in values:
            changed = copy.deepcopy(sound)
            owner = changed
            for key in path[:-1]:
                owner = owner[key]
            if not path:
                changed = value
            else:
                owner[path[-1]] = value
            cases.append(changed)
        if path and isinstance(path[-1], str):
            changed = copy.deepcopy(sound)
            owner = changed
            for key in path[:-1]:
                owner = owner[key]
            del owner[path[-1]]
            cases.append(changed)
    code = """
    import { parseManifest } from "@/core/manifest.mjs";
    answer(input.map((text) => {
      try { parseManifest(new TextEncoder().encode(text)); return null; }
      catch (error) { if (error.exitCode !== 2) throw error; return error.message; }
    }));
    """
    texts = [json.dumps(case) for case in cases]
    found = evaluate(app, code, texts)
    for case, text, said in zip(cases, texts, found, strict=True):
        wanted = None
        try:
            manifest = Manifest.parse(text)
            # What opening a bundle asks for beyond the manifest's own fields.
            names = [manifest.model["file"], *([manifest.tokenizer["file"]] if manifest.tokenizer else [])]
            wanted = next((f"{name} is not among the files" for name in names if name not in manifest.files), None)
        except BundleError as error:
            wanted = str(error)
        assert (said is None) == (wanted is None), (said, wanted, case)
        if said is not None and wanted is not None:
            assert "\n" not in said
            if "not among the files" not in said and "JSON" not in said:
                assert field_of(said) == field_of(wanted)


# ---- golden ----

GOLDEN = 'import { readGolden } from "@/core/golden.mjs";\n'


def test_a_golden_is_read_as_python_reads_it(app: Program, tiny: Callable[..., Path]):
    path = tiny() / "golden.safetensors"
    found = evaluate(app, GOLDEN + "answer(readGolden(fs.readFileSync(input)));", str(path))
    wanted = load_golden(path)
    assert [each["id"] for each in found] == [case.id for case in wanted]
    for each, case in zip(found, wanted, strict=True):
        assert (each["batch"], each["sequence"], each["pattern"]) == (case.batch, case.sequence, case.pattern)
        assert tuple(each["texts"]) == case.texts
        for kind, arrays in (("inputs", case.inputs), ("outputs", case.outputs)):
            assert set(each[kind]) == set(arrays)
            for name, values in arrays.items():
                assert tuple(each[kind][name]["shape"]) == values.shape
                assert each[kind][name]["dtype"] == values.dtype.name
                np.testing.assert_array_equal(
                    np.array(each[kind][name]["data"], values.dtype).reshape(values.shape), values
                )


def test_a_golden_of_another_bundle_or_with_odd_names_is_refused(app: Program, tmp_path: Path):
    ids = {"name": "ids", "dtype": "int64", "shape": ["batch", "sequence"], "role": "token_ids", "limit": None}
    out = {"name": "__proto__", "dtype": "float32", "shape": ["batch", 2]}
    manifest = {"inputs": [ids, {**ids, "name": "more"}], "outputs": [out]}

    def golden(shapes: dict[str, list[int]] | None = None, batch: int = 1, odd: str = "I64") -> str:
        header: dict[str, Any] = {
            "__metadata__": {"cases": json.dumps([{"id": "a", "batch": batch, "sequence": 2, "pattern": "full"}])}
        }
        end = 0
        usual = {"inputs/ids": [1, 2], "inputs/more": [1, 2], "outputs/__proto__": [1, 2]}
        for name, shape in (usual | (shapes or {})).items():
            kind, size = ("F32", 4) if name.startswith("outputs") else (odd, 8)
            start, end = end, end + size * int(np.prod(shape))
            header[f"a/{name}"] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
        return str(path)

    paths = [
        golden(),
        golden(batch=2),
        golden({"inputs/more": [1, 3]}),
        golden({"inputs/ids": [2]}),
        golden({"inputs/z": [1, 2]}),
        golden({"outputs/z": [1, 2]}),
        golden(odd="constructor"),
    ]
    code = """
    const read = (path) => Object.keys(readGolden(fs.readFileSync(path), input.manifest)[0].outputs);
    const found = [];
    for (const path of input.paths) found.push(await attempt(() => read(path)));
    answer(found);
    """
    sound, *wrong = evaluate(app, GOLDEN + code, {"manifest": manifest, "paths": paths})
    assert sound == {"value": ["__proto__"]}
    for found, words in zip(
        wrong,
        (
            "case a: ids: found shape (1, 2), wanted (2, sequence)",
            "case a: more: found shape (1, 3), wanted (1, 2)",
            "case a: ids: found shape (2), wanted (1, sequence)",
            "case a records z, which is no input of the bundle",
            "case a records z, which is no output of the bundle",
            'found "constructor"',
        ),
        strict=True,
    ):
        assert found["code"] == 2 and words in found["error"], found


def test_a_very_large_batch_is_padded(app: Program):
    code = """
    import { pad } from "@/core/feeds.mjs";
    const inputs = [{ name: "ids", dtype: "int64", role: "token_ids" }];
    answer(pad(new Array(300_000).fill({ ids: [1, 2], types: [0, 0] }), { inputs, pad_id: 0 }).ids.shape);
    """
    assert evaluate(app, code) == [300_000, 2]


def test_damaged_goldens_are_errors_and_nothing_worse(app: Program, tiny: Callable[..., Path]):
    content = (tiny() / "golden.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])

    def with_header(change: Callable[[dict[str, Any]], Any]) -> list[int]:
        changed = copy.deepcopy(header)
        change(changed)
        text = json.dumps(changed).encode()
        return list(struct.pack("<Q", len(text)) + text)

    name = next(key for key in header if key != "__metadata__")
    damaged = [[], list(content[:7]), list(struct.pack("<Q", 2**63)), list(struct.pack("<Q", 10**7) + b"{}")]
    for change in (
        lambda all_: all_.pop("__metadata__"),
        lambda all_: all_["__metadata__"].update(cases="[]"),
        lambda all_: all_["__metadata__"].update(cases="{"),
        lambda all_: all_["__metadata__"].update(cases='[{"id": "a/b", "batch": 1, "sequence": 1, "pattern": "x"}]'),
        lambda all_: all_[name].update(dtype="C64"),
        lambda all_: all_[name].update(shape=[2**52, 2**52]),
        lambda all_: all_[name].update(shape=[-1]),
        lambda all_: all_[name].update(data_offsets=[0]),
        lambda all_: all_[name].update(data_offsets=[2**52, 2**53]),
        lambda all_: all_[name].update(data_offsets=[8, 0]),
        lambda all_: all_.update(extra={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        lambda all_: all_.update(list=[1]),
    ):
        damaged.append(with_header(change))
    rng = random.Random(0)
    small = content[: 8 + size]
    for _ in range(300):
        mutated = bytearray(small)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        damaged.append(list(mutated))
    code = GOLDEN + """
    const data = fs.readFileSync(input.path).subarray(input.start);
    const read = (bytes, more) => readGolden(Buffer.concat([Buffer.from(bytes), more]));
    const open = (bytes) => [data, Buffer.alloc(0)].map((more) => attempt(() => read(bytes, more).length));
    answer(await Promise.all(input.damaged.map((bytes) => Promise.all(open(bytes)))));
    """  # fmt: skip
    path = str(tiny() / "golden.safetensors")
    found = evaluate(app, code, {"path": path, "start": 8 + size, "damaged": damaged})
    for i, (whole, alone) in enumerate(found):
        for each in (whole, alone):
            assert "value" in each or (each["code"] == 2 and each["error"].startswith("golden.safetensors")), each
        assert "error" in alone  # there are no numbers behind the header
        if i < 16:
            assert "error" in whole, i


# ---- the model's external data ----


def test_external_data_is_found_without_onnx_and_damage_is_an_error(app: Program, tiny: Callable[..., Path]):
    from tfx.runtime.external import external_data

    folder = tiny(external=True)
    content = (folder / "model.onnx").read_bytes()
    rng = random.Random(0)
    damaged = [content, content[: len(content) // 2], b"", b"\xff" * 50]
    for _ in range(200):
        mutated = bytearray(content)
        for _ in range(rng.randint(1, 5)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        damaged.append(bytes(mutated))
    code = """
    import { bytesOf, externalData } from "@/core/external.mjs";
    const read = (text) => externalData(bytesOf(Buffer.from(text, "base64")), "model.onnx");
    answer(await Promise.all(input.map((text) => attempt(() => read(text)))));
    """
    import base64

    found = evaluate(app, code, [base64.b64encode(each).decode() for each in damaged])
    for each in found:
        assert "value" in each or each["error"].startswith("model.onnx: not an ONNX file"), each
    wanted = [{"location": each.location, "end": each.end} for each in external_data(folder / "model.onnx")]
    assert found[0]["value"] == wanted
    assert all("error" in each for each in found[2:4])


# ---- numbers ----


def test_verdicts_are_those_of_python(app: Program):
    rng = np.random.default_rng(0)
    calls: list[dict[str, Any]] = []
    wanted = []
    axes = {2: ["batch", 8], 3: ["batch", "sequence", 8]}
    tolerance = Tolerance(max_abs=0.05, min_cosine=0.9999, min_token_cosine=0.99)
    for i in range(60):
        shape = (3, 8) if i % 3 == 0 else (3, 5, 8)
        expected = rng.standard_normal(shape).astype(np.float32)
        actual = (expected + rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 0)).astype(np.float32)
        kinds = {3: np.nan, 5: np.inf, 7: -np.inf}
        if i % 20 in kinds:
            (actual if i % 2 else expected).reshape(-1)[-1] = kinds[i % 20]
        if i % 20 == 9:
            actual[...] = 0.5
        if i % 20 == 11:
            actual = expected.copy()
        if i % 20 == 13:
            actual, expected = np.zeros_like(actual), expected
        if i % 20 == 15:
            actual = actual[:2]
        if i % 20 == 17:
            actual[0], expected[0] = 0, 0
        mask = (rng.random((3, 5)) < 0.6).astype(np.int64)
        if i % 20 == 19:
            mask[...] = 0
        spec = axes[len(shape)]
        comparison = compare(actual, expected, mask, spec)
        wanted.append((comparison, tolerance.allows(comparison)))
        calls.append(
            {
                "actual": {"shape": actual.shape, "data": [repr(float(value)) for value in actual.reshape(-1)]},
                "expected": {"shape": expected.shape, "data": [repr(float(value)) for value in expected.reshape(-1)]},
                "mask": {"shape": mask.shape, "data": mask.reshape(-1).tolist()},
                "axes": spec,
            }
        )
    code = """
    import { allows, attendedPositions, compare } from "@/core/parity.mjs";
    const parse = (text) => ({ nan: NaN, inf: Infinity, "-inf": -Infinity })[text] ?? Number(text);
    const tensor = ({ shape, data }) => ({ dtype: "float32", shape, data: Float32Array.from(data, parse) });
    answer(input.calls.map(({ actual, expected, mask, axes }) => {
      const attended = attendedPositions([{ name: "m", role: "attention_mask" }], { m: mask });
      const found = compare(tensor(actual), tensor(expected), attended, axes);
      return { ...found, allowed: allows(input.tolerance, found) };
    }));
    """
    found = evaluate(app, code, {"calls": calls, "tolerance": tolerance.to_json()})
    assert {each["allowed"] for each in found} == {True, False}
    for each, (comparison, allowed) in zip(found, wanted, strict=True):
        assert (each["allowed"], each["perToken"]) == (allowed, comparison.per_token)
        assert (each["problem"] is None) == (comparison.problem is None)
        if comparison.problem is None:
            assert each["maxAbs"] == pytest.approx(comparison.max_abs, rel=1e-12)
            assert each["minCosine"] == pytest.approx(comparison.min_cosine, abs=1e-12)
        else:
            assert each["problem"].split(" (")[0] == comparison.problem.split(" (")[0]
            assert each["maxAbs"] is None


def test_half_floats_are_those_of_numpy(app: Program):
    code = """
    import { fromFloat16, toFloat16 } from "@/core/tensors.mjs";
    const bits = Uint16Array.from({ length: 65536 }, (_, i) => i);
    const values = fromFloat16(bits);
    const back = Array.from(values, (value) => toFloat16(value));
    const lost = [0.1, 65520, 1e-9, 2 ** -25, 1.0009765625 + 2 ** -12].map(toFloat16);
    answer({ values: Array.from(new Uint32Array(values.buffer)), back, lost });
    """
    found = evaluate(app, code)
    wanted = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = np.array(found["values"], np.uint32).view(np.float32)
    np.testing.assert_array_equal(values, wanted)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.array(found["back"])[numbers], np.arange(65536)[numbers])
    assert found["lost"] == [None] * 5


def test_a_file_beyond_one_buffer_is_said(app: Program):
    code = """
    import { Bundle, checkFiles } from "@/core/bundle.mjs";
    const files = { "model.onnx": { bytes: 3 * 2 ** 30, sha256: "0".repeat(64) } };
    const bundle = new Bundle({ files, model: { file: "model.onnx" } }, async () => null);
    answer([await attempt(() => bundle.file("model.onnx")), await attempt(() => bundle.file("other"))]);
    """
    large, other = evaluate(app, code)
    assert large == {
        "error": f"model.onnx: found {3 << 30} bytes, wanted at most {(1 << 31) - 1} in one buffer",
        "code": 3,
    }
    assert other == {"error": 'tfx.json: "other" is not among the files', "code": 2}


def test_a_host_without_a_hash_of_its_own_checks_files_in_memory(app: Program, tiny: Callable[..., Path]):
    """As a page does: every file is read and checked, and one that is missing or altered is the first problem."""
    code = """
    import { checkFiles, readBundle } from "@/core/bundle.mjs";
    const folder = input + "/";
    let change = () => null;
    const read = async (name) => {
      const changed = change(name);
      return changed === null ? new Uint8Array(fs.readFileSync(folder + name)) : changed();
    };
    const states = [];
    const bundle = await readBundle(read, { onProgress: (state) => states.push(state) });
    const found = [await checkFiles(bundle)];
    for (const changed of [() => null, () => new Uint8Array(3), () => { throw new Error("no network"); }]) {
      change = (name) => (name === "tokenizer.json" ? changed : null);
      found.push(await checkFiles(await readBundle(read, { verify: false })));
      found.push(await attempt(() => readBundle(read)));
    }
    change = () => () => null;
    found.push(await attempt(() => readBundle(read)));
    answer({ states, found, files: Object.keys(bundle.manifest.files) });
    """  # fmt: skip
    answer = evaluate(app, code, str(tiny()))
    states, found, files = answer["states"], answer["found"], answer["files"]
    assert states[-1]["done"] == states[-1]["total"] > 0
    assert found[0] == {"checked": len(files), "problem": None}
    said = ["found nothing", "found 3 bytes", "no network"]
    for words, (checked, opened) in zip(said, zip(found[1:-1:2], found[2:-1:2], strict=True), strict=True):
        assert checked["problem"].startswith("tokenizer.json: ")
        assert words in checked["problem"]
        assert checked["checked"] == files.index("tokenizer.json")
        assert opened == {"error": checked["problem"], "code": 2}
    assert found[-1] == {"error": "not a bundle: it has no tfx.json", "code": 2}
