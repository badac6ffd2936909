"""The Node app: vectors and ids of Python, its command line, its library, and what it says when something is wrong."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfx.runtime.bundle import Bundle
from tfx.runtime.session import Session
from tfx.runtime.text import text_encoder

from .bundles import planted, reseal
from .javascript import evaluate
from .programs import Program

TEXTS = [
    "A first text",
    "",
    "short",
    "a text that is a good deal longer than the others, and goes on, and on, and on",
    "naïve café ÅNGSTRÖM İstanbul ΟΔΟΣ Σας",
    "日本語 中文 𠀀𪜶 한국어",
    "🙂 👩‍🚀 🇩🇪 tab\tand\u00a0space\u2003wide",
    "[MASK] <mask> [CLS]</s>",
    "שלום مرحبا e\u0301\u0323",
    "x" * 120,
]
"""Unequal lengths, and what tokenizers stumble over."""

BUNDLES: dict[str, dict[str, Any]] = {
    "fused": {},
    "portable": {"target": "portable"},
    "padded": {"layout": "padded"},
    "external": {"external": True},
    "bpe": {"tokenizer": "bpe"},
    "int8": {"precision": "int8"},
}


@pytest.fixture(scope="module")
def app(built: Callable[..., Program]) -> Program:
    return built("node")


@pytest.fixture(scope="module")
def sound(tiny: Callable[..., Path]) -> Path:
    return tiny()


def vectors_of(bundle: Path) -> np.ndarray:
    """Python's vectors of the texts."""
    vectors = Session(bundle).encode(TEXTS)
    assert isinstance(vectors, np.ndarray)
    return vectors


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


# ---- the same numbers ----


@pytest.mark.parametrize("name", BUNDLES)
def test_vectors_and_ids_are_those_of_python(name: str, app: Program, tiny: Callable[..., Path]):
    bundle = tiny(**BUNDLES[name])
    vectors = np.array(app.answers(TEXTS, bundle=bundle), np.float32)
    wanted = vectors_of(bundle)
    if name == "int8":
        # Rounding to 8 bits makes other numbers of an activation at a boundary.
        assert cosines(vectors, wanted).min() > 0.99
    else:
        np.testing.assert_allclose(vectors, wanted, rtol=0, atol=1e-5)
    encodings = text_encoder(Bundle.open(bundle)).encode(TEXTS)
    tokens = app.answers(TEXTS, "--tokens", bundle=bundle)
    assert tokens == [{"ids": list(each.ids), "types": list(each.types)} for each in encodings]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_minilm(precision: str, app: Program, minilm: Callable[..., Path]):
    bundle = minilm(precision)
    code, report = app.self_check(bundle)
    assert (code, report["problem"]) == (0, None)
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert stages["tokens"]["checked"] >= 18
    assert stages["vectors"]["min_cosine"] > (0.999999 if precision == "fp32" else 0.99)
    if precision == "fp32":
        assert stages["vectors"]["max_abs"] < 1e-5
        vectors = np.array(app.answers(TEXTS, bundle=bundle), np.float32)
        np.testing.assert_allclose(vectors, vectors_of(bundle), rtol=0, atol=1e-5)
    else:
        assert report["batch_variance"] <= report["promised_batch_variance"]


def test_the_report(app: Program, sound: Path):
    code, report = app.self_check(sound)
    assert code == 0
    assert list(report) == [
        *("app", "passed", "stage", "problem", "runtime", "library", "provider", "precision", "target", "layout"),
        *("max_abs", "min_cosine", "stages", "batch_variance", "promised_batch_variance"),
    ]
    assert (report["app"], report["provider"], report["precision"], report["layout"]) == (
        "node",
        "cpu",
        "fp32",
        "ragged",
    )
    assert report["runtime"] == "onnxruntime 1.30.0"
    assert Path(report["library"]).is_file()
    assert report["stages"][0] == {"stage": "files", "passed": True, "checked": len(Bundle.open(sound).manifest.files)}
    assert 0 < report["max_abs"] < 1e-4
    assert 0 <= report["batch_variance"] < 1e-5
    said = app.run("--self-check", bundle=sound)
    assert said.returncode == 0
    lines = said.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:5]] == [[each["stage"], "passed"] for each in report["stages"]]
    assert lines[5].startswith("self-check passed: fp32, max abs ")


def test_without_pooling_every_output_is_compared_and_raw_is_asked_for(app: Program, tiny: Callable[..., Path]):
    bundle = tiny(pooling="none")
    code, report = app.self_check(bundle)
    assert (code, report["problem"]) == (0, None)
    assert report["stages"][4]["checked"] > 0
    done = app.run("a text", bundle=bundle)
    assert done.returncode == 2
    assert "--raw" in done.stderr
    rows = app.answers(TEXTS[:3], "--raw", bundle=bundle)
    lengths = [len(each["ids"]) for each in app.answers(TEXTS[:3], "--tokens", bundle=bundle)]
    wanted = Session(bundle).encode(TEXTS[:3])
    assert isinstance(wanted, dict)
    for row, length, expected in zip(rows, lengths, wanted["last_hidden_state"], strict=True):
        np.testing.assert_allclose(np.array(row["last_hidden_state"]), expected[:length], rtol=0, atol=1e-5)


def test_a_manifest_says_nothing_to_the_terminal(app: Program, sound: Path, tmp_path: Path):
    words = "\x1b[31m\n{}"
    bundle = planted(sound, tmp_path / "b", lambda folder: reseal(folder, precision=words), seal=False)
    done = app.run("--self-check", bundle=bundle)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 6)
    assert "\x1b" not in done.stdout + done.stderr
    assert app.self_check(bundle)[1]["precision"] == words


def test_a_bundle_without_tokenizer_takes_arrays(app: Program, tiny: Callable[..., Path]):
    bundle = tiny(tokenizer=None)
    code, report = app.self_check(bundle)
    assert (code, [stage.get("checked") for stage in report["stages"]][2::2]) == (0, [0, 0])
    done = app.run("a text", bundle=bundle)
    assert (done.returncode, done.stdout) == (2, "")
    assert "tokenizer" in done.stderr


# ---- the library ----


OPEN = 'import { open, selfCheck, TfxError, EXIT } from "@/index.mjs";\nconst encoder = await open(input.bundle);\n'


def test_the_library_is_used_from_another_folder(app: Program, sound: Path):
    found = evaluate(
        app,
        OPEN
        + """
        const vectors = await encoder.embed(input.texts);
        const alone = [];
        for (const text of input.texts) alone.push((await encoder.embed([text]))[0]);
        const small = await encoder.embed(input.texts, { batchSize: 3 });
        const told = [];
        await encoder.embed(input.texts, { batchSize: 4, onProgress: (done, total) => told.push([done, total]) });
        const { report, exitCode, lines } = await selfCheck(input.bundle, { threads: 1 });
        const kinds = vectors.map((vector) => vector.constructor.name);
        await encoder.dispose();
        const gone = await attempt(() => encoder.embed(["a"]));
        const max = encoder.manifest.max_length;
        answer({ vectors, alone, small, told, report, exitCode, lines, kinds, gone, EXIT, max });
        """,
        {"bundle": str(sound), "texts": TEXTS},
    )
    wanted = vectors_of(sound)
    for key in ("vectors", "alone", "small"):
        np.testing.assert_allclose(np.array(found[key]), wanted, rtol=0, atol=1e-5)
    assert set(found["kinds"]) == {"Float32Array"}
    assert found["told"] == [[4, 10], [8, 10], [10, 10]]
    assert (found["report"]["passed"], found["exitCode"], len(found["lines"])) == (True, 0, 6)
    assert found["EXIT"] == {"done": 0, "check": 1, "input": 2, "machine": 3}
    assert found["gone"] == {"error": "the encoder was disposed of", "code": 2}
    assert found["max"] == 64


def test_an_array_that_is_written_to_again_changes_no_call_that_waits(app: Program, sound: Path):
    found = evaluate(
        app,
        OPEN
        + """
        const data = BigInt64Array.from([2n, 7n, 3n]);
        const feeds = { input_ids: { data, shape: [1, 3] } };
        const alone = await encoder.run(feeds, ["sentence_embedding"]);
        const first = encoder.run(feeds, ["sentence_embedding"]);
        const waits = encoder.run(feeds, ["sentence_embedding"]);
        data[1] = 9n;
        const other = await encoder.run(feeds, ["sentence_embedding"]);
        answer([alone, await first, await waits, other].map((each) => each.sentence_embedding.data));
        """,
        {"bundle": str(sound)},
    )
    alone, first, waits, other = np.array(found)
    np.testing.assert_array_equal(first, alone)
    np.testing.assert_array_equal(waits, alone)
    assert np.abs(other - alone).max() > 1e-3


def test_outputs_that_are_asked_for_wrongly(app: Program, sound: Path):
    found = evaluate(
        app,
        OPEN
        + """
        const feeds = { input_ids: [[2, 7, 3]] };
        const found = [];
        for (const outputs of ["sentence_embedding", [], ["nothing"], ["sentence_embedding", "sentence_embedding"]]) {
          found.push(await attempt(async () => Object.keys(await encoder.run(feeds, outputs))));
        }
        await encoder.dispose();
        found.push(await attempt(() => encoder.run({ input_ids: { data: [], shape: [0, 3] } })));
        answer(found);
        """,
        {"bundle": str(sound)},
    )
    for each in found[:3]:
        assert each["code"] == 2 and each["error"].startswith("outputs: found "), each
    assert found[3] == {"value": ["sentence_embedding"]}
    assert found[4] == {"error": "the encoder was disposed of", "code": 2}


def test_calls_at_the_same_time(app: Program, sound: Path):
    found = evaluate(
        app,
        OPEN
        + """
        const all = await Promise.all(input.texts.map((text) => encoder.embed([text])));
        answer(all.map(([vector]) => vector));
        """,
        {"bundle": str(sound), "texts": TEXTS},
    )
    np.testing.assert_allclose(np.array(found), vectors_of(sound), rtol=0, atol=1e-5)


def test_texts_that_are_none(app: Program, sound: Path):
    found = evaluate(
        app,
        OPEN
        + """
        const wrong = [[], "a text", ["a", 3], ["a", "\\ud800"], [null], ["a", "b\\u1acf"]];
        answer(await Promise.all(wrong.map((texts) => attempt(() => encoder.embed(texts)))));
        """,
        {"bundle": str(sound)},
    )
    assert all(each["code"] == 2 for each in found)
    words = ["empty", "an array of strings", "texts[1]: found 3", "texts[1]: no valid Unicode", "texts[0]: found null"]
    for each, word in zip(found, [*words, "texts[1]: U+1ACF"], strict=True):
        assert word in each["error"]


def test_integers_are_cast_where_nothing_is_lost(app: Program, sound: Path):
    found = evaluate(
        app,
        OPEN
        + """
        const ids = [[2, 7, 9, 3], [2, 8, 3, 0]];
        const mask = [[1, 1, 1, 1], [1, 1, 1, 0]];
        const shape = [2, 4];
        const forms = {
          lists: [ids, mask],
          int32: [Int32Array.from(ids.flat()), Int32Array.from(mask.flat())],
          int64: [BigInt64Array.from(ids.flat(), BigInt), BigInt64Array.from(mask.flat(), BigInt)],
          mixed: [ids.flat().map(BigInt), mask.flat().map(Boolean)],
          bytes: [Uint16Array.from(ids.flat()), Uint8Array.from(mask.flat())],
        };
        const outputs = {};
        for (const [name, [one, other]] of Object.entries(forms)) {
          const feed = (data) => (Array.isArray(data[0]) ? data : { data, shape });
          const found = await encoder.run({ input_ids: feed(one), attention_mask: feed(other) });
          outputs[name] = found.sentence_embedding;
        }
        const empty = await encoder.run({ input_ids: { data: [], shape: [0, 4] } });
        answer({ outputs, empty: empty.sentence_embedding });
        """,
        {"bundle": str(sound)},
    )
    feeds = {"input_ids": [[2, 7, 9, 3], [2, 8, 3, 0]], "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]]}
    wanted = Session(sound).run(feeds)["sentence_embedding"]
    for output in found["outputs"].values():
        assert (output["dtype"], output["shape"]) == ("float32", [2, 64])
        np.testing.assert_allclose(np.array(output["data"]).reshape(2, 64), wanted, rtol=0, atol=1e-5)
    assert found["empty"] == {"dtype": "float32", "shape": [0, 64], "data": []}


WRONG_FEEDS = {
    "{ input_ids: { data: Float32Array.of(2, 3), shape: [1, 2] } }": "input_ids: found float32, wanted int64",
    "{ input_ids: [[2, 3.5]] }": "input_ids: found 3.5, wanted int64",
    "{ input_ids: [[2, 2 ** 53]] }": "input_ids: found 9007199254740992, wanted int64",
    "{ input_ids: [[2, NaN]] }": "input_ids: found null, wanted int64",
    "{ input_ids: [[2, '3']] }": 'input_ids: found "3", wanted int64',
    "{ input_ids: [[2, 2n ** 64n]] }": "wanted int64 values of -9223372036854775808 to 9223372036854775807",
    "{ input_ids: [[2, 400]] }": "input_ids: found 400, wanted values of 0 to 399",
    "{ input_ids: [[-1, 3]] }": "input_ids: found -1, wanted values of 0 to 399",
    "{ input_ids: [[2, 5, 3], [2, 3]] }": "input_ids: rows differ in length",
    "{ input_ids: [2, 3] }": "input_ids: found shape (2), wanted (batch, sequence)",
    "{ input_ids: { data: [2, 3], shape: [1, 3] } }": "input_ids: found 2 values, wanted 3",
    "{ input_ids: [[2, 3]], attention_mask: [[1, 1], [1, 1]] }": "found batch 2, wanted 1 as in input_ids",
    "{ input_ids: [[2, 3]], attention_mask: [[1, 2]] }": "attention_mask: found 2, wanted 0 or 1",
    "{ input_ids: [[2, 3, 0]] }": "attention_mask: missing, and input_ids has rows that begin or end with the",
    "{ attention_mask: [[1, 1]] }": "input_ids: missing",
    "{ input_ids: [[]] }": "input_ids: found sequence length 0",
    "{ input_ids: [Array(65).fill(2)] }": "input_ids: found sequence length 65, wanted at most 64",
    "{ ids: [[2, 3]] }": 'feeds: found "ids", wanted only input_ids',
    "[[2, 3]]": "feeds: found [[2,3]], wanted arrays by input name",
    "null": "feeds: found null",
}


def test_feeds_that_are_wrong_are_named(app: Program, sound: Path):
    calls = ", ".join(f"() => encoder.run({feeds})" for feeds in WRONG_FEEDS)
    code = f"{OPEN}const found = []; for (const call of [{calls}]) found.push(await attempt(call)); answer(found);"
    for found, said in zip(evaluate(app, code, {"bundle": str(sound)}), WRONG_FEEDS.values(), strict=True):
        assert found["code"] == 2, found
        assert said in found["error"]


def test_types_hold_for_a_strict_user(app: Program, tmp_path: Path):
    """What a user of TypeScript writes is checked, and the types are those of what is exported."""
    shutil.copytree(app.folder, tmp_path / "app", ignore=shutil.ignore_patterns("bundle", "node_modules"))
    (tmp_path / "use.mts").write_text(
        'import { open, selfCheck, TfxError, type Encoder, type Report, type Tensor } from "./app/index.mjs";\n'
        'const encoder: Encoder = await open("folder", { threads: 2 });\n'
        "const options = { batchSize: 2, onCut: (i: number, cut: number) => console.log(i + cut) };\n"
        "const vectors: Float32Array[] = await encoder.embed([encoder.runtime], options);\n"
        "const feeds = { a: [[1, 2n]], b: { data: vectors[0], shape: [1] } };\n"
        "const outputs: Record<string, Tensor> = await encoder.run(feeds);\n"
        "const report: Report = (await selfCheck()).report;\n"
        "export const lost: number = new TfxError(report.stages[0].stage, 2).exitCode + outputs.a.data.length;\n"
        "// @ts-expect-error texts are an array\n"
        'await encoder.embed("a text");\n'
        "// @ts-expect-error a typing mistake\n"
        "await open(undefined, { thread: 2 });\n"
    )
    settings = {
        "compilerOptions": {"strict": True, "noEmit": True, "module": "nodenext", "target": "es2022"},
        "files": ["use.mts"],
    }
    (tmp_path / "tsconfig.json").write_text(json.dumps(settings))
    assert app.modules is not None
    tsc = app.modules / "typescript" / "bin" / "tsc"
    done = subprocess.run(
        [str(app.node), str(tsc), "--project", str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    names = evaluate(app, 'import * as all from "@/index.mjs"; answer(Object.keys(all));')
    typed = (app.folder / "index.d.mts").read_text()
    assert names
    for name in names:
        assert any(f"export declare {kind} {name}" in typed for kind in ("const", "class", "function")), name


# ---- the command line ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "found no text"),
        (["--bogus"], "--bogus"),
        (["--threads", "0", "a"], "--threads"),
        (["--threads", "two", "a"], "--threads"),
        (["--jsonl", "a"], "--jsonl"),
        (["--json", "a"], "--self-check"),
        (["--tokens", "--raw", "a"], "--raw"),
        (["--self-check", "a"], "takes no texts"),
        (["--bundle", "/no/such/folder", "a"], "/no/such/folder"),
        (["fine", "x\u1acf"], "text 2: U+1ACF"),
    ],
)
def test_wrong_calls_are_one_line_and_code_2(arguments: list[str], said: str, app: Program):
    done = app.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_help_and_version(app: Program):
    for option, said in (("--help", "--self-check"), ("--version", "onnxruntime-node 1.30.0")):
        done = app.run(option)
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout


def test_arguments_are_answered_in_order_and_floats_are_exact(app: Program, sound: Path):
    done = app.run("--threads", "1", "--", "-dash", *TEXTS, bundle=sound)
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 1 + len(TEXTS)
    again = app.run("--raw", "--threads", "1", "--", "-dash", *TEXTS, bundle=sound)
    exact = [json.loads(line)["sentence_embedding"] for line in again.stdout.splitlines()]
    assert lines == exact
    as_float32 = [[float(np.float32(value)) for value in line] for line in lines]
    assert [[float(f"{value:.9g}") for value in line] for line in as_float32] == lines


def test_a_text_that_is_too_long_is_cut_and_that_is_said(app: Program, sound: Path):
    done = app.run("--tokens", "word " * 100, bundle=sound)
    assert done.returncode == 0
    ids = json.loads(done.stdout)["ids"]
    assert ids == list(text_encoder(Bundle.open(sound)).encode(["word " * 100])[0].ids)
    assert len(ids) == 64
    assert "note: text 1:" in done.stderr
    assert "cut off" in done.stderr


def test_lines_are_answered_while_more_may_come(app: Program, sound: Path):
    command = [*app.command, "--bundle", str(sound), "--tokens", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in ("one", "", "and three"):
            process.stdin.write(text + "\n")
            process.stdin.flush()
            assert len(json.loads(process.stdout.readline())["ids"]) >= 2
        process.stdin.write("no end of line")
        process.stdin.close()
        assert len(process.stdout.readlines()) == 1
        assert process.wait(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_reader_that_is_slow_or_gone(app: Program, sound: Path):
    """Nothing is read ahead beyond what the pipes hold, and a reader that leaves is no error."""
    command = [*app.command, "--bundle", str(sound), "--raw", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stdin.fileno(), False)
        assert process.stdin.write(b"a text\n") == 7
        process.stdin.flush()
        assert process.stdout.readline()
        line, sent = b"words " * 50 + b"\n", 0
        for _ in range(200):  # far more than fits into two pipes and Node's own buffers
            try:
                sent += os.write(process.stdin.fileno(), line * 200)
            except BlockingIOError:
                break
            process.poll()
        assert sent < 200 * 200 * len(line) / 4
        process.stdout.close()
        os.set_blocking(process.stdin.fileno(), True)
        process.stdin.close()
        assert process.wait(120) == 0
        assert process.stderr.read().replace(b"\n", b"").count(b"error") == 0


@pytest.mark.parametrize(
    ("options", "content", "answered", "said"),
    [
        ([], b"fine\n\xff\xfe\n", 1, "line 2: no valid UTF-8"),
        (["--jsonl"], b'"fine"\n"also"\nnot json\n', 2, "line 3: not JSON"),
        (["--jsonl"], b"[1]\n", 0, "line 1: found [1], wanted a JSON string"),
        (["--jsonl"], b'"\\ud800"\n', 0, "line 1: no valid Unicode"),
        ([], "fine\nx\u1acf\n".encode(), 1, "line 2: U+1ACF"),
    ],
)
def test_a_bad_line_is_named(options: list[str], content: bytes, answered: int, said: str, app: Program, sound: Path):
    done = app.run(*options, "--tokens", "-", bundle=sound, text=content)
    assert done.returncode == 2
    assert done.stdout.count("\n") == answered
    assert done.stderr.startswith(f"error: {said}")


def test_lines_may_end_as_on_windows(app: Program, sound: Path):
    done = app.run("--tokens", "-", bundle=sound, text=b"one\r\ntwo\r\n")
    plain = app.run("--tokens", "-", bundle=sound, text=b"one\ntwo\n")
    assert done.stdout == plain.stdout


# ---- what is wrong with the bundle or the machine ----


def test_external_data_that_is_missing_or_short_is_named_with_its_size(
    app: Program, tiny: Callable[..., Path], tmp_path: Path
):
    sound = tiny(external=True)
    size = (sound / "model.onnx.data").stat().st_size
    changes = {
        "found nothing": lambda folder: (folder / "model.onnx.data").unlink(),
        "incomplete": lambda folder: (folder / "model.onnx.data").write_bytes(b"short"),
    }
    for i, (said, change) in enumerate(changes.items()):
        done = app.run("a text", bundle=planted(sound, tmp_path / str(i), change, seal=False))
        assert (done.returncode, done.stdout) == (2, "")
        for word in ("model.onnx.data", said, str(size)):
            assert word in done.stderr
    # Where the manifest agrees with the damage, the model itself says what it needs.
    for i, (said, change) in enumerate({"not among the files": "unlink", "incomplete": "short"}.items(), 2):
        bundle = planted(sound, tmp_path / str(i), changes["found nothing" if change == "unlink" else "incomplete"])
        done = app.run("a text", bundle=bundle)
        assert (done.returncode, done.stdout) == (2, "")
        for word in ("model.onnx.data", said):
            assert word in done.stderr


def test_a_file_that_is_a_link_out_of_the_bundle(app: Program, sound: Path, tmp_path: Path):
    def link(folder: Path) -> None:
        (folder / "tokenizer.json").rename(tmp_path / "outside.json")
        (folder / "tokenizer.json").symlink_to(tmp_path / "outside.json")

    done = app.run("a text", bundle=planted(sound, tmp_path / "b", link, seal=False))
    assert done.returncode == 2
    assert "tokenizer.json: is a link that leaves the bundle" in done.stderr


@pytest.mark.parametrize("part", ["ir_version", "opset"])
def test_a_model_that_is_too_new(part: str, app: Program, tiny: Callable[..., Path], tmp_path: Path):
    import onnx

    sound = tiny(target="portable")

    def change(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx")
        if part == "opset":
            next(each for each in model.opset_import if not each.domain).version = 28
        else:
            model.ir_version = 14
        onnx.save(model, folder / "model.onnx")

    bundle = planted(sound, tmp_path / "b", change)
    code, report = app.self_check(bundle)
    assert (code, report["stage"]) == (3, "runtime")
    assert "newer than onnxruntime 1.30.0 reads" in report["problem"]
    assert "--target web" in report["problem"]
    assert "onnxruntime_src" not in report["problem"]


def test_a_model_of_another_manifest(app: Program, sound: Path, tmp_path: Path):
    manifest = json.loads((sound / "tfx.json").read_text())
    outputs = [{**spec, "dtype": "float64"} for spec in manifest["outputs"]]
    bundle = planted(sound, tmp_path / "b", lambda _: None, seal=False)
    reseal(bundle, outputs=outputs)
    done = app.run("a text", bundle=bundle)
    assert done.returncode == 2
    assert "tfx.json says" in done.stderr


def test_packages_that_are_not_there(app: Program, sound: Path, tmp_path: Path):
    folder = tmp_path / "app"
    shutil.copytree(app.folder, folder, ignore=shutil.ignore_patterns("bundle", "node_modules"))
    alone = Program("node", folder, node=app.node)
    done = alone.run("a text", bundle=sound)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "error: onnxruntime-node is not installed; run: npm install --ignore-scripts\n"
    code, report = alone.self_check(sound)
    assert (code, report["stage"], report["library"]) == (3, "runtime", None)
    assert "npm install --ignore-scripts" in report["problem"]
    # A package without a library for this machine.
    assert app.modules is not None
    (folder / "node_modules").mkdir()
    for name in ("onnxruntime-common", "@huggingface"):
        (folder / "node_modules" / name).symlink_to(app.modules / name)
    shutil.copytree(
        app.modules / "onnxruntime-node",
        folder / "node_modules" / "onnxruntime-node",
        ignore=shutil.ignore_patterns("bin", "script"),
    )
    code, report = alone.self_check(sound)
    assert (code, report["stage"]) == (3, "runtime")
    assert "onnxruntime-node has no library for" in report["problem"]


def test_a_number_of_threads_that_was_tuned(app: Program, sound: Path, tmp_path: Path):
    """More threads than there are cores are not taken over, and what was tuned does not change a number."""
    for i, threads in enumerate((1, 4096)):
        tuning = {"threads": threads, "spinning": False, "schedule": None, "log": None}
        bundle = planted(
            sound, tmp_path / str(i), lambda folder, tuning=tuning: reseal(folder, tuning=tuning), seal=False
        )
        vectors = np.array(app.answers(TEXTS, bundle=bundle), np.float32)
        np.testing.assert_allclose(vectors, vectors_of(sound), rtol=0, atol=1e-5)


def test_the_programs_of_the_readme_run(app: Program, tmp_path: Path):
    """The library in three lines, and the worker that a service asks."""
    folder = tmp_path / "app"
    shutil.copytree(app.folder, folder, symlinks=True)
    _, *blocks = (folder / "README.md").read_text().split("```js\n")
    short, worker, main = (block.partition("```")[0] for block in blocks)
    (folder / "short.mjs").write_text(f"{short}\nconsole.log(JSON.stringify([...one, ...other].length));\n")
    (folder / "worker.mjs").write_text(worker)
    (folder / "main.mjs").write_text(main)
    (folder / "use.mjs").write_text(
        'import { embed } from "./main.mjs";\n'
        "const wrong = embed([]).catch((error) => error.message);\n"
        'const found = await Promise.all([embed(["one", "two"]), embed(["three"]), wrong]);\n'
        "console.log(JSON.stringify([found[0].length, found[1][0].length, found[2]]));\n"
        "process.exit(0);\n"
    )
    said = []
    for name in ("short.mjs", "use.mjs"):
        command = [str(app.node), str(folder / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    assert said == [128, [2, 64, "texts: found an empty array, wanted at least one text"]]


def test_the_readme_says_what_there_is(app: Program):
    text = (app.folder / "README.md").read_text()
    said = app.run("--help").stdout
    for option in itertools.chain(("--self-check", "--tokens", "--raw", "--jsonl", "--bundle", "--threads", "--json")):
        assert option in text
        assert option in said
    package = json.loads((app.folder / "package.json").read_text())
    assert package["engines"] == {"node": ">=20"}
    assert "Node 20 or newer" in text
    assert "@TFX" not in text + json.dumps(package)


def test_every_dtype_goes_in_and_comes_out(app: Program, tmp_path: Path):
    """A graph with ids of 32 bits, a mask of booleans and half floats, which come out as a Float32Array."""
    from onnx import TensorProto, helper, save

    batch, sequence = "batch", "sequence"
    types = {"ids": TensorProto.INT32, "mask": TensorProto.BOOL, "x": TensorProto.FLOAT16}
    shapes = {"ids": [batch, sequence], "mask": [batch, sequence], "x": [batch, sequence, 2]}
    outs = {"wide": TensorProto.INT64, "not": TensorProto.BOOL, "twice": TensorProto.FLOAT16}
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["ids"], ["wide"], to=TensorProto.INT64),
            helper.make_node("Not", ["mask"], ["not"]),
            helper.make_node("Add", ["x", "x"], ["twice"]),
        ],
        "dtypes",
        [helper.make_tensor_value_info(name, types[name], shapes[name]) for name in types],
        [
            helper.make_tensor_value_info(name, outs[name], shape)
            for name, shape in zip(outs, shapes.values(), strict=True)
        ],
    )
    (tmp_path / "b").mkdir()
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "b" / "model.onnx",
    )
    roles = {"ids": "token_ids", "mask": "attention_mask", "x": "features"}
    dtypes = {"ids": "int32", "mask": "bool", "x": "float16", "wide": "int64", "not": "bool", "twice": "float16"}
    fields = {
        "format": 1,
        "source": {"kind": "test", "name": "dtypes"},
        "inputs": [
            {"name": name, "dtype": dtypes[name], "shape": shapes[name], "role": role, "limit": None}
            for name, role in roles.items()
        ],
        "outputs": [
            {"name": name, "dtype": dtypes[name], "shape": shape}
            for name, shape in zip(outs, shapes.values(), strict=True)
        ],
        "max_length": None, "pad_id": 0, "pooling": None, "tokenizer": None, "target": "cpu", "precision": "fp16",
        "layout": "padded", "model": {"file": "model.onnx", "opset": 17, "ir_version": 8, "domains": [""]},
        "counts": dict.fromkeys(("attention", "layer_norm", "rms_norm", "gelu", "rotary"), 0), "refusals": [],
        "tolerance": {"max_abs": None, "min_cosine": None}, "parity": None, "versions": {},
    }  # fmt: skip
    (tmp_path / "b" / "tfx.json").write_text("{}")
    reseal(tmp_path / "b", **fields)
    calls = (
        "{ ids: [[1, 2]], mask: [[true, false]], x: [[[0.5, -2], [65504, 2 ** -23]]] }",
        "{ ids: [[1n, 2n]], mask: [[1, 0]], x: { data: Uint16Array.of(0x3800, 0xc000, 0x7bff, 2), shape: [1, 2, 2] } }",
        "{ ids: [[1, 2]], x: [[[0.1, 0], [0, 0]]] }",
        "{ ids: [[1, 2]], mask: [[2, 0]], x: [[[0, 0], [0, 0]]] }",
        "{ ids: [[2 ** 31, 2]], x: [[[0, 0], [0, 0]]] }",
    )
    code = f"""{OPEN}
    const found = [];
    const kinds = [];
    const run = async (feeds) => {{
      const outputs = await encoder.run(feeds);
      kinds.push(Object.values(outputs).map(({{ data }}) => data.constructor.name));
      return outputs;
    }};
    for (const call of [{", ".join(f"() => run({call})" for call in calls)}]) found.push(await attempt(call));
    answer({{ found, kinds }});"""
    answer = evaluate(app, code, {"bundle": str(tmp_path / "b")})
    assert answer["kinds"] == [["BigInt64Array", "Uint8Array", "Float32Array"]] * 2
    first, second, *wrong = answer["found"]
    assert first["value"]["twice"]["data"][:2] == [1, -4]
    assert second["value"]["wide"] == {"dtype": "int64", "shape": [1, 2], "data": [1, 2]}
    assert second["value"]["not"] == {"dtype": "bool", "shape": [1, 2], "data": [0, 1]}
    assert second == first
    said = ["x: found 0.1, wanted a number that float16 holds", "mask: found 2, wanted bool values of 0 to 1"]
    for each, words in zip(wrong, [*said, "ids: found 2147483648, wanted int32 values"], strict=True):
        assert words in each["error"]
