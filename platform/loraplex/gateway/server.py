"""uvicorn, embedded: the bounds that it lacks and a shutdown that drains first and exits 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraplex.gateway.drain import Drain

_HEADERS_S = 10.0
_MAX_HEADER_BYTES = 64 << 10
_MAX_HEADERS = 100
_BLOCKED_S = 30.0
_REST_S = 5.0
_KEEP_ALIVE_S = 75
_LAST_EVENTS_S = 5
_BACKLOG = 2048


_BODY = msgspec.json.encode(
    {
        "error": {
            "message": f"The headers of a request may have {_MAX_HEADER_BYTES} bytes and {_MAX_HEADERS} names.",
            "type": "invalid_request_error",
            "param": None,
            "code": "headers_too_large",
        }
    }
)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class _HeadersRefusedError(Exception):
    """Stops the parser; never leaves this module."""


class BoundedProtocol(HttpToolsProtocol):
    """Bounds what uvicorn leaves open: headers in size and time, the time to read an answer, the body after a refusal.

    A client that does not read is cut off: closing would wait for the unread bytes and keep the descriptor for ever.
    """

    _blocked_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _is_reading_body = False
    _is_reading_headers = True
    _num_header_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Refuse headers that do not end: more bytes than the bound before they are complete."""
        if self._is_reading_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_reading_headers and self._num_header_bytes > _MAX_HEADER_BYTES:
            self._refuse_headers()

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

    def _refuse_headers(self) -> None:
        self._headers_timer.cancel()
        self._is_reading_headers = False
        if self.transport.is_closing():
            return
        # an answer to an earlier request of the connection must not be written into
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LARGE)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed; one that was refused already has its answer."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def on_message_complete(self) -> None:
        """Stop the clock of a body that its answer did not wait for."""
        self._is_reading_body = False
        self._stop_rest_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the clock of a client that goes on sending a body after its answer, such as a refusal."""
        super().on_response_complete()
        if self._is_reading_body and not self.transport.is_closing():
            self._rest_timer = self.loop.call_later(_REST_S, self.transport.abort)

    def pause_writing(self) -> None:
        """Start the clock of a client that has left much unread."""
        super().pause_writing()
        self._blocked_timer = self.loop.call_later(_BLOCKED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop its clock."""
        self._stop_blocked_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; what is still unread of its last answer goes with it."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._headers_timer.cancel()
        self._stop_blocked_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)

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
