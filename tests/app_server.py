"""Serving an ASGI application in the loop of a test, on real sockets, without uvicorn's waits at the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn


class _PromptServer(uvicorn.Server):
    """uvicorn's server without its waits of a tenth of a second: hundreds of tests start and end some."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self._ended.set()

    async def main_loop(self) -> None:
        for second in itertools.count():
            await self.on_tick(10 * second)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 1)
                return

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for each in sockets or []:
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        deadline = time.monotonic() + 0.1
        while (self.server_state.connections or self.server_state.tasks) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(server.wait_closed() for server in self.servers)), 1)


@asynccontextmanager
async def running_app(app: Any, *, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a port of the loopback, by default a free one, and yield its URL."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1, **options
    )
    server = _PromptServer(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.end()
        await task
        listening.close()
