"""Planted incidents: a tenant that floods, adapters that push each other out, a canary that fails. All made up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from dashboard_traffic import build_usage, fill_stats
from gateway_world import GatewayWorld
from loraplex.db.tables import tenant, usage, version_outcome

NUM_TENANTS, NUM_ADAPTERS = 6, 24
FLOOD = "team-000"
CANARY = ("team-001", "support")
WANTED = ("team-002/billing", "team-003/legal", "team-004/sales")


async def plant_tenants(world: GatewayWorld) -> None:
    """Tenants who behave."""
    for number in range(NUM_TENANTS):
        await world.create_tenant(f"team-{number:03}")


async def plant_flood(world: GatewayWorld) -> None:
    """Let one tenant send most of all tokens for five minutes, while others wait."""
    await fill_stats(world, NUM_TENANTS, NUM_ADAPTERS, num_pieces=60)


async def plant_thrash(world: GatewayWorld) -> None:
    """Let an engine want more adapters than it has slots, and load three of them again and again."""
    engine = world.engine
    engine.num_slots = 2
    engine.state_changes["slot_schedule"] = {"mode": "turns", "working_set": 3}
    await world.gateway.fleet.poll()
    ids = {row["name"]: str(row["id"]) for row in await world.rows(tenant)}
    now = datetime.now(UTC)
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(WANTED):
        owner, adapter = name.split("/")
        for number in range(40 - 10 * index):
            row = build_usage(ids[owner], owner, adapter, now - timedelta(seconds=number))
            rows.append(row | {"replica": engine.url, "load_bytes": 27_262_976})
    async with world.gateway.database.write() as connection:
        await connection.execute(usage.insert(), rows)


async def plant_canary(world: GatewayWorld) -> None:
    """Give a version that fails most of its calls a tenth of live."""
    owner, adapter = CANARY
    for _ in range(2):
        await world.push(owner, adapter, promote="auto")
    path = f"/api/v1/tenants/{owner}/adapters/{adapter}/aliases/live"
    etag = (await world.call("GET", path)).headers["etag"]
    targets = {"targets": [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]}
    answer = await world.call("PUT", path, json=targets, headers={"if-match": etag})
    assert answer.status_code == 200, answer.text
    await world.gateway.names.ensure_fresh()
    found = world.gateway.names.find_adapter(owner, adapter)
    assert found is not None
    minute = datetime.now(UTC).replace(second=0, microsecond=0)
    counts = ((1, "ok", 890), (1, "error", 10), (2, "ok", 30), (2, "error", 70))
    rows = [
        {"adapter_id": found.adapter_id, "version": version, "minute": minute, "outcome": outcome, "num_requests": num}
        for version, outcome, num in counts
    ]
    async with world.gateway.database.write() as connection:
        await connection.execute(version_outcome.insert(), rows)


async def plant_all(world: GatewayWorld) -> None:
    """All of them."""
    await plant_tenants(world)
    await plant_flood(world)
    await plant_thrash(world)
    await plant_canary(world)
