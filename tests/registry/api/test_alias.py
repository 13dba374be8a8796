"""Aliases over HTTP: compare-and-set by ETag, weights, rollback, history."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from registry_world import Caller, World

A = "/api/v1/tenants/team-a/adapters/style"


def _to(*pairs: tuple[int, int]) -> dict[str, Any]:
    return {"targets": [{"version": version, "weight": weight} for version, weight in pairs]}


@pytest.fixture
async def team(world: World, make_adapter: Any) -> Caller:
    """Someone whose adapter has versions 1 (live), 2 and 3."""
    team = world.caller()
    for seed in (1, 2, 3):
        assert (await team.upload(A, make_adapter(seed))).status_code == 201
    return team


async def test_put_needs_what_the_client_has_seen(team: Caller) -> None:
    blind = await team("PUT", f"{A}/aliases/live", json=_to((2, 100)))
    assert (blind.status_code, blind.json()["error"]["code"]) == (428, "precondition_required")
    stale = await team("PUT", f"{A}/aliases/live", json=_to((2, 100)), headers={"If-Match": '"7"'})
    assert (stale.status_code, stale.headers["etag"]) == (412, '"1"')
    assert stale.json()["error"]["code"] == "precondition_failed"
    assert stale.json()["current"] == (await team("GET", f"{A}/aliases/live")).json()
    moved = await team("PUT", f"{A}/aliases/live", json=_to((2, 100)), headers={"If-Match": '"1"'})
    assert (moved.status_code, moved.headers["etag"]) == (200, '"2"')
    assert moved.json()["targets"] == [{"version": 2, "weight": 100}]
    again = await team("PUT", f"{A}/aliases/live", json=_to((3, 100)), headers={"If-Match": '"1"'})
    assert again.status_code == 412
    weak = await team("PUT", f"{A}/aliases/live", json=_to((3, 100)), headers={"If-Match": 'W/"2"'})
    assert weak.status_code == 412
    several = await team("PUT", f"{A}/aliases/live", json=_to((3, 100)), headers={"If-Match": '"9", "2"'})
    assert (several.status_code, several.headers["etag"]) == (200, '"3"')


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_what_readers_understand_differently_moves_no_alias(team: Caller) -> None:
    for body in (
        '{"targets": [{"version": 2, "weight": 100}], "targets": [{"version": 1, "weight": 100}]}',
        '{"targets": [{"version": 2, "version": 3, "weight": 100}]}',
        '{"targets": [{"version": 2, "weight": NaN}]}',
        '\ufeff{"targets": [{"version": 2, "weight": 100}]}',
        "[" * 5000,
    ):
        answer = await team("PUT", f"{A}/aliases/live", content=body, headers={"If-Match": '"1"'})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), body[:80]
        assert (await team("GET", f"{A}/aliases/live")).json()["targets"] == [{"version": 1, "weight": 100}], body[:80]


async def test_create_only_if_absent(team: Caller) -> None:
    absent = {"If-None-Match": "*"}
    created = await team("PUT", f"{A}/aliases/canary", json=_to((2, 90), (1, 10)), headers=absent)
    assert (created.status_code, created.headers["etag"]) == (201, '"1"')
    assert created.json()["targets"] == [{"version": 1, "weight": 10}, {"version": 2, "weight": 90}]
    assert (await team("PUT", f"{A}/aliases/canary", json=_to((3, 100)), headers=absent)).status_code == 412
    nowhere = await team("PUT", f"{A}/aliases/other", json=_to((3, 100)), headers={"If-Match": "*"})
    assert nowhere.status_code == 412
    assert nowhere.json()["current"] is None


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_bad_targets_are_400_and_name_the_field(team: Caller) -> None:
    for targets in (
        _to(),
        _to((1, 50), (2, 49)),
        _to((1, 100), (2, 0)),
        _to((1, 50), (1, 50)),
        _to((1, 150), (2, -50)),
        {"targets": [{"version": 1, "weight": 99.5}]},
        {"targets": [{"version": "1", "weight": 100}]},
        {"targets": [{"version": 1, "weight": 100, "note": "x"}]},
        {},
        {"targets": [{"version": 1, "weight": 100}], "extra": 1},
        _to(*((number, 10) for number in range(1, 10))),
    ):
        answer = await team("PUT", f"{A}/aliases/live", json=targets, headers={"If-Match": '"1"'})
        assert answer.status_code == 400, (targets, answer.text)
        assert answer.json()["error"]["param"], targets
        assert (await team("GET", f"{A}/aliases/live")).headers["etag"] == '"1"', targets


async def test_only_ready_versions_can_be_targets(team: Caller) -> None:
    assert (await team("DELETE", f"{A}/versions/3")).json()["state"] == "retired"
    for number, status in ((3, 409), (9, 404)):
        answer = await team("PUT", f"{A}/aliases/live", json=_to((number, 100)), headers={"If-Match": '"1"'})
        assert answer.status_code == status


async def test_bad_json_names_and_preconditions(team: Caller) -> None:
    seen = {"If-Match": '"1"', "Content-Type": "application/json"}
    broken = await team("PUT", f"{A}/aliases/live", content=b"{", headers=seen)
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    named = await team("PUT", f"{A}/aliases/3", json=_to((1, 100)), headers={"If-None-Match": "*"})
    assert (named.status_code, named.json()["error"]["code"]) == (400, "invalid_name")
    unquoted = await team("PUT", f"{A}/aliases/live", json=_to((2, 100)), headers={"If-Match": "1"})
    assert (unquoted.status_code, unquoted.json()["error"]["param"]) == (400, "If-Match")


async def test_rollback_is_itself_an_entry(team: Caller) -> None:
    for revision, number in ((1, 2), (2, 3)):
        await team("PUT", f"{A}/aliases/live", json=_to((number, 100)), headers={"If-Match": f'"{revision}"'})
    back = await team("POST", f"{A}/aliases/live/rollback")
    assert (back.status_code, back.json()["targets"], back.json()["revision"]) == (
        200,
        [{"version": 2, "weight": 100}],
        4,
    )
    forth = await team("POST", f"{A}/aliases/live/rollback")
    assert forth.json()["targets"] == [{"version": 3, "weight": 100}]
    stale = await team("POST", f"{A}/aliases/live/rollback", headers={"If-Match": '"4"'})
    assert stale.status_code == 412
    history = (await team("GET", f"{A}/aliases/live/history")).json()["data"]
    assert [(entry["revision"], entry["targets"][0]["version"], entry["action"]) for entry in history] == [
        (5, 3, "rollback"),
        (4, 2, "rollback"),
        (3, 3, "set"),
        (2, 2, "set"),
        (1, 1, "upload"),
    ]
    assert {entry["actor"] for entry in history} == {"tenant@team-a"}


async def test_rollback_refuses_what_is_no_longer_ready(team: Caller) -> None:
    assert (await team("POST", f"{A}/aliases/live/rollback")).status_code == 409
    await team("PUT", f"{A}/aliases/live", json=_to((2, 100)), headers={"If-Match": '"1"'})
    await team("DELETE", f"{A}/versions/1")
    refused = await team("POST", f"{A}/aliases/live/rollback")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert refused.json()["error"]["message"] == "Version 1 is retired, not ready; restore it first, or name another"
    assert (await team("GET", f"{A}/aliases/live")).headers["etag"] == '"2"'


async def test_rollback_goes_to_what_was_another_before(team: Caller) -> None:
    for revision, number in ((1, 2), (2, 3), (3, 3)):
        await team("PUT", f"{A}/aliases/live", json=_to((number, 100)), headers={"If-Match": f'"{revision}"'})
    for expected in (2, 3):
        back = await team("POST", f"{A}/aliases/live/rollback")
        assert back.json()["targets"] == [{"version": expected, "weight": 100}]


async def test_deleted_alias_comes_back_with_a_later_revision(team: Caller) -> None:
    assert (await team("DELETE", f"{A}/aliases/live", headers={"If-Match": '"9"'})).status_code == 412
    assert (await team("DELETE", f"{A}/aliases/live")).status_code == 204
    assert (await team("GET", f"{A}/aliases/live")).status_code == 404
    assert (await team("GET", f"{A}/aliases")).json() == {"data": [], "next_cursor": None}
    again = await team("PUT", f"{A}/aliases/live", json=_to((2, 100)), headers={"If-None-Match": "*"})
    assert (again.status_code, again.headers["etag"]) == (201, '"3"')
    assert len((await team("GET", f"{A}/aliases/live/history")).json()["data"]) == 3


async def test_concurrent_moves_have_one_winner(team: Caller) -> None:
    moves = (
        team("PUT", f"{A}/aliases/live", json=_to((number, 100)), headers={"If-Match": '"1"'}) for number in (2, 3, 2)
    )
    answers = await asyncio.gather(*moves)
    assert sorted(answer.status_code for answer in answers) == [200, 412, 412]
    assert (await team("GET", f"{A}/aliases/live")).headers["etag"] == '"2"'


async def test_history_is_paged(team: Caller) -> None:
    for revision in range(1, 5):
        targets = _to((1 + revision % 3, 100))
        await team("PUT", f"{A}/aliases/live", json=targets, headers={"If-Match": f'"{revision}"'})
    first = (await team("GET", f"{A}/aliases/live/history", params={"limit": 3})).json()
    rest = (await team("GET", f"{A}/aliases/live/history", params={"limit": 3, "cursor": first["next_cursor"]})).json()
    assert [entry["revision"] for entry in first["data"] + rest["data"]] == [5, 4, 3, 2, 1]
    assert rest["next_cursor"] is None
