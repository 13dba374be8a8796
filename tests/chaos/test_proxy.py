"""The proxy of the chaos suite does each of its faults, and nothing otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tcp_proxy import NONE, Fault, TcpProxy

pytestmark = pytest.mark.enable_socket
NUM_BYTES = 300_000


@asynccontextmanager
async def running_proxy() -> AsyncIterator[TcpProxy]:
    """A proxy to a server that answers each line with that line and many bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(line + b"x" * NUM_BYTES)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    proxy = TcpProxy(server.sockets[0].getsockname()[1])
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
        server.close()


async def ask(proxy: TcpProxy, timeout_s: float = 5.0) -> bytes:
    """All that comes back for one line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(b"hello\n")
        writer.write_eof()
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.transport.abort()


@asynccontextmanager
async def open_idle(proxy: TcpProxy) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that the server has taken and that nothing comes back on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"hello\n")
    await reader.readexactly(6 + NUM_BYTES)
    yield reader
    writer.close()


async def test_passes_everything_and_half_closed_ends() -> None:
    async with running_proxy() as proxy:
        assert await ask(proxy) == b"hello\n" + b"x" * NUM_BYTES
        assert proxy.num_connections == 1


async def test_delays_each_way() -> None:
    async with running_proxy() as proxy:
        await proxy.suffer(Fault(delay_s=0.1))
        began_at = time.monotonic()
        assert len(await ask(proxy)) == NUM_BYTES + 6
        assert time.monotonic() - began_at >= 0.2


async def test_breaks_after_so_many_bytes() -> None:
    async with running_proxy() as proxy:
        await proxy.suffer(Fault(reset_after=1000))
        with pytest.raises(ConnectionResetError):
            await ask(proxy)


async def test_ends_after_so_many_bytes_as_if_that_were_all() -> None:
    async with running_proxy() as proxy:
        await proxy.suffer(Fault(end_after=1000))
        assert await ask(proxy) == b"hello\n" + b"x" * 994


async def test_is_silent_and_goes_on_where_it_was() -> None:
    async with running_proxy() as proxy:
        await proxy.suffer(Fault(is_silent=True))
        with pytest.raises(TimeoutError):
            await ask(proxy, 0.2)
        waiting = asyncio.create_task(ask(proxy))
        await asyncio.sleep(0.1)
        await proxy.suffer(NONE)
        assert len(await waiting) == NUM_BYTES + 6


async def test_is_gone_with_all_connections_and_comes_back_at_its_port() -> None:
    async with running_proxy() as proxy:
        port = proxy.port
        async with open_idle(proxy) as reader:
            await proxy.suffer(Fault(is_gone=True))
            with pytest.raises(ConnectionResetError):
                await reader.read()
        with pytest.raises(ConnectionRefusedError):
            await ask(proxy)
        await proxy.suffer(NONE)
        assert proxy.port == port
        assert len(await ask(proxy)) == NUM_BYTES + 6


async def test_cut_breaks_what_is_open_once() -> None:
    async with running_proxy() as proxy:
        async with open_idle(proxy) as reader:
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                await reader.read()
        assert len(await ask(proxy)) == NUM_BYTES + 6
