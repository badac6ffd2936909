"""What ``serve.py`` compares with: a server of the same framework that runs each text by itself, on all threads.

Prints one JSON line, ``{"url": ...}``, when it can be reached.
"""

from __future__ import annotations

import json
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import click
import numpy as np
import orjson
import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel

from tfx.runtime.serve import bind
from tfx.runtime.session import Session


class Texts(BaseModel):
    """What a client asks."""

    texts: list[str]


def make_app(session: Session, url: str) -> FastAPI:
    """Return the application."""
    one_at_a_time = threading.Lock()

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        print(json.dumps({"url": url}), flush=True)
        yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/embed")
    def embed(texts: Texts) -> Response:
        with one_at_a_time:
            vectors = [np.asarray(session.encode([text]))[0] for text in texts.texts]
        return Response(orjson.dumps({"vectors": vectors}, option=orjson.OPT_SERIALIZE_NUMPY))

    return app


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--threads", type=int, required=True)
def main(bundle: Path, threads: int) -> None:
    """Serve until it is killed."""
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = make_app(Session(bundle, threads=threads), url)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none")).run([listener])


if __name__ == "__main__":
    main()
