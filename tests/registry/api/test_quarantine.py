"""Quarantine over HTTP and by failed loads: who may, what it says, what it leaves behind, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from loraplex_registry.adapters.lookup import find_live
from loraplex_registry.db.model import EventRow, VersionRow
from registry_world import World

T = "/api/v1/tenants/team-a/adapters"
A = f"{T}/style"
MISMATCH = "The adapter's bytes do not match its digest."


async def read_events(world: World) -> list[tuple[str, str, dict[str, Any]]]:
    async with world.registry.services.database.read() as session:
        rows = (await session.execute(select(EventRow).order_by(EventRow.id))).scalars()
        return [(row.action, row.subject, row.details) for row in rows if row.action.startswith("adapter.version_")]


async def fail_load(world: World, digest: str) -> int:
    return await world.registry.quarantine_failed(digest, MISMATCH, world.identity(None, role="admin"))


async def test_failed_load_quarantines_every_version_of_the_digest_once(world: World, make_adapter: Any) -> None:
    folder = make_adapter(1)
    digest = (await world.caller().upload(A, folder)).json()["digest"]
    await world.caller().upload(f"{T}/retired", folder, params={"promote": "never"})
    await world.caller()("DELETE", f"{T}/retired/versions/1")
    await world.caller("team-b").upload(A.replace("team-a", "team-b"), folder)
    await world.caller().upload(f"{T}/other", make_adapter(2))
    before = world.registry.epoch.current
    assert await fail_load(world, digest) == 2
    assert world.registry.epoch.current == before + 1
    delta = await world.registry.names_delta(before)
    assert {(adapter.tenant, adapter.name) for adapter in delta.adapters} == {("team-a", "style"), ("team-b", "style")}
    assert await fail_load(world, digest) == 0

    shown = (await world.caller()("GET", f"{A}/versions/1")).json()
    assert (shown["state"], shown["promoted"]) == ("quarantined", True)
    since = shown["quarantine"].pop("since")
    assert shown["quarantine"] == {"reason": "load_failed", "message": MISMATCH}
    assert since.endswith("Z")
    (version,) = delta.adapters[0].versions
    assert version.quarantine is not None
    assert (version.quarantine.reason, version.quarantine.message) == ("load_failed", MISMATCH)
    assert (await world.caller()("GET", f"{T}/other/versions/1")).json()["quarantine"] is None
    assert (await world.caller()("GET", f"{T}/retired/versions/1")).json()["state"] == "retired"
    told = [event for event in await read_events(world) if event[0] == "adapter.version_quarantined"]
    details = {"digest": digest, "reason": "load_failed", "message": MISMATCH}
    assert [one[:2] for one in told] == [("adapter.version_quarantined", f"team-{team}/style@1") for team in "ab"]
    assert all(details.items() <= one[2].items() for one in told)


async def test_admin_quarantines_and_releases(world: World, make_adapter: Any) -> None:
    digest = (await world.caller().upload(A, make_adapter(1))).json()["digest"]
    admin, forgotten = world.caller("team-a", role="admin"), []

    async def forget(digest: str) -> None:
        forgotten.append(((await admin("GET", f"{A}/versions/1")).json()["state"], digest))

    world.registry.know_engines(forget, lambda base, digests: None)
    for _ in range(2):
        taken = await admin("POST", f"{A}/versions/1/quarantine")
        assert (taken.status_code, taken.json()["state"]) == (200, "quarantined")
        assert taken.json()["quarantine"]["reason"] == "by_admin"
    assert forgotten == []
    for _ in range(2):
        released = await admin("POST", f"{A}/versions/1/release")
        assert (released.status_code, released.json()["state"]) == (200, "ready")
        assert (released.json()["quarantine"], released.json()["promoted"]) == (None, True)
    assert forgotten == [("quarantined", digest), ("ready", digest)]
    assert [action for action, *_ in await read_events(world)] == [
        "adapter.version_created",
        "adapter.version_quarantined",
        "adapter.version_released",
    ]


@pytest.mark.parametrize("verb", ["quarantine", "release"])
@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_only_an_admin_may_and_only_what_is_there(world: World, make_adapter: Any, verb: str) -> None:
    await world.caller().upload(A, make_adapter(1))
    await world.caller().upload(A, make_adapter(2))
    path = f"{A}/versions/1/{verb}"
    for caller in (world.caller(), world.caller("team-a", role="admin_readonly")):
        answer = await caller("POST", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    assert (await world.caller("team-b")("POST", path)).status_code == 404
    admin = world.caller("team-a", role="admin")
    assert (await admin("POST", f"{A}/versions/9/{verb}")).status_code == 404
    assert (await admin("POST", path, params={"force": "true"})).json()["error"]["code"] == "unknown_parameter"
    await world.caller()("DELETE", f"{A}/versions/2")
    retired = await admin("POST", f"{A}/versions/2/{verb}")
    assert (retired.status_code, retired.json()["error"]["code"]) == (409, "conflict")


async def test_next_upload_leaves_a_quarantine_behind(world: World, make_adapter: Any) -> None:
    team, bad = world.caller(), make_adapter(1)
    digest = (await team.upload(A, bad)).json()["digest"]
    await fail_load(world, digest)
    for params in ({}, {"dry_run": "true"}):
        again = await team.upload(A, bad, params=params)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "adapter_quarantined")
    fresh = (await team.upload(A, make_adapter(2))).json()
    assert (fresh["version"], fresh["state"], fresh["promoted"]) == (2, "ready", True)
    third = (await team.upload(A, make_adapter(3))).json()
    assert (third["state"], third["promoted"]) == ("ready", False)
    back = await team("POST", f"{A}/aliases/live/rollback")
    assert (back.status_code, back.json()["error"]["code"]) == (409, "conflict")
    assert (await team("DELETE", f"{A}/versions/1")).json()["state"] == "retired"


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_auto_moves_no_alias_that_has_a_ready_target_left(world: World, make_adapter: Any) -> None:
    team = world.caller()
    digest = (await team.upload(A, make_adapter(1))).json()["digest"]
    await team.upload(A, make_adapter(2))
    targets = [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]
    await team("PUT", f"{A}/aliases/live", json={"targets": targets}, headers={"if-match": "*"})
    await fail_load(world, digest)
    assert not (await team.upload(A, make_adapter(3))).json()["promoted"]
    async with world.registry.services.database.read() as session:
        row = (await session.execute(select(VersionRow).where(VersionRow.number == 3))).scalar_one()
        assert [target.version for target in await find_live(session, row.adapter_id)] == [1, 2]


async def test_a_quarantined_version_that_was_retired_comes_back_quarantined(world: World, make_adapter: Any) -> None:
    await world.caller().upload(A, make_adapter(1))
    await world.caller().upload(A, make_adapter(2))
    admin = world.caller("team-a", role="admin")
    taken = (await admin("POST", f"{A}/versions/2/quarantine")).json()["quarantine"]
    retired = await world.caller()("DELETE", f"{A}/versions/2")
    assert (retired.status_code, retired.json()["state"], retired.json()["quarantine"]) == (200, "retired", None)
    assert (await admin("POST", f"{A}/versions/2/release")).status_code == 409
    restored = (await world.caller()("POST", f"{A}/versions/2/restore")).json()
    assert (restored["state"], restored["quarantine"]) == ("quarantined", taken)
    assert (await admin("POST", f"{A}/versions/2/release")).json()["state"] == "ready"
    # while an alias points to it, it stays
    await admin("POST", f"{A}/versions/1/quarantine")
    assert (await world.caller()("DELETE", f"{A}/versions/1")).status_code == 409
