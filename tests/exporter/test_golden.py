from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tfx.errors import SourceError
from tfx.exporter import golden
from tfx.exporter.sources import Source, parse_input, reference
from tfx.models.config import EncoderConfig
from tfx.runtime.tensors import Case, default_cases

CASES = [Case("one", 1, 3, "full"), Case("two", 2, 5, "right")]


def source_of(module: nn.Module, *inputs: str, outputs: tuple[str, ...] | None = None) -> Source:
    return Source(module, tuple(map(parse_input, inputs)), "module", "mine", "", output_names=outputs)


@pytest.fixture(scope="module")
def encoder() -> Source:
    return reference(EncoderConfig(d_model=16, heads=2, layers=1, d_ff=32, vocab_size=50, max_len=20))


def test_every_default_case_is_recorded_as_the_module_answers_it(encoder):
    cases = golden.record(encoder)
    assert [case.id for case in cases] == [case.id for case in default_cases(encoder.inputs, 20)]
    assert {case.sequence for case in cases} == {1, 7, 16, 20}
    for case in cases:
        with torch.no_grad():
            hidden = encoder.module(
                attention_mask=torch.tensor(case.inputs["attention_mask"]),
                input_ids=torch.tensor(case.inputs["input_ids"]),
            )["last_hidden_state"]
        assert np.array_equal(case.outputs["last_hidden_state"], hidden.numpy())
        assert hidden.shape == (case.batch, case.sequence, 16)


def test_the_same_source_gives_the_same_golden_and_cases_differ(encoder):
    first, again = golden.record(encoder, CASES), golden.record(encoder, CASES)
    for one, two in zip(first, again, strict=True):
        assert all(np.array_equal(one.inputs[name], two.inputs[name]) for name in one.inputs)
        assert all(np.array_equal(one.outputs[name], two.outputs[name]) for name in one.outputs)
    assert not np.array_equal(first[0].inputs["input_ids"][0], first[1].inputs["input_ids"][0, :3])


class Segments(nn.Module):
    """Takes its inputs in an order that a call by position would get wrong (case A05)."""

    def forward(self, ids, types, mask):
        return {"ids_": ids + 0, "types_": types + 0, "mask_": mask + 0}


def test_inputs_are_bound_by_name_and_outputs_keep_theirs():
    axes = "int64:batch,sequence"
    source = source_of(Segments(), f"mask:{axes}", f"ids:{axes}", f"types:{axes}", outputs=("types_", "mask_"))
    for case in golden.record(source, CASES):
        assert list(case.inputs) == ["mask", "ids", "types"]
        assert list(case.outputs) == ["types_", "mask_"]
        assert np.array_equal(case.outputs["types_"], case.inputs["types"])
        assert np.array_equal(case.outputs["mask_"], case.inputs["mask"])
        assert not np.array_equal(case.inputs["types"], case.inputs["mask"])


class Writes(nn.Module):
    def forward(self, x):
        x += 1
        return x


def test_a_module_that_writes_into_its_input_cannot_change_the_feeds():
    (case,) = golden.record(source_of(Writes(), "x:float32:batch,2"), CASES[:1])
    assert np.allclose(case.outputs["output"], case.inputs["x"] + 1)


class Flags(nn.Module):
    def forward(self, x):
        state = torch.tensor([torch.backends.mha.get_fastpath_enabled(), self.training, torch.is_grad_enabled()])
        return {"state": state, "x": x}


@pytest.mark.parametrize("enabled", [True, False])
def test_flags_are_off_during_the_recording_and_as_before_afterwards(enabled):
    module = nn.Sequential(Flags())
    module.train()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        (case,) = golden.record(source_of(module, "input:float32:batch,2"), CASES[:1])
        assert not case.outputs["state"].any()
        assert torch.backends.mha.get_fastpath_enabled() is enabled
        assert module.training and module[0].training
        with pytest.raises(SourceError):
            golden.record(source_of(module, "wrong:float32:batch,2"), CASES)
        assert torch.backends.mha.get_fastpath_enabled() is enabled
        assert module.training and module[0].training
        assert torch.is_grad_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Halves(nn.Module):
    def forward(self, x):
        return {"whole": x, "half": x.bfloat16()}


def test_a_type_that_no_bundle_holds_is_named():
    with pytest.raises(SourceError, match=r"^mine: output half is bfloat16, wanted one of bool, int8"):
        golden.record(source_of(Halves(), "x:float32:batch,2"), CASES)
    assert golden.record(source_of(Halves(), "x:float32:batch,2", outputs=("whole",)), CASES)


class Short(nn.Module):
    def forward(self, x):
        return x + torch.zeros(4)


def test_a_case_that_does_not_run_is_named():
    with pytest.raises(SourceError, match=r"^mine: case two does not run: RuntimeError: The size of tensor") as caught:
        golden.record(source_of(Short(), "x:float32:batch,sequence"), [Case("two", 2, 5, "full")])
    assert "\n" not in str(caught.value)
