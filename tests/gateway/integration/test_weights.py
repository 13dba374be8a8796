"""Versions that the parity gate compared are served with the weights that they were compared on, and with no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_world import BASE, GatewayWorld, check_error, running_world, until
from loraplex_registry.parity import gate as gate_module
from scripted_engine import FINGERPRINT, GOOD_PARITY, ScriptedEngine
from support import linear_shapes, tiny_llama_config

A = "/api/v1/tenants/team-x/adapters/default"
OLD, NEW = "sha256:" + "1" * 64, "sha256:" + "2" * 64


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayWorld]:
    monkeypatch.setattr(gate_module, "_FOUND_EVERY_S", 0.05)
    async with running_world(database_url, tmp_path, num_engines=2) as running:
        for engine in running.engines:
            engine.serve_weights(OLD)
        await running.create_tenant("team-x")
        yield running


async def register(world: GatewayWorld, weights_digest: str) -> None:
    """Say which weights the base has, as `loraplex up` and operators do."""
    config = tiny_llama_config()
    body = {
        "name": BASE,
        "fingerprint": FINGERPRINT,
        "weights_digest": weights_digest,
        "modules": {path: list(shape) for path, shape in linear_shapes(config).items()},
        "vocab_size": config["vocab_size"],
    }
    answer = await world.call("POST", "/api/v1/bases", json=body)
    assert (answer.status_code, answer.json()["weights_digest"]) == (200, weights_digest)


async def find_serving(world: GatewayWorld, key: str, model: str = "team-x") -> list[int]:
    """Return which of the engines answer when they are alone."""
    found = []
    for number, engine in enumerate(world.engines):
        others = [other for other in world.engines if other is not engine]
        for other in others:
            other.state_changes["is_ready"] = False
        await world.gateway.fleet.poll()
        answer = await world.complete(model, "answer", key)
        assert answer.status_code in (200, 503), answer.text
        found += [number] if answer.status_code == 200 else []
        for other in others:
            other.state_changes["is_ready"] = True
    await world.gateway.fleet.poll()
    return found


async def change(world: GatewayWorld, engine: ScriptedEngine) -> None:
    """Start one engine again with the new weights."""
    engine.serve_weights(NEW)
    await world.gateway.fleet.poll()


async def bound_to(world: GatewayWorld) -> str:
    return str((await world.call("GET", f"{A}/versions/1")).json()["report"]["parity"]["weights_digest"])


async def test_an_engine_with_other_weights_gets_nothing_that_was_compared_on_the_first(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    await world.push("team-x")
    assert await bound_to(world) == OLD
    assert await find_serving(world, key) == [0, 1]
    await change(world, world.engines[1])
    assert await find_serving(world, key) == [0]
    assert await find_serving(world, key, BASE) == [0, 1], "the base itself was compared with nothing"
    for _ in range(5):
        assert (await world.complete("team-x", "answer", key)).status_code == 200
    for engine in world.engines:
        engine.asked_to_load.clear()
    warmed = (await world.call("POST", f"{A}/versions/1/warm")).json()["replicas"]
    assert (len(warmed), world.engines[1].asked_to_load) == (1, [])


async def test_without_the_weights_the_caller_is_told_what_is_missing(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    await world.push("team-x")
    for engine in world.engines:
        await change(world, engine)
    answer = await world.complete("team-x", "answer", key)
    assert "with the weights that team-x/default@1 was compared on" in check_error(answer, 503, "no_replica")
    assert int(answer.headers["retry-after"]) >= 1
    assert not any(engine.calls for engine in world.engines)


async def test_weights_that_are_registered_have_everything_compared_on_them(world: GatewayWorld) -> None:
    await register(world, OLD)
    key = await world.create_key("team-x")
    await world.push("team-x")
    await change(world, world.engines[1])
    await register(world, NEW)

    async def is_moved() -> bool:
        return await bound_to(world) == NEW

    await until(is_moved)
    assert await find_serving(world, key) == [1], "from then on no engine with the old ones serves it"
    await change(world, world.engines[0])
    assert await find_serving(world, key) == [0, 1]
    events = (await world.call("GET", "/api/v1/audit", params={"action": "adapter.version_validated"})).json()["data"]
    assert events[0]["details"]["weights_digest"] == NEW


async def test_what_answers_otherwise_on_the_new_weights_is_quarantined_and_a_release_binds_it_to_none(
    world: GatewayWorld,
) -> None:
    key = await world.create_key("team-x")
    await world.push("team-x")
    for engine in world.engines:
        engine.parity = (200, GOOD_PARITY | {"max_kl": 1.0})
        await change(world, engine)
    await register(world, NEW)

    async def is_stopped() -> bool:
        return bool((await world.call("GET", f"{A}/versions/1")).json()["state"] == "quarantined")

    await until(is_stopped)
    assert (await world.call("POST", f"{A}/versions/1/release")).json()["state"] == "ready"
    asked = sum(len(engine.asked_to_measure) for engine in world.engines)
    world.engines[0].serve_weights(OLD)
    assert await find_serving(world, key) == [0, 1]
    assert sum(len(engine.asked_to_measure) for engine in world.engines) == asked, "whoever released it has decided"


async def test_what_nobody_compared_goes_anywhere(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    for engine in world.engines:
        engine.state_changes["is_ready"] = False
    await world.gateway.fleet.poll()
    version = await world.push("team-x")
    assert (version["state"], "parity" in version["report"]) == ("ready", False)
    for engine in world.engines:
        engine.state_changes["is_ready"] = True
    await change(world, world.engines[1])
    await register(world, OLD)
    assert await find_serving(world, key) == [0, 1]


async def test_an_operator_who_switched_the_gate_off_is_not_held_to_what_it_found(
    database_url: str, tmp_path: Path
) -> None:
    for mode, expected in (("when_available", 503), ("off", 200)):
        async with running_world(database_url, tmp_path, parity_gate=mode) as world:
            if mode == "when_available":
                world.engine.serve_weights(OLD)
                await world.create_tenant("team-x")
                await world.push("team-x")
            await change(world, world.engine)
            answer = await world.complete("team-x", "answer", await world.create_key("team-x"))
            assert answer.status_code == expected, answer.text
