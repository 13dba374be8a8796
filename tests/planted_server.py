"""An OpenAI-compatible server whose latencies are planted: it sleeps to moments that it decides beforehand.

A busy machine makes it late by what a thread waits for its core, and never adds that up over a stream.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Planted:
    """What the server does, may be changed while it runs; seconds."""

    url: str = ""
    first_s: float = 0.05
    token_s: float = 0.01
    noise: float = 0.0
    """How much each request's time varies (lognormal)."""
    slowdown: float = 1.0
    tokens_per_piece: int = 1
    max_open: int | None = None
    """Requests that are worked on at once; others wait."""
    stall_after: tuple[float, float] | None = None
    """From when to when after the first request nothing is sent."""
    stall: tuple[float, float] = (0.0, 0.0)
    """The same by `time.monotonic`."""
    fail_every: int = 0
    """Each so-many-th request is refused with 429."""
    has_usage: bool = True
    keeps_alive: bool = True
    metrics: str = ""
    usage: list[dict[str, Any]] = field(default_factory=list)
    """Rows that it has written down, as Loraplex does."""
    tokens_per_word: float = 1.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    num_connections: int = 0


@contextmanager
def planted_server(**options: Any) -> Iterator[Planted]:
    """Serve in a thread; ends with the block."""
    planted, is_up = Planted(**options), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        seats = asyncio.Semaphore(planted.max_open or 1_000_000)
        server = await asyncio.start_server(lambda *pair: _Client(planted, seats, *pair).run(), "127.0.0.1", 0)
        planted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_up.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert is_up.wait(60)
    try:
        yield planted
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


class _Client:
    """One connection."""

    def __init__(
        self, planted: Planted, seats: asyncio.Semaphore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._planted, self._seats, self._reader, self._writer = planted, seats, reader, writer
        planted.num_connections += 1

    async def run(self) -> None:
        try:
            while True:
                head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await self._reader.readexactly(int(fields.get("content-length", 0)))
                if head.startswith("POST"):
                    self._planted.keys.append(fields.get("authorization", ""))
                    await self._answer(json.loads(body))
                else:
                    self._show(head)
                if not self._planted.keeps_alive:
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            # cancelled at the end only: as an error of a task that streams began it would be logged
            pass
        finally:
            self._writer.close()

    def _show(self, head: str) -> None:
        if "/metrics" in head and self._planted.metrics:
            self._send_whole(200, self._planted.metrics)
        elif "/usage/requests" in head and self._planted.usage:
            self._send_whole(200, json.dumps({"data": self._planted.usage, "next_cursor": None}))
        else:
            self._send_whole(404, "{}")

    async def _answer(self, body: dict[str, Any]) -> None:
        planted = self._planted
        planted.bodies.append(body)
        number = len(planted.bodies)
        if number == 1 and planted.stall_after is not None:
            begin_s, end_s = planted.stall_after
            planted.stall = (time.monotonic() + begin_s, time.monotonic() + end_s)
        if planted.fail_every and number % planted.fail_every == 0:
            self._send_whole(429, json.dumps({"error": {"message": "Too fast.", "code": "rate_limit_exceeded"}}))
            return
        planted.num_open += 1
        planted.most_open = max(planted.most_open, planted.num_open)
        try:
            async with self._seats:
                await self._stream(body, number)
        finally:
            planted.num_open -= 1

    async def _stream(self, body: dict[str, Any], number: int) -> None:
        planted, is_chat = self._planted, "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        factor = planted.slowdown * random.Random(f"{number} {prompt}").lognormvariate(0, planted.noise)
        self._writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        due = time.monotonic() + planted.first_s * factor
        if is_chat:
            self._send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for place in range(0, body["max_tokens"], planted.tokens_per_piece):
            if planted.stall[0] <= max(due, time.monotonic()) < planted.stall[1]:
                due = planted.stall[1]
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += planted.token_s * factor * planted.tokens_per_piece
            piece: dict[str, Any] = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
            is_last = place + planted.tokens_per_piece >= body["max_tokens"]
            self._send({"choices": [piece | {"finish_reason": "length" if is_last else None}]})
        if planted.has_usage:
            num_prompt = round(len(prompt.split()) * planted.tokens_per_word)
            self._send({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}})
        self._write_chunk(b"data: [DONE]\n\n")
        self._writer.write(b"0\r\n\r\n")

    def _send(self, event: dict[str, Any]) -> None:
        self._write_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write_chunk(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send_whole(self, status: int, body: str) -> None:
        data = body.encode()
        self._writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))
