"""The request path over real HTTP: names, identity, relay, endings, usage; the engine is scripted, all else is real."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_world import ADMIN_KEY, BASE, GatewayWorld, running_world, until
from loraplex.fleet.view import FleetView, Replica
from loraplex.gateway import dispatch
from loraplex_registry.http import hardened, protocol
from loraplex_registry.wire.identity import TokenVerifier
from scripted_engine import NUM_CHUNKS


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as running:
        await running.create_tenant("team-x")
        yield running


@pytest.fixture
async def key(world: GatewayWorld) -> str:
    return await world.create_key("team-x")


def events(response: httpx.Response) -> list[str]:
    assert response.text.endswith("\n\n")
    return response.text.removesuffix("\n\n").split("\n\n")


async def read_until_end(response: httpx.Response) -> tuple[bytes, bool]:
    """The bytes of a stream and whether it ended without an error of the connection."""
    body = b""
    try:
        async for chunk in response.aiter_raw():
            body += chunk
    except httpx.RemoteProtocolError:
        return body, False
    return body, True


async def settled(world: GatewayWorld) -> list[str]:
    """Wait until no request is open and return the outcomes."""

    async def is_settled() -> bool:
        return not await world.open_requests()

    await until(is_settled)
    return [used["outcome"] for used in await world.usage()]


async def test_a_whole_answer_is_relayed_named_and_recorded(world: GatewayWorld, key: str) -> None:
    version = await world.push("team-x")
    response = await world.complete(
        "team-x", "answer", key, fields={"metadata": {"run": "7"}}, headers={"x-request-id": "mine-1"}
    )
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == "x" * NUM_CHUNKS
    headers = response.headers
    assert headers["x-loraplex-model"] == "team-x/default@1"
    assert headers["x-loraplex-digest"] == version["digest"]
    assert headers["x-loraplex-replica"].startswith("main-")
    assert headers["x-request-id"].startswith("req_")
    assert "x-loraplex-done" not in headers
    (used,) = await world.usage()
    shown = ("request_id", "tenant", "adapter", "version", "digest", "outcome", "prompt_tokens", "completion_tokens")
    assert {name: used[name] for name in shown} == {
        "request_id": headers["x-request-id"],
        "tenant": "team-x",
        "adapter": "default",
        "version": 1,
        "digest": version["digest"],
        "outcome": "ok",
        "prompt_tokens": 7,
        "completion_tokens": NUM_CHUNKS,
    }
    assert (used["client_request_id"], used["tags"], used["cached_tokens"]) == ("mine-1", {"run": "7"}, 2)
    assert await world.open_requests() == []


async def test_the_engine_learns_who_calls_and_gets_the_fields_as_they_came(world: GatewayWorld, key: str) -> None:
    version = await world.push("team-x")
    fields = {"temperature": 0.25, "stop": ["ü"], "made_up": None, "max_tokens": 9}
    response = await world.complete(
        "team-x/default@1",
        "answer",
        key,
        fields=fields,
        headers={"x-loraplex-tenant-id": "forged", "x-loraplex-priority": "9", "X-LoRAPlex-Digest": "forged"},
    )
    (call,) = world.engine.calls
    assert call["body"] == {"model": version["digest"], "prompt": "answer", **fields}
    headers = call["headers"]
    assert headers["x-loraplex-request-id"] == response.headers["x-request-id"]
    assert headers["x-loraplex-echo-model"] == "team-x/default@1"
    assert headers["x-loraplex-done"] == "1"
    assert 0 < int(headers["x-loraplex-deadline-ms"]) <= 600_000
    assert "forged" not in json.dumps(headers)
    assert (headers["x-loraplex-priority"], headers["x-loraplex-weight"]) == ("0", "1")
    assert "x-loraplex-cache-salt" not in headers
    assert key not in json.dumps(headers)
    verifier = TokenVerifier([world.gateway.signer.public_pem], "engine")
    identity = verifier.verify(headers["authorization"].removeprefix("Bearer "))
    assert (identity.tenant, identity.role, identity.request_id) == (
        "team-x",
        "tenant",
        headers["x-loraplex-request-id"],
    )
    assert headers["x-loraplex-tenant-id"] == identity.tenant_id


async def test_the_engine_learns_the_share_of_the_team_and_the_priority_of_the_key(world: GatewayWorld) -> None:
    await world.create_tenant("team-w", weight=40)
    await world.push("team-w")
    key = await world.create_key("team-w", priority=3)
    await world.complete("team-w", "answer", key, headers={"x-loraplex-weight": "900", "x-loraplex-cache-salt": "mine"})
    await world.complete(BASE, "answer", key)
    # an admin's question is in the turns of the team whose adapter it is, and at none of its prefixes
    await world.complete("team-w", "answer", ADMIN_KEY)
    shares, salts = [], []
    for call in world.engine.calls:
        shares.append((call["headers"]["x-loraplex-weight"], call["headers"]["x-loraplex-priority"]))
        salts.append(call["headers"].get("x-loraplex-cache-salt"))
    assert shares == [("40", "3"), ("40", "3"), ("40", "0")]
    assert salts[:2] == [None, None]
    assert salts[2] not in (None, "mine", "")


async def test_a_stream_is_whole_events_and_ends_with_done(world: GatewayWorld, key: str) -> None:
    await world.push("team-x")
    response = await world.complete("team-x", "answer", key, fields={"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response)
    assert len(found) == NUM_CHUNKS + 1
    assert found[-1] == "data: [DONE]"
    assert "loraplex.done" not in response.text
    assert [used["completion_tokens"] for used in await world.usage()] == [NUM_CHUNKS]


async def test_characters_survive_pieces_of_one_byte(world: GatewayWorld, key: str) -> None:
    response = await world.complete(BASE, "bytewise", key, fields={"stream": True})
    (chunk, last) = events(response)
    assert json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] == "Grüße 🙂"
    assert last == "data: [DONE]"


async def test_usage_is_on_disk_when_the_client_sees_the_end(world: GatewayWorld, key: str) -> None:
    async with world.stream(BASE, "answer", key) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                assert [used["outcome"] for used in await world.usage()] == ["ok"]


async def test_a_base_answers_under_its_name(world: GatewayWorld, key: str) -> None:
    response = await world.complete(BASE, "answer", key)
    assert (response.headers["x-loraplex-model"], response.headers["x-loraplex-digest"]) == (BASE, "base")
    (used,) = await world.usage()
    assert (used["tenant"], used["adapter"], used["digest"], used["base"]) == ("team-x", None, None, BASE)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/tokenize"])
async def test_all_routes_know_the_same_names(world: GatewayWorld, key: str, route: str) -> None:
    await world.push("team-x")
    for model, status in (("team-x", 200), ("team-x/default@live", 200), ("team-y", 404), ("", 404)):
        said = {"messages": []} if "chat" in route else {"prompt": "answer"}
        response = await world.call("POST", route, key=key, json={"model": model, **said})
        assert response.status_code == status, (model, response.text)
        if status == 404:
            assert response.json()["error"]["code"] == "model_not_found"
            assert response.json()["error"]["param"] == "model"
    assert {call["path"] for call in world.engine.calls} == {route}


async def test_tokenising_is_not_recorded(world: GatewayWorld, key: str) -> None:
    await world.call("POST", "/v1/tokenize", key=key, json={"model": BASE, "prompt": "answer"})
    assert await world.usage() == []


async def test_nobody_reaches_another_tenants_adapter_but_an_admin(world: GatewayWorld, key: str) -> None:
    await world.create_tenant("team-y")
    await world.push("team-y")
    foreign = await world.complete("team-y", "answer", key)
    unknown = await world.complete("team-z", "answer", key)
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace("team-y", "team-z") == unknown.text
    assert (await world.complete("team-y", "answer", ADMIN_KEY)).status_code == 200
    (used,) = await world.usage()
    assert used["tenant"] == "team-y"


async def test_a_change_is_seen_by_the_next_request(world: GatewayWorld, key: str) -> None:
    first = await world.push("team-x")
    for _ in range(5):
        version = await world.push("team-x", promote="always")
        response = await world.complete("team-x", "answer", key)
        assert response.headers["x-loraplex-digest"] == version["digest"]
    await world.call("DELETE", "/api/v1/tenants/team-x/adapters/default/versions/1")
    assert (await world.complete("team-x/default@1", "answer", key)).json()["error"]["code"] == "adapter_retired"
    retired = await world.complete(f"team-x/default@{first['digest']}", "answer", key)
    assert retired.status_code == 410
    await world.call("DELETE", "/api/v1/tenants/team-x/adapters/default")
    assert (await world.complete("team-x", "answer", key)).status_code == 404


async def test_a_running_stream_keeps_its_version(world: GatewayWorld, key: str) -> None:
    first = await world.push("team-x")
    async with world.stream("team-x", "slow", key) as response:
        await anext(response.aiter_lines())
        await world.push("team-x", promote="always")
        assert response.headers["x-loraplex-digest"] == first["digest"]
    await until(lambda: len(world.engine.closed) == 1)


@pytest.mark.parametrize("num_read", [0, 3])
async def test_a_client_that_leaves_a_stream_ends_it_at_the_engine(
    world: GatewayWorld, key: str, num_read: int
) -> None:
    async with world.stream(BASE, "slow", key) as response:
        lines = response.aiter_lines()
        for _ in range(num_read):
            await anext(lines)
    await until(lambda: len(world.engine.closed) == 1, 10)
    assert await settled(world) == ["cancelled"]
    (used,) = await world.usage()
    assert used["completion_tokens"] == world.engine.sent[used["request_id"]]
    assert world.engine.aborted == [used["request_id"]]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_queue_is_noticed(world: GatewayWorld, key: str, stream: bool) -> None:
    task = asyncio.create_task(world.complete(BASE, "wait", key, fields={"stream": stream}))
    await until(lambda: len(world.engine.calls) == 1)
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: len(world.engine.closed) == 1, 10)
    await settled(world)
    (used,) = await world.usage()
    assert (used["outcome"], used["prompt_tokens"], used["completion_tokens"]) == ("cancelled", 0, 0)


async def test_normal_endings_abort_nothing(world: GatewayWorld, key: str) -> None:
    for _ in range(5):
        calls = [world.complete(BASE, "answer", key, fields={"stream": i % 2 == 0}) for i in range(8)]
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 8
    assert world.engine.aborted == []
    assert len(await world.usage()) == 40
    assert await world.open_requests() == []


@pytest.mark.parametrize(
    ("prompt", "code"), [("die", "replica_failed"), ("cut", "replica_failed"), ("fail", "adapter_output_invalid")]
)
async def test_a_failure_in_the_middle_is_an_error_event_never_an_end(
    world: GatewayWorld, key: str, prompt: str, code: str
) -> None:
    async with world.stream(BASE, prompt, key) as response:
        assert response.status_code == 200
        body, is_clean = await read_until_end(response)
    assert is_clean
    found = body.decode().removesuffix("\n\n").split("\n\n")
    assert len(found) == 3
    assert json.loads(found[-1].removeprefix("data: "))["error"]["code"] == code
    assert "[DONE]" not in body.decode()
    assert all(json.loads(event.removeprefix("data: ")) for event in found)
    (used,) = await world.usage()
    assert (used["outcome"], used["error_code"], used["completion_tokens"]) == ("error", code, 2)


async def test_a_refusal_of_the_engine_reaches_the_client_and_costs_nothing(world: GatewayWorld, key: str) -> None:
    response = await world.complete(BASE, "refuse", key, fields={"stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "queue_full"
    assert "x-loraplex-done" not in response.headers
    (used,) = await world.usage()
    assert (used["outcome"], used["error_code"], used["prompt_tokens"]) == ("error", "queue_full", 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "code"),
    [(429, "queue_full"), (503, "adapter_loading"), (503, "draining"), (504, "deadline_exceeded")],
)
async def test_a_refusal_keeps_its_status_and_says_when_to_come_back(
    world: GatewayWorld, key: str, status: int, code: str, stream: bool
) -> None:
    response = await world.complete(BASE, f"refuse {status} {code} 7", key, fields={"stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (status, "7")
    assert response.json()["error"]["code"] == code


async def test_refusals_are_counted_once_by_code_whoever_made_them(world: GatewayWorld, key: str) -> None:
    await world.complete("team-z", "answer", key)
    await world.call("GET", "/api/v1/tenants/team-x/adapters/none")
    await world.complete(BASE, "refuse", key)
    await world.complete(BASE, "refuse", key, fields={"stream": True})
    await world.complete(BASE, "refuse 418 made-up 1", key)
    await world.complete(BASE, "fail", key, fields={"stream": True})
    await world.complete(BASE, "cut", key, fields={"stream": True})
    await world.complete(BASE, "answer", key, fields={"stream": True})
    world.gateway.drain.begin()
    await world.call("GET", "/readyz", key=None)
    text = (await world.call("GET", "/metrics", key=None)).text
    found = re.findall(r'^loraplex_rejected_total\{reason="(\w+)"\} (\d)', text, re.MULTILINE)
    assert dict(found) == {
        "model_not_found": "1",
        "not_found": "1",
        "queue_full": "2",
        "other": "1",
        "adapter_output_invalid": "1",
        "replica_failed": "1",
    }


@pytest.mark.parametrize("prompt", ["unknown", "other"])
async def test_an_engine_that_cannot_be_believed_is_no_answer(world: GatewayWorld, key: str, prompt: str) -> None:
    response = await world.complete(BASE, prompt, key)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_failed")
    (used,) = await world.usage()
    assert used["outcome"] == "error"


async def test_time_limits_end_a_request_before_and_after_its_first_byte(world: GatewayWorld, key: str) -> None:
    short = {"x-request-timeout": "0.3"}
    waiting = await world.complete(BASE, "wait", key, headers=short)
    assert (waiting.status_code, waiting.json()["error"]["code"]) == (504, "deadline_exceeded")
    running = await world.complete(BASE, "slow", key, fields={"stream": True}, headers=short)
    assert running.status_code == 200
    last = json.loads(events(running)[-1].removeprefix("data: "))
    assert last["error"]["code"] == "deadline_exceeded"
    assert len(world.engine.closed) == 2
    assert [used["error_code"] for used in await world.usage()] == ["deadline_exceeded"] * 2


async def test_a_limit_below_a_millisecond_is_a_limit_and_no_mistake(world: GatewayWorld, key: str) -> None:
    response = await world.complete(BASE, "wait", key, headers={"x-request-timeout": "0.0005"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(("timeout_s", "deadline"), [(0.0005, "1"), (0.25, "250"), (1.0001, "1001")])
def test_an_engine_is_told_no_deadline_of_zero(timeout_s: float, deadline: str) -> None:
    assert dispatch.show_deadline(timeout_s) == deadline


async def test_a_client_that_does_not_read_is_gone(
    world: GatewayWorld, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_S", 0.5)
    async with world.stream(BASE, "flood", key):
        await until(lambda: len(world.engine.closed) == 1)
    assert await settled(world) == ["cancelled"]


async def test_a_body_that_stalls_ends_the_request(
    world: GatewayWorld, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardened, "BODY_IDLE_S", 0.3)

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.sleep(1)
        yield b'"tiny"}'

    headers = {"content-type": "application/json"}
    response = await world.call("POST", "/v1/completions", key=key, content=body(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")


async def test_an_engine_that_falls_silent_has_failed(
    world: GatewayWorld, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "GAP_S", 0.3)
    response = await world.complete(BASE, "pause", key, fields={"stream": True})
    assert json.loads(events(response)[-1].removeprefix("data: "))["error"]["code"] == "replica_failed"
    assert await settled(world) == ["error"]


async def test_draining_refuses_new_requests_and_then_ends_the_old(world: GatewayWorld, key: str) -> None:
    async with world.stream(BASE, "slow", key) as response:
        world.gateway.drain.begin()
        refused = await world.complete(BASE, "answer", key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        assert (await world.call("GET", "/readyz", key=None)).status_code == 503
        world.gateway.drain.expire()
        body, is_clean = await read_until_end(response)
    assert is_clean
    assert b'"code":"draining"' in body.split(b"\n\n")[-2]


async def test_without_an_engine_the_answer_is_no_replica(world: GatewayWorld, key: str) -> None:
    world.engine.state_changes = {"model": {"fingerprint": "another"}}
    await world.gateway.fleet.poll()
    response = await world.complete(BASE, "answer", key)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
    assert response.headers["retry-after"] == "1"
    assert world.engine.calls == []
    assert await world.usage() == []
    fleet = (await world.call("GET", "/api/v1/fleet")).json()["data"]
    assert "another model" in fleet[0]["problem"]


async def test_many_names_of_clients_leave_no_metric_series(world: GatewayWorld, key: str) -> None:
    await asyncio.gather(*(world.complete(f"made-up-{i}", "answer", key) for i in range(50)))
    text = (await world.call("GET", "/metrics", key=None)).text
    assert "made-up" not in text
    assert 'loraplex_rejected_total{reason="model_not_found"} 50.0' in text
    assert 'loraplex_http_requests_total{route="/v1/completions",status="404"} 50.0' in text


async def test_requests_left_open_are_settled_by_the_next_gateway(
    database_url: str, tmp_path: Path, world: GatewayWorld, key: str
) -> None:
    task = asyncio.create_task(world.complete(BASE, "wait", key))
    await until(lambda: len(world.engine.calls) == 1)
    (request_id,) = await world.open_requests()
    world.engine.sent[request_id] = 11
    known = {request_id: world.engine.describe_done(request_id, "abort")}
    # The first one hangs here as one that was killed: it holds nothing any more.
    await world.gateway.claim.release()
    async with running_world(database_url, tmp_path, known=known) as second:

        async def is_settled() -> bool:
            return len(await second.usage()) == 1

        await until(is_settled)
        (used,) = await second.usage()
    assert (used["request_id"], used["completion_tokens"]) == (request_id, 11)
    task.cancel()
    await asyncio.wait([task])


class TestTwoEngines:
    """Residency decides, and a replica that takes no connection is replaced once."""

    @pytest.fixture
    async def world(self, database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
        async with running_world(database_url, tmp_path, num_engines=2) as running:
            await running.create_tenant("team-x")
            yield running

    async def test_the_resident_replica_is_chosen(self, world: GatewayWorld, key: str) -> None:
        version = await world.push("team-x")
        for engine in world.engines:
            for other in world.engines:
                other.resident = [version["digest"]] if other is engine else []
            await world.gateway.fleet.poll()
            before = len(engine.calls)
            for _ in range(3):
                await world.complete("team-x", "answer", key)
            assert len(engine.calls) == before + 3

    async def test_a_dead_replica_costs_no_request(self, world: GatewayWorld, key: str) -> None:
        replica = world.gateway.fleet.view.replicas[0]
        dead = "http://127.0.0.1:1"

        def with_dead(view: Any) -> Any:
            first = type(replica)(url=dead, pool="main", base=BASE, problem=None)
            return type(view)((first, *view.replicas))

        world.gateway.fleet.view = with_dead(world.gateway.fleet.view)
        response = await world.complete(BASE, "answer", key)
        assert response.status_code == 200
        (used,) = await world.usage()
        assert used["outcome"] == "ok"
        assert used["replica"] in {engine.url for engine in world.engines}

    async def test_a_replica_that_took_over_is_the_one_that_is_asked_and_counted(
        self, world: GatewayWorld, key: str
    ) -> None:
        fleet, dead = world.gateway.fleet, "http://127.0.0.1:1"
        replica = fleet.view.replicas[0]
        fleet.view = FleetView((Replica(url=dead, pool="main", base=BASE, problem=None), replica))
        task = asyncio.create_task(world.complete(BASE, "wait", key))
        (taker,) = [engine for engine in world.engines if engine.url == replica.url]
        await until(lambda: len(taker.calls) == 1)
        assert fleet.num_in_flight(dead) == 0
        assert fleet.num_in_flight(replica.url) == 1
        task.cancel()
        await asyncio.wait([task])
        assert await settled(world) == ["cancelled"]
        (used,) = await world.usage()
        assert taker.aborted == [used["request_id"]]
        assert used["replica"] == replica.url
        assert fleet.num_in_flight(replica.url) == 0
