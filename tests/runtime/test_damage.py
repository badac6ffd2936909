"""Files whose bytes were changed at random: they are read, or refused with an error of ours."""

from __future__ import annotations

import json
import random
import warnings

import numpy as np
import pytest

from tfx.errors import TfxError
from tfx.runtime.arrays import read_npz
from tfx.runtime.golden import GoldenCase, load_golden, save_golden
from tfx.runtime.manifest import Manifest

ROUNDS = 400


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Change a few bytes, or cut the end off."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(len(changed))
        changed[place] = chance.choice((chance.randrange(256), changed[place] ^ 1 << chance.randrange(8)))
    return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.1 else changed)


def write_npz(path, save):
    save(path, ids=np.arange(60).reshape(2, 30), x=np.ones((2, 3), np.float32))


def write_golden(path):
    case = GoldenCase("c", 1, 2, "full", {"x": np.arange(6)}, {"y": np.ones(3, np.float32)})
    save_golden(path, [case, GoldenCase("d", 1, 2, "full", case.inputs, case.outputs)])


@pytest.mark.parametrize(
    ("write", "read"),
    [
        pytest.param(lambda path: write_npz(path, np.savez), read_npz, id="npz"),
        pytest.param(lambda path: write_npz(path, np.savez_compressed), read_npz, id="deflated npz"),
        pytest.param(write_golden, load_golden, id="golden"),
    ],
)
def test_files(tmp_path, write, read):
    path = tmp_path / "file.npz"
    write(path)
    content, chance, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(ROUNDS):
        path.write_bytes(damaged(content, chance))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # zipfile's and numpy's, about names and headers
                read(path)
        except TfxError as error:
            refused += 1
            assert "\n" not in str(error)
            str(error).encode()
    assert refused > ROUNDS / 2


def test_manifests(tiny_manifest):
    entry = {"bytes": 1, "sha256": "0" * 64}
    files = {"model.onnx": entry, "tokenizer.json": entry}
    content = json.dumps(tiny_manifest(files=files).to_json()).encode()
    chance, refused = random.Random(0), 0
    for _ in range(10 * ROUNDS):
        try:
            Manifest.parse(damaged(content, chance))
        except TfxError as error:
            refused += 1
            assert "\n" not in str(error)
            str(error).encode()
    assert refused > ROUNDS
