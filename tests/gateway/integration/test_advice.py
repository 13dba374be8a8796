"""GET /api/v1/advice: from what engines say and what was called; tenants hear of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gateway_world import GatewayWorld, check_error, running_world, until
from loraplex.advise.reading import read_calls
from loraplex.db.tables import usage


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as found:
        for name in ("team-x", "team-y"):
            await found.create_tenant(name)
            await found.push(name)
        yield found


async def tell(world: GatewayWorld, **state: Any) -> None:
    """Let the engine say so much of itself, and the gateway hear it."""
    world.engine.state_changes |= state
    await until(lambda: all(world.gateway.fleet.view.replicas[0].state.get(name) == state[name] for name in state))


async def advise(world: GatewayWorld, **options: Any) -> dict[str, dict[str, Any]]:
    found = await world.call("GET", "/api/v1/advice", **options)
    assert found.status_code == 200, found.text
    return {f"{one['rule']} {one['subject']}": one for one in found.json()["data"]}


def history(tenant_id: str, share: float) -> dict[str, Any]:
    counts = {"requests": 500, "prompt_tokens": 100_000, "repeated_tokens": int(100_000 * share)}
    own = {"tenant_id": tenant_id, "requests": 200, "prompt_tokens": 1000, "repeated_tokens": 150}
    return {**counts, "forgotten_blocks": 0, "is_caching": False, "tenants": [own]}


async def copy_usage(world: GatewayWorld, count: int, **changes: Any) -> None:
    """Add so many rows like the latest one."""
    row = (await world.usage())[-1] | changes
    rows = [row | {"request_id": f"req_copy{i}{row['tenant']}"} for i in range(count)]
    async with world.gateway.database.write() as connection:
        await connection.execute(sa.insert(usage), rows)


async def test_what_an_engine_says_becomes_advice_with_its_flag(world: GatewayWorld) -> None:
    tenant_id = world.gateway.directory.find_tenant_id("team-x")
    assert tenant_id is not None
    await tell(
        world,
        prefix_history=history(tenant_id, 0.8),
        preemptions=50,
        preempted_at=6,
        max_running=16,
        kv={"num_free": 1},
    )
    found = await advise(world)
    assert found["prefix_cache tiny"]["flag"] == "--enable-prefix-caching"
    assert found["prefix_cache tiny"]["evidence"]["repeated_share"] == 0.8
    (seats,) = (one for name, one in found.items() if name.startswith("max_num_seqs"))
    assert seats["flag"] == "--max-num-seqs 5"


async def test_lengths_are_those_of_usage(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    await world.complete("team-x", "hello", key)
    await copy_usage(world, 600, outcome="ok", prompt_tokens=90, completion_tokens=10)
    await tell(world, model=world.gateway.fleet.view.replicas[0].state["model"] | {"max_model_len": 4096})
    found = await advise(world)
    assert found["max_model_len tiny"]["flag"] == "--max-model-len 256"


async def test_tenant_hears_of_its_own_only(world: GatewayWorld) -> None:
    tenant_id = world.gateway.directory.find_tenant_id("team-x")
    assert tenant_id is not None
    await tell(world, prefix_history=history(tenant_id, 0.8))
    key = await world.create_key("team-x", scopes=["usage:read", "infer"])
    other = await world.create_key("team-y", scopes=["usage:read", "infer"])
    await world.complete("team-x", "hello", key)
    await copy_usage(world, 40)
    await world.complete("team-y", "hello", other)
    found = await advise(world, key=key)
    assert found["prefix_cache your calls"]["evidence"]["repeated_share"] == 0.15
    assert not any("team-y" in repr(one) for one in found.values())
    assert {name.split()[0] for name in found} == {"prefix_cache", "idle_adapters"}
    assert found["idle_adapters adapters"]["evidence"]["calls_seen"] == 1
    check_error(await world.call("GET", "/api/v1/advice?tenant=team-y", key=key), 404, "not_found", "tenant")
    assert await advise(world, params={"tenant": "team-x"}) == found


async def test_key_without_the_scope_is_refused(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", scopes=["infer"])
    check_error(await world.call("GET", "/api/v1/advice", key=key), 403, "permission_denied")
    check_error(await world.call("GET", "/api/v1/advice?by=base"), 400, "unknown_parameter", "by")


async def test_calls_are_read_in_pages_oldest_first(world: GatewayWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.advise.reading._PAGE", 7)
    key = await world.create_key("team-x")
    await world.complete("team-x", "hello", key)
    now = datetime.now(UTC)
    for days in (0, 1, 2):
        row = (await world.usage())[0]
        async with world.gateway.database.write() as connection:
            rows = [
                row | {"request_id": f"req_{days}x{i}", "created_at": now - timedelta(days=days, seconds=i % 3)}
                for i in range(10)
            ]
            await connection.execute(sa.insert(usage), rows)
    calls = await read_calls(world.gateway.database, now - timedelta(days=1, hours=1), None)
    assert len(calls) == 21
    assert [call.began_s for call in calls] == sorted(call.began_s for call in calls)
