"""One HTTP/1.1 exchange on a connection of its own, for answers that come in many small pieces.

`HttpStream` is written by its connection alone. A general client spends more on a piece than a token's whole way
through the gateway may cost; this one parses in C and wakes its reader once for all that has arrived.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from loraplex_engine.errors import ReplicaFailedError, UnreachableError

_MAX_HEAD_BYTES = 64 << 10
_MAX_UNREAD_BYTES = 256 << 10
_FIRST_FINAL, _LAST = 200, 599
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


class Address(msgspec.Struct, frozen=True):
    """Where a server listens: `uds` is the path of a Unix socket, or None for host and port."""

    host: str
    port: int
    path: str
    is_tls: bool
    uds: str | None = None


def parse_address(url: str, uds: str | None = None) -> Address:
    """Return the address in an http or https URL; `path` is what its paths begin with."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    return Address(parts.hostname or "", port, parts.path.rstrip("/"), is_tls, uds)


class HttpStream(asyncio.Protocol):
    """The answer to one request: `status` and `headers` once `wait_head` has returned, then the body by `read`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._num_head_bytes = self._num_unread = 0
        self._is_complete = self._is_lost = self._is_paused = False

    async def wait_head(self, deadline_s: float) -> None:
        """Wait for status and headers.

        Raises:
            ReplicaFailedError: They did not come in time, the connection ended before, or what came is no HTTP.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._head
        except TimeoutError as error:
            raise ReplicaFailedError from error

    async def read(self, gap_s: float) -> bytes:
        """Return what has arrived of the body since the last call, nothing at its end.

        Raises:
            ReplicaFailedError: The connection ended in the middle, or nothing came for `gap_s` seconds.
        """
        if not self._pieces and not self._is_complete and not self._is_lost:
            await self._wait(gap_s)
        if self._pieces:
            return self._take()
        if not self._is_complete:
            raise ReplicaFailedError
        return b""

    def send(self, data: bytes) -> None:
        """Send the request."""
        assert self._transport is not None, "it is connected"
        self._transport.write(data)

    def close(self) -> None:
        """End the exchange at once; a server that has not finished sees its client gone."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        # uvloop's are no subclass of it
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse; what is no HTTP ends the connection."""
        if not self._head.done():
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._lose()
        if not self._head.done() and self._num_head_bytes > _MAX_HEAD_BYTES:
            self._lose()

    def connection_lost(self, _: Exception | None) -> None:
        """Tell who waits."""
        self._lose()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header (parser); trailers, and another answer behind the first, are nobody's."""
        if self._head.done():
            return
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Give out the head (parser)."""
        if self._head.done():
            return
        self.status = self._parser.get_status_code()
        if self.status < _FIRST_FINAL:
            # what is only informational is followed by the answer
            self.headers.clear()
        elif self.status > _LAST:
            self._lose()
        else:
            self._head.set_result(None)

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body, and take no more while the reader lags behind (parser)."""
        if self._is_complete:
            return
        self._pieces.append(body)
        self._num_unread += len(body)
        if self._num_unread > _MAX_UNREAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        """Note the end (parser)."""
        if self._head.done():
            self._is_complete = True
            self._wake()

    async def _wait(self, gap_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(gap_s, self._lose)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _take(self) -> bytes:
        pieces, self._pieces, self._num_unread = self._pieces, [], 0
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self) -> None:
        self._is_lost = True
        if not self._head.done():
            self._head.set_exception(ReplicaFailedError())
            # nobody may be waiting any more
            self._head.exception()
        self._wake()
        self.close()


async def open_stream(
    address: Address, path: str, headers: Mapping[str, str], body: bytes, tls: ssl.SSLContext | None
) -> HttpStream:
    """Connect, send one POST and return its stream, whose head is still to come.

    Raises:
        UnreachableError: No connection was made.
    """
    head = _build_head(address, path, headers, len(body))
    loop = asyncio.get_running_loop()
    try:
        if address.uds is not None:
            _, stream = await loop.create_unix_connection(HttpStream, address.uds)
        else:
            _, stream = await loop.create_connection(HttpStream, address.host, address.port, ssl=tls)
    except OSError as error:
        raise UnreachableError from error
    stream.send(head + body)
    return stream


def _build_head(address: Address, path: str, headers: Mapping[str, str], length: int) -> bytes:
    host = f"[{address.host}]" if ":" in address.host else address.host
    every = {"host": f"{host}:{address.port}", **headers, "content-length": str(length), "connection": "close"}
    for name, value in every.items():
        if _HEADER_VALUE.fullmatch(value) is None:
            raise ValueError(f"The header {name} holds characters that no header may hold.")
    lines = [f"POST {address.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in every.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii")
