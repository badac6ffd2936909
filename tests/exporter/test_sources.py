from __future__ import annotations

import sys
import textwrap
from collections import namedtuple
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx_ir import to_proto

from tfx.errors import InputError, SourceError
from tfx.exporter import golden
from tfx.exporter.capture import capture
from tfx.exporter.sources import module, named_outputs, parse_input, reference, role_of
from tfx.models.config import EncoderConfig
from tfx.runtime.tensors import Case

TINY: dict[str, Any] = {"d_model": 16, "heads": 2, "layers": 2, "d_ff": 32, "vocab_size": 50, "max_len": 20}


def feeds(batch: int = 3, length: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones(batch, length, dtype=torch.int64)}


# --- the reference encoder


def test_reference_is_made_by_its_seed_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (reference(EncoderConfig(**TINY), seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), wanted)
    with torch.no_grad():
        outputs = [source.call(feeds())["last_hidden_state"] for source in (first, again, other)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])
    assert first.sha256 == again.sha256 != other.sha256
    assert first.sha256 != reference(replace(EncoderConfig(**TINY), heads=4)).sha256


def test_reference_output_depends_on_token_position_and_neighbours():
    source = reference(EncoderConfig(**TINY), 0)
    given = feeds()
    changed = given | {"input_ids": given["input_ids"].clone()}
    changed["input_ids"][0, 0] = (changed["input_ids"][0, 0] + 1) % 50
    with torch.no_grad():
        hidden = source.call(given)["last_hidden_state"]
        moved = source.call(changed)["last_hidden_state"]
        repeated = source.call(feeds() | {"input_ids": torch.full((3, 6), 7)})["last_hidden_state"]
    assert hidden.std(dim=(0, 1)).min() > 0.1
    assert (hidden[0, 1:] - moved[0, 1:]).abs().max() > 1e-3
    assert (repeated[0, 0] - repeated[0, 1]).abs().max() > 1e-3
    assert torch.equal(hidden[1:], moved[1:])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"attention": 2, "gelu": 2, "layer_norm": 4}),
        ({"norm": "pre"}, {"attention": 2, "gelu": 2, "layer_norm": 5}),
        ({"activation": "relu"}, {"attention": 2, "gelu": 0, "layer_norm": 4}),
        ({"activation": "gelu_tanh", "layers": 3}, {"attention": 3, "gelu": 3, "layer_norm": 6}),
    ],
)
def test_reference_counts(options, expected):
    source = reference(EncoderConfig(**(TINY | options)))
    assert source.expected == expected
    assert (source.max_length, source.pad_id, source.inputs[0].limit) == (20, 0, 50)
    assert not source.module.training


def test_reference_pooling_is_an_output():
    source = reference(EncoderConfig(**TINY, pooling="mean", normalize=True))
    assert source.pooling == {"mode": "mean", "normalize": True, "output": "sentence_embedding"}
    assert list(source.call(feeds())) == ["last_hidden_state", "sentence_embedding"]
    assert list(reference(EncoderConfig(**TINY)).call(feeds())) == ["last_hidden_state"]


def test_reference_refuses_a_seed_that_torch_cannot_take():
    with pytest.raises(InputError, match=r"seed: found 36893488147419103232, wanted an integer"):
        reference(EncoderConfig(**TINY), 2**65)


# --- names


def test_outputs_are_named_by_the_mapping_or_by_position():
    a, b = torch.zeros(1), torch.ones(1)
    pair = namedtuple("pair", "a b")(a, b)
    assert list(named_outputs({"a": a, "b": b, "none": None})) == ["a", "b"]
    assert list(named_outputs(pair)) == ["a", "b"]
    assert list(named_outputs(a)) == ["output"]
    assert list(named_outputs((a, b))) == ["output_0", "output_1"]
    assert named_outputs((a, b), ("x", "y"))["y"] is b
    swapped = named_outputs({"a": a, "b": b}, ("b", "a"))
    assert list(swapped) == ["b", "a"]
    assert swapped["b"] is b


def test_an_output_that_is_not_returned_lists_those_that_are():
    with pytest.raises(SourceError, match=r'output "c": not returned by the module, which returns a, b'):
        named_outputs({"a": torch.zeros(1), "b": torch.zeros(1)}, ("c",))
    with pytest.raises(SourceError, match="the module returned dict without a tensor"):
        named_outputs({"a": 1})


@pytest.mark.parametrize(
    ("text", "shape", "role", "limit"),
    [
        ("input_ids:int64:batch,sequence", ("batch", "sequence"), "token_ids", None),
        ("attention_mask:bool:batch,sequence", ("batch", "sequence"), "attention_mask", 2),
        ("token_type_ids:int32:batch, sequence", ("batch", "sequence"), "token_type_ids", None),
        ("position_ids:int64:1,sequence", (1, "sequence"), "position_ids", None),
        ("inputs_embeds:float32:batch,sequence,32", ("batch", "sequence", 32), "features", None),
        ("src_key_padding_mask:bool:batch,sequence", ("batch", "sequence"), "padding_mask", 2),
        ("pad_mask:int64:batch,sequence", ("batch", "sequence"), "padding_mask", 2),
        ("padding_mask:float32:batch,sequence", ("batch", "sequence"), "features", None),
        ("non_padding_mask:bool:batch,sequence", ("batch", "sequence"), "attention_mask", 2),
        ("mask:float32:sequence,sequence", ("sequence", "sequence"), "features", None),
    ],
)
def test_inputs_are_read(text, shape, role, limit):
    spec = parse_input(text)
    assert (spec.shape, spec.role, spec.limit) == (shape, role, limit)
    assert spec.name == text.split(":")[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("input_ids", "wanted name:dtype:axes"),
        ("a:b:c:d", "wanted name:dtype:axes"),
        (":int64:batch", "wanted name:dtype:axes"),
        ("x:int65:batch", 'found dtype "int65", wanted one of bool'),
        ("x:int64:batch,,sequence", 'found axis "", wanted a name'),
        ("x:int64:batch,0", 'found axis "0"'),
        ("x:int64:batch,-1", 'found axis "-1"'),
        ("x:int64:batch,se quence", 'found axis "se quence"'),
    ],
)
def test_a_wrong_input_says_what_is_wrong(text, reason):
    with pytest.raises(SourceError) as caught:
        parse_input(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mask_that_marks_padding_is_no_attention_mask():
    assert role_of("src_key_padding_mask", "bool", ("batch", "sequence")) == "padding_mask"
    assert role_of("src_key_padding_mask", "bool", ("batch", 1, "sequence")) == "features"
    assert role_of("mask", "int64", ("batch", "sequence")) == "attention_mask"


# --- factories

MODELS = """
    import torch
    from torch import nn

    class Words(nn.Module):
        def __init__(self, rows=11, positions=9):
            super().__init__()
            self.word = nn.Embedding(rows, 4, padding_idx=1)
            self.place = nn.Embedding(positions, 4)
            self.segment = nn.Embedding(3, 4)

        def forward(self, ids, types, mask=None):
            x = self.word(ids) + self.place(torch.arange(ids.shape[1])) + self.segment(types)
            return {"a": x + 1, "b": x - 1}

    def words():
        return Words()

    def with_tuple():
        return Words(), (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))

    def with_mapping():
        ids = torch.zeros(2, 5, dtype=torch.int64)
        return Words(), {"types": ids, "mask": torch.ones(2, 5), "ids": ids}

    def with_tensor():
        return nn.Linear(4, 3), torch.zeros(2, 5, 4)

    def two_lengths():
        return Two(), (torch.zeros(2, 5, 4), torch.zeros(2, 9, 4))

    class Two(nn.Module):
        def forward(self, x, memory):
            return x.sum(1) + memory.sum(1)

    def lazily():
        import helper
        return helper.Thing(), torch.zeros(2, 5, 4)

    def raises():
        raise ValueError("no weights here\\nsecond line")

    def exits():
        raise SystemExit("leaving")

    def number():
        return 3

    def complex_example():
        return Words(), {"ids": "text", "types": "text"}

    def half():
        return nn.Linear(4, 3), torch.zeros(2, 5, 4, dtype=torch.bfloat16)

    def empty():
        return nn.Linear(4, 3), torch.zeros(0, 5, 4)

    def many():
        return nn.Linear(4, 3), (torch.zeros(2, 5, 4), torch.zeros(2, 5, 4))

    instance = nn.Linear(4, 3)
    constant = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "factories.py").write_text(textwrap.dedent(MODELS))
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "helper.py").write_text("from torch import nn\nclass Thing(nn.Identity):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    for name in ("factories", "broken", "helper"):  # another test's module of that name
        sys.modules.pop(name, None)
    yield tmp_path
    for name in ("factories", "broken", "helper"):
        sys.modules.pop(name, None)


WORDS = ["ids:int64:batch,sequence", "types:int64:batch,sequence"]


@pytest.mark.parametrize("factory", ["words", "with_tuple", "with_mapping"])
def test_limits_are_found_by_watching_the_tables(folder, factory):
    source = module(f"factories:{factory}", WORDS if factory == "words" else ())
    specs = {spec.name: spec for spec in source.inputs}
    assert specs["ids"].limit == 11
    assert specs["types"].limit == 3
    assert (source.max_length, source.pad_id) == (9, 1)
    assert all(spec.shape == ("batch", "sequence") for spec in source.inputs)
    assert [spec.name for spec in source.inputs][:2] == ["ids", "types"]
    assert (source.kind, source.expected, source.output_names) == ("module", None, None)
    assert not source.module.training


def test_an_example_gives_names_types_and_axes_whatever_its_sizes(folder):
    (spec,) = module("factories:with_tensor").inputs
    assert (spec.name, spec.dtype, spec.shape) == ("input", "float32", ("batch", "sequence", 4))
    x, memory = module("factories:two_lengths").inputs
    assert x.shape == ("batch", "sequence", 4)
    assert memory.shape == ("batch", "memory_sequence", 4)


def test_a02_an_example_of_one_row_and_one_token_gives_a_graph_for_any(folder):
    source = module("factories:with_tuple")
    graph = ReferenceEvaluator(to_proto(capture(source)))
    for case in golden.record(source, [Case("a", 1, 1, "full"), Case("b", 4, 9, "full"), Case("c", 4, 1, "full")]):
        for found, wanted in zip(graph.run(None, dict(case.inputs)), case.outputs.values(), strict=True):
            assert np.abs(found - wanted).max() <= 1e-6


def test_a_declared_input_takes_precedence_over_the_example(folder):
    (spec,) = module("factories:with_tensor", ["input:float32:batch,4"]).inputs
    assert spec.shape == ("batch", 4)


def test_a_module_itself_is_taken_and_the_path_is_restored(folder):
    before = list(sys.path)
    source = module("factories:instance", ["input:float32:batch,4"])
    assert isinstance(source.module, torch.nn.Linear)
    assert isinstance(module("factories:lazily").module, torch.nn.Identity)
    with pytest.raises(SourceError):
        module("factories:raises")
    assert sys.path == before


def test_the_hash_is_that_of_the_weights(folder):
    module("factories:words", WORDS)  # the import draws numbers too
    torch.manual_seed(0)
    one = module("factories:words", WORDS).sha256
    two = module("factories:words", WORDS).sha256
    torch.manual_seed(0)
    assert module("factories:words", WORDS).sha256 == one != two


@pytest.mark.parametrize(
    ("target", "inputs", "reason"),
    [
        ("factories", (), 'module "factories": wanted pkg.mod:factory'),
        ("factories:", (), 'module "factories:": wanted pkg.mod:factory'),
        ("fac tories:x", (), "wanted pkg.mod:factory"),
        ("absent:x", (), "importing absent failed: ModuleNotFoundError: No module named 'absent'"),
        ("broken:x", (), "importing broken failed: ModuleNotFoundError: No module named 'no_such_package'"),
        ("factories:absent", (), 'factories has no attribute "absent"'),
        ("factories:constant", (), "found int, wanted a callable"),
        ("factories:raises", (), "the factory raised ValueError: no weights here"),
        ("factories:exits", (), "the factory raised SystemExit: leaving"),
        ("factories:number", (), "the factory returned int, wanted a torch.nn.Module"),
        ("factories:words", (), "no inputs; give --input name:dtype:axes or return (module, examples) for ids, types"),
        ("factories:words", ("ids:int64:batch,sequence",), 'input "types": forward needs it, found only ids'),
        ("factories:words", (*WORDS, "input_ids:int64:batch,sequence"), "whose forward takes ids, types, mask"),
        ("factories:words", (*WORDS, WORDS[0]), '--input "ids": given more than once'),
        ("factories:words", ("ids:float32:batch,sequence", WORDS[1]), "the module does not run on ids float32[2, 3]"),
        ("factories:complex_example", (), "example input 'ids' is str, wanted a tensor"),
        ("factories:half", (), "example input input is bfloat16, wanted one of bool"),
        ("factories:empty", (), "example input input is empty: [0, 5, 4]"),
        ("factories:many", (), "found 2 example inputs, forward takes input"),
    ],
)
def test_a_module_that_cannot_be_used_says_why(folder, target, inputs, reason):
    with pytest.raises(SourceError) as caught:
        module(target, inputs)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outputs_are_checked_before_the_export(folder):
    assert module("factories:words", WORDS, ["b", "a"]).output_names == ("b", "a")
    with pytest.raises(SourceError, match=r'output "c": not returned by the module, which returns a, b'):
        module("factories:words", WORDS, ["c"])
    with pytest.raises(SourceError, match=r'--output "a": given more than once'):
        module("factories:words", WORDS, ["a", "a"])
