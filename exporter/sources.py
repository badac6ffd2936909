"""What can be exported: a torch module together with everything that its bundle must know about it.

Here: `reference` (the encoder of this package) and `module` (a factory of the user's). `checkpoint.checkpoint`
makes a `Source` from a folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, SourceError
from ..models.config import EncoderConfig
from ..models.encoder import Encoder
from ..runtime.tensors import DTYPES, MASK_ROLES, TensorSpec
from .probe import first_line, probe

__all__ = ["Source", "module", "named_outputs", "parse_input", "reference", "role_of"]


@dataclass(frozen=True)
class Source:
    """A module in eval mode and what its bundle must know.

    Attributes:
        module: called with its inputs by name, in eval mode whatever its own mode is.
        inputs: in the order of the graph's inputs.
        kind: "reference", "checkpoint" or "module".
        name: for people.
        sha256: of the weights, or of what makes them.
        expected: exact canonical counts (attention, gelu, layer_norm), None when unknown.
        max_length: longest sequence in tokens, None when nothing bounds it.
        pad_id: token id that pads a batch.
        pooling: {mode, normalize, output} of the sentence vector, None without one.
        tokenizer: {file, max_length}, None without one.
        files: copied into the bundle under their own names.
        output_names: wanted outputs in their order, None for all that the module returns.
        notes: what makes it again (config and seed of the reference encoder), or choices worth reporting, such as
            the attention implementation.
    """

    module: nn.Module
    inputs: tuple[TensorSpec, ...]
    kind: str
    name: str
    sha256: str
    expected: Mapping[str, int] | None = None
    max_length: int | None = None
    pad_id: int = 0
    pooling: Mapping[str, Any] | None = None
    tokenizer: Mapping[str, Any] | None = None
    files: tuple[Path, ...] = ()
    output_names: tuple[str, ...] | None = None
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def call(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call the module by keyword.

        Returns:
            Tensors by output name, in the order of `output_names`.

        Raises:
            SourceError: a wanted output is not among those returned.
        """
        return named_outputs(self.module(**feeds), self.output_names)


def named_outputs(returned: Any, wanted: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Name what a module returned.

    A mapping or named tuple has its own names. A tensor is called `output`, those of a sequence `output_0`,
    `output_1`, ...; having no names of their own, these take the wanted names in order.

    Args:
        returned: what the module returned.
        wanted: names to keep, in this order; None keeps every tensor.

    Raises:
        SourceError: a wanted name is not there, or nothing returned is a tensor.
    """
    if isinstance(returned, Mapping):
        found = dict(returned)
    elif hasattr(returned, "_asdict"):
        found = dict(returned._asdict())
    else:
        items = returned if isinstance(returned, list | tuple) else [returned]
        tensors = [item for item in items if isinstance(item, Tensor)]
        names = ["output"] if isinstance(returned, Tensor) else [f"output_{i}" for i in range(len(tensors))]
        if wanted is not None and len(wanted) == len(tensors):
            names = list(wanted)
        found = dict(zip(names, tensors, strict=True))
    outputs = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not outputs:
        raise SourceError(f"the module returned {type(returned).__name__} without a tensor, wanted tensors by name")
    if wanted is None:
        return outputs
    for name in wanted:
        if name not in outputs:
            raise SourceError(f'output "{name}": not returned by the module, which returns {", ".join(outputs)}')
    return {name: outputs[name] for name in wanted}


def reference(config: EncoderConfig, seed: int = 0) -> Source:
    """Return the reference encoder with weights drawn from a seed; torch's own generator is left as it was.

    Raises:
        InputError: the seed is out of torch's range.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(seed)
        except (RuntimeError, ValueError, TypeError) as error:
            raise InputError(f"seed: found {seed}, wanted an integer in [-2^63, 2^64)") from error
        encoder = Encoder(config).eval()
    ids = TensorSpec("input_ids", "int64", ("batch", "sequence"), "token_ids", config.vocab_size)
    mask = TensorSpec("attention_mask", "int64", ("batch", "sequence"), "attention_mask", 2)
    recipe = {"config": config.to_json(), "seed": seed}
    pooling = None
    if config.pooling != "none":
        pooling = {"mode": config.pooling, "normalize": config.normalize, "output": "sentence_embedding"}
    return Source(
        module=encoder,
        inputs=(ids, mask),
        kind="reference",
        name=f"encoder-d{config.d_model}-h{config.heads}-l{config.layers}",
        sha256=hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
        expected={
            "attention": config.layers,
            "gelu": 0 if config.activation == "relu" else config.layers,
            "layer_norm": 2 * config.layers + (config.norm == "pre"),
        },
        max_length=config.max_len,
        pad_id=config.pad_id,
        pooling=pooling,
        output_names=("last_hidden_state",) + (() if pooling is None else (pooling["output"],)),
        notes=recipe,
    )


def module(target: str | nn.Module, inputs: Sequence[str] = (), outputs: Sequence[str] | None = None) -> Source:
    """Make a source of a user's module.

    Args:
        target: the module itself, or "pkg.mod:factory"; the working folder can be imported from while the factory
            is made and called. The factory takes no arguments and returns a module, or (module, example inputs):
            a mapping by input name, a tensor, or a tuple in the order of `forward`.
        inputs: "name:dtype:axes" each, such as "input_ids:int64:batch,sequence" or "x:float32:batch,sequence,32";
            takes precedence over an example of the same name.
        outputs: names to export, in this order; None exports every tensor that is returned.

    Raises:
        SourceError: the target, its import, its call, its result, an input or an output is wrong.
    """
    declared = [parse_input(text) for text in inputs]
    _unique("--input", [spec.name for spec in declared])
    if outputs is not None:
        _unique("--output", list(outputs))
    if isinstance(target, nn.Module):
        built, example, target = target, None, type(target).__name__
    else:
        built, example = _build(target)
        built.eval()
    parameters = _parameters(built)
    specs = {spec.name: spec for spec in _example_specs(_bind(example, parameters, target), target)}
    specs |= {spec.name: spec for spec in declared}
    _check_names(specs, parameters, target)
    # Graph inputs follow forward's order, whatever order they were given in.
    order = [name for name in parameters if name in specs] + [name for name in specs if name not in parameters]
    source = Source(
        module=built,
        inputs=tuple(specs[name] for name in order),
        kind="module",
        name=target,
        sha256=_weights_hash(built),
        output_names=None if outputs is None else tuple(outputs),
    )
    found = probe(source.module, source.inputs, lambda feeds: source.module(**feeds))
    named_outputs(found.outputs, source.output_names)
    return replace(
        source,
        inputs=tuple(replace(spec, limit=found.limits.get(spec.name, spec.limit)) for spec in source.inputs),
        max_length=found.max_length,
        pad_id=found.pad_id or 0,
    )


def parse_input(text: str) -> TensorSpec:
    """Read "name:dtype:axes".

    Raises:
        SourceError: not three parts, no such dtype, or an axis that is neither a name nor a positive size.
    """
    parts = text.split(":")
    where = f'input "{text}"'
    if len(parts) != 3 or not parts[0].isidentifier():
        raise SourceError(f"{where}: wanted name:dtype:axes, such as input_ids:int64:batch,sequence")
    name, dtype, listing = parts
    if dtype not in DTYPES:
        raise SourceError(f'{where}: found dtype "{dtype}", wanted one of {", ".join(DTYPES)}')
    axes: list[str | int] = []
    for axis in (entry.strip() for entry in listing.split(",")):
        if axis.isidentifier():
            axes.append(axis)
        elif re.fullmatch(r"[0-9]{1,9}", axis) and int(axis) >= 1:
            axes.append(int(axis))
        else:
            raise SourceError(f'{where}: found axis "{axis}", wanted a name (batch, sequence) or a size of at least 1')
    return _spec(name, dtype, axes)


def _spec(name: str, dtype: str, axes: Sequence[str | int]) -> TensorSpec:
    role = role_of(name, dtype, axes)
    return TensorSpec(name, dtype, tuple(axes), role, 2 if role in MASK_ROLES else None)


def role_of(name: str, dtype: str, axes: Sequence[str | int]) -> str:
    """Return what an input means, judged by its name, type and axes.

    A mask of one value per token attends where it is 1; one that is named for padding, as torch.nn's
    `src_key_padding_mask`, ignores what it marks. As floats the latter is added to the scores, so it is a feature.
    """
    whole = "int" in dtype
    if "mask" in name:
        if len(axes) != 2 or axes[0] == axes[1]:
            return "features"
        if "pad" not in name or re.search("(non|not|un)_?pad", name):
            return "attention_mask"
        return "features" if "float" in dtype else "padding_mask"
    if whole and re.search("type|segment", name):
        return "token_type_ids"
    if whole and "position" in name:
        return "position_ids"
    return "token_ids" if whole else "features"


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def _build(target: str) -> tuple[nn.Module, Any]:
    """Import and call the factory; return its module and its example, None without one."""
    path, colon, attribute = target.partition(":")
    names = [*path.split("."), *attribute.split(".")]
    if not colon or not all(name.isidentifier() for name in names):
        raise SourceError(f'module "{target}": wanted pkg.mod:factory')
    with _importable(Path.cwd()):
        try:
            factory: Any = importlib.import_module(path)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            raise SourceError(f'module "{target}": importing {path} failed: {first_line(error)}') from error
        for name in attribute.split("."):
            if not hasattr(factory, name):
                raise SourceError(f'module "{target}": {path} has no attribute "{attribute}"')
            factory = getattr(factory, name)
        if not callable(factory):
            raise SourceError(f'module "{target}": found {type(factory).__name__}, wanted a callable')
        try:
            result = factory if isinstance(factory, nn.Module) else factory()
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            raise SourceError(f'module "{target}": the factory raised {first_line(error)}') from error
    built, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(built, nn.Module):
        raise SourceError(
            f'module "{target}": the factory returned {type(result).__name__}, '
            "wanted a torch.nn.Module or (module, example inputs)"
        )
    return built, example


def _parameters(built: nn.Module) -> dict[str, inspect.Parameter]:
    """Return forward's parameters that can be given by name."""
    parameters = inspect.signature(built.forward).parameters
    by_position = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
    return {name: p for name, p in parameters.items() if p.kind not in by_position}


def _bind(example: Any, parameters: Mapping[str, inspect.Parameter], target: str) -> dict[str, Tensor]:
    """Return the example's tensors by input name."""
    if example is None:
        return {}
    if isinstance(example, Mapping):
        named = dict(example)
    else:
        values = list(example) if isinstance(example, tuple | list) else [example]
        names = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(values) > len(names):
            raise SourceError(
                f'module "{target}": found {len(values)} example inputs, forward takes {", ".join(names)}'
            )
        named = dict(zip(names, values, strict=False))
    named = {name: value for name, value in named.items() if value is not None}
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise SourceError(f'module "{target}": example input {name!r} is {type(value).__name__}, wanted a tensor')
    return named


def _example_specs(example: Mapping[str, Tensor], target: str) -> Iterator[TensorSpec]:
    """Name the axes: first batch, then, for ids, masks and rank 3, sequence; an axis of another length by its input."""
    rows = max((tensor.shape[0] for tensor in example.values() if tensor.dim()), default=1)
    length = None
    for name, tensor in example.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise SourceError(f'module "{target}": example input {name} is {dtype}, wanted one of {", ".join(DTYPES)}')
        axes: list[str | int] = list(tensor.shape)
        if 0 in axes:
            raise SourceError(f'module "{target}": example input {name} is empty: {list(axes)}')
        if axes and axes[0] == rows:
            axes[0] = "batch"
        if len(axes) == 3 or (len(axes) == 2 and (not tensor.is_floating_point() or "mask" in name)):
            length = length or tensor.shape[1]
            axes[1] = "sequence" if axes[1] in (1, length) else f"{name}_sequence"
        yield _spec(name, dtype, axes)


def _check_names(names: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], target: str) -> None:
    """Refuse inputs that forward does not take, and missing ones that it needs."""
    valid = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    listing = ", ".join(valid)
    if not names:
        raise SourceError(
            f'module "{target}": no inputs; give --input name:dtype:axes or return (module, examples) for {listing}'
        )
    if len(valid) == len(parameters):
        for name in names:
            if name not in valid:
                raise SourceError(f'input "{name}": not an input of {target}, whose forward takes {listing}')
    for name in valid:
        if parameters[name].default is inspect.Parameter.empty and name not in names:
            raise SourceError(f'input "{name}": forward needs it, found only {", ".join(names)}')


def _unique(option: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise SourceError(f'{option} "{name}": given more than once')


def _weights_hash(built: nn.Module) -> str:
    """Hash names, types, shapes and bytes of parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(built.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
