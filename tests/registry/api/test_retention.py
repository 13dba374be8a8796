"""What was retired or deleted long ago is purged, its bytes go when nobody refers to them, and not a moment before."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.retention import Retention
from loraplex_registry.db.model import AdapterRow, EventRow, VersionRow
from loraplex_registry.uploads.sweep import Sweeper
from registry_world import World

T = "/api/v1/tenants/team-a/adapters"
A = f"{T}/style"
OTHER = "/api/v1/tenants/team-b/adapters/style"


async def let_days_pass(world: World, days: int) -> None:
    """Move every instant of retirement and deletion into the past."""

    async def work(session: AsyncSession) -> None:
        for row in (await session.execute(sa.select(VersionRow))).scalars():
            row.retired_at = row.retired_at and row.retired_at - timedelta(days=days)
        for adapter in (await session.execute(sa.select(AdapterRow))).scalars():
            adapter.deleted_at = adapter.deleted_at and adapter.deleted_at - timedelta(days=days)

    await world.registry.services.database.write(work)


async def purge(world: World) -> int:
    return await Retention(world.registry.services.database, world.registry.services.settings).purge()


async def sweep(world: World) -> list[str]:
    services = world.registry.services
    return await Sweeper(services.database, services.store, replace(services.settings, orphan_grace_s=-1.0)).sweep()


async def count_versions(world: World) -> dict[str, int]:
    async with world.registry.services.database.read() as session:
        query = sa.select(VersionRow.state, sa.func.count().label("num")).group_by(VersionRow.state)
        return {row.state: row.num for row in await session.execute(query)}


async def test_a_retired_version_can_be_restored_until_its_days_are_over(world: World, make_adapter: Any) -> None:
    team = world.caller()
    digest = (await team.upload(A, make_adapter(1))).json()["digest"]
    await team.upload(A, make_adapter(2), params={"promote": "always"})
    assert (await team("DELETE", f"{A}/versions/1")).status_code == 200
    await let_days_pass(world, 29)
    assert (await purge(world), await sweep(world)) == (0, [])
    assert (await team("POST", f"{A}/versions/1/restore")).json()["state"] == "ready"
    await team("DELETE", f"{A}/versions/1")
    await let_days_pass(world, 31)
    before = world.registry.epoch.current
    assert (await purge(world), await purge(world)) == (1, 0)
    assert world.registry.epoch.current == before + 1, "a pass without work changes no epoch"
    shown = (await team("GET", f"{A}/versions/1")).json()
    assert (shown["state"], shown["digest"], shown["report"]["verdict"]) == ("purged", digest, "warn")
    assert await sweep(world) == [digest]
    for gone in (
        await team("POST", f"{A}/versions/1/restore"),
        await team("DELETE", f"{A}/versions/1"),
        await team("GET", f"{A}/versions/1/files/adapter_config.json"),
    ):
        assert (gone.status_code, gone.json()["error"]["code"]) == (410, "adapter_retired"), gone.text
    async with world.registry.services.database.read() as session:
        event = (await session.execute(sa.select(EventRow).order_by(EventRow.id.desc()).limit(1))).scalar_one()
    assert (event.action, event.subject, event.actor) == ("adapter.version_purged", "team-a/style@1", "retention")
    assert (event.details["before"], event.details["after"]) == ({"state": "retired"}, {"state": "purged"})


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_purged_content_comes_again_under_a_new_number(world: World, make_adapter: Any) -> None:
    team, folder = world.caller(), make_adapter(1)
    digest = (await team.upload(A, folder)).json()["digest"]
    await team.upload(A, make_adapter(2), params={"promote": "always"})
    await team("DELETE", f"{A}/versions/1")
    await let_days_pass(world, 31)
    await purge(world)
    await sweep(world)
    again = await team.upload(A, folder)
    assert (again.status_code, again.json()["version"], again.json()["digest"]) == (201, 3, digest)
    assert (await team("GET", f"{A}/versions/3/files/adapter_config.json")).status_code == 200


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_bytes_stay_while_another_tenant_has_them_and_nobody_is_told(world: World, make_adapter: Any) -> None:
    folder, mine, theirs = make_adapter(1), world.caller(), world.caller("team-b")
    digest = (await mine.upload(A, folder, params={"promote": "never"})).json()["digest"]
    await theirs.upload(OTHER, folder)
    await mine("DELETE", f"{A}/versions/1")
    await let_days_pass(world, 31)
    assert (await purge(world), await sweep(world)) == (1, [])
    assert (await mine("GET", f"{A}/versions/1")).json()["state"] == "purged", "as if nobody else had it"
    assert (await theirs("GET", f"{OTHER}/versions/1/files/adapter_model.safetensors")).status_code == 200
    await theirs("DELETE", OTHER)
    assert await sweep(world) == []
    await let_days_pass(world, 31)
    assert (await purge(world), await sweep(world)) == (1, [digest])
    assert world.objects() == []


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_deleted_adapters_go_whole_quarantined_versions_too(world: World, make_adapter: Any) -> None:
    team, admin = world.caller(), world.caller(role="admin")
    for seed in (1, 2, 3):
        await team.upload(A, make_adapter(seed))
    await admin("POST", f"{A}/versions/2/quarantine")
    await team("DELETE", A)
    await let_days_pass(world, 31)
    assert await purge(world) == 3
    assert await count_versions(world) == {"purged": 3}
    assert len(await sweep(world)) == 3
    assert (await team.upload(A, make_adapter(9))).json()["version"] == 4, "numbers continue after what was purged"
