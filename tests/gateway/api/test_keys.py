"""Shares and rotation of keys, weights of tenants and limits of adapters, through the whole application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway_world import GatewayWorld, check_error, enclosed_world
from loraplex_registry.wire.limits import RateLimits

TENANTS = "/api/v1/tenants"
KEYS = f"{TENANTS}/team-x/keys"
ALL = {
    "requests_per_minute": 1,
    "tokens_per_minute": 2,
    "concurrent_requests": 3,
    "tokens_per_day": 4,
    "tokens_per_month": 2**53 - 1,
}


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        await found.create_tenant("team-x")
        yield found


async def create(world: GatewayWorld, key: str | None = None, **fields: Any) -> dict[str, Any]:
    response = await world.call("POST", KEYS, json={"name": "app", **fields}, **({"key": key} if key else {}))
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


async def rotate(world: GatewayWorld, key_id: str, **fields: Any) -> dict[str, Any]:
    response = await world.call("POST", f"{KEYS}/{key_id}/rotate", json=fields)
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


async def works(world: GatewayWorld, text: str) -> bool:
    return (await world.call("GET", "/v1/models", key=text)).status_code == 200


class TestAllowances:
    """Limits and priorities of keys, limits and weights of tenants, limits of adapters."""

    async def test_a_tenant_has_limits_on_calls_beside_those_on_what_it_stores(self, world: GatewayWorld) -> None:
        path, directory = f"{TENANTS}/team-x", world.gateway.directory
        assert (directory.find_tenant("team-x").rate_limits, directory.find_weight("team-x")) == (None, 1)  # type: ignore[union-attr]
        changed = await world.call("PATCH", path, json={"limits": {**ALL, "adapter_rank": 8}, "weight": 1000})
        assert (changed.json()["limits"], changed.json()["weight"]) == ({**ALL, "adapter_rank": 8}, 1000)
        entry = directory.find_tenant("team-x")
        assert entry is not None
        assert (entry.rate_limits, entry.weight) == (RateLimits(**ALL), 1000)
        assert entry.limits is not None
        assert entry.limits.adapter_rank == 8
        await world.push("team-x")
        cleared = await world.call("PATCH", path, json={"limits": dict.fromkeys(ALL), "weight": None})
        assert (cleared.json()["limits"], cleared.json()["weight"]) == ({"adapter_rank": 8}, 1)
        for weight in (0, 1001, -1, 1.5, "2", True):
            response = await world.call("PATCH", path, json={"weight": weight})
            check_error(response, 400, "invalid_request_error", "weight")

    async def test_a_key_is_given_an_allowance_and_it_can_be_changed(self, world: GatewayWorld) -> None:
        key = await create(world, limits=ALL, priority=-8)
        assert (key["limits"], key["priority"]) == (ALL, -8)
        entry = world.gateway.directory.find_key_by_id(key["id"])
        assert entry is not None
        assert (entry.rate_limits, entry.priority) == (RateLimits(**ALL), -8)
        path = f"{KEYS}/{key['id']}"
        change = {"limits": {"tokens_per_day": None, "concurrent_requests": 9}, "priority": None}
        changed = (await world.call("PATCH", path, json=change)).json()
        del key["key"]
        left = {**{name: value for name, value in ALL.items() if name != "tokens_per_day"}, "concurrent_requests": 9}
        assert changed == {**key, "limits": left, "priority": 0}
        assert (await world.call("GET", KEYS)).json()["data"] == [changed]
        entry = world.gateway.directory.find_key_by_id(key["id"])
        assert entry is not None
        assert (entry.rate_limits, entry.priority) == (RateLimits(**left), 0)
        assert (await world.call("PATCH", path, json={})).json() == changed
        events = (await world.call("GET", f"/api/v1/audit?subject={key['id']}")).json()["data"]
        assert [event["action"] for event in events] == ["key.changed", "key.created"]
        assert events[0]["details"]["before"] == {"limits": ALL, "priority": -8}
        check_error(await world.call("PATCH", path, json={"name": "b"}), 400, "unknown_parameter", "name")
        check_error(await world.call("PATCH", f"{KEYS}/key_no", json={"priority": 1}), 404, "not_found", "key_id")

    async def test_a_team_shares_out_what_it_has_and_no_more(self, world: GatewayWorld) -> None:
        scopes = ["infer", "keys:write"]
        giver = await create(world, scopes=scopes, limits={"tokens_per_minute": 100}, priority=2)
        text = giver["key"]
        child = await create(world, text)
        assert (child["limits"], child["priority"]) == ({"tokens_per_minute": 100}, 2)
        assert (await create(world, text, limits={"tokens_per_minute": 5}, priority=8))["priority"] == 8
        for wider, param in (
            ({"limits": {"tokens_per_minute": 101}}, "limits.tokens_per_minute"),
            ({"limits": {"tokens_per_minute": None}}, "limits.tokens_per_minute"),
            ({"priority": 1}, "priority"),
        ):
            refused = await world.call("POST", KEYS, key=text, json={"name": "app", **wider})
            check_error(refused, 403, "permission_denied", param)
            for own in (giver["id"], child["id"]):
                refused = await world.call("PATCH", f"{KEYS}/{own}", key=text, json=wider)
                check_error(refused, 403, "permission_denied", param)
        soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
        brief = await create(world, scopes=scopes, expires_at=soon)
        assert (await create(world, brief["key"]))["expires_at"] == brief["expires_at"]
        longer = {"name": "app", "expires_at": "2999-01-01T00:00:00Z"}
        refused = await world.call("POST", KEYS, key=brief["key"], json=longer)
        check_error(refused, 403, "permission_denied", "expires_at")
        for key_id in (giver["id"], child["id"]):
            refused = await world.call("POST", f"{KEYS}/{key_id}/rotate", key=brief["key"], json={})
            check_error(refused, 403, "permission_denied", "expires_at")
        own = f"{KEYS}/{giver['id']}"
        assert (await world.call("PATCH", own, key=text, json={"limits": {"tokens_per_minute": 9}})).status_code == 200

    async def test_limits_of_an_adapter_are_an_admins_to_set(self, world: GatewayWorld) -> None:
        await world.push("team-x")
        path = f"{TENANTS}/team-x/adapters/default"
        team = await world.create_key("team-x", scopes=["adapters:write", "adapters:read", "keys:write"])
        for limits in ({"tokens_per_minute": 1}, {}, None):
            refused = await world.call("PATCH", path, key=team, json={"limits": limits})
            check_error(refused, 403, "permission_denied")
        changed = await world.call("PATCH", path, json={"limits": ALL, "is_default": True})
        assert (changed.json()["limits"], changed.json()["is_default"]) == (ALL, True)
        await world.gateway.names.ensure_fresh()
        known = world.gateway.names.find_adapter("team-x", "default")
        assert known is not None
        assert known.limits == RateLimits(**ALL)
        assert (await world.call("GET", path, key=team)).json()["limits"] == ALL
        assert (await world.call("PATCH", path, json={"limits": {"tokens_per_day": None}})).json()["limits"] == {
            name: value for name, value in ALL.items() if name != "tokens_per_day"
        }
        assert (await world.call("PATCH", path, json={"limits": None})).json()["limits"] == {}
        await world.gateway.names.ensure_fresh()
        known = world.gateway.names.find_adapter("team-x", "default")
        assert known is not None
        assert known.limits is None
        unknown = await world.call("PATCH", path, json={"limits": {"adapter_rank": 1}})
        check_error(unknown, 400, "unsupported_parameter", "limits.adapter_rank")
        zero = await world.call("PATCH", path, json={"limits": {"tokens_per_day": 0}})
        check_error(zero, 400, "invalid_request_error", "limits.tokens_per_day")
        events = (await world.call("GET", "/api/v1/audit?action=adapter.limits_set")).json()["data"]
        assert [event["details"]["after"] for event in events][-1] == {"limits": ALL}
        assert len(events) == 3


class TestRotation:
    """One key after another, both good for a while."""

    async def test_both_keys_work_until_the_overlap_is_over(self, world: GatewayWorld) -> None:
        old = await create(world, owner="ada", scopes=["infer", "usage:read"], limits=ALL, priority=4)
        new = await rotate(world, old["id"], overlap_s=3)
        assert new["rotated_from"] == old["id"]
        assert new["created_by"] == "bootstrap"
        same = ("name", "owner", "role", "scopes", "limits", "priority", "expires_at")
        assert {name: new[name] for name in same} == {name: old[name] for name in same}
        assert new["key"] != old["key"]
        assert await works(world, old["key"])
        assert await works(world, new["key"])
        told = check_error(await world.call("POST", f"{KEYS}/{old['id']}/rotate", json={}), 409, "conflict")
        assert new["id"] in told
        await asyncio.sleep(3.05)
        check_error(await world.call("GET", "/v1/models", key=old["key"]), 401, "invalid_api_key")
        assert await works(world, new["key"])
        check_error(await world.call("POST", f"{KEYS}/{old['id']}/rotate", json={}), 409, "conflict")
        events = (await world.call("GET", f"/api/v1/audit?subject={old['id']}")).json()["data"]
        assert events[0]["action"] == "key.rotated"
        assert events[0]["details"]["after"]["rotated_to"] == new["id"]
        assert new["key"][-20:] not in (await world.call("GET", "/api/v1/audit")).text

    async def test_without_an_overlap_the_old_key_is_dead_with_the_answer(self, world: GatewayWorld) -> None:
        old = await create(world)
        new = await rotate(world, old["id"], overlap_s=0)
        assert (await works(world, old["key"]), await works(world, new["key"])) == (False, True)
        revoked = next(key for key in (await world.call("GET", KEYS)).json()["data"] if key["id"] == old["id"])
        assert revoked["revoked_at"] is not None

    async def test_a_rotation_never_lengthens_the_old_key_and_may_renew_the_new_one(self, world: GatewayWorld) -> None:
        soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
        old = await create(world, expires_at=soon)
        new = await rotate(world, old["id"])
        keys = {key["id"]: key for key in (await world.call("GET", KEYS)).json()["data"]}
        assert keys[old["id"]]["expires_at"] == old["expires_at"] == new["expires_at"]
        later = await rotate(world, new["id"], expires_at="2999-01-01T00:00:00Z")
        assert later["expires_at"].startswith("2999-01-01T00:00:00")
        open_end = await create(world)
        await rotate(world, open_end["id"])
        keys = {key["id"]: key for key in (await world.call("GET", KEYS)).json()["data"]}
        left = datetime.fromisoformat(keys[open_end["id"]]["expires_at"]) - datetime.now(UTC)
        assert timedelta(hours=23) < left <= timedelta(days=1)

    async def test_rotation_is_no_way_to_rights_that_one_lacks(self, world: GatewayWorld) -> None:
        strong = await create(world, scopes=["infer", "adapters:write"])
        free = await create(world)
        first = await create(world, priority=-1)
        platform = await create(world, role="admin")
        weak = (await create(world, scopes=["infer", "keys:write"], limits={"tokens_per_day": 5}))["key"]
        for key, status, code, param in (
            (strong, 403, "permission_denied", "scopes"),
            (free, 403, "permission_denied", "limits.tokens_per_day"),
            (first, 403, "permission_denied", "limits.tokens_per_day"),
            (platform, 404, "not_found", "key_id"),
        ):
            path = f"{KEYS}/{key['id']}/rotate"
            check_error(await world.call("POST", path, key=weak, json={}), status, code, param)
            assert await works(world, key["key"])
        bare = (await create(world, scopes=["infer"]))["key"]
        check_error(
            await world.call("POST", f"{KEYS}/{free['id']}/rotate", key=bare, json={}), 403, "permission_denied"
        )

    async def test_a_bad_field_is_named(self, world: GatewayWorld) -> None:
        key = await create(world)
        for body, param in (
            ({"overlap_s": -1}, "overlap_s"),
            ({"overlap_s": 30 * 86_400 + 1}, "overlap_s"),
            ({"overlap_s": 1.5}, "overlap_s"),
            ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ):
            check_error(
                await world.call("POST", f"{KEYS}/{key['id']}/rotate", json=body), 400, "invalid_request_error", param
            )
            assert len((await world.call("GET", KEYS)).json()["data"]) == 1


async def test_no_log_and_no_error_has_the_text_of_a_key(world: GatewayWorld, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    first = await create(world, scopes=["infer", "keys:write"])
    second = await rotate(world, first["id"], overlap_s=0)
    texts = [first["key"], second["key"]]
    shown = []
    for text in texts:
        await world.call("POST", KEYS, key=text, json={"name": text, "scopes": [text]})
        for broken in (text[:-1], text[:30] + "0" * 33, text + "0"):
            response = await world.call("GET", "/v1/models", key=broken)
            check_error(response, 401, "invalid_api_key")
            shown.append(response.text)
    for text in texts:
        # the first part of a key only finds it
        secret = text[15:40]
        assert all(secret not in answer for answer in shown)
        assert secret not in caplog.text
        assert secret not in (await world.call("GET", "/api/v1/audit")).text
        assert secret not in (await world.call("GET", "/metrics")).text


async def test_a_list_tells_which_keys_are_in_use(world: GatewayWorld) -> None:
    used, unused = await create(world), await create(world)
    assert await works(world, used["key"])
    await world.call("GET", "/v1/models", key=unused["key"][:-1])
    await world.gateway.last_use.flush()
    keys = {key["id"]: key["last_used_at"] for key in (await world.call("GET", KEYS)).json()["data"]}
    assert keys[unused["id"]] is None
    assert datetime.now(UTC) - datetime.fromisoformat(keys[used["id"]]) < timedelta(minutes=1)
