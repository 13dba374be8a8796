"""A client that says exactly the bytes it is told to, piece by piece, and leaves when and how it is told to."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

LEAVES = ("close", "half", "reset")
"""Ways to go: close the connection, close only the side that sends, break it off."""


@dataclass
class ByteAnswer:
    """One answer; `status` is 0 where the server closed without one."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def build_request(
    path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST", version: str = "1.1"
) -> bytes:
    """The bytes of a request; headers with an empty value are left out."""
    found = {"host": "e", "content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in found.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


class ByteClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes, piece: int = 1 << 20) -> None:
        for start in range(0, len(data), piece):
            self.writer.write(data[start : start + piece])
            await self.writer.drain()

    async def read_until(self, text: bytes) -> bytes:
        """What arrives up to and with `text`."""
        return await self.reader.readuntil(text)

    async def read_head(self) -> ByteAnswer:
        """Status and headers."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        pairs = [line.partition(": ") for line in lines]
        return ByteAnswer(int(first.split()[1]), {name.lower(): value for name, _, value in pairs}, b"")

    async def read_answer(self) -> ByteAnswer:
        """One whole answer, with its chunks joined."""
        try:
            answer = await self.read_head()
            while answer.status == 100:
                answer = await self.read_head()
        except (asyncio.IncompleteReadError, ConnectionError):
            return ByteAnswer(0, {}, b"")
        if answer.headers.get("transfer-encoding") == "chunked":
            answer.body = b"".join([chunk async for chunk in self._chunks()])
        else:
            answer.body = await self.reader.readexactly(int(answer.headers.get("content-length", 0)))
        return answer

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    def leave(self, how: str) -> None:
        """Go in one of the ways of `LEAVES`; after `half` what the server sends can still be read."""
        if how == "half":
            self.writer.write_eof()
            return
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


@asynccontextmanager
async def connected(address: str | tuple[str, int]) -> AsyncIterator[ByteClient]:
    """A connection to a Unix socket's path, or to host and port."""
    if isinstance(address, str):
        reader, writer = await asyncio.open_unix_connection(address, limit=1 << 24)
    else:
        reader, writer = await asyncio.open_connection(*address, limit=1 << 24)
    try:
        yield ByteClient(reader, writer)
    finally:
        writer.transport.abort()
