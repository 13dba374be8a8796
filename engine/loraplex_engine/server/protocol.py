"""uvicorn's HTTP protocol with the bounds that it lacks: on a request's head, and on clients that leave or do not read.

A client that closes its side of the connection, or only its half, is gone: its request ends.
"""

from __future__ import annotations

import asyncio

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex_engine.errors import EngineError, InvalidRequestError
from loraplex_engine.server.http_error import error_body

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
MAX_QUEUED_BYTES = 256 << 10
"""Of requests that are sent while an earlier one of the connection is answered."""
WRITE_TIMEOUT_S = 30.0
_HEAD_REFUSAL = f"A request may have {MAX_HEADERS} headers and {MAX_HEAD_BYTES >> 10} KiB before its body."
_NO_HTTP = "What was sent is no HTTP/1.1 request."


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
    # received since requests wait behind the one that is answered
    _queued_bytes = 0
    _answered: RequestResponseCycle | None = None

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse what goes on without end."""
        self._held_bytes += len(data)
        super().data_received(data)
        self._bound_queue(len(data))
        if self._held_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - says nothing that helps
        """Answer what the parser stopped at: our own limit, or what is no HTTP."""
        if self._is_head_too_large():
            self._refuse_head()
        else:
            self._refuse("400 Bad Request", InvalidRequestError(_NO_HTTP))

    def eof_received(self) -> None:
        """Take a client that has closed its half as gone; an answer that is complete still goes out."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self._close()

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
        if self.pipeline:
            # or nobody would see that the client goes while it is answered
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Give a client that is to be left some time to take the rest."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def on_body(self, body: bytes) -> None:
        """Pass bytes of the body on, whose size is the app's business."""
        self._held_bytes = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        """Start the clock: the client has left much unread."""
        super().pause_writing()
        self._start_clock()

    def resume_writing(self) -> None:
        """Stop the clock, unless the connection is to end: then it runs to the last byte."""
        if not self.transport.is_closing():
            self._stop_clock()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and tell the app; uvicorn tells only the last request of those in line."""
        self._stop_clock()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _bound_queue(self, num_bytes: int) -> None:
        """Cut off who sends on and on while an earlier request is answered."""
        self._queued_bytes = self._queued_bytes + num_bytes if self.pipeline else 0
        if self._queued_bytes > MAX_QUEUED_BYTES:
            self.transport.abort()

    def _refuse_head(self) -> None:
        self._refuse("431 Request Header Fields Too Large", InvalidRequestError(_HEAD_REFUSAL))

    def _refuse(self, status: str, error: EngineError) -> None:
        """Say so, unless another answer is on its way on this connection, and close."""
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(error)
            head = (
                f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._close()

    def _close(self) -> None:
        """Close once the client has taken everything, or has had its time."""
        self.transport.close()
        self._start_clock()

    def _start_clock(self) -> None:
        self._stop_clock()
        self._blocked_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
            self._blocked_timer = None
