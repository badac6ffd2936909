"""What a server counts, in Prometheus's format. Needs the extra ``serve``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counters of one server; nothing is shared with other servers of the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = Counter("tfx_requests", "Requests answered.", ("route", "status"), registry=self._registry)
        self.seconds = Histogram(
            "tfx_request_seconds",
            "From a request's first byte to the last of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.texts = Counter("tfx_texts", "Texts answered.", registry=self._registry)
        self.tokens = Counter("tfx_tokens", "Tokens of the texts answered.", registry=self._registry)
        self._batch_rows = Histogram(
            "tfx_batch_rows", "Texts in a call of the model.", buckets=_ROWS, registry=self._registry
        )
        self._batch_tokens = Histogram(
            "tfx_batch_tokens", "Tokens in a call of the model.", buckets=_TOKENS, registry=self._registry
        )
        self._batch_seconds = Histogram(
            "tfx_batch_seconds", "Duration of a call of the model.", buckets=_SECONDS, registry=self._registry
        )

    def watch_queue(self, tokens: Callable[[], float], rows: Callable[[], float], limit: int) -> None:
        """Show how much waits, asked when metrics are read, and how much may."""
        for name, text, read in (
            ("tfx_queue_tokens", "Tokens that wait for a call.", tokens),
            ("tfx_queue_rows", "Texts that wait for a call.", rows),
            ("tfx_queue_limit_tokens", "Tokens that may wait.", lambda: float(limit)),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)

    def call(self, rows: int, tokens: int, seconds: float) -> None:
        """Count a call of the model."""
        self._batch_rows.observe(rows)
        self._batch_tokens.observe(tokens)
        self._batch_seconds.observe(seconds)

    def text(self) -> bytes:
        """Return everything as ``GET /metrics`` does."""
        return generate_latest(self._registry)
