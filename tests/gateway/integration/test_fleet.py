"""The fleet over real sockets: clients come and go with the addresses of a name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from gateway_world import until
from loraplex.fleet import lookout as lookout_module
from loraplex.fleet.discovery import Discovery
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

    async def find_urls(discovery: Discovery, engines: Iterable[str]) -> list[str]:
        return list(found)

    monkeypatch.setattr(Discovery, "find_urls", find_urls)
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


def build_fleet(*urls: str) -> Fleet:
    """A fleet of one pool, whose base is registered."""
    return Fleet([Pool("main", "tiny", urls)], lambda: "token", lambda _: FINGERPRINT)


async def test_a_name_is_resolved_for_real(engine: ScriptedEngine) -> None:
    port = engine.url.rsplit(":", 1)[1]
    fleet = build_fleet(f"dns+http://localhost:{port}", "dns+http://no-such-name.invalid:8100")
    await fleet.poll()
    assert engine.url in [replica.url for replica in fleet.view.replicas if replica.problem is None]
    await fleet.stop()


async def test_an_engine_that_is_slow_delays_nothing_of_others(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine() as slow:
        fleet = build_fleet(engine.url, slow.url)
        await fleet.poll()
        may_answer = asyncio.Event()
        state = slow._state

        async def wait_and_say(*_: Any) -> dict[str, Any]:
            await may_answer.wait()
            return state()

        monkeypatch.setattr(fleet.client(slow.url), "state", wait_and_say)
        engine.state_changes = {"running": 5}
        slow.state_changes = {"running": 7}
        async with asyncio.timeout(lookout_module.ANSWER_S - 1):
            await fleet.poll()
        loads = {replica.url: replica.load for replica in fleet.view.replicas}
        assert loads == {engine.url: 5, slow.url: 0}
        may_answer.set()
        await asyncio.sleep(0)
        await fleet.poll()
        assert {replica.load for replica in fleet.view.replicas} == {5, 7}
        await fleet.stop()


async def test_many_that_are_chosen_for_at_once_do_not_fall_on_one(engine: ScriptedEngine) -> None:
    async with running_engine() as other:
        fleet = build_fleet(engine.url, other.url)
        await fleet.poll()
        chosen = [fleet.choose("tiny", None, 0) for _ in range(20)]
        counts = Counter(replica.url for replica in chosen if replica is not None)
        assert set(counts.values()) == {10}
        with fleet.count(engine.url):
            assert fleet.num_in_flight(engine.url) == 1
        await fleet.stop()


async def test_copies_of_what_is_hot_are_loaded_and_nothing_that_no_name_means(engine: ScriptedEngine) -> None:
    hot, gone = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    async with running_engine() as other:
        fleet = Fleet(
            [Pool("main", "tiny", (engine.url, other.url))],
            lambda: "token",
            lambda _: FINGERPRINT,
            lambda _, digest: digest == hot,
        )
        for one in (engine, other):
            one.is_faithful, one.num_slots = True, 2
        engine.resident = [hot]
        await fleet.poll()
        assert (engine.asked_to_load, other.asked_to_load) == ([], [])
        for digest in (hot, gone) * 10:
            fleet.traffic.note("tiny", digest, 4)
        await fleet.poll()
        await until(lambda: other.asked_to_load == [hot])
        await fleet.poll()
        await asyncio.sleep(0.05)
        assert (engine.asked_to_load, other.asked_to_load) == ([], [hot])
        await fleet.stop()
