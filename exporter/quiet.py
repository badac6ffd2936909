"""Keeps the advice of torch, onnxscript and onnx_ir off the user's terminal."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO, cast

__all__ = ["quiet"]


class _WithoutGraphs:
    """A stream that drops the half-traced graph which torch.export prints when it fails; the rest passes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # print writes the line's end by itself.
        self._dropped, before = "torch.ops." in text, self._dropped
        return len(text) if self._dropped or (before and text == "\n") else self._stream.write(text)


@contextmanager
def quiet() -> Iterator[None]:
    """Mutes loggers, warnings and printed graphs; errors still raise."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    loggers += [
        logger
        for name, logger in logging.Logger.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
        and logger.level
        and name.startswith(("torch.", "onnxscript.", "onnx_ir."))
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(cast(TextIO, _WithoutGraphs(sys.stderr))):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
