"""uvicorn, embedded: a shutdown that drains first and exits 0."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from litestar.types import ASGIApp

from loraplex.gateway.drain import Drain
from loraplex_registry.http.server import build_config

_LAST_EVENTS_S = 5
_BACKLOG = 2048


class GatewayServer(uvicorn.Server):
    """Serves one application until SIGTERM or SIGINT; then running answers get `drain_s` seconds to end."""

    def __init__(self, app: ASGIApp, drain: Drain, drain_s: float) -> None:
        super().__init__(build_config(app, int(drain_s) + _LAST_EVENTS_S))
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
