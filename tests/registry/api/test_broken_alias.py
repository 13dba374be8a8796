"""Aliases that lead to what is not there any more: found wherever they are, and led back to what is."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.errors import NotFoundError
from planted import purge_by_hand
from registry_world import Caller, World

A = "/api/v1/tenants/team-a/adapters/style"
TEAM = TenantRef("id-team-a", "team-a")


@pytest.fixture
async def team(world: World, make_adapter: Any) -> Caller:
    """Someone with an adapter of versions 1, 2 and 3, the last live and a part of canary, and with another adapter."""
    team = world.caller()
    for seed in (4, 5, 6):
        other = "/api/v1/tenants/team-a/adapters/other"
        assert (await team.upload(other, make_adapter(seed), params={"promote": "always"})).status_code == 201
    for seed in (1, 2, 3):
        assert (await team.upload(A, make_adapter(seed), params={"promote": "always"})).status_code == 201
    targets = [{"version": 2, "weight": 90}, {"version": 3, "weight": 10}]
    absent = {"If-None-Match": "*"}
    made = await team("PUT", f"{A}/aliases/canary", json={"targets": targets}, headers=absent)
    assert made.status_code == 201
    return team


async def broken(world: World) -> list[tuple[str, list[int]]]:
    found = await world.registry.find_broken_aliases()
    assert all((one.tenant, one.adapter) == (TEAM, "style") for one in found)
    return sorted((one.alias, [target.version for target in one.targets]) for one in found)


async def mend(world: World, alias: str) -> list[int] | None:
    view = await world.registry.mend_alias(TEAM, "style", alias, world.identity(role="admin"))
    return None if view is None else [target.version for target in view.targets]


@pytest.mark.parametrize("state", ["purged", "retired"])
async def test_a_broken_alias_goes_back_to_where_it_last_led_that_is_there(
    world: World, team: Caller, database_url: str, state: str
) -> None:
    assert await broken(world) == []
    await purge_by_hand(database_url, "style", [3], state)
    assert await broken(world) == [("canary", [2, 3]), ("live", [3])]
    assert await mend(world, "live") == [2]
    assert await broken(world) == [("canary", [2, 3])]
    history = (await team("GET", f"{A}/aliases/live/history")).json()["data"]
    assert [(entry["revision"], entry["action"]) for entry in history[:2]] == [(4, "rollback"), (3, "upload")]
    assert await mend(world, "canary") is None


async def test_versions_in_between_that_are_gone_too_are_passed_over(
    world: World, team: Caller, database_url: str
) -> None:
    await purge_by_hand(database_url, "style", [2, 3])
    assert await mend(world, "live") == [1]
    assert await mend(world, "canary") is None


async def test_an_alias_that_never_led_to_what_is_there_is_deleted(
    world: World, team: Caller, database_url: str
) -> None:
    await purge_by_hand(database_url, "style", [3])
    assert await mend(world, "canary") is None
    assert (await team("GET", f"{A}/aliases/canary")).status_code == 404
    history = (await team("GET", f"{A}/aliases/canary/history")).json()["data"]
    assert (history[0]["action"], history[0]["targets"]) == ("delete", [])
    await mend(world, "live")
    assert await broken(world) == []


async def test_a_whole_alias_stays_as_it_is(world: World, team: Caller) -> None:
    assert await mend(world, "live") == [3]
    assert (await team("GET", f"{A}/aliases/live")).headers["etag"] == '"3"'
    assert (await world.caller(role="admin")("POST", f"{A}/versions/3/quarantine")).status_code == 200
    assert await broken(world) == []
    with pytest.raises(NotFoundError):
        await mend(world, "other")
