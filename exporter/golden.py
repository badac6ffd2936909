"""The golden: what the live torch module answers, recorded case by case."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import SourceError
from ..runtime.golden import GoldenCase
from ..runtime.tensors import DTYPES, Case, default_cases, make_feeds
from ..runtime.text import TextEncoder
from .golden_texts import text_feeds
from .probe import first_line, inference
from .sources import Source

__all__ = ["record"]


def record(
    source: Source, cases: Sequence[Case] | None = None, *, encoder: TextEncoder | None = None
) -> list[GoldenCase]:
    """Call the module on each case, by keyword.

    Args:
        source: what is called; its flags and torch's are as before afterwards.
        cases: shapes and mask patterns, `default_cases` when None.
        encoder: the source's tokenizer; with it hard texts are recorded too, as the cases `texts` and `text-long`.

    Returns:
        Feeds and outputs, both by name. The feeds differ from case to case and are the same at every call.

    Raises:
        SourceError: the module cannot run a case, or an output is of a type that a bundle cannot hold; the message
            names it.
    """
    planned: list[tuple[Case, dict[str, np.ndarray], tuple[str, ...]]] = []
    for seed, case in enumerate(default_cases(source.inputs, source.max_length) if cases is None else cases):
        feeds = make_feeds(source.inputs, batch=case.batch, sequence=case.sequence, pattern=case.pattern, seed=seed)
        planned.append((case, feeds, ()))
    if encoder is not None:
        planned += text_feeds(encoder, source.inputs, source.max_length)
    recorded = []
    with inference(source.module):
        for case, feeds, texts in planned:
            try:
                # A copy: a module may write into its inputs.
                returned = source.call({name: torch.tensor(array) for name, array in feeds.items()})
            except (SourceError, MemoryError):
                raise
            except Exception as error:
                raise SourceError(f"{source.name}: case {case.id} does not run: {first_line(error)}") from error
            for name, tensor in returned.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                if dtype not in DTYPES:  # bfloat16 and complex ones, for which numpy or ONNX has no equal
                    raise SourceError(f"{source.name}: output {name} is {dtype}, wanted one of {', '.join(DTYPES)}")
            outputs = {name: tensor.detach().cpu().numpy().copy() for name, tensor in returned.items()}
            recorded.append(GoldenCase(case.id, case.batch, case.sequence, case.pattern, feeds, outputs, texts))
    return recorded
