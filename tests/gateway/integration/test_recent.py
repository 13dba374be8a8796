"""A gateway that begins knows what was asked for before it, and warms engines that began with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway_world import BASE, running_world, until


@pytest.fixture
def dialect() -> str:
    return "sqlite"


async def test_engines_that_begin_with_a_gateway_are_warmed_by_what_was_asked_for(
    database_url: str, tmp_path: Path
) -> None:
    async with running_world(database_url, tmp_path) as first:
        await first.create_tenant("team-x")
        key = await first.create_key("team-x")
        version, _ = await first.push("team-x"), await first.push("team-x", "other")
        for model in ("team-x", "team-x", BASE):
            assert (await first.complete(model, "answer", key)).status_code == 200
        assert len(await first.usage()) == 3
    async with running_world(database_url, tmp_path) as second:
        engine = second.engine
        engine.is_faithful, engine.num_slots = True, 4
        fleet = second.gateway.fleet
        (demand,) = fleet.traffic.demands(BASE)
        assert (demand.digest, demand.rank) == (version["digest"], 2)
        assert demand.count == pytest.approx(2.0, abs=0.5)
        await until(lambda: engine.asked_to_load == [version["digest"]])


async def test_what_was_deleted_meanwhile_is_forgotten(database_url: str, tmp_path: Path) -> None:
    async with running_world(database_url, tmp_path) as first:
        await first.create_tenant("team-x")
        key = await first.create_key("team-x")
        await first.push("team-x")
        assert (await first.complete("team-x", "answer", key)).status_code == 200
        deleted = await first.call("DELETE", "/api/v1/tenants/team-x/adapters/default")
        assert deleted.status_code == 204
    async with running_world(database_url, tmp_path) as second:
        assert second.gateway.fleet.traffic.demands(BASE) == []
