"""The bounds of the embedded server: slow headers, and a second request on a kept connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from loraplex.gateway import server
from loraplex.gateway.drain import Drain
from loraplex.gateway.server import GatewayServer, bind

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(server, "_HEADERS_S", 0.4)
    with bind("127.0.0.1", 0) as listening:
        serving = GatewayServer(answer, Drain(), 0)
        task = asyncio.create_task(serving.serve(sockets=[listening]))
        yield listening.getsockname()[1]
        serving.stop()
        await task


async def test_a_connection_that_sends_no_headers_is_closed(port: int) -> None:
    for begun in (b"", b"GET / HTTP/1.1\r\nhost:"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        async with asyncio.timeout(3):
            assert await reader.read() == b""
        writer.close()


async def test_a_kept_connection_may_wait_but_not_dawdle(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(REQUEST)
        assert b"204" in await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.6)
    writer.write(REQUEST[:10])
    async with asyncio.timeout(3):
        assert await reader.read() == b""
    writer.close()


async def flood(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})


async def test_a_client_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BLOCKED_S", 0.4)
    with bind("127.0.0.1", 0) as listening:
        serving = GatewayServer(flood, Drain(), 0)
        task = asyncio.create_task(serving.serve(sockets=[listening]))
        _, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1], limit=1)
        writer.write(REQUEST)
        connections = serving.server_state.connections
        for is_open in (True, False):
            async with asyncio.timeout(3):
                while bool(connections) is not is_open:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.01)
        writer.transport.abort()
        serving.stop()
        await task


async def test_draining_begins_at_once_and_expires_later() -> None:
    drain = Drain()
    with bind("127.0.0.1", 0) as listening:
        serving = GatewayServer(answer, drain, 0.2)
        task = asyncio.create_task(serving.serve(sockets=[listening]))
        while not serving.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        serving.stop()
        assert drain.has_begun
        async with asyncio.timeout(3):
            await drain.wait_expired()
            await task
