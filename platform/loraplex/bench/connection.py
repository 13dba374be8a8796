"""One HTTP/1.1 connection that carries one streamed answer at a time, read as its bytes arrive.

`Connection` is the only writer of the outcome that it was given. httptools takes the protocol apart, msgspec the
events; nothing is awaited between two tokens.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

import httptools
import msgspec

from loraplex.bench.outcome import ErrorDetail, Event, Outcome
from loraplex_registry.peft.unreadable import UNREADABLE

_OK = 200
_MAX_BODY_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 22
_DECODER = msgspec.json.Decoder(Event)


class Connection(asyncio.Protocol):
    """Sends a request, fills its outcome, and says by a future when that is over."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._over: asyncio.Future[None] | None = None
        self._is_done = False
        self.is_usable = False
        """Whether another request may follow."""
        self.has_answered = False
        """Whether a byte of the answer came."""

    def ask(self, request: bytes, outcome: Outcome) -> asyncio.Future[None]:
        """Send a request; the returned future is done when its answer is read to the end, or cannot be."""
        assert self._transport is not None
        self._over = asyncio.get_running_loop().create_future()
        self._outcome, self._parser = outcome, httptools.HttpResponseParser(self)
        self._tail, self._refusal, self._now = b"", b"", 0.0
        self._is_done = self.is_usable = self.has_answered = False
        self._transport.write(request)
        return self._over

    def close(self) -> None:
        """End it at once."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    # what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        # uvloop's transports are no subclasses of asyncio's
        self._transport, self.is_usable = cast("asyncio.Transport", transport), True

    def data_received(self, data: bytes) -> None:
        """Bytes came: this is the instant of all tokens in them."""
        if self._over is None or self._over.done():
            self.close()
            return
        self._now, self.has_answered = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break("protocol", f"The answer is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone; an answer that had said its last word is whole without the rest."""
        self.is_usable = False
        if self._over is not None and not self._over.done():
            if not self._is_done:
                self._outcome.fail("cut", ErrorDetail(f"The connection ended in the answer{_explain(error)}."))
            self._settle()

    # what httptools calls

    def on_body(self, body: bytes) -> None:
        """A part of the body: events, or the reason of a refusal."""
        if self._parser.get_status_code() != _OK:
            self._refusal += body[: _MAX_BODY_BYTES - len(self._refusal)]
            return
        *lines, self._tail = (self._tail + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self._is_done:
                self._take(line[5:].strip())
        if len(self._tail) > _MAX_LINE_BYTES:
            self._break("protocol", "An event of the stream is longer than 4 MiB.")

    def on_message_complete(self) -> None:
        """The answer is over, and the connection may be free again."""
        status = self._parser.get_status_code()
        if status != _OK:
            self._outcome.refuse(status, self._refusal)
        elif not self._is_done and not self._outcome.error:
            self._outcome.fail("cut", ErrorDetail("The stream ended without [DONE]."))
        self.is_usable = self._parser.should_keep_alive()
        self._settle()
        if not self.is_usable:
            self.close()

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done, self._outcome.end_at = True, self._now
            return
        try:
            event = _DECODER.decode(data)
        except UNREADABLE as error:
            self._outcome.fail("protocol", ErrorDetail(f"An event of the stream is no JSON as OpenAI's: {error}"))
            return
        self._outcome.take(event, self._now)

    def _break(self, kind: str, message: str) -> None:
        self._outcome.fail(kind, ErrorDetail(message))
        self._settle()
        self.close()

    def _settle(self) -> None:
        if self._over is not None and not self._over.done():
            self._outcome.end_at = self._outcome.end_at or time.perf_counter()
            self._over.set_result(None)


def _explain(error: Exception | None) -> str:
    return f" ({error})" if error else ""
