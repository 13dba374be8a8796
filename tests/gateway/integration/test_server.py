"""The bounds of the embedded server: slow headers, a second request on a kept connection, clients that go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from byte_client import LEAVES, connected
from loraplex.gateway.drain import Drain
from loraplex.gateway.server import GatewayServer, bind
from loraplex_registry.http import protocol
from scripted_core import until

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(protocol, "HEAD_S", 0.4)
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
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_a_kept_connection_may_wait_but_not_dawdle(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(REQUEST)
        assert b"204" in await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.6)
    writer.write(REQUEST[:10])
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(b"x-long: " + b"a" * 200_000, id="one that never ends"),
        pytest.param(b"x-long: " + b"a" * 70_000 + b"\r\n\r\n", id="one that is too long"),
        pytest.param(b"".join(b"x-%d: 1\r\n" % i for i in range(200)) + b"\r\n", id="too many"),
    ],
)
async def test_headers_beyond_the_bound_are_refused_and_the_connection_closed(port: int, headers: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n" + headers)
    async with asyncio.timeout(60):
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
        with suppress(ConnectionError):
            assert b"204" not in await reader.read()
    writer.transport.abort()


async def test_long_headers_within_the_bound_and_long_bodies_pass(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(b"POST / HTTP/1.1\r\nhost: g\r\ncontent-length: 300000\r\nx-long: " + b"a" * 50_000 + b"\r\n\r\n")
        writer.write(b"b" * 300_000)
        assert b"204" in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def flood(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})


async def test_a_client_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_S", 0.4)
    with bind("127.0.0.1", 0) as listening:
        serving = GatewayServer(flood, Drain(), 0)
        task = asyncio.create_task(serving.serve(sockets=[listening]))
        _, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1], limit=1)
        writer.write(REQUEST)
        connections = serving.server_state.connections
        for is_open in (True, False):
            async with asyncio.timeout(60):
                while bool(connections) is not is_open:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.01)
        writer.transport.abort()
        serving.stop()
        await task


class Waiting:
    """An application that answers nothing and notes who has gone."""

    def __init__(self) -> None:
        self.num_asked = self.num_gone = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_gone += 1


@asynccontextmanager
async def serving_app(app: Any) -> AsyncIterator[tuple[GatewayServer, tuple[str, int]]]:
    with bind("127.0.0.1", 0) as listening:
        serving = GatewayServer(app, Drain(), 0)
        task = asyncio.create_task(serving.serve(sockets=[listening]))
        yield serving, listening.getsockname()
        serving.stop()
        await task


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("num_queued", [0, 2], ids=["alone", "with more in line"])
async def test_a_client_that_goes_is_noticed_at_once(how: str, num_queued: int) -> None:
    app = Waiting()
    async with serving_app(app) as (_, address), connected(address) as client:
        await client.send(REQUEST * (1 + num_queued))
        await until(lambda: app.num_asked == 1)
        await asyncio.sleep(0.05)
        client.leave(how)
        await until(lambda: app.num_gone == 1, 10)
        assert app.num_asked == 1


async def test_who_sends_on_and_on_while_it_is_answered_is_cut_off() -> None:
    app = Waiting()
    async with serving_app(app) as (_, address), connected(address) as client:
        with pytest.raises(ConnectionError):
            await client.send(REQUEST * 2_000_000, piece=4096)
        await until(lambda: app.num_gone == 1, 10)


async def test_what_is_no_http_is_told_so_in_the_shape_of_errors() -> None:
    async with serving_app(answer) as (_, address), connected(address) as client:
        await client.send(b"\x00\x01 nonsense\r\n\r\n")
        refused = await client.read_answer()
        assert (refused.status, refused.json()["error"]["code"]) == (400, "invalid_request_error")


async def test_nonsense_behind_a_request_is_no_answer_to_it() -> None:
    app = Waiting()
    async with serving_app(app) as (_, address), connected(address) as client, asyncio.timeout(5):
        await client.send(REQUEST)
        await until(lambda: app.num_asked == 1)
        await client.send(b"\x00\x01 nonsense\r\n\r\n")
        assert await client.reader.read() == b""
        await until(lambda: app.num_gone == 1, 1)


async def pour(scope: Any, receive: Any, send: Any) -> None:
    head = [(b"content-length", b"8000000"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"x" * 8_000_000})


async def test_a_connection_that_is_to_end_does_not_wait_for_ever_for_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client takes so much that the server may write again, and then nothing."""
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_S", 2.0)
    async with serving_app(pour) as (serving, address), connected(address) as client:
        connections = serving.server_state.connections
        await until(lambda: connections)
        [connection] = connections
        # or the two sockets would hold what the client does not take
        for end, option in ((client.writer, socket.SO_RCVBUF), (connection.transport, socket.SO_SNDBUF)):
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 65536)
        connection.transport.set_write_buffer_limits(high=7_000_000, low=6_000_000)
        client.writer.transport.pause_reading()
        await client.send(REQUEST)
        await until(connection.transport.is_closing)
        client.writer.transport.resume_reading()
        while connection.flow.write_paused:  # noqa: ASYNC110 - a pause would let the client take the rest
            await asyncio.sleep(0)
        client.writer.transport.pause_reading()
        await until(lambda: not connections)


async def test_draining_begins_at_once_and_expires_later() -> None:
    drain = Drain()
    with bind("127.0.0.1", 0) as listening:
        serving = GatewayServer(answer, drain, 0.2)
        task = asyncio.create_task(serving.serve(sockets=[listening]))
        while not serving.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        serving.stop()
        assert drain.has_begun
        async with asyncio.timeout(60):
            await drain.wait_expired()
            await task


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def test_body_that_goes_on_after_its_refusal_is_cut_off_and_a_short_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "REST_S", 0.4)
    with bind("127.0.0.1", 0) as listening:
        serving = GatewayServer(refuse, Drain(), 0)
        task = asyncio.create_task(serving.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nb")
        assert b"401" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"b")
        await asyncio.sleep(0.6)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000000\r\n\r\nb")
        assert b"401" in await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.transport.abort()
        serving.stop()
        await task
