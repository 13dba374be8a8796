"""A replica that fails before its first byte is replaced once; later the client is told, and others go elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway_world import BASE, GatewayWorld, running_world, until
from loraplex.fleet import fleet as fleet_module
from loraplex.fleet import health as health_module
from loraplex.fleet import lookout as lookout_module
from loraplex.gateway import dispatch as dispatch_module
from scripted_engine import ScriptedEngine


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayWorld]:
    # the tests look themselves
    monkeypatch.setattr(fleet_module, "POLL_EVERY_S", 3600)
    async with running_world(database_url, tmp_path, num_engines=2) as running:
        await running.create_tenant("team-x")
        yield running


@pytest.fixture
async def key(world: GatewayWorld) -> str:
    return await world.create_key("team-x")


@pytest.fixture
async def first(world: GatewayWorld, key: str) -> ScriptedEngine:
    """The engine that takes these requests while both are well."""
    await world.complete(BASE, "answer", key)
    (engine,) = [engine for engine in world.engines if engine.calls]
    return engine


@pytest.fixture
def second(world: GatewayWorld, first: ScriptedEngine) -> ScriptedEngine:
    """The other one."""
    (engine,) = [engine for engine in world.engines if engine is not first]
    return engine


async def ask(world: GatewayWorld, key: str, **fields: Any) -> Any:
    # the same words as those that found the first engine: what begins alike goes to the same
    return await world.complete(BASE, "answer", key, fields=fields)


def answer_with(engine: ScriptedEngine, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an engine answer everything by another script."""
    serve = engine._serve_call

    async def serve_otherwise(scope: Any, receive: Any, send: Any) -> None:
        async def receive_otherwise() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                message = {**message, "body": message["body"].replace(b'"answer"', b'"%b"' % word.encode())}
            return message

        await serve(scope, receive_otherwise, send)

    monkeypatch.setattr(engine, "_serve_call", serve_otherwise)


async def break_off(scope: Any, receive: Any, send: Any) -> None:
    """Close the connection without a word."""
    await receive()
    # uvicorn's own object: an exception would be answered
    send.__self__.transport.abort()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_engine_that_breaks_before_its_first_byte_is_replaced(
    world: GatewayWorld,
    key: str,
    first: ScriptedEngine,
    second: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    is_stream: bool,
) -> None:
    monkeypatch.setattr(first, "_serve_call", break_off)
    assert (await ask(world, key, stream=is_stream)).status_code == 200
    fleet = world.gateway.fleet
    assert fleet.health.find_ejected() == {first.url}
    assert fleet.num_in_flight(first.url) == fleet.num_in_flight(second.url) == 0
    assert (await world.usage())[-1]["replica"] == second.url


@pytest.mark.parametrize("refusal", ["refuse 503 draining 1", "refuse 429 queue_full 3", "refuse 502 replica_failed 1"])
async def test_what_one_engine_cannot_do_at_the_moment_another_may(
    world: GatewayWorld,
    key: str,
    first: ScriptedEngine,
    second: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
) -> None:
    answer_with(first, refusal, monkeypatch)
    assert (await ask(world, key)).status_code == 200
    assert (len(first.calls), len(second.calls)) == (2, 1)
    used = (await world.usage())[-1]
    assert (used["outcome"], used["replica"]) == ("ok", second.url)
    assert first.url not in world.gateway.fleet.health.find_ejected()


async def test_if_no_other_can_the_first_refusal_is_the_answer(
    world: GatewayWorld, key: str, first: ScriptedEngine, second: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    second.state_changes = {"is_draining": True}
    await world.gateway.fleet.poll()
    answer_with(first, "refuse 429 queue_full 3", monkeypatch)
    response = await ask(world, key)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "queue_full"
    assert [used["outcome"] for used in await world.usage()] == ["ok", "error"]


async def test_who_has_waited_long_in_one_queue_does_not_begin_again_in_another(
    world: GatewayWorld, key: str, first: ScriptedEngine, second: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_module, "_QUICK_S", 0.0)
    answer_with(first, "refuse 429 queue_full 3", monkeypatch)
    assert (await ask(world, key)).status_code == 429
    assert second.calls == []


async def test_a_refusal_that_would_be_the_same_anywhere_is_not_tried_again(
    world: GatewayWorld, key: str, first: ScriptedEngine, second: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(first, "refuse 400 context_length_exceeded 1", monkeypatch)
    assert (await ask(world, key)).status_code == 400
    assert second.calls == []


async def test_errors_of_an_engines_own_put_it_out_until_a_trial_is_good(
    world: GatewayWorld, key: str, first: ScriptedEngine, second: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    health = world.gateway.fleet.health
    monkeypatch.setattr(health, "_clock", lambda: now[0])
    health.keep_only([])
    with monkeypatch.context() as patch:
        answer_with(first, "refuse 502 replica_failed 1", patch)
        for _ in range(6):
            assert (await ask(world, key)).status_code == 200
        assert len(first.calls) == 1 + health_module.MAX_IN_A_ROW
    now[0] += health_module.FIRST_EJECTION_S
    assert (await ask(world, key)).status_code == 200
    assert len(first.calls) == 2 + health_module.MAX_IN_A_ROW
    assert health.find_ejected() == frozenset()


async def test_after_the_first_byte_the_client_is_told_and_the_next_request_goes_elsewhere(
    world: GatewayWorld, key: str, first: ScriptedEngine, second: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(first, "die", monkeypatch)
    response = await ask(world, key, stream=True)
    assert response.status_code == 200
    assert '"code":"replica_failed"' in response.text
    assert "[DONE]" not in response.text
    assert second.calls == []
    assert (await ask(world, key, stream=True)).text.endswith("data: [DONE]\n\n")
    assert len(second.calls) == 1
    assert [used["outcome"] for used in await world.usage()] == ["ok", "error", "ok"]


async def test_a_request_that_waits_for_a_lost_engine_goes_to_another(
    world: GatewayWorld, key: str, first: ScriptedEngine, second: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout_module, "ANSWER_S", 0.05)
    answer_with(first, "wait", monkeypatch)
    task = asyncio.create_task(ask(world, key))
    await until(lambda: len(first.calls) == 2)

    async def say_nothing(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(type(first), "__call__", _route(first, say_nothing))
    for _ in range(4):
        await world.gateway.fleet.poll()
    response = await asyncio.wait_for(task, 60)
    assert response.status_code == 200
    assert (await world.usage())[-1]["replica"] == second.url


def _route(stuck: ScriptedEngine, serve: Any) -> Any:
    """A call that is `serve` at one engine and as ever at others."""
    call = ScriptedEngine.__call__

    async def route(self: ScriptedEngine, scope: Any, receive: Any, send: Any) -> None:
        await (serve(scope, receive, send) if self is stuck else call(self, scope, receive, send))

    return route
