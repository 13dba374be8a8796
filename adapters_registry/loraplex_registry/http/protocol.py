"""uvicorn's HTTP protocol with what it leaves open: bounds in size and time, and requests that mean one thing only.

All three servers speak it. A client that closes its side of the connection, or only its half, is gone: its request
ends. One that does not read is cut off: closing would wait for the unread bytes and keep the descriptor for ever.
What another server on the way could read otherwise than we do is refused (RFC 9112, 11.2).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_S = 10.0
"""From the first byte of a head to its last, and until the first head of a connection."""
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
MAX_QUEUED_BYTES = 256 << 10
"""Of requests that are sent while an earlier one of the connection is answered."""
WRITE_TIMEOUT_S = 30.0
REST_S = 5.0
"""How long a client may go on sending a body after its answer."""
KEEP_ALIVE_S = 75
_log = logging.getLogger("uvicorn.error.connection")
# or whoever sends what is no HTTP would fill the log
_log.setLevel(logging.ERROR)
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(:[0-9]{0,5})?")
_FRAMING = (b"content-length", b"transfer-encoding")


def _build_refusal(status: str, code: str, message: str) -> bytes:
    """Return the bytes of a whole answer."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error})
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}"
    return f"{head}\r\nx-content-type-options: nosniff\r\ncache-control: no-store\r\n\r\n{body}".encode("ascii")


_TOO_LARGE = _build_refusal(
    "431 Request Header Fields Too Large",
    "headers_too_large",
    f"The headers of a request may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} names.",
)
_NO_HTTP = _build_refusal("400 Bad Request", "invalid_request_error", "What was sent is no HTTP/1.1 request.")


class _HeadRefusedError(Exception):
    """Stops the parser; never leaves this module."""


class BoundedProtocol(HttpToolsProtocol):
    """Serves one connection; see the module."""

    parser: Any
    _blocked_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _is_reading_body = False
    _num_headers = 0
    _head_bytes = 0
    # received since the parser last had something whole that is no header: what it holds back, and trailers
    _held_bytes = 0
    # received since requests wait behind the one that is answered
    _queued_bytes = 0
    _answered: RequestResponseCycle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _PlainParser(self)
        self.logger = _log

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse what goes on without end."""
        self._held_bytes += len(data)
        super().data_received(data)
        self._bound_queue(len(data))
        if self._held_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - says nothing that helps
        """Answer what the parser stopped at: our own limits, or what is no HTTP."""
        self._refuse(_TOO_LARGE if self._is_head_too_large() else _NO_HTTP)

    def eof_received(self) -> None:
        """Take a client that has closed its half as gone; an answer that is complete still goes out."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self._close()

    def on_message_begin(self) -> None:
        """Start clock and count anew for each request of the connection."""
        self._num_headers = self._head_bytes = 0
        self._start_head_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a piece of the request's target."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer; trailers mean nothing here."""
        self._num_headers += 1
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        if not self._is_reading_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the clock and let the request begin, if it means one thing."""
        self._stop_head_timer()
        self._held_bytes = 0
        if not _is_plain(self.url, self.headers, self.parser.get_http_version()):
            raise _HeadRefusedError
        self._is_reading_body = True
        super().on_headers_complete()
        if self.pipeline:
            # or nobody would see that the client goes while it is answered
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Pass bytes of the body on, whose size is the app's business."""
        self._held_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the clock of a body that its answer did not wait for."""
        if self.parser.is_ahead_of_body():
            return
        self._is_reading_body = False
        self._stop_rest_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give a client some time: to take the rest if it is to be left, to send the rest if its answer is there."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self._is_reading_body:
            self._rest_timer = self.loop.call_later(REST_S, self.transport.abort)

    def pause_writing(self) -> None:
        """Start the clock: the client has left much unread."""
        super().pause_writing()
        self._start_blocked_timer()

    def resume_writing(self) -> None:
        """Stop the clock, unless the connection is to end: then it runs to the last byte."""
        if not self.transport.is_closing():
            self._stop_blocked_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; what is still unread of its last answer goes with it."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell the app; uvicorn tells only the last request of those in line."""
        self._stop_head_timer()
        self._stop_blocked_timer()
        self._stop_rest_timer()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._is_head_too_large():
            raise _HeadRefusedError

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

    def _refuse(self, refusal: bytes) -> None:
        """Say so, unless another answer is on its way on this connection, and close."""
        if self.transport.is_closing():
            return
        self._stop_head_timer()
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.write(refusal)
        elif cycle is self._answered and cycle.more_body and not cycle.response_started:
            # its body is broken: this is its answer, and the app sees its client gone
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.write(refusal)
        self._close()

    def _close(self) -> None:
        """Close once the client has taken everything, or has had its time."""
        self.transport.close()
        self._start_blocked_timer()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _start_blocked_timer(self) -> None:
        self._stop_blocked_timer()
        self._blocked_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _stop_blocked_timer(self) -> None:
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
            self._blocked_timer = None


class _PlainParser:
    """httptools' parser, for which `Upgrade` is a header like any other.

    The library takes a request that offers to go on in another protocol, as some clients' every first one does, for
    one without a body, and all that follows for that protocol. Here it goes on behind that request's head.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._parser = _build_parser(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def should_upgrade(self) -> bool:
        """Never."""
        return False

    def is_ahead_of_body(self) -> bool:
        """Whether the library says that a message is complete whose body is still to come."""
        return bool(self._parser.should_upgrade()) and any(name in _FRAMING for name, _ in self._protocol.headers)

    def feed_data(self, data: bytes) -> None:
        """Parse some bytes; the protocol is called back."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as pause:
            framing = [b"%b: %b\r\n" % header for header in self._protocol.headers if header[0] in _FRAMING]
            self._parser = _build_parser(_Resumed(self._protocol) if framing else self._protocol)
            if framing:
                self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
            self.feed_data(data[pause.args[0] :])


class _Resumed:
    """What a new parser calls back in the middle of a request: the protocol, but for the head that it has seen."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._is_seen = True
        self.on_body, self.on_message_complete = protocol.on_body, protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self._is_seen:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_seen:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_seen:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_seen:
            self._protocol.on_headers_complete()
        self._is_seen = False


def _build_parser(called: Any) -> Any:
    parser = httptools.HttpRequestParser(called)
    # or what follows a request that closes its connection would be answered in place of that request
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _is_plain(target: bytes, headers: Iterable[tuple[bytes, bytes]], version: str) -> bool:
    """Whether every server on the way reads this head alike: one host, one framing, a version that there is."""
    hosts = [value for name, value in headers if name == b"host"]
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if version == "1.1":
        return len(hosts) == 1 and codings in ([], [b"chunked"]) and _is_well_formed(target, hosts)
    return version == "1.0" and len(hosts) <= 1 and not codings and _is_well_formed(target, hosts)


def _is_well_formed(target: bytes, hosts: Iterable[bytes]) -> bool:
    return b"#" not in target and all(_HOST.fullmatch(host) for host in hosts)
