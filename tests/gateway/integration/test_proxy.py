"""Proxies of the environment: never between the parts of a platform, nor to a gateway on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.client.location import Location
from loraplex_engine.wire.client import EngineClient
from scripted_engine import ScriptedEngine, running_engine


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with running_engine() as running:
        yield running


@pytest.fixture
async def seen(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """A proxy that the environment names, which refuses and remembers what reached it."""
    heads: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with server:
        yield heads


def fetch(location: Location) -> int:
    with Connection(location) as connection:
        return connection.send("GET", "/internal/state").status_code


async def test_the_gateway_calls_its_engines_past_a_proxy(engine: ScriptedEngine, seen: list[str]) -> None:
    client = EngineClient(engine.url, lambda: "the-token")
    assert (await client.state())["is_ready"]
    await client.close()
    assert seen == []


async def test_a_client_calls_its_own_machine_past_a_proxy(engine: ScriptedEngine, seen: list[str]) -> None:
    for url in (engine.url, engine.url.replace("127.0.0.1", "localhost")):
        assert await asyncio.to_thread(fetch, Location(url, "the-key")) == 200
    assert seen == []


async def test_a_gateway_elsewhere_is_called_through_the_users_proxy(seen: list[str]) -> None:
    with pytest.raises(ClientError):
        await asyncio.to_thread(fetch, Location("http://gateway.example", "the-key"))
    assert seen[0].startswith("GET http://gateway.example/internal/state")


async def test_a_platform_asks_its_own_address_directly(seen: list[str]) -> None:
    with pytest.raises(ClientError, match="Nothing answers"):
        await asyncio.to_thread(fetch, Location("http://127.0.0.2:1", "the-key", is_direct=True))
    assert seen == []
