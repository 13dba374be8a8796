"""The fleet over real sockets: clients come and go with the addresses of a name."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from loraplex.fleet import fleet as fleet_module
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.pools import Pool
from scripted_engine import FINGERPRINT, ScriptedEngine, running_engine


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with running_engine() as running:
        yield running


@pytest.fixture
async def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that the pool's name has now."""
    found: list[str] = []

    async def resolve(name: str) -> list[str]:
        return list(found)

    monkeypatch.setattr(fleet_module, "_addresses", resolve)
    return found


async def test_the_client_of_an_address_that_is_gone_is_closed_when_its_requests_are(
    engine: ScriptedEngine, addresses: list[str]
) -> None:
    pools = [Pool("main", "tiny", ("dns+http://engines:8100",))]
    fleet = Fleet(pools, lambda: "token", lambda _: FINGERPRINT)
    addresses.append(engine.url)
    await fleet.poll()
    client = fleet.client(engine.url)
    addresses.clear()
    with fleet.count(engine.url):
        await fleet.poll()
        assert fleet.view.replicas == ()
        assert fleet.client(engine.url) is client
        assert await client.state()
    await fleet.poll()
    assert client.is_closed
    addresses.append(engine.url)
    await fleet.poll()
    assert [replica.problem for replica in fleet.view.replicas] == [None]
    await fleet.stop()
