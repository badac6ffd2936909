"""What running a module on tiny feeds teaches: value limits, longest sequence, padding id, counts.

A table of architectures would have to know where each one keeps its embeddings and how it numbers positions.
Watching the lookups of a forward call needs no such table: a table that is read at exactly the values of an
input bounds that input, and a table that is read at values growing with the sequence bounds the sequence.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import SourceError, TfxError
from ..runtime.tensors import MASK_ROLES, TensorSpec, make_feeds

__all__ = ["Findings", "first_line", "inference", "located", "probe"]

_HERE = Path(__file__).resolve().parents[1]

# Two lengths show what grows; square tables of relative positions (S, S) must not look like (batch, S).
_BATCH, _SHORT, _LONG = 2, 3, 4


@dataclass(frozen=True)
class Findings:
    """What `probe` saw.

    Attributes:
        limits: exclusive upper bound of each integer input whose table was found.
        max_length: longest sequence that the position tables hold, None when no table bounds it.
        pad_id: padding index of the token table, None when it has none.
        counts: calls of attention (`scaled_dot_product_attention`), layer_norm and gelu in one forward call.
        outputs: what the call returned, unchanged.
    """

    limits: Mapping[str, int]
    max_length: int | None
    pad_id: int | None
    counts: Mapping[str, int]
    outputs: Any


def located(error: BaseException) -> str:
    """Return ``first_line`` and where in the user's own code it happened, as ``file:line``."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if "site-packages" not in path.parts and _HERE not in path.parents and path.is_file():
            place = f" ({path.name}:{frame.lineno})"
    return first_line(error) + place


def first_line(error: BaseException) -> str:
    """Return an error as one line: its type, unless it is one of ours, and the first line of its message."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, TfxError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Run a module as it is deployed: eval, no gradients, no fused TransformerEncoderLayer; all restored after.

    The fast path of `nn.TransformerEncoderLayer` is one opaque operator in an exported graph, and it trims
    padding, so that its shapes differ from those of every other path. `nn.TransformerEncoder` also looks into a
    mask to see whether it is causal, only to choose a kernel; nothing can be traced through that.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    looks = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    training = [part for part in module.modules() if part.training]
    torch.backends.mha.set_fastpath_enabled(False)
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        transformer._detect_is_causal_mask = looks
        for part in training:
            part.training = True


def probe(module: nn.Module, inputs: Sequence[TensorSpec], call: Callable[[dict[str, Tensor]], Any]) -> Findings:
    """Run a module a few times on short sequences and watch its table lookups.

    Args:
        module: what `call` runs.
        inputs: its inputs; known limits are kept to.
        call: takes one tensor per input, returns the outputs.

    Returns:
        The findings. For a position table read at offset..offset + S - 1 the longest sequence is rows - offset;
        RoBERTa's offset is its padding index + 1.

    Raises:
        SourceError: the module does not run on feeds of the declared shapes and types.
    """
    with inference(module):
        calls = _Calls()
        with calls.written_out_gelu(module):
            feeds, (lookups, outputs) = _first_run(inputs, call, calls)
        limits: dict[str, int] = {}
        pad_id = None
        for spec in _integers(inputs):
            tables = [found for found in lookups if _same(found.indices, feeds[spec.name])]
            if tables:
                limits[spec.name] = min(found.rows for found in tables)
            if spec.role == "token_ids":
                pad_id = next((found.padding for found in tables if found.padding is not None), pad_id)
        known = [replace(spec, limit=limits.get(spec.name, spec.limit)) for spec in inputs]
        max_length = _longest(known, call)
    return Findings(limits, max_length, pad_id, calls.counts, outputs)


@dataclass(frozen=True)
class _Lookup:
    indices: Tensor
    rows: int
    padding: int | None


class _Lookups(TorchDispatchMode):
    """Notes every read of a table by an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Lookup] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            padding = args[2] if len(args) > 2 and args[2] >= 0 else None
            self.found.append(_Lookup(args[1].detach().clone(), args[0].shape[0], padding))
        elif func is torch.ops.aten.index.Tensor and args[0].dim() == 2 and len(args[1]) == 1:
            index = args[1][0]
            if index is not None and index.dtype in (torch.int32, torch.int64):
                self.found.append(_Lookup(index.detach().clone(), args[0].shape[0], None))
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Counts the calls that become one canonical node each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"attention": 0, "layer_norm": 0, "gelu": 0}
        self._names = {F.scaled_dot_product_attention: "attention", F.layer_norm: "layer_norm", F.gelu: "gelu"}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = self._names.get(func)
        if name is not None:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def written_out_gelu(self, module: nn.Module) -> Iterator[None]:
        """Count the GELU modules that compute their formula without `F.gelu` too."""
        handles = []
        for part in module.modules():
            kind = type(part).__name__.lower()
            # QuickGELU is x sigmoid(1.702 x): another function.
            if "gelu" in kind and "quick" not in kind:
                before: list[int] = []
                handles.append(part.register_forward_pre_hook(lambda *_, b=before: b.append(self.counts["gelu"])))
                handles.append(part.register_forward_hook(lambda *_, b=before: self._note(b.pop())))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, before: int) -> None:
        self.counts["gelu"] += self.counts["gelu"] == before


def _integers(inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [s for s in inputs if np.dtype(s.dtype).kind in "iu" and s.role not in MASK_ROLES]


def _same(indices: Tensor, feed: Tensor) -> bool:
    return indices.numel() == feed.numel() and torch.equal(indices.flatten().long(), feed.flatten().long())


def _first_run(
    inputs: Sequence[TensorSpec], call: Callable[[dict[str, Tensor]], Any], calls: _Calls
) -> tuple[dict[str, Tensor], tuple[list[_Lookup], Any]]:
    """Run once with every integer input at its own pattern of 0 and 1, so that a table shows whose it is."""
    feeds = _feeds(inputs, _SHORT)
    random = np.random.default_rng(0)
    taken = [feed.numpy() for feed in feeds.values()]
    for spec in _integers(inputs):
        values = feeds[spec.name].numpy()
        if spec.role != "position_ids" and (spec.limit or 2) >= 2 and values.size > 2:
            while any(np.array_equal(values, other) for other in taken):
                values = random.integers(0, 2, values.shape).astype(values.dtype)
            taken.append(values)
            feeds[spec.name] = torch.from_numpy(values)
    try:
        with calls:
            return feeds, _run(feeds, call)
    except SourceError:
        # A table of one row (one segment type) knows only the id 0.
        segments = [s.name for s in inputs if s.role == "token_type_ids" and s.limit is None]
        if not segments:
            raise
        feeds |= {name: torch.zeros_like(feeds[name]) for name in segments}
        calls.counts.update(dict.fromkeys(calls.counts, 0))
        with calls:
            return feeds, _run(feeds, call)


def _longest(inputs: Sequence[TensorSpec], call: Callable[[dict[str, Tensor]], Any]) -> int | None:
    """Return rows - offset of the tightest table whose indices grow by one per position."""
    tokens = [s for s in _integers(inputs) if s.role == "token_ids"]
    # Positions may be counted over real tokens only, so one id at least must not be the padding id.
    ids = [i for i in (3, 1, 0) if all(i < (s.limit or 2) for s in tokens)] if tokens else [0]
    lengths: list[int] = []
    for token in ids:
        short, long = (_positions(inputs, call, tokens, token, length) for length in (_SHORT, _LONG))
        if len(short) != len(long):
            continue
        for (last, rows), (later, _) in zip(short, long, strict=True):
            if later - last == _LONG - _SHORT:
                lengths.append(rows - (last - (_SHORT - 1)))
    return min(lengths, default=None)


def _positions(
    inputs: Sequence[TensorSpec],
    call: Callable[[dict[str, Tensor]], Any],
    tokens: Sequence[TensorSpec],
    token: int,
    length: int,
) -> list[tuple[int, int]]:
    """Return (largest index, rows) of each lookup that has one index per position."""
    feeds = _feeds(inputs, length)
    feeds |= {s.name: torch.full_like(feeds[s.name], token) for s in tokens}
    try:
        lookups, _ = _run(feeds, call)
    except SourceError:
        return []
    return [
        (int(found.indices.max()), found.rows)
        for found in lookups
        if found.indices.numel() in (length, _BATCH * length)
    ]


def _feeds(inputs: Sequence[TensorSpec], length: int) -> dict[str, Tensor]:
    # Ids below 2 are in any vocabulary but a table of one row.
    safe = [replace(s, limit=min(s.limit or 2, 2)) if np.dtype(s.dtype).kind in "iu" else s for s in inputs]
    arrays = make_feeds(safe, batch=_BATCH, sequence=length, pattern="full")
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


def _run(feeds: dict[str, Tensor], call: Callable[[dict[str, Tensor]], Any]) -> tuple[list[_Lookup], Any]:
    lookups = _Lookups()
    try:
        with lookups:
            outputs = call(feeds)
    except (SourceError, MemoryError):
        raise
    except Exception as error:
        shapes = ", ".join(
            f"{name} {feed.dtype}{list(feed.shape)}".replace("torch.", "") for name, feed in feeds.items()
        )
        raise SourceError(f"the module does not run on {shapes}: {located(error)}") from error
    return lookups.found, outputs
