"""Usage row by row, what answered a request, and both against the engine, over HTTP and with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway_world import BASE, GatewayWorld, running_world, until
from scripted_engine import Script, ScriptedEngine

USAGE = "/api/v1/usage"
NO_REQUEST = "req_" + "a" * 26
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "load_bytes")


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as running:
        for name in ("team-x", "team-y"):
            await running.create_tenant(name)
        yield running


@pytest.fixture
def dialect() -> str:
    return "sqlite"


async def reader(world: GatewayWorld, tenant: str) -> str:
    return await world.create_key(tenant, owner=f"{tenant} dev", scopes=["infer", "usage:read", "audit:read"])


async def ask(world: GatewayWorld, key: str, **params: Any) -> list[dict[str, Any]]:
    response = await world.call("GET", "/api/v1/audit", key=key, params=params)
    assert response.status_code == 200, response.text
    events: list[dict[str, Any]] = response.json()["data"]
    return events


async def test_which_content_answered_a_request_is_one_question(world: GatewayWorld) -> None:
    own, foreign = await reader(world, "team-x"), await reader(world, "team-y")
    version = await world.push("team-x")
    answer = await world.complete("team-x", "answer", own, headers={"x-request-id": "mine-7"})
    request_id = answer.headers["x-request-id"]
    (event,) = await ask(world, own, request_id=request_id)
    details = event.pop("details")
    assert event == {
        "id": request_id,
        "at": event["at"],
        "action": "request.answered",
        "tenant": "team-x",
        "subject": "team-x/default@1",
        "actor": "team-x dev",
        "key_id": event["key_id"],
        "request_id": request_id,
    }
    assert details == {
        "digest": version["digest"],
        "base": BASE,
        "model": "team-x",
        "route": "/v1/completions",
        "client_request_id": "mine-7",
        "outcome": "ok",
        "error_code": None,
        "finish": "stop",
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "completion_tokens": 5,
        "replica": answer.headers["x-loraplex-replica"],
    }
    # nobody else's is told from what never was
    assert await ask(world, foreign, request_id=request_id) == await ask(world, foreign, request_id=NO_REQUEST) == []
    fitting = {"subject": "team-x/default", "actor": "team-x dev", "action": "request.answered", "from": "2020-01-01"}
    assert len(await ask(world, own, request_id=request_id, **fitting)) == 1
    others = {"subject": "team-x/other", "actor": "nobody", "action": "request.open", "from": "2100-01-01"}
    for name, other in others.items():
        assert await ask(world, own, request_id=request_id, **{name: other}) == [], name


async def test_a_request_that_runs_is_open(world: GatewayWorld) -> None:
    key = await reader(world, "team-x")
    waiting = asyncio.create_task(world.complete(BASE, "wait", key))
    await until(lambda: len(world.engine.calls) == 1)
    (request_id,) = await world.open_requests()
    (event,) = await ask(world, key, request_id=request_id)
    assert (event["action"], event["subject"], event["details"]["outcome"]) == ("request.open", BASE, None)
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_what_was_done_in_a_request_comes_before_the_page_with_its_answer(world: GatewayWorld) -> None:
    created = await world.call("POST", "/api/v1/tenants", json={"name": "team-z"})
    (event,) = await ask(world, "an-admin-key-for-tests", request_id=created.headers["x-request-id"], limit=1)
    assert event["action"] == "tenant.created"


async def test_rows_are_listed_page_by_page_to_those_whom_they_concern(world: GatewayWorld) -> None:
    own, foreign = await reader(world, "team-x"), await reader(world, "team-y")
    for word in ("answer", "answer", "refuse"):
        await world.complete(BASE, word, own)
    await world.complete(BASE, "answer", foreign)
    seen: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await world.call("GET", f"{USAGE}/requests", key=own, params={"limit": 2, **cursor})).json()
        seen += page["data"]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert [(row["tenant"], row["outcome"], row["load_bytes"]) for row in seen] == [
        ("team-x", "error", 0),
        ("team-x", "ok", 64),
        ("team-x", "ok", 64),
    ]
    assert seen[0]["error_code"] == "queue_full"
    assert world.engine.url not in str(seen)
    assert seen[0]["replica"].startswith("main-")
    every = (await world.call("GET", f"{USAGE}/requests")).json()["data"]
    assert len({row["request_id"] for row in every}) == 4
    key_id = seen[0]["key_id"]
    for params, num_rows in (
        ({"key": key_id}, 3),
        ({"outcome": "ok"}, 3),
        ({"tenant": "team-y"}, 1),
        ({"digest": "x"}, 0),
    ):
        assert len((await world.call("GET", f"{USAGE}/requests", params=params)).json()["data"]) == num_rows, params
    by_key = (await world.call("GET", f"{USAGE}?group_by=tenant,key", key=own)).json()["data"]
    assert [(row["key"], row["requests"], row["load_bytes"]) for row in by_key] == [(key_id, 3, 128)]


async def test_a_wrong_question_about_rows_names_what_is_wrong(world: GatewayWorld) -> None:
    for params, param in (
        ({"outcome": "good"}, "outcome"),
        ({"key": ""}, "key"),
        ({"cursor": "x"}, "cursor"),
        ({"cursor": "WyIyMDI2LTAxLTAxVDAwOjAwOjAwIiwicmVxIl0"}, "cursor"),
        ({"limit": "0"}, "limit"),
        ({"nothing": "1"}, "nothing"),
    ):
        response = await world.call("GET", f"{USAGE}/requests", params=params)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), params


async def test_usage_is_held_against_the_engine_for_the_platform_only(world: GatewayWorld) -> None:
    key = await reader(world, "team-x")
    for word in ("answer", "refuse", "fail", "die"):
        await world.complete(BASE, word, key, fields={"stream": word != "answer"})
    async with world.stream(BASE, "slow", key) as response:
        async for _ in response.aiter_bytes():
            break
    await until(lambda: _has_rows(world, 5))
    assert (await world.call("GET", f"{USAGE}/reconcile", key=key)).status_code == 403
    found = (await world.call("GET", f"{USAGE}/reconcile")).json()
    (engine,) = found["data"]
    assert found["is_exact"]
    assert engine["engine"] == engine["usage"]
    # the one that was refused costs nothing
    assert engine["engine"]["requests"] == 4
    assert engine["difference"] == dict.fromkeys(COUNTS, 0)
    # somebody else used the engine
    world.engine.sent["req_unbooked"] = 3
    world.engine.describe_done("req_unbooked", "stop")
    found = (await world.call("GET", f"{USAGE}/reconcile")).json()
    (engine,) = found["data"]
    assert not found["is_exact"]
    assert engine["difference"] == dict(zip(COUNTS, (1, 7, 2, 3, 64), strict=True))
    assert [(one["request_id"], one["usage"]) for one in engine["mismatches"]] == [("req_unbooked", None)]


async def test_a_request_is_charged_where_it_was_answered_not_where_it_was_refused(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = Script.do_answer, list[ScriptedEngine]()

    async def refuse_first(script: Script) -> None:
        asked.append(script.engine)
        await (script.do_refuse() if len(asked) == 1 else answer(script))

    monkeypatch.setattr(Script, "do_answer", refuse_first)
    async with running_world(database_url, tmp_path, num_engines=2) as world:
        await world.create_tenant("team-x")
        response = await world.complete(BASE, "answer", await reader(world, "team-x"))
        assert response.status_code == 200
        refusing, answering = asked
        assert refusing is not answering
        (row,) = await world.usage()
        assert (row["replica"], row["completion_tokens"]) == (answering.url, 5)
        found = (await world.call("GET", f"{USAGE}/reconcile")).json()
    assert found["is_exact"]
    assert sorted(one["engine"]["requests"] for one in found["data"]) == [0, 1]


async def test_an_engine_that_does_not_answer_is_a_problem_not_an_agreement(world: GatewayWorld) -> None:
    world.engine.ended["broken"] = {"prompt_tokens": "?"}
    found = (await world.call("GET", f"{USAGE}/reconcile")).json()
    assert (found["is_exact"], found["data"][0]["problem"]) == (False, "it does not answer")


async def _has_rows(world: GatewayWorld, count: int) -> bool:
    return len(await world.usage()) == count
