"""A bundle that runs: arrays or texts in, named arrays or text vectors out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleError, FeedError
from .bundle import DEFAULT_BUNDLE, Bundle
from .doctor import default_threads
from .feeds import FeedChecker, axis_sizes
from .providers import StrictSession, create_session
from .schedule import Call, Schedule, blocks_of, candidates, fastest, in_order, tuned
from .text import Encoding, TextEncoder, pad, text_encoder, token_encoding

__all__ = ["MEASURED_ROWS", "Session"]

MEASURED_ROWS = 4096
"""Rows on which schedules are measured; with fewer, that would take longer than it saves."""

# onnxruntime's names of the dtypes that a bundle's inputs can have.
_ORT_TYPES = {"float": "float32", "double": "float64"}

_BLOCK_ROWS = 1024  # rows that are divided into calls together: enough to find neighbours in length
_BLOCK_ROWS_WHOLE = 64  # the same where a row's result is every output at every position
_BLOCK_SIZE = 4 << 20  # characters or tokens in a block: bounds memory where rows are long


class Session:
    """Runs a bundle on a provider, strictly; safe to call from several threads.

    Args:
        bundle: the bundle or its folder.
        provider: ``cpu`` or ``cuda``; it runs there or an error says why not.
        threads: threads inside an operator, and in all for a schedule that the bundle was tuned to; None for what the
            bundle was tuned to, else onnxruntime's choice.
        optimize: False turns onnxruntime's graph optimization off.
        allow_fallback: take the CPU where the provider does not run; ``provider`` then says ``cpu``.
        spinning: let idle threads wait in a loop; None for what the bundle was tuned to, else onnxruntime's default,
            which does.
        memory: how memory is held between calls, one of ``providers.MEMORY``.

    Attributes:
        bundle: the bundle.
        provider: where the model runs.
        placement: number of graph nodes per onnxruntime provider, None when onnxruntime cannot tell.

    Raises:
        BundleError: the bundle is damaged.
        ProviderError: the provider does not run here.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path = DEFAULT_BUNDLE,
        *,
        provider: str = "cpu",
        threads: int | None = None,
        optimize: bool = True,
        allow_fallback: bool = False,
        spinning: bool | None = None,
        memory: str = "steady",
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        manifest = self.bundle.manifest
        self._tuning = manifest.tuning if provider == "cpu" else None
        self._limit = threads  # what the caller allows, which no tuning exceeds
        if self._tuning is not None:
            # Tuned elsewhere, it may want more cores than there are here.
            if threads is None and (self._tuning["threads"] or 0) <= default_threads():
                threads = self._tuning["threads"]
            spinning = self._tuning["spinning"] if spinning is None else spinning

        def load(threads: int | None, rest: bool = False) -> StrictSession:
            return create_session(
                self.bundle.model_path,
                provider,
                threads,
                optimize,
                allow_fallback=allow_fallback,
                spinning=spinning is not False,
                rest=rest,
                memory=memory,
            )

        self._load = load
        self._session = load(threads)
        self._other: StrictSession | None = None  # for a schedule that wants another number of threads
        self._other_lock = threading.Lock()
        self.provider = self._session.provider
        self.placement = self._session.placement
        self._check_graph()
        self._check_feeds = FeedChecker(manifest.inputs, manifest.max_length, manifest.pad_id)
        self._outputs = {spec.name: spec for spec in manifest.outputs}
        self._text: TextEncoder | None = None
        self._text_lock = threading.Lock()

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Run the model once.

        Args:
            feeds: arrays or nested lists by input name. Integers are cast where nothing is lost. A missing mask attends
                everywhere, and is an error where ids begin or end with the padding id; missing segment ids are
                zeros. Tokenizer fields that the model does not take are ignored with one notice.
            outputs: names of the wanted outputs, None for all.

        Returns:
            Arrays by output name. A batch of 0 rows gives outputs of 0 rows without running.

        Raises:
            FeedError: an unknown name, or a feed of a wrong dtype, rank, size, range or length.
            MachineError: memory ran out.
        """
        return self._run(self._session, feeds, outputs)

    def _run(
        self, session: StrictSession, feeds: Mapping[str, Any], outputs: Sequence[str] | None
    ) -> dict[str, np.ndarray]:
        names = list(self._outputs if outputs is None else outputs)
        for name in names:
            if name not in self._outputs:
                raise FeedError(f'outputs: found "{name}", wanted only {", ".join(self._outputs)}')
        arrays, sizes = self._check_feeds(feeds)
        if sizes.get("batch") == 0:
            specs = [self._outputs[name] for name in names]
            shapes = axis_sizes(specs, sizes)
            return {spec.name: np.zeros(shapes[spec.name], spec.dtype) for spec in specs}
        return session.run(arrays, names)

    def tokenize(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Turn texts into feeds of shape (batch, sequence), padded to the longest, cut to the longest the model takes.

        Raises:
            FeedError: no texts, a text that is no string or has no tokens, or the model takes no text.
            BundleError: the bundle has no tokenizer.
        """
        encoder = self._text_encoder()
        return encoder.feeds(encoder.encode(texts))

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray | dict[str, np.ndarray]:
        """Run texts, batched by length, in the order they were given.

        Args:
            texts: at least one text.
            batch_size: texts in one call.

        Returns:
            With pooling in the bundle, one vector per text (texts, d). Without, every output by name; positions beyond
            a text's own length are zeros.

        Raises:
            FeedError: as ``tokenize``, or a batch size below 1.
            BundleError: the bundle has no tokenizer.
        """
        if batch_size < 1:
            raise FeedError(f"batch_size: found {batch_size}, wanted at least 1")
        encoder = self._text_encoder()
        encodings = encoder.encode(texts)
        pooling = self.bundle.manifest.pooling
        names = list(self._outputs) if pooling is None else [pooling["output"]]
        # Neighbours in length share a batch, so little of it is padding.
        order = sorted(range(len(encodings)), key=lambda i: -len(encodings[i]))
        collected: dict[str, np.ndarray] = {}
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = [encodings[i] for i in rows]
            for name, values in self.run(encoder.feeds(batch), names).items():
                self._scatter(collected, name, values, rows, batch, len(encodings))
        return collected if pooling is None else collected[pooling["output"]]

    def run_many(
        self,
        items: Iterable[str | Encoding | Sequence[int]],
        *,
        schedule: Schedule | None = None,
        cores: int | None = None,
    ) -> Iterator[Any]:
        """Run any number of texts or token sequences, as many at once as there are cores, and yield results in order.

        Memory stays the same however many there are: a few thousand items are read ahead. What comes after an
        interrupt or an error does not run on.

        Args:
            items: texts, ``Encoding`` objects, or token ids with special tokens in them.
            schedule: how they are run. None takes the one that the bundle was tuned to or, for 4096 items and more,
                measures some on the first items for two or three seconds. One of another number of threads than the
                session's loads the model a second time.
            cores: threads in all for schedules that are measured, None for the session's.

        Yields:
            With pooling in the bundle, the vector (d,) of each item. Without, a dictionary of each item's outputs,
            cut to its own length.

        Raises:
            FeedError: an item that is no text and no token ids, or is longer than the model takes; it is named by its
                number. Texts are cut instead.
            BundleError: a text, and the bundle has no tokenizer.
        """
        if isinstance(items, str):
            raise FeedError("items: found one string, wanted texts or token ids, any number of them")
        blocks = self.blocks(items)
        if schedule is None:
            schedule, blocks = self._schedule_for(blocks, cores)
        return chain.from_iterable(self.run_blocks(blocks, schedule))

    def blocks(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        """Cut items into the blocks that ``run_many`` runs; the same items give the same blocks."""
        rows = _BLOCK_ROWS if self.bundle.manifest.pooling else _BLOCK_ROWS_WHOLE
        return blocks_of(items, rows, _BLOCK_SIZE, lambda item: len(item) if hasattr(item, "__len__") else 1)

    def run_blocks(
        self,
        blocks: Iterable[Sequence[Any]],
        schedule: Schedule,
        *,
        first: int = 0,
        done: Callable[[int], None] | None = None,
    ) -> Iterator[list[Any]]:
        """Run blocks of items and yield each block's results; a block gives the same bits wherever it stands.

        Args:
            blocks: made by ``blocks``.
            schedule: how they are run.
            first: number of the first item.
            done: told after each call how many items it ran, from several threads.

        Raises:
            As ``run_many``.
        """
        call = self.caller(schedule)

        def counted(encodings: list[Encoding]) -> Iterable[Any]:
            found = call(encodings)
            if done is not None:
                done(len(encodings))
            return found

        return in_order(blocks, self._encode_items, counted, schedule, padded=self._padded, first=first)

    def choose_schedule(
        self, items: Sequence[Any], cores: int | None = None, tried: Sequence[Schedule] | None = None
    ) -> tuple[Schedule, dict[Schedule, float]]:
        """Measure which schedule runs such items fastest; it takes two or three seconds.

        Args:
            items: as ``run_many`` takes them; their lengths should be those of what is to come.
            cores: threads in all, None for the session's.
            tried: the schedules to measure, None for ``schedule.candidates``.

        Returns:
            The schedule, and tokens per second of each that was tried.
        """
        tried = self._candidates(cores) if tried is None else tried
        encodings = self._encode_items(items, 0)
        chosen, rates = fastest(tried, self.caller, encodings, padded=self._padded)
        with self._other_lock:  # the loser's memory goes back
            if self._other is not None and self._other.threads != chosen.threads:
                self._other = None
        return chosen, rates

    @property
    def _padded(self) -> bool:
        return self.bundle.manifest.layout == "padded"

    def _candidates(self, cores: int | None) -> list[Schedule]:
        return candidates(cores or self._session.threads or default_threads(), self.provider)

    def _schedule_for(self, blocks: Iterator[list[Any]], cores: int | None) -> tuple[Schedule, Iterator[list[Any]]]:
        """Return the schedule to take, and the blocks with those put back that were looked at."""
        known = tuned(self._tuning, self._limit or default_threads()) if cores is None else None
        if known is not None:
            return known, blocks
        ahead: list[list[Any]] = []
        items: list[Any] = []
        while len(items) < MEASURED_ROWS and (block := next(blocks, None)) is not None:
            ahead.append(block)
            items += block
        if len(items) < MEASURED_ROWS:
            schedule = self._candidates(cores)[0]
        else:
            schedule, _ = self.choose_schedule(items, cores)
        return schedule, chain(ahead, blocks)

    def caller(self, schedule: Schedule) -> Call:
        """Return the function that runs sequences together under a schedule, for several threads at once.

        It gives the vector (d,) of each sequence or, without pooling, a dictionary of its outputs.
        """
        session = self._with_threads(schedule.threads)
        inputs, pad_id = self.bundle.manifest.inputs, self.bundle.manifest.pad_id
        pooling = self.bundle.manifest.pooling
        if pooling is not None:
            output = pooling["output"]
            return lambda encodings: self._run(session, pad(encodings, inputs, pad_id), [output])[output]

        def whole(encodings: list[Encoding]) -> list[dict[str, np.ndarray]]:
            found = self._run(session, pad(encodings, inputs, pad_id), None)
            return [
                {name: self._own(name, values[row], len(encoding)) for name, values in found.items()}
                for row, encoding in enumerate(encodings)
            ]

        return whole

    def _own(self, name: str, values: np.ndarray, length: int) -> np.ndarray:
        """Return a row's values without those of padding."""
        return values[:length] if self._outputs[name].shape[1:2] == ("sequence",) else values

    def _with_threads(self, threads: int) -> StrictSession:
        """Return a session of so many threads inside an operator; a second one is loaded where the first has others."""
        if self.provider != "cpu" or threads == (self._session.threads or default_threads()):
            return self._session
        with self._other_lock:
            if self._other is None or self._other.threads != threads:
                self._other = self._load(threads, rest=True)  # the first one has work between its calls
            return self._other

    def _encode_items(self, items: Sequence[Any], first: int) -> list[Encoding]:
        manifest = self.bundle.manifest
        if all(isinstance(item, str) for item in items):
            return self._text_encoder().encode(items, first, "items")
        return [
            self._text_encoder().encode([item], i, "items")[0]
            if isinstance(item, str)
            else token_encoding(item, manifest.inputs, manifest.max_length, f"items[{i}]")
            for i, item in enumerate(items, first)
        ]

    def _scatter(
        self,
        collected: dict[str, np.ndarray],
        name: str,
        values: np.ndarray,
        rows: list[int],
        batch: list[Encoding],
        count: int,
    ) -> None:
        """Put a batch's rows where they belong; the first batch is the longest and sets the size."""
        whole = collected.setdefault(name, np.zeros((count, *values.shape[1:]), values.dtype))
        if self._outputs[name].shape[1:2] == ("sequence",):
            for row, row_values, encoding in zip(rows, values, batch, strict=True):
                whole[row, : len(encoding)] = row_values[: len(encoding)]
        else:
            whole[rows] = values

    def _text_encoder(self) -> TextEncoder:
        with self._text_lock:
            if self._text is None:
                self._text = text_encoder(self.bundle)
            return self._text

    def _check_graph(self) -> None:
        """Refuse a graph whose inputs or outputs are not those of the manifest."""
        manifest, ort = self.bundle.manifest, self._session.ort
        for kind, nodes, specs in (
            ("inputs", ort.get_inputs(), manifest.inputs),
            ("outputs", ort.get_outputs(), manifest.outputs),
        ):
            found = {node.name: _dtype(node.type) for node in nodes}
            wanted = {spec.name: spec.dtype for spec in specs}
            if found != wanted:
                raise BundleError(
                    f"{self.bundle.model_path}: found {kind} {_show(found)}, tfx.json says {_show(wanted)}"
                )


def _dtype(ort_type: str) -> str:
    """Return the numpy name of ``tensor(...)``."""
    inner = ort_type.removeprefix("tensor(").removesuffix(")")
    return _ORT_TYPES.get(inner, inner)


def _show(tensors: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {dtype}" for name, dtype in tensors.items())
