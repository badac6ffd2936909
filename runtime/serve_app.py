"""The routes of ``tfx serve``. Needs the extra ``serve``."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from .. import __version__
from ..errors import FeedError, MachineError
from .serve_batch import Batcher, BusyError, RowError
from .serve_http import Guard, RefusedError, error_body
from .serve_metrics import CONTENT_TYPE_LATEST, Metrics
from .serve_schemas import (
    EmbedRequest,
    EmbedResponse,
    ErrorResponse,
    OpenAIRequest,
    OpenAIResponse,
    problem,
    state_limits,
)
from .serve_tokenize import TokenizeQueue
from .tensors import TensorSpec
from .text import Encoding, TextEncoder, token_encoding

__all__ = ["Service", "make_app"]

_ROUTES = frozenset({"/embed", "/v1/embeddings", "/v1/models", "/health", "/ready", "/metrics", "/openapi.json"})
_SLICE = 64  # vectors written as JSON before others have their turn in the event loop

# The documentation page runs its own script; with this, it can ask no other machine for anything.
_DOCS_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)


@dataclass(frozen=True)
class Service:
    """What the routes work with.

    Attributes:
        name: of the model, as clients say it.
        encoder: texts to tokens.
        inputs: of the model; they say which token ids there are.
        max_length: longest sequence, None when there is no limit.
        dimension: of a vector.
        make_batcher: makes the queue; called in the event loop.
        copies: how often the weights are in memory.
        queue_tokens: tokens that may wait, and the most of one request.
        max_texts: texts in one request.
        max_body: bytes in one request.
        refuse_long: answer a text that is longer than the model takes with an error; False cuts it and says so.
        stopping: True once the server takes no new work.
    """

    name: str
    encoder: TextEncoder
    inputs: Sequence[TensorSpec]
    max_length: int | None
    dimension: int
    make_batcher: Callable[[Callable[[int, int, float], None]], Batcher]
    copies: int
    queue_tokens: int
    max_texts: int
    max_body: int
    refuse_long: bool
    stopping: Callable[[], bool]


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "400 the request is wrong, 413 too large, 429 the queue is full"},
    "5XX": {
        "model": ErrorResponse,
        "description": "500 the model failed on it, 503 memory ran out or the server stops",
    },
}


def make_app(service: Service) -> FastAPI:
    """Return the ASGI application; its queue lives as long as its lifespan."""
    metrics = Metrics()
    state: dict[str, Batcher] = {}
    tokenizing = TokenizeQueue(service.queue_tokens)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        batcher = state["batcher"] = service.make_batcher(metrics.call)
        metrics.watch_queue(lambda: batcher.tokens, lambda: batcher.rows, service.queue_tokens)
        try:
            yield
        finally:
            await batcher.close()
            await asyncio.to_thread(tokenizing.close)

    app = FastAPIOffline(
        redoc_url=None,
        title="tfx serve",
        version=__version__,
        summary=f"Vectors of texts by {service.name}",
        lifespan=lifespan,
        swagger_ui_parameters={"validatorUrl": None},  # which asks another machine to judge the schema
    )

    async def run(
        items: Sequence[Any], key: str, encode: Callable[[Sequence[Any], int], list[Encoding]]
    ) -> tuple[list[Encoding], Any]:
        """Tokenize outside of the event loop and run; refused before that where the queue is surely full."""
        count = len(items)
        if count > service.max_texts:
            raise RefusedError(400, f"found {count} texts, wanted at most {service.max_texts} (--max-texts)", key)
        batcher = state["batcher"]

        def check(tokens: int) -> None:
            if tokens > service.queue_tokens:  # it would never fit
                raise RefusedError(413, f"found {tokens} tokens, wanted at most {service.queue_tokens} (--queue)", key)
            batcher.check(tokens)

        try:
            check(count)  # a token each, at least
            encodings = await tokenizing.run(items, encode)
            tokens = sum(len(encoding) for encoding in encodings)
            check(tokens)
            vectors = await batcher.run(encodings)
        except BusyError as error:
            raise RefusedError(429, str(error), headers={"retry-after": str(error.retry_after)}) from error
        except FeedError as error:
            message = str(error)
            raise RefusedError(400, message.replace("text[0]", "text", 1), key) from error
        except RowError as error:
            status = 503 if isinstance(error.reason, MachineError | MemoryError) else 500
            raise RefusedError(status, f"text {error.row}: {error.reason}") from error
        metrics.texts.inc(count)
        metrics.tokens.inc(tokens)
        return encodings, vectors

    async def run_texts(texts: list[str], key: str) -> tuple[list[Encoding], Any]:
        def encode(some: Sequence[str], first: int) -> list[Encoding]:
            encodings = service.encoder.encode(some, first, key)
            for i, encoding in enumerate(encodings, first):
                if encoding.cut and service.refuse_long:
                    raise FeedError(f"{key}[{i}]: is longer than {len(encoding)} tokens, the most there can be")
            return encodings

        return await run(texts, key, encode)

    async def run_ids(rows: list[list[int]], key: str) -> tuple[list[Encoding], Any]:
        def encode(some: Sequence[list[int]], first: int) -> list[Encoding]:
            return [
                token_encoding(row, service.inputs, service.max_length, f"{key}[{i}]")
                for i, row in enumerate(some, first)
            ]

        return await run(rows, key, encode)

    @app.post(
        "/embed",
        tags=["vectors"],
        summary="Vectors of texts",
        response_class=Response,
        responses={200: {"model": EmbedResponse}, **_ERRORS},
    )
    async def embed(request: EmbedRequest) -> Response:
        """Turn texts into vectors."""
        if "text" in request.model_fields_set:
            encodings, vectors = await run_texts([request.text], "text")
        else:
            encodings, vectors = await run_texts(request.texts, "texts")
        rest = {
            "tokens": [len(encoding) for encoding in encodings],
            "cut": [encoding.cut for encoding in encodings],
            "model": service.name,
        }
        return _json(b'{"vectors":[' + await _joined(vectors, _dump) + b"]," + _dump(rest)[1:])

    @app.post(
        "/v1/embeddings",
        tags=["vectors"],
        summary="The same, as OpenAI's API",
        response_class=Response,
        responses={200: {"model": OpenAIResponse}, **_ERRORS},
    )
    async def openai_embeddings(request: OpenAIRequest) -> Response:
        """Turn texts or token ids into vectors, as OpenAI's API does."""
        if request.model != service.name:
            raise RefusedError(
                404, f'model: found "{request.model}", this server has "{service.name}" (--model-name)', "model"
            )
        if request.dimensions not in (None, service.dimension):
            raise RefusedError(
                400, f"dimensions: found {request.dimensions}, this model has {service.dimension}", "dimensions"
            )
        texts, ids = request.rows()
        encodings, vectors = await (run_texts(texts, "input") if texts else run_ids(ids, "input"))

        def item(index: int, vector: np.ndarray) -> bytes:
            values: Any = vector
            if request.encoding_format == "base64":
                values = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            return _dump({"object": "embedding", "index": index, "embedding": values})

        tokens = sum(len(encoding) for encoding in encodings)
        rest = {"model": service.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        data = await _joined(list(enumerate(vectors)), lambda pair: item(*pair))
        return _json(b'{"object":"list","data":[' + data + b"]," + _dump(rest)[1:])

    @app.get("/v1/models", tags=["server"], summary="The model")
    async def models() -> dict[str, Any]:
        """Say which model there is."""
        return {
            "object": "list",
            "data": [{"id": service.name, "object": "model", "created": 0, "owned_by": "tfx"}],
        }

    @app.get("/health", tags=["server"], summary="Alive?")
    async def health() -> dict[str, str]:
        """Say that the process lives."""
        return {"status": "ok"}

    @app.get("/ready", tags=["server"], summary="Ready for work?", responses={"5XX": _ERRORS["5XX"]})
    async def ready() -> dict[str, str]:
        """Say that new work is taken."""
        if service.stopping():
            raise RefusedError(503, "the server stops")
        return {"status": "ready"}

    @app.get(
        "/metrics",
        tags=["server"],
        summary="Counters",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    async def prometheus() -> Response:
        """Show counters in Prometheus's format."""
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("/docs")

    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            state_limits(
                describe(),
                name=service.name,
                dimension=service.dimension,
                max_texts=service.max_texts,
                max_length=service.max_length,
                limit=next((spec.limit for spec in service.inputs if spec.role == "token_ids"), None),
            )
        return describe()

    app.openapi = openapi
    _answer_errors(app)
    app.add_middleware(
        Guard, max_body=service.max_body, metrics=metrics, routes=_ROUTES, policies={"/docs": _DOCS_POLICY}
    )
    return app


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


async def _joined(items: Sequence[Any], dump: Callable[[Any], bytes]) -> bytes:
    """Return items as JSON with commas between; others have their turn between slices of a long answer."""
    parts: list[bytes] = []
    for start in range(0, len(items), _SLICE):
        parts += [dump(item) for item in items[start : start + _SLICE]]
        if start + _SLICE < len(items):
            await asyncio.sleep(0)
    return b",".join(parts)


def _answer_errors(app: FastAPI) -> None:
    """Give every error the same shape and one line."""

    def answer(error: RefusedError) -> Response:
        body = error_body(error.status, error.message, error.param)
        return Response(body, error.status, error.headers, "application/json")

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> Response:
        del request
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        del request
        message, param = problem(error.errors()[0])
        return answer(RefusedError(400, message, param))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return answer(RefusedError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        del request  # what happened is in the server's log
        return answer(RefusedError(500, f"unexpected {type(error).__name__}"))
