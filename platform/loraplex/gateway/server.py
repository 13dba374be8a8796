"""uvicorn, embedded: the bounds that it lacks and a shutdown that drains first and exits 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraplex.gateway.drain import Drain

_HEADERS_S = 10.0
_BLOCKED_S = 30.0
_KEEP_ALIVE_S = 75
_LAST_EVENTS_S = 5
_BACKLOG = 2048


class BoundedProtocol(HttpToolsProtocol):
    """Ends connections whose client dawdles: ten seconds for a request's headers, thirty to read what is written.

    A client that does not read is cut off: closing would wait for the unread bytes and keep the descriptor for ever.
    """

    _blocked_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._headers_timer = self.loop.call_later(_HEADERS_S, transport.close)

    def on_message_begin(self) -> None:
        """Start the clock anew for a later request of the connection."""
        self._headers_timer.cancel()
        self._headers_timer = self.loop.call_later(_HEADERS_S, self.transport.close)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop the clock."""
        self._headers_timer.cancel()
        super().on_headers_complete()

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
        super().connection_lost(exc)

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
