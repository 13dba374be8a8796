"""An engine that answers by bytes that a real one once sent, and a client that notes when each of them arrives.

Both run in one loop, so that their clocks are one; neither knows the gateway between them. A recording is an answer as
`record.py` read it from a socket: its head, and the chunks of its body.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httptools

_CHUNK_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_NUMBER = re.compile(rb'"seed": ?(\d+)')
_EVENT = b'data: {"id"'
_LONGEST_S = 30.0


@dataclass(frozen=True)
class Recording:
    """An answer: its head, and the pieces in which its body came, each framed as it was."""

    head: bytes
    pieces: tuple[bytes, ...]

    @classmethod
    def read(cls, file: Path, digest: str) -> Recording:
        """Read one, as if it had been made for another adapter."""
        head, _, body = file.read_bytes().replace(b"sha256:" + b"0" * 64, digest.encode()).partition(_HEAD_END)
        is_chunked = b"transfer-encoding: chunked" in head.lower()
        return cls(head + _HEAD_END, tuple(_split_chunks(body)) if is_chunked else (body,))


def _split_chunks(body: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        size_end = body.index(_CHUNK_END, place)
        end = size_end + len(_CHUNK_END) + int(body[place:size_end], 16) + len(_CHUNK_END)
        yield body[place:end]
        place = end


@dataclass
class Trace:
    """What happened to one request, on the loop's clock."""

    began_at: float = 0.0
    sent_at: list[float] = field(default_factory=list)
    """When the engine sent each event."""
    arrived_at: list[float] = field(default_factory=list)
    """When each event arrived."""
    ended_at: float = 0.0
    status: int = 0
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """From the request to the last byte of its answer."""
        return self.ended_at - self.began_at

    @property
    def first_s(self) -> float:
        """From the request to its first event."""
        return self.arrived_at[0] - self.began_at

    @property
    def delays_s(self) -> list[float]:
        """How long each event was on its way."""
        return [there - here for here, there in zip(self.sent_at, self.arrived_at, strict=True)]


class Replay:
    """The engine: whole answers at once, streams by a piece every `gap_s`, and `state` to who asks for it."""

    def __init__(self, whole: Recording, stream: Recording, state: bytes, gap_s: float) -> None:
        self.whole, self.stream, self.state, self.gap_s = whole, stream, state, gap_s
        self.traces: dict[int, Trace] = {}

    def build_connection(self) -> asyncio.Protocol:
        """A protocol for one client."""
        return _EngineConnection(self)


class _EngineConnection(asyncio.Protocol):
    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, body, self._path, self._body = self._path, self._body, b"", b""
        is_kept = self._parser.should_keep_alive()
        if not path.startswith(b"/v1/"):
            answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            self._transport.write(answer % (len(self._replay.state), self._replay.state))
            self._end(is_kept=is_kept)
            return
        found = _NUMBER.search(body)
        trace = self._replay.traces.get(int(found[1]) if found else -1, Trace())
        is_stream = re.search(rb'"stream": ?true', body) is not None
        recording = self._replay.stream if is_stream else self._replay.whole
        if not is_stream:
            self._transport.write(recording.head + b"".join(recording.pieces))
            self._end(is_kept=is_kept)
            return
        self._transport.write(recording.head)
        self._send(recording.pieces, 0, trace, time.perf_counter(), is_kept=is_kept)

    def _send(self, pieces: tuple[bytes, ...], index: int, trace: Trace, began_at: float, *, is_kept: bool) -> None:
        if self._transport.is_closing():
            return
        # what follows the last token comes with it
        is_last = index + 1 >= len(pieces) or _EVENT not in pieces[index + 1]
        data = b"".join(pieces[index:]) if is_last else pieces[index]
        trace.sent_at.extend([time.perf_counter()] * data.count(_EVENT))
        self._transport.write(data)
        if is_last:
            self._end(is_kept=is_kept)
            return
        delay_s = max(0.0, began_at + (index + 1) * self._replay.gap_s - time.perf_counter())
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, lambda: self._send(pieces, index + 1, trace, began_at, is_kept=is_kept))

    def _end(self, *, is_kept: bool) -> None:
        if not is_kept:
            self._transport.close()


class _ClientConnection(asyncio.Protocol):
    """A connection of a client that is kept from one request to the next."""

    def __init__(self, on_free: Callable[[_ClientConnection], None]) -> None:
        self._on_free = on_free
        self._trace = Trace()
        self.ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the answer was cut"))

    def send(self, request: bytes, trace: Trace) -> asyncio.Future[None]:
        """Send a request; the future is done at the end of the answer."""
        self._trace = trace
        self._parser = httptools.HttpResponseParser(self)
        self.ended = asyncio.get_running_loop().create_future()
        trace.began_at = time.perf_counter()
        self._transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._trace.num_bytes += len(body)
        if count := body.count(_EVENT):
            self._trace.arrived_at.extend([time.perf_counter()] * count)

    def on_message_complete(self) -> None:
        self._trace.ended_at = time.perf_counter()
        self._trace.status = self._parser.get_status_code()
        assert self.ended is not None
        if not self.ended.done():
            self.ended.set_result(None)
        self._on_free(self)

    def close(self) -> None:
        self._transport.close()


class Client:
    """Sends requests to one address when they are due, however many of them are still open."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key
        self._free: deque[_ClientConnection] = deque()

    async def send(self, path: str, body: bytes, trace: Trace) -> None:
        """Send one request and wait for the whole answer."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        connection = self._free.popleft() if self._free else await self._connect()
        async with asyncio.timeout(_LONGEST_S):
            await connection.send(head.encode() + body, trace)

    async def open(self, num_connections: int) -> None:
        """Connect ahead, as a client that has been there for a while has."""
        self._free.extend([await self._connect() for _ in range(num_connections)])

    async def _connect(self) -> _ClientConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _ClientConnection(self._free.append), "127.0.0.1", self._port
        )
        return connection

    def close(self) -> None:
        """Close all connections."""
        for connection in self._free:
            connection.close()
