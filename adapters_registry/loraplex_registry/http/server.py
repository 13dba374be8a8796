"""How uvicorn is set up, by every part alike: the bounded protocol, no lines of its own in the log, no banner."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import uvicorn

from loraplex_registry.http.protocol import KEEP_ALIVE_S, BoundedProtocol


def build_config(app: Any, grace_s: int, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration.

    Args:
        app: The ASGI application.
        grace_s: How long answers may go on after a signal.
        options: As `uvicorn.Config` takes them.
    """
    fields: dict[str, Any] = {
        "http": BoundedProtocol,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": grace_s,
    }
    return uvicorn.Config(app, **fields | options)


class Server(uvicorn.Server):
    """Stops on SIGTERM or SIGINT and then returns: uvicorn's own would end the process by the signal itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals through the loop."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        # only the main thread of a system with signals can take them
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            for number in numbers:
                loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                for number in numbers:
                    loop.remove_signal_handler(number)
