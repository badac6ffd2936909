"""The clients of ``serve.py``, in a process of their own: a closed loop on connections that stay open.

Reads one JSON object from stdin ({url, clients, seconds, texts, vectors: a .npy, max_abs, seed}) and prints one. Each
client asks for one text, waits for the answer and asks for the next. It speaks HTTP by hand, since a client library
would take more of the cores than the server's own framework does.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson

_CHECKED = 8  # one answer in so many is compared with the vector that it has to be


class Clients:
    """So many clients at once, and what they saw."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.place = urlsplit(asked["url"])
        self.vectors = np.load(asked["vectors"], allow_pickle=False)  # noqa: TID251
        self.requests = [self.request(text) for text in asked["texts"]]
        self.seconds: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.worst = 0.0
        self.checked = 0

    def request(self, text: str) -> bytes:
        """Return the bytes of a request."""
        body = json.dumps({"texts": [text]}).encode()
        head = f"POST /embed HTTP/1.1\r\nhost: {self.place.netloc}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def client(self, number: int, until: float) -> None:
        """Ask until the time is over."""
        draw = random.Random(self.asked["seed"] * 100_003 + number)
        reader, writer = await asyncio.open_connection(self.place.hostname, self.place.port)
        while time.perf_counter() < until:
            row = draw.randrange(len(self.requests))
            start = time.perf_counter()
            writer.write(self.requests[row])
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head[9:12])
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            body = await reader.readexactly(length)
            self.statuses[status] += 1
            if status != 200:
                await asyncio.sleep(0.05)
                if b"connection: close" in head.lower():
                    writer.close()
                    reader, writer = await asyncio.open_connection(self.place.hostname, self.place.port)
                continue
            self.seconds.append(time.perf_counter() - start)
            if len(self.seconds) % _CHECKED == 0:
                found = np.array(orjson.loads(body)["vectors"][0], np.float32)
                self.worst = max(self.worst, float(np.abs(found - self.vectors[row]).max()))
                self.checked += 1
        writer.close()

    async def run(self) -> dict[str, Any]:
        """Run all clients."""
        start = time.perf_counter()
        until = start + self.asked["seconds"]
        await asyncio.gather(*(self.client(i, until) for i in range(self.asked["clients"])))
        elapsed = time.perf_counter() - start
        times = np.array(self.seconds) * 1e3
        p50, p99 = np.percentile(times, [50, 99]) if len(times) else (np.nan, np.nan)
        return {
            "texts_per_s": len(times) / elapsed,
            "answers": len(times),
            "p50_ms": float(p50),
            "p99_ms": float(p99),
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "max_abs": self.worst,
            "checked": self.checked,
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(Clients(json.load(sys.stdin)).run())))
