"""Several gateways on one Postgres: what one acknowledges the others know, with Redis and without; and their deaths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from company_world import running_company
from gateway_world import BASE, GatewayWorld, until
from loraplex.db import epoch_bus
from loraplex.db.claim import Claim
from loraplex.db.database import Database
from loraplex.db.epoch_bus import BusError, Epochs, RedisBus
from loraplex.db.tables import request
from loraplex.errors import DatabaseInUseError
from loraplex.usage import dead_gateways
from redis_world import RedisServer

NUM_FLIPS = 60
NUM_FLIPS_ENDURE = 10_000


@pytest.fixture
def dialect() -> str:
    return "postgresql"


class Pair:
    """Two gateways, `a` and `b`, that share all but their memory."""

    def __init__(self, a: GatewayWorld, b: GatewayWorld) -> None:
        self.a = a
        self.b = b

    async def flip(self, number: int, etag: str) -> str:
        """Point `live` at a version through the first gateway, and return the next etag."""
        body = {"targets": [{"version": number, "weight": 100}]}
        path = "/api/v1/tenants/team-x/adapters/style/aliases/live"
        answer = await self.a.call("PUT", path, json=body, headers={"if-match": etag})
        assert answer.status_code == 200, answer.text
        return str(answer.headers["etag"])

    async def resolve(self, world: GatewayWorld, key: str) -> str:
        """Ask a gateway what the alias stands for."""
        answer = await world.call("GET", "/v1/models/team-x/style", key=key)
        assert answer.status_code == 200, answer.text
        root: str = answer.json()["root"]
        return root


@pytest.fixture
async def pair(database_url: str, redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Pair]:
    async with running_company(database_url, redis_server.url, tmp_path) as worlds:
        yield Pair(*worlds)


async def _prepare(pair: Pair) -> tuple[str, str]:
    """A tenant with two ready versions; return its key and the etag of `live`."""
    await pair.a.create_tenant("team-x")
    key = await pair.a.create_key("team-x", scopes=["infer", "adapters:read", "adapters:write"])
    for _ in range(2):
        await pair.a.push("team-x", "style")
    answer = await pair.b.call("GET", "/api/v1/tenants/team-x/adapters/style/aliases/live")
    return key, answer.headers["etag"]


async def test_a_flip_through_one_is_seen_by_the_other_at_once(pair: Pair, request: pytest.FixtureRequest) -> None:
    key, etag = await _prepare(pair)
    num_flips = NUM_FLIPS_ENDURE if request.config.getoption("--endure") else NUM_FLIPS
    old = []
    for turn in range(num_flips):
        number = 2 - turn % 2
        etag = await pair.flip(number, etag)
        seen = await pair.resolve(pair.b, key)
        if seen != f"team-x/style@{number}":
            old.append((turn, seen))
    assert old == []


async def test_a_revoked_key_is_dead_at_every_gateway_at_once(pair: Pair) -> None:
    await pair.a.create_tenant("team-x")
    for _ in range(20):
        created = await pair.a.call("POST", "/api/v1/tenants/team-x/keys", json={"name": "k"})
        key, key_id = created.json()["key"], created.json()["id"]
        assert (await pair.b.call("GET", "/v1/models", key=key)).status_code == 200
        gone = await pair.a.call("DELETE", f"/api/v1/tenants/team-x/keys/{key_id}")
        assert gone.status_code == 204
        assert (await pair.b.call("GET", "/v1/models", key=key)).status_code == 401
    await pair.b.call("PATCH", "/api/v1/tenants/team-x", json={"state": "suspended"})
    last = await pair.a.call("POST", "/api/v1/tenants/team-x/keys", json={"name": "k"})
    assert (await pair.a.call("GET", "/v1/models", key=last.json().get("key", key))).status_code in (401, 403)


async def test_without_redis_and_after_it_comes_back_empty_nothing_old_is_seen(
    pair: Pair, redis_server: RedisServer
) -> None:
    key, etag = await _prepare(pair)
    for turn, outage in enumerate(["none", "killed", "killed", "back", "back", "back"]):
        if outage == "killed" and turn == 1:
            redis_server.kill()
        elif outage == "back" and turn == 3:
            redis_server.start()
        number = 2 - turn % 2
        begun = time.monotonic()
        etag = await pair.flip(number, etag)
        assert time.monotonic() - begun < 30
        assert await pair.resolve(pair.b, key) == f"team-x/style@{number}", (turn, outage)
    await until(lambda: b"loraplex_redis_up 1.0" in pair.b.gateway.metrics.render(pair.b.gateway.fleet.view))


async def test_a_gateway_that_is_alone_and_gateways_in_company_keep_apart(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.db.claim._PATIENCE_S", 0.0)
    first, second = (Claim(database_url, name, is_shared=True) for name in ("gw_1", "gw_2"))
    await first.take()
    await second.take()
    with pytest.raises(DatabaseInUseError):
        await Claim(database_url).take()
    async with second.hold_dead("gw_1") as is_dead:
        assert not is_dead
    await first.release()
    async with second.hold_dead("gw_1") as is_dead:
        assert is_dead
        # it cannot come back under its id while it is being buried
        with pytest.raises(DatabaseInUseError):
            await first.take()
    await first.take()
    for claim in (first, second):
        await claim.release()


async def _open_row(database: Database, request_id: str, gateway: str | None) -> None:
    row = {
        "request_id": request_id, "tenant_id": None, "tenant": "platform", "adapter_id": None, "adapter": None,
        "version": None, "digest": None, "base": BASE, "key_id": "key_1", "route": "/v1/completions", "model": BASE,
        "is_stream": False, "client_request_id": None, "tags": None, "created_at": datetime.now(UTC),
        "replica": "http://gone", "tokens_seen": 3, "settled_at": None, "gateway": gateway,
    }  # fmt: skip
    async with database.write() as connection:
        await connection.execute(request.insert(), row)


async def test_requests_of_the_dead_are_settled_and_those_of_the_living_are_not(
    pair: Pair, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_gateways, "_DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(dead_gateways, "_LOOK_EVERY_S", 0.1)
    for request_id, gateway in (("req_b", pair.b.gateway.id), ("req_dead", "gw_dead"), ("req_old", None)):
        await _open_row(pair.a.gateway.database, request_id, gateway)

    async def is_settled() -> bool:
        return await pair.a.open_requests() == ["req_b"]

    await until(is_settled)
    outcomes = {row["request_id"]: row["outcome"] for row in await pair.a.usage()}
    assert outcomes == {"req_dead": "lost", "req_old": "lost"}


async def test_one_repairs_the_fleet_and_another_when_it_is_gone(pair: Pair) -> None:
    engine = pair.a.engine
    worlds = [pair.a, pair.b]
    for turn in (1, 2):
        # it stays, so that every gateway has its time to act
        engine.resident = [f"sha256:{turn:064d}"]
        asked = engine.asked_to_drop
        await until(lambda: asked.count(engine.resident[0]) == 2)  # noqa: B023 - it is over when the turn is
        (acting,) = [world for world in worlds if world.gateway.reconciler.recent]
        events = (await pair.b.call("GET", "/api/v1/audit", params={"action": "fleet.adapter_dropped"})).json()["data"]
        told = [event["details"]["digest"] for event in events]
        assert told.count(engine.resident[0]) in (1, 2)
        for world in worlds:
            shown = (await world.call("GET", "/api/v1/fleet")).json()["differences"]
            assert [found["kind"] for found in shown] == ["adapter_extra"]
        worlds.remove(acting)
        await acting.gateway.claim.release()


class TestRedisBus:
    """What Redis holds, and what is made of a server that is slow, lost or older than it was."""

    @pytest.fixture
    async def bus(self, redis_server: RedisServer) -> AsyncIterator[RedisBus]:
        opened = RedisBus(redis_server.url, "name")
        yield opened
        await opened.close()

    async def test_epochs_only_grow_unless_the_database_was_put_back(self, bus: RedisBus) -> None:
        assert await bus.read() is None
        await bus.publish(registry=5, gateway=3)
        assert await bus.read() == Epochs(5, 3)
        await bus.publish(registry=4)
        await bus.publish(gateway=7)
        assert await bus.read() == Epochs(5, 7)
        await bus.put_back(Epochs(4, 7), Epochs(2, 2))
        assert await bus.read() == Epochs(5, 2)

    async def test_many_readers_share_reads_that_began_after_them(self, bus: RedisBus) -> None:
        await bus.read()
        await bus.publish(registry=1, gateway=1)
        calls = 0
        ask = epoch_bus.RedisBus._ask

        async def count(call: Any) -> list[str]:
            nonlocal calls
            calls += 1
            return await ask(call)

        bus._ask = count  # type: ignore[method-assign]
        assert await asyncio.gather(*(bus.read() for _ in range(50))) == [Epochs(1, 1)] * 50
        assert calls == 1

    async def test_a_server_that_began_again_is_not_believed(self, bus: RedisBus, redis_server: RedisServer) -> None:
        await bus.publish(registry=5, gateway=5)
        await bus.read()
        assert await bus.read() == Epochs(5, 5)
        redis_server.kill()
        with pytest.raises(BusError):
            await bus.read()
        redis_server.start()
        # as from an old snapshot
        other = RedisBus(redis_server.url, "name")
        await other.publish(registry=4, gateway=4)
        await other.close()
        assert await bus.read() is None
        assert await bus.read() == Epochs(4, 4)

    async def test_a_server_that_hangs_costs_a_quarter_of_a_second(
        self, bus: RedisBus, redis_server: RedisServer
    ) -> None:
        await bus.read()
        redis_server.freeze()
        begun = time.monotonic()
        with pytest.raises(BusError):
            await bus.publish(registry=1)
        assert time.monotonic() - begun < 10
        redis_server.thaw()
