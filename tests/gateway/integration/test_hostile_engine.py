"""An engine that was taken over: whatever it answers is a failed replica, within bounds, and never a page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loraplex_engine.errors import ReplicaFailedError
from loraplex_engine.wire import client as client_module
from loraplex_engine.wire.client import EngineClient

OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"content-type: application/json\r\n"
STREAM = OK + b"content-type: text/event-stream\r\nconnection: close\r\n\r\n"
NESTED = b"[" * 5000


@asynccontextmanager
async def answering(*pieces: bytes, again: bytes = b"") -> AsyncIterator[EngineClient]:
    """An engine that says these bytes to whoever calls, and then `again`, for ever."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while again:
                writer.write(again)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", lambda: "token")
        yield client
        await client.close()


async def generate(client: EngineClient) -> bytes:
    """Everything that comes of one generation."""
    async with client.generate("/v1/completions", b"{}", token="t", headers={}, deadline_s=3, gap_s=3) as answer:
        if not answer.is_stream:
            return await answer.read()
        return b"".join([events.data async for events in answer.events()])


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x01\x02",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
        OK + b"x: " + b"v" * 100_000,
        OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
        JSON + b"x-loraplex-done: {\r\ncontent-length: 2\r\n\r\n{}",
        JSON + b'x-loraplex-done: {"request_id": 5}\r\ncontent-length: 2\r\n\r\n{}',
        JSON + b"content-length: 50\r\n\r\n{}",
        STREAM + b"event: loraplex.done\ndata: {\n\n",
        STREAM + b"event: loraplex.done\ndata: " + NESTED + b"\n\n",
        STREAM + b'event: loraplex.done\ndata: {"request_id": "\xff"}\n\n',
    ],
)
async def test_nonsense_of_an_engine_is_a_failed_replica(said: bytes) -> None:
    async with asyncio.timeout(10), answering(said) as client:
        with pytest.raises(ReplicaFailedError):
            await generate(client)


async def test_what_has_no_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_MAX_EVENT_BYTES", 1 << 20)
    monkeypatch.setattr(client_module, "_MAX_BODY_BYTES", 1 << 20)
    endless = JSON + b"content-length: 999999999\r\n\r\n"
    for head in (STREAM + b"data: ", endless):
        async with asyncio.timeout(10), answering(head, again=b"x" * 65536) as client:
            with pytest.raises(ReplicaFailedError):
                await generate(client)
            with pytest.raises(ReplicaFailedError):
                await client.state()


@pytest.mark.parametrize("body", [b"{", NESTED, b'"\xff"', b"5", b'{"totals": 1}'])
async def test_calls_of_the_platform_bear_with_nonsense(body: bytes) -> None:
    said = JSON + b"content-length: %d\r\nretry-after: %b\r\n\r\n%b" % (len(body), b"9" * 5000, body)
    async with asyncio.timeout(20), answering(said) as client:
        for call in (
            lambda: client.abort("req"),
            lambda: client.find_request("req"),
            lambda: client.read_usage(5),
            lambda: client.measure_parity("sha256:" + "a" * 64),
            *(() if body.endswith(b"}") else (client.state,)),
        ):
            with pytest.raises(ReplicaFailedError):
                await call()


async def test_an_answer_after_what_is_informational_is_read() -> None:
    async with answering(
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + JSON + b"content-length: 2\r\n\r\n{}"
    ) as client:
        assert await generate(client) == b"{}"
