"""Adapters and versions over HTTP: who may see them, lists, retire and restore, default, deletion."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from registry_world import World

T = "/api/v1/tenants/team-a/adapters"
A = f"{T}/style"


async def test_nobody_without_a_token_and_nobody_elses(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    bare = await world.http.get(A)
    assert (bare.status_code, bare.json()["error"]["code"]) == (401, "invalid_api_key")
    forged = await world.http.get(A, headers={"Authorization": "Bearer x.y.z"})
    assert forged.status_code == 401
    for path in (
        T,
        A,
        f"{A}/versions",
        f"{A}/versions/1",
        f"{A}/versions/1/report",
        f"{A}/aliases",
        f"{A}/aliases/live",
    ):
        other = await world.caller("team-b")("GET", path)
        assert (other.status_code, other.json()["error"]["code"]) == (404, "not_found"), path
        assert (await world.caller("team-a", role="admin_readonly")("GET", path)).status_code == 200, path


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_writing_needs_the_scope(world: World) -> None:
    for method, path in (
        ("PATCH", A),
        ("DELETE", A),
        ("POST", f"{A}/versions"),
        ("DELETE", f"{A}/versions/1"),
        ("POST", f"{A}/versions/1/restore"),
        ("PUT", f"{A}/aliases/live"),
        ("DELETE", f"{A}/aliases/live"),
        ("POST", f"{A}/aliases/live/rollback"),
    ):
        for caller in (world.caller(scopes=("adapters:read",)), world.caller("team-a", role="admin_readonly")):
            answer = await caller(method, path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error"), (method, path)


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_whoever_may_change_an_adapter_sees_it_but_not_its_files(world: World, make_adapter: Any) -> None:
    writer = world.caller(scopes=("adapters:write",))
    await writer.upload(A, make_adapter(1))
    for path in (T, A, f"{A}/versions", f"{A}/versions/1", f"{A}/versions/1/report", f"{A}/aliases"):
        assert (await writer("GET", path)).status_code == 200, path
    for path in (f"{A}/aliases/live", f"{A}/aliases/live/history"):
        assert (await writer("GET", path)).status_code == 200, path
    file = await writer("GET", f"{A}/versions/1/files/adapter_config.json")
    assert (file.status_code, file.json()["error"]["message"]) == (403, "This key lacks the scope adapters:read")
    stranger = await world.caller(scopes=("infer",))("GET", A)
    message = "This key lacks the scope adapters:read or adapters:write"
    assert (stranger.status_code, stranger.json()["error"]["message"]) == (403, message)


async def test_retire_and_restore(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    second = make_adapter(2)
    await team.upload(A, second)
    live = await team("DELETE", f"{A}/versions/1")
    assert (live.status_code, live.json()["error"]["code"]) == (409, "conflict")
    for _ in range(2):
        retired = await team("DELETE", f"{A}/versions/2")
        assert (retired.status_code, retired.json()["state"]) == (200, "retired")
    same = await team.upload(A, second, params={"promote": "always"})
    assert (same.status_code, same.json()["state"], same.json()["promoted"]) == (200, "retired", False)
    restored = await team("POST", f"{A}/versions/2/restore")
    assert (restored.status_code, restored.json()["state"]) == (200, "ready")
    assert (await team("POST", f"{A}/versions/2/restore")).status_code == 409
    for path in (f"{A}/versions/3", f"{A}/versions/0", f"{A}/versions/99999999999", f"{T}/other/versions/1"):
        assert (await team("DELETE", path)).status_code == 404


async def test_lists_are_paged_newest_first(world: World, make_adapter: Any) -> None:
    team, folder = world.caller(), make_adapter(1)
    for name in ("one", "two", "three"):
        await team.upload(f"{T}/{name}", folder)
    first = (await team("GET", T, params={"limit": 2})).json()
    assert [adapter["name"] for adapter in first["data"]] == ["three", "two"]
    second = (await team("GET", T, params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert ([adapter["name"] for adapter in second["data"]], second["next_cursor"]) == (["one"], None)
    for query in ({"limit": "0"}, {"limit": "201"}, {"limit": "x"}, {"cursor": "?"}):
        answer = await team("GET", T, params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))
    assert (await team("GET", T, params={"page": "2"})).json()["error"]["code"] == "unknown_parameter"


async def test_numbers_that_no_column_holds_are_the_clients_mistake(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    for number in (str(2**31), str(2**63), str(2**70), "9" * 5000, "-1"):
        cursor = base64.urlsafe_b64encode(number.encode()).decode()
        for path in (f"{A}/versions", f"{A}/aliases/live/history"):
            answer = await team("GET", path, params={"cursor": cursor})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cursor"), number[:80]
        for path in (
            f"{A}/versions/{number}",
            f"{A}/versions/{number}/report",
            f"{A}/versions/{number}/files/README.md",
        ):
            assert (await team("GET", path)).status_code == 404, path[:80]
        assert (await team("GET", T, params={"limit": number})).status_code == 400, number[:80]
        targets = {"targets": [{"version": number, "weight": 100}]}
        body = str(targets).replace("'", '"').replace(f'"{number}"', number)
        moved = await team("PUT", f"{A}/aliases/live", content=body, headers={"If-Match": f'"{number}", "1"'})
        assert moved.status_code in (400, 404), number[:80]


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_a_version_has_one_path(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(A, make_adapter(1))
    for number in ("01", "+1", "1%20", "%201", "\u0661", "1.0", "1_0", "0", "x"):
        for method, rest in (("GET", ""), ("GET", "/report"), ("GET", "/files/adapter_config.json"), ("DELETE", "")):
            answer = await team(method, f"{A}/versions/{number}{rest}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), (number, rest)
        assert (await team("POST", f"{A}/versions/{number}/restore")).status_code == 404, number
        assert (await team("GET", f"{A}/versions/1")).status_code == 200


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity, br", 415), ("Identity", 200)])
@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_a_body_that_says_it_is_compressed_is_refused(
    world: World, make_adapter: Any, encoding: str, status: int
) -> None:
    team, headers = world.caller(), {"Content-Encoding": encoding}
    await team.upload(A, make_adapter(1))
    patched = await team("PATCH", A, json={"is_default": True}, headers=headers)
    assert patched.status_code == status
    assert (await team.upload(A, make_adapter(1), headers=headers)).status_code == status


async def test_names_that_nobody_can_have_are_not_found(world: World) -> None:
    for name in ("a%00b", "%F0%9F%99%82", "x" * 3000):
        for path in (f"{T}/{name}", f"{T}/{name}/versions/1", f"{T}/{name}/aliases/live", f"{A}/aliases/{name}"):
            assert (await world.caller()("GET", path)).status_code == 404


async def test_first_live_adapter_is_the_default_until_told_otherwise(world: World, make_adapter: Any) -> None:
    team = world.caller()
    await team.upload(f"{T}/one", make_adapter(1), params={"promote": "never"})
    await team.upload(f"{T}/two", make_adapter(2))
    await team.upload(f"{T}/three", make_adapter(3))
    assert {a["name"]: a["is_default"] for a in (await team("GET", T)).json()["data"]} == {
        "one": False,
        "two": True,
        "three": False,
    }
    assert (await team("PATCH", f"{T}/three", json={"is_default": False})).status_code == 400
    assert (await team("PATCH", f"{T}/three", json={"base_model": "x"})).json()["error"]["code"] == "unknown_parameter"
    assert (await team("PATCH", f"{T}/three", json={"is_default": True})).json()["is_default"] is True
    assert (await team("GET", f"{T}/two")).json()["is_default"] is False
    assert (await team("DELETE", f"{T}/three")).status_code == 204
    assert not any(a["is_default"] for a in (await team("GET", T)).json()["data"])


async def test_unknown_routes_and_methods_have_the_error_shape(world: World) -> None:
    team = world.caller()
    for method, path, status in (
        ("GET", "/api/v1/nothing", 404),
        ("PUT", A, 405),
        ("POST", f"{A}/versions/1/warm", 404),
    ):
        answer = await team(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
