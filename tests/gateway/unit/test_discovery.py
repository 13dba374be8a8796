"""Names of engines: asked over and over, one question at a time, and not forgotten when the name server fails."""

from __future__ import annotations

import asyncio
import socket

import pytest

from loraplex.fleet import discovery as discovery_module
from loraplex.fleet.discovery import KEPT_ABSENT_S, KEPT_UNKNOWN_S, Discovery

NAME = "dns+http://engines:8100"


class NameServer:
    """Answers what a test says; `now` is the time."""

    def __init__(self) -> None:
        self.addresses: list[str] | OSError = ["10.0.0.2", "10.0.0.1"]
        self.now = 0.0
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def resolve(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("engines", 8100)
        self.num_asked += 1
        await self.may_answer.wait()
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


@pytest.fixture
async def server() -> NameServer:
    return NameServer()


@pytest.fixture
async def discovery(server: NameServer) -> Discovery:
    return Discovery(server.resolve, lambda: server.now)


async def ask(discovery: Discovery, *engines: str) -> list[str]:
    """What is known once the question that is asked now is answered."""
    await discovery.find_urls(engines)
    await asyncio.sleep(0)
    return await discovery.find_urls(engines)


async def test_a_name_is_one_url_per_address_beside_plain_ones(server: NameServer, discovery: Discovery) -> None:
    found = await discovery.find_urls(["http://here:1", NAME, "http://10.0.0.1:8100"])
    assert found == ["http://here:1", "http://10.0.0.1:8100", "http://10.0.0.2:8100"]
    server.addresses = ["fd00::1"]
    assert await ask(discovery, NAME) == ["http://[fd00::1]:8100"]


async def test_no_name_server_leads_to_where_no_engine_is(server: NameServer, discovery: Discovery) -> None:
    bad = [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "fe80::1",
        "224.0.0.1",
        "0.0.0.0",
        "::",
        "10.0.0.1/x",
        "evil",
        "",
    ]
    server.addresses = [*bad, "10.0.0.1", "127.0.0.1", "fd00::1"]
    assert await discovery.find_urls([NAME]) == [
        "http://10.0.0.1:8100",
        "http://127.0.0.1:8100",
        "http://[fd00::1]:8100",
    ]


async def test_addresses_come_and_go(server: NameServer, discovery: Discovery) -> None:
    await discovery.find_urls([NAME])
    server.addresses = ["10.0.0.3"]
    assert await ask(discovery, NAME) == ["http://10.0.0.3:8100"]


async def test_a_slow_name_server_holds_nobody_up(
    server: NameServer, discovery: Discovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery_module, "FIRST_ANSWER_S", 0.05)
    server.may_answer.clear()
    assert await discovery.find_urls([NAME, "http://here:1"]) == ["http://here:1"]
    assert await discovery.find_urls([NAME]) == []
    assert server.num_asked == 1
    server.may_answer.set()
    assert len(await ask(discovery, NAME)) == 2
    server.may_answer.clear()
    monkeypatch.setattr(discovery_module, "FIRST_ANSWER_S", 3600.0)
    async with asyncio.timeout(60):
        for _ in range(3):
            assert len(await discovery.find_urls([NAME])) == 2
    await discovery.stop()


@pytest.mark.parametrize(
    ("failure", "kept_s"),
    [
        (socket.gaierror(socket.EAI_AGAIN, "again"), KEPT_UNKNOWN_S),
        (socket.gaierror(socket.EAI_NONAME, "none"), KEPT_ABSENT_S),
        (OSError("no"), KEPT_UNKNOWN_S),
    ],
)
async def test_addresses_stay_for_a_while_when_the_name_server_fails(
    server: NameServer, discovery: Discovery, failure: OSError, kept_s: float
) -> None:
    await discovery.find_urls([NAME])
    server.addresses = failure
    server.now = kept_s
    assert len(await ask(discovery, NAME)) == 2
    server.now = kept_s + 1
    assert await ask(discovery, NAME) == []
