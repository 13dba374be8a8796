"""uvicorn's HTTP protocol with the bounds that it lacks: on a request's head, and on a client that does not read."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.http_error import error_body

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
WRITE_TIMEOUT_S = 30.0
_HEAD_REFUSAL = f"A request may have {MAX_HEADERS} headers and {MAX_HEAD_BYTES >> 10} KiB before its body."


class _HeadTooLargeError(Exception):
    """Stops the parser; the client is told by `send_400_response`."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head that is too large with 431, and aborts a connection whose client takes nothing for a while.

    Closing the latter instead would wait for the unread bytes and keep the descriptor for as long as the client likes;
    aborted, the app sees a disconnect.
    """

    _blocked_timer: asyncio.TimerHandle | None = None
    _num_headers = 0
    _head_bytes = 0
    # received since the parser last had something whole that is no header: what it holds back, and trailers
    _held_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse what goes on without end."""
        self._held_bytes += len(data)
        super().data_received(data)
        if self._held_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser stopped at: our own limit, or what is no HTTP."""
        if self._is_head_too_large():
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Count anew."""
        self._num_headers = self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a piece of the request's target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer."""
        self._num_headers += 1
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let the request begin."""
        self._held_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass bytes of the body on, whose size is the app's business."""
        self._held_bytes = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        """Start the clock: the client has left much unread."""
        super().pause_writing()
        self._blocked_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; what is still unread of its last answer goes with it."""
        self.transport.abort()

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._is_head_too_large():
            raise _HeadTooLargeError

    def _is_head_too_large(self) -> bool:
        return self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES

    def _refuse_head(self) -> None:
        """Say so, unless another answer is on its way on this connection, and close."""
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(InvalidRequestError(_HEAD_REFUSAL))
            head = (
                "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_clock(self) -> None:
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
            self._blocked_timer = None
