from __future__ import annotations

import logging
import warnings
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from tfx.errors import SourceError
from tfx.exporter.capture import bounded, capture
from tfx.exporter.fusion import ORIGIN
from tfx.exporter.sources import Source, parse_input, reference
from tfx.models.config import EncoderConfig
from tfx.runtime.tensors import Case

from .capturing import (
    CASES,
    CONFIG,
    IDS,
    MASK,
    TYPES,
    answers,
    check_equal,
    check_fully_masked,
    source_of,
)

# --- the reference encoder


@pytest.fixture(scope="module")
def encoder() -> tuple[Source, ir.Model]:
    source = reference(CONFIG)
    return source, capture(source)


def test_the_reference_encoder_equals_torch_at_every_shape_and_mask(encoder):
    check_equal(encoder[0], encoder[1])
    check_fully_masked(encoder[0], encoder[1], "attention_mask", 0)


def test_the_graph_is_plain_onnx_with_named_axes(encoder):
    source, model = encoder
    assert dict(model.opset_imports) == {"": 23}
    assert not model.functions
    assert {node.domain for node in model.graph} == {""}
    ends = {value.name: (str(value.shape), value.dtype) for value in (*model.graph.inputs, *model.graph.outputs)}
    assert ends == {
        "input_ids": ("[batch,sequence]", ir.DataType.INT64),
        "attention_mask": ("[batch,sequence]", ir.DataType.INT64),
        "last_hidden_state": ("[batch,sequence,16]", ir.DataType.FLOAT),
        "sentence_embedding": ("[batch,16]", ir.DataType.FLOAT),
    }
    counts = Counter(node.op_type for node in model.graph)
    assert (counts["Gelu"], counts["LayerNormalization"], counts["Softmax"]) == (2, 4, 2)
    axes = {
        str(dim)
        for node in model.graph
        for out in node.outputs
        for dim in (out.shape or ())
        if not isinstance(dim, int)
    }
    assert axes <= {"batch", "sequence"}
    assert bounded(source, model).max_length == 40


def test_nodes_keep_their_module_path_and_nothing_of_this_machine(encoder):
    _, model = encoder
    origins = {node.metadata_props.get(ORIGIN, "") for node in model.graph}
    assert {"layers.0.attention", "layers.1.norm_2"} <= origins
    assert {"layers.0.norm_1.weight", "embeddings.token.weight"} <= set(model.graph.initializers)
    text = ir.to_proto(model).SerializeToString()
    assert b".py" not in text
    assert b"pkg.torch" not in text


# --- A01, A02: dynamic axes


class Stack(nn.Module):
    """`nn.TransformerEncoder`, 2 layers, d 32, 4 heads; the mask may say what to keep or what to ignore."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        for parameter in self.encoder.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, src: torch.Tensor, src_key_padding_mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(src, src_key_padding_mask=src_key_padding_mask)


class Kept(Stack):
    def forward(self, src: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(src, src_key_padding_mask=mask == 0)


SRC = "src:float32:batch,sequence,32"


@pytest.fixture(scope="module")
def stack() -> tuple[Source, ir.Model]:
    torch.manual_seed(0)
    source = source_of(Kept(), SRC, MASK)
    return source, capture(source)


def test_a01_a_transformer_encoder_runs_at_any_batch_and_length(stack):
    check_equal(stack[0], stack[1], tolerance=1e-5)


def test_a07_no_fused_layer_is_left_and_attention_is_one_node_a_layer(stack):
    counts = Counter(node.op_type for node in stack[1].graph)
    assert (counts["Attention"], counts["Gelu"], counts["LayerNormalization"]) == (2, 2, 4)
    assert {node.domain for node in stack[1].graph} == {""}


def test_a08_a_fully_masked_row_is_what_torch_makes_of_it(stack):
    check_fully_masked(stack[0], stack[1], "mask", 0)


def test_a08_with_a_padding_mask():
    torch.manual_seed(0)
    source = source_of(Stack(norm_first=True), SRC, "src_key_padding_mask:bool:batch,sequence")
    model = capture(source)
    check_equal(source, model, [Case("x", 3, 5, "full"), Case("y", 1, 9, "full")], tolerance=1e-5)
    check_fully_masked(source, model, "src_key_padding_mask", 1)


class Baked(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = int(x.shape[self.axis])
        return x.reshape([size, -1] if self.axis == 0 else [-1, size]) * 2


@pytest.mark.parametrize(("axis", "name"), [(0, "batch"), (1, "sequence")])
def test_a01_an_axis_that_the_module_pins_is_named(axis, name):
    with pytest.raises(SourceError) as caught:
        capture(source_of(Baked(axis), "x:float32:batch,sequence,4"))
    assert f'mine: axis "{name}" (axis {axis} of input x) is frozen at {(3, 7)[axis]}' in str(caught.value)
    assert "\n" not in str(caught.value)


class Constant(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x_": x + 1, "fixed": torch.ones(3, 2)}


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[1] > 4 else x - 1


class Tied(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class SameName(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x + 1}


X = "x:float32:batch,sequence"


@pytest.mark.parametrize(
    ("module", "inputs", "reason"),
    [
        (Constant(), [X], 'axis "batch" (axis 0 of output fixed) is frozen at 3'),
        (Branches(), [X], 'the graph is only right for axis "sequence" of at least 5'),
        (Tied(), [X, "y:float32:batch,other"], 'axes "sequence" and "other" (axis 1 of input y) always have the same'),
        (Decides(), [X], "mine: torch.export failed: "),
        (SameName(), [X], 'mine: output "x" has the name of an input'),
    ],
)
def test_a_graph_that_would_be_right_at_some_sizes_only_is_refused(module, inputs, reason):
    with pytest.raises(SourceError) as caught:
        capture(source_of(module, *inputs))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


class Memory(nn.Module):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, memory), dim=1) * 2


def test_two_lengths_stay_two():
    model = capture(source_of(Memory(), "x:float32:batch,sequence,4", "memory:float32:batch,memory_sequence,4"))
    assert str(model.graph.outputs[0].shape) in (
        "[batch,sequence + memory_sequence,4]",
        "[batch,memory_sequence + sequence,4]",
    )
    x, memory = np.ones((2, 3, 4), np.float32), np.zeros((2, 5, 4), np.float32)
    assert answers(model, {"x": x, "memory": memory})["output"].shape == (2, 8, 4)


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


def test_a_table_that_is_cut_to_the_sequence_bounds_it():
    source = source_of(Sliced(), "x:float32:batch,sequence,4")
    model = capture(source)
    source = bounded(source, model)
    assert source.max_length == 12
    check_equal(source, model, [Case("x", 1, 1, "full"), Case("y", 2, 12, "full")])
    assert bounded(source_of(Sliced(), X, max_length=5), model).max_length == 5


def test_fixed_axes_stay_fixed_and_short_sources_are_traced_within_their_length():
    model = capture(source_of(Tied(), "x:float32:batch,4", "y:float32:1,4"))
    assert [str(value.shape) for value in model.graph.inputs] == ["[batch,4]", "[1,4]"]
    assert str(model.graph.outputs[0].shape) == "[batch,4]"
    short = reference(EncoderConfig(d_model=8, heads=2, layers=1, d_ff=8, vocab_size=9, max_len=3))
    check_equal(short, capture(short), [Case("x", 2, 3, "full"), Case("y", 1, 1, "full")])


# --- A04, A05: names


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"a": x + 1, "b": x - 1, "nothing": None}


def test_a04_output_names_follow_the_keys():
    for names in (("b", "a"), ("a", "b"), None, ("b",)):
        source = source_of(Two(), X, output_names=names)
        model = capture(source)
        assert [value.name for value in model.graph.outputs] == list(names or ("a", "b"))
        check_equal(source, model, CASES[:5])
    with pytest.raises(SourceError, match=r'output "c": not returned by the module, which returns a, b'):
        capture(source_of(Two(), X, output_names=("c",)))


class Repeats(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x + 1
        return {"add": y, "again": y, "same": x}


def test_a04_outputs_that_are_one_value_or_an_input_each_have_their_name():
    source = source_of(Repeats(), X)
    model = capture(source)
    assert [value.name for value in model.graph.outputs] == ["add", "again", "same"]
    check_equal(source, model, CASES[:5])


class Segments(nn.Module):
    """Its inputs stand in an order in which a call by position puts the mask into the segment slot."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.segment = nn.Embedding(9, 4), nn.Embedding(2, 4)

    def forward(self, ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.word(ids) + self.segment(types)) * mask[:, :, None]


def test_a05_inputs_are_bound_by_name():
    source = source_of(Segments(), IDS, MASK, TYPES)
    source = Source(**{**vars(source), "inputs": tuple(limited(spec) for spec in source.inputs)})
    model = capture(source)
    assert [value.name for value in model.graph.inputs] == ["ids", "mask", "types"]
    check_equal(source, model)


def limited(spec):
    return type(spec)(spec.name, spec.dtype, spec.shape, spec.role, {"ids": 9, "types": 2}.get(spec.name, spec.limit))


# --- A07: flags


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            raise ValueError("not for export\nsecond line")
        return x


@pytest.mark.parametrize("enabled", [True, False])
def test_a07_global_state_is_as_before_also_when_the_export_raises(enabled):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    levels = {name: logging.getLogger(name).level for name in ("torch", "torch.onnx", "onnxscript")}
    filters = list(warnings.filters)
    good, bad = nn.Sequential(Two()).train(), nn.Sequential(Breaks()).train()
    try:
        capture(Source(good, (parse_input("input:float32:batch,4"),), "module", "mine", ""))
        with pytest.raises(SourceError, match=r"^mine: torch\.export failed: ValueError: not for export$"):
            capture(Source(bad, (parse_input("input:float32:batch,4"),), "module", "mine", ""))
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert good.training and good[0].training and bad[0].training
    assert levels == {name: logging.getLogger(name).level for name in levels}
    assert warnings.filters == filters
    assert torch.is_grad_enabled()


def test_nothing_is_printed_or_warned(capfd, recwarn):
    capture(source_of(Two(), X))
    with pytest.raises(SourceError):
        capture(source_of(Decides(), X))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert not recwarn.list


def test_weights_are_not_copied(encoder):
    source, model = encoder
    weight = source.module.state_dict()["embeddings.token.weight"]
    stored = model.graph.initializers["embeddings.token.weight"].const_value
    assert stored is not None
    assert stored.numpy().ctypes.data == weight.data_ptr()
