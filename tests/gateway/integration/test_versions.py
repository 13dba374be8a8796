"""Versions on engines: outcomes by minute, warming, the gate before ready, and old content that stays for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gateway_world import GatewayWorld, running_world, until
from loraplex.db.tables import version_outcome
from loraplex.usage.outcomes import keep_outcomes_short
from scripted_engine import GOOD_PARITY

TENANTS = "/api/v1/tenants"
A = f"{TENANTS}/team-x/adapters/default"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
def changes() -> dict[str, Any]:
    return {}


@pytest.fixture
async def world(database_url: str, tmp_path: Path, changes: dict[str, Any]) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path, num_engines=2, **changes) as running:
        await running.create_tenant("team-x")
        yield running


async def read_outcomes(world: GatewayWorld, **params: Any) -> list[dict[str, Any]]:
    response = await world.call("GET", f"{A}/outcomes", params=params)
    assert response.status_code == 200, response.text
    rows: list[dict[str, Any]] = response.json()["data"]
    return rows


async def test_outcomes_are_counted_by_version_in_the_commit_that_settles(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    for _ in range(2):
        await world.push("team-x", promote="always")
    began = datetime.now(UTC)
    for model in ("team-x@", "team-x/default@1", "team-x/default@1", "team-x/default@2", "tiny"):
        await world.complete(model.rstrip("@"), "answer", key)
    async with world.stream("team-x/default@1", "die", key) as response:
        assert b"replica_failed" in await response.aread()
    assert len(await world.usage()) == 6
    rows = await read_outcomes(world)
    counts = {1: [0, 0], 2: [0, 0]}
    for row in rows:
        assert row["requests"] == row["ok"] + row["error"]
        assert row["minute"].endswith(":00.000Z")
        counts[row["version"]][0] += row["ok"]
        counts[row["version"]][1] += row["error"]
    assert counts == {1: [2, 1], 2: [2, 0]}
    assert {row["version"] for row in await read_outcomes(world, version=2)} == {2}
    assert await read_outcomes(world, to=(began - timedelta(minutes=2)).isoformat()) == []


async def test_outcomes_have_pages_and_bounds(world: GatewayWorld) -> None:
    await world.push("team-x")
    await world.gateway.names.ensure_fresh()
    adapter = world.gateway.names.find_adapter("team-x", "default")
    assert adapter is not None
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    values = [
        {
            "adapter_id": adapter.adapter_id,
            "version": version,
            "minute": now - timedelta(minutes=age),
            "outcome": outcome,
            "num_requests": 1 + age,
        }
        for age in range(5)
        for version in (1, 2)
        for outcome in ("ok", "lost")
    ]
    async with world.gateway.database.write() as connection:
        await connection.execute(sa.insert(version_outcome), values)
    found: list[tuple[str, int]] = []
    cursor = None
    while True:
        params = {"limit": 3} | ({} if cursor is None else {"cursor": cursor})
        page = (await world.call("GET", f"{A}/outcomes", params=params)).json()
        assert len(page["data"]) <= 3
        assert all(row["requests"] == row["ok"] + row["lost"] == 2 * row["ok"] for row in page["data"])
        found += [(row["minute"], row["version"]) for row in page["data"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert len(found) == len(set(found)) == 10
    assert found == sorted(found, reverse=True)
    for wrong in (
        {"version": "0"}, {"version": "x"}, {"from": "yesterday"}, {"cursor": "!"}, {"cursor": "WzEsMl0"},
        {"limit": "0"}, {"to": "0001-01-01"}, {"since": "1"},
    ):  # fmt: skip
        answer = await world.call("GET", f"{A}/outcomes", params=wrong)
        assert answer.status_code == (200 if "to" in wrong else 400), (wrong, answer.text)
    missing = await world.call("GET", f"{A}/outcomes", params={"version": 9})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "team-x/default has no version 9" in missing.json()["error"]["message"]
    shortening = asyncio.create_task(keep_outcomes_short(world.gateway.database, 0))

    async def are_short() -> bool:
        return {row["minute"] for row in await world.rows(version_outcome)} <= {now + timedelta(minutes=1), now}

    await until(are_short)
    shortening.cancel()


async def test_who_may_read_outcomes_and_warm(world: GatewayWorld) -> None:
    await world.create_tenant("team-y")
    await world.push("team-x")
    reader = await world.create_key("team-x", scopes=["adapters:read"])
    writer = await world.create_key("team-x", scopes=["adapters:write"])
    other = await world.create_key("team-y", scopes=["adapters:read", "adapters:write"])
    infer = await world.create_key("team-x")
    warm = f"{A}/versions/1/warm"
    for key, method, path, status in (
        (reader, "GET", f"{A}/outcomes", 200),
        (writer, "GET", f"{A}/outcomes", 200),
        (reader, "POST", warm, 403),
        (infer, "GET", f"{A}/outcomes", 403),
        (other, "GET", f"{A}/outcomes", 404),
        (other, "POST", warm, 404),
    ):
        answer = await world.call(method, path, key=key)
        assert answer.status_code == status, (method, path, answer.text)
    for path in (f"{A}/versions/9/warm", f"{A}/versions/01/warm", f"{A}/versions/x/warm"):
        assert (await world.call("POST", path)).status_code == 404
    assert (await world.call("GET", f"{TENANTS}/team-x/adapters/none/outcomes")).status_code == 404


async def test_warming_loads_a_ready_version_on_every_engine_of_its_base(world: GatewayWorld) -> None:
    digest = (await world.push("team-x"))["digest"]
    await world.push("team-x", promote="always")
    answer = await world.call("POST", f"{A}/versions/1/warm")
    assert answer.status_code == 200, answer.text
    assert [one["state"] for one in answer.json()["replicas"]] == ["resident", "resident"]
    assert [engine.asked_to_load for engine in world.engines] == [[digest], [digest]]
    world.engines[0].state_changes = {"is_ready": False}
    await world.gateway.fleet.poll()
    assert len((await world.call("POST", f"{A}/versions/1/warm")).json()["replicas"]) == 1
    world.engines[1].state_changes = {"is_ready": False}
    await world.gateway.fleet.poll()
    answer = await world.call("POST", f"{A}/versions/1/warm")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    await world.call("DELETE", f"{A}/versions/1")
    answer = await world.call("POST", f"{A}/versions/1/warm")
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "adapter_retired")


async def test_a_flip_reaches_new_requests_and_leaves_running_ones_their_version(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    old = (await world.push("team-x"))["digest"]
    async with world.stream("team-x", "pause", key) as response:
        assert (response.status_code, response.headers["x-loraplex-digest"]) == (200, old)
        new = (await world.push("team-x", promote="always"))["digest"]
        answer = await world.complete("team-x", "answer", key)
        assert answer.headers["x-loraplex-digest"] == new
        for engine in world.engines:
            engine.go_on.set()
        assert b"[DONE]" in await response.aread()
    assert {(row["version"], row["outcome"]) for row in await world.usage()} == {(1, "ok"), (2, "ok")}
    await asyncio.sleep(0.2)
    assert [engine.asked_to_drop for engine in world.engines] == [[], []], "a rollback finds it loaded"


class TestWarmth:
    @pytest.fixture
    def changes(self) -> dict[str, Any]:
        return {"warm_s": 0.6}

    async def test_what_was_retired_stays_loaded_for_a_while_and_a_restore_keeps_it(self, world: GatewayWorld) -> None:
        digests = [(await world.push("team-x", promote="always"))["digest"] for _ in range(3)]
        for number in (1, 2):
            await world.call("DELETE", f"{A}/versions/{number}")
        await asyncio.sleep(0.2)
        assert [engine.asked_to_drop for engine in world.engines] == [[], []]
        await world.call("POST", f"{A}/versions/1/restore")
        await until(lambda: all(engine.asked_to_drop == [digests[1]] for engine in world.engines))
        await asyncio.sleep(0.3)
        assert all(engine.asked_to_drop == [digests[1]] for engine in world.engines)

    async def test_what_is_deleted_is_dropped_at_once(self, world: GatewayWorld) -> None:
        digests = [(await world.push("team-x", promote="always"))["digest"] for _ in range(2)]
        await world.call("DELETE", f"{A}/versions/1")
        await world.call("DELETE", A)
        await until(lambda: all(digests[1] in engine.asked_to_drop for engine in world.engines))


async def test_the_gate_asks_an_engine_and_calls_wait_for_it(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    for engine in world.engines:
        engine.may_measure.clear()
    pushing = asyncio.create_task(world.push("team-x"))
    await until(lambda: any(engine.asked_to_measure for engine in world.engines))
    early = await world.complete("team-x", "answer", key)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "adapter_loading")
    for engine in world.engines:
        engine.may_measure.set()
    version = await pushing
    assert (version["state"], version["promoted"]) == ("ready", True)
    assert version["report"]["parity"]["num_positions"] == GOOD_PARITY["num_positions"]
    assert (await world.complete("team-x", "answer", key)).status_code == 200
    metrics = (await world.call("GET", "/metrics")).text
    assert 'loraplex_parity_verdicts_total{verdict="pass"} 1.0' in metrics


async def test_the_gate_quarantines_what_answers_otherwise(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    for engine in world.engines:
        engine.parity = (200, GOOD_PARITY | {"max_kl": 1.0})
    assert (await world.push("team-x"))["state"] == "quarantined"
    answer = await world.complete("team-x", "answer", key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_quarantined")
    assert "parity" in answer.json()["error"]["message"]


async def test_bytes_that_no_engine_loads_end_the_wait_for_the_gate(world: GatewayWorld) -> None:
    error = {"error": {"code": "digest_mismatch", "message": "The bytes do not match.", "type": "x", "param": None}}
    for engine in world.engines:
        engine.parity = (503, error)
    pushing = asyncio.create_task(world.push("team-x"))
    await until(lambda: any(engine.asked_to_measure for engine in world.engines))
    digest = next(engine.asked_to_measure[0] for engine in world.engines if engine.asked_to_measure)
    for engine in world.engines:
        engine.fail_load(digest)
    await world.gateway.fleet.poll()
    version = await pushing
    assert (version["state"], version["quarantine"]["reason"]) == ("quarantined", "load_failed")
