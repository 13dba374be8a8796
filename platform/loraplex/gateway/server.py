"""uvicorn, embedded: the bounds that it lacks and a shutdown that drains first and exits 0."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import uvicorn
from litestar.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex.gateway.drain import Drain

_HEADERS_S = 10.0
_MAX_HEADER_BYTES = 64 << 10
_MAX_HEADERS = 100
_MAX_QUEUED_BYTES = 256 << 10
_BLOCKED_S = 30.0
_REST_S = 5.0
_KEEP_ALIVE_S = 75
_LAST_EVENTS_S = 5
_BACKLOG = 2048


def _build_refusal(status: str, code: str, message: str) -> bytes:
    """Return the bytes of a whole answer."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}"
    return b"%s\r\n\r\n%s" % (head.encode(), body)


_TOO_LARGE = _build_refusal(
    "431 Request Header Fields Too Large",
    "headers_too_large",
    f"The headers of a request may have {_MAX_HEADER_BYTES} bytes and {_MAX_HEADERS} names.",
)
_NO_HTTP = _build_refusal("400 Bad Request", "invalid_request_error", "What was sent is no HTTP/1.1 request.")


class _HeadersRefusedError(Exception):
    """Stops the parser; never leaves this module."""


class BoundedProtocol(HttpToolsProtocol):
    """Bounds what uvicorn leaves open: headers in size and time, the time to read an answer, the body after a refusal.

    A client that does not read is cut off: closing would wait for the unread bytes and keep the descriptor for ever.
    One that closes its side of the connection, or only its half, is gone: its request ends.
    """

    _blocked_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _is_reading_body = False
    _is_reading_headers = True
    _num_header_bytes = 0
    # received since requests wait behind the one that is answered
    _queued_bytes = 0
    _answered: RequestResponseCycle | None = None

    def data_received(self, data: bytes) -> None:
        """Refuse headers that do not end: more bytes than the bound before they are complete."""
        if self._is_reading_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_reading_headers and self._num_header_bytes > _MAX_HEADER_BYTES:
            self._refuse_headers()
        self._queued_bytes = self._queued_bytes + len(data) if self.pipeline else 0
        if self._queued_bytes > _MAX_QUEUED_BYTES:
            self.transport.abort()

    def eof_received(self) -> None:
        """Take a client that has closed its half as gone; an answer that is complete still goes out."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self._close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._headers_timer = self.loop.call_later(_HEADERS_S, transport.close)

    def on_message_begin(self) -> None:
        """Start clock and count anew for a later request of the connection."""
        self._is_reading_headers, self._num_header_bytes = True, 0
        self._headers_timer.cancel()
        self._headers_timer = self.loop.call_later(_HEADERS_S, self.transport.close)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop the clock; refuse what is too much also where it came at once."""
        self._headers_timer.cancel()
        self._is_reading_headers, self._is_reading_body = False, True
        size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        if size > _MAX_HEADER_BYTES or len(self.headers) > _MAX_HEADERS:
            self._refuse_headers()
            # the parser goes on with the rest of what has arrived unless it is stopped
            raise _HeadersRefusedError
        super().on_headers_complete()
        if self.pipeline:
            # or nobody would see that the client goes while it is answered
            self.flow.resume_reading()

    def _refuse_headers(self) -> None:
        self._headers_timer.cancel()
        self._is_reading_headers = False
        if self.transport.is_closing():
            return
        # an answer to an earlier request of the connection must not be written into
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LARGE)
        self._close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - says nothing that helps
        """Answer a request that cannot be parsed; one that was refused already has its answer."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_NO_HTTP)
        self._close()

    def on_message_complete(self) -> None:
        """Stop the clock of a body that its answer did not wait for."""
        self._is_reading_body = False
        self._stop_rest_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the clock of a client that goes on sending a body after its answer, such as a refusal."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self._is_reading_body:
            self._rest_timer = self.loop.call_later(_REST_S, self.transport.abort)

    def pause_writing(self) -> None:
        """Start the clock of a client that has left much unread."""
        super().pause_writing()
        self._start_blocked_timer()

    def resume_writing(self) -> None:
        """Stop its clock, unless the connection is to end: then it runs to the last byte."""
        if not self.transport.is_closing():
            self._stop_blocked_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; what is still unread of its last answer goes with it."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell the app; uvicorn tells only the last request of those in line."""
        self._headers_timer.cancel()
        self._stop_blocked_timer()
        self._stop_rest_timer()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _close(self) -> None:
        """Close once the client has taken everything, or has had its time."""
        self.transport.close()
        self._start_blocked_timer()

    def _start_blocked_timer(self) -> None:
        self._stop_blocked_timer()
        self._blocked_timer = self.loop.call_later(_BLOCKED_S, self.transport.abort)

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _stop_blocked_timer(self) -> None:
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
            self._blocked_timer = None


class GatewayServer(uvicorn.Server):
    """Serves one application until SIGTERM or SIGINT; then running answers get `drain_s` seconds to end."""

    def __init__(self, app: ASGIApp, drain: Drain, drain_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(drain_s) + _LAST_EVENTS_S,
        )
        super().__init__(config)
        self._drain = drain
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve; what there is by then stays, so the collector need not look at it ever again."""
        gc.collect()
        gc.freeze()
        await super().startup(sockets)

    def stop(self) -> None:
        """Begin to drain; once more: at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._drain.begin()
        asyncio.get_running_loop().call_later(self._drain_s, self._drain.expire)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals through the loop, and end normally after them: uvicorn would end by the signal itself."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            for number in signals:
                loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                for number in signals:
                    loop.remove_signal_handler(number)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        OSError: The address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(_BACKLOG)
    except OSError:
        found.close()
        raise
    found.settimeout(0)
    return found


def describe_address(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    address: Any = bound.getsockname()
    host, port = address[0], address[1]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
