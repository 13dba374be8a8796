"""From a failed load on an engine to a quarantined version, and back, over real HTTP with two scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_world import ADMIN_KEY, BASE, GatewayWorld, running_world, until
from loraplex.cli.app import main
from loraplex_registry.errors import UnavailableError

VERSIONS = "/api/v1/tenants/team-x/adapters/default/versions"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path, num_engines=2) as running:
        await running.create_tenant("team-x")
        yield running


@pytest.fixture
async def key(world: GatewayWorld) -> str:
    return await world.create_key("team-x")


async def show(world: GatewayWorld, number: int = 1) -> dict[str, Any]:
    version: dict[str, Any] = (await world.call("GET", f"{VERSIONS}/{number}")).json()
    return version


async def list_models(world: GatewayWorld, key: str) -> list[str]:
    return [model["id"] for model in (await world.call("GET", "/v1/models", key=key)).json()["data"]]


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def quarantines(world: GatewayWorld) -> list[dict[str, Any]]:
    events = (await world.call("GET", "/api/v1/audit")).json()["data"]
    return [event for event in events if event["action"] == "adapter.version_quarantined"]


async def test_a_version_that_no_engine_can_load_is_quarantined_once(world: GatewayWorld, key: str) -> None:
    digest = (await world.push("team-x"))["digest"]
    first, second = world.engines
    first.fail_load(digest)
    second.fail_load(digest, is_final=False, attempts=2, retry_in_s=4.0)
    await world.gateway.fleet.poll()
    assert (await show(world))["state"] == "ready"

    second.fail_load(digest)
    await world.gateway.fleet.poll()
    shown = await show(world)
    assert (shown["state"], shown["promoted"]) == ("quarantined", True)
    assert shown["quarantine"]["reason"] == "load_failed"
    for model in ("team-x", "team-x/default", "team-x/default@live", "team-x/default@1", f"team-x/default@{digest}"):
        answer = await world.complete(model, "answer", key)
        assert code(answer) == (409, "adapter_quarantined"), model
        message = answer.json()["error"]["message"]
        assert "load_failed: The adapter's bytes do not match its digest" in message
        assert shown["quarantine"]["since"] in message
        assert "upload a new version" in message
    assert first.calls == second.calls == []
    assert await world.usage() == []
    assert await list_models(world, key) == [BASE]
    assert (await world.complete(BASE, "answer", key)).status_code == 200

    for _ in range(3):
        await world.gateway.fleet.poll()
    (event,) = await quarantines(world)
    assert (event["actor"], event["subject"]) == ("gateway", "team-x/default@1")
    assert event["details"]["reason"] == "load_failed"
    metrics = (await world.call("GET", "/metrics")).text
    assert "loraplex_adapter_quarantines_total 1.0" in metrics
    for engine in world.gateway.fleet.view.replicas:
        for cause, count in (("load", "1.0"), ("output", "0.0")):
            labels = f'{{cause="{cause}",pool="main",replica="{engine.name}"}}'
            assert f"loraplex_replica_adapters_refused{labels} {count}" in metrics


async def test_causes_outside_the_bytes_quarantine_nothing(world: GatewayWorld) -> None:
    digest = (await world.push("team-x"))["digest"]
    for engine in world.engines:
        engine.fail_load(digest, is_content=False, is_final=False, code="adapter_loading", attempts=99)
    await world.gateway.fleet.poll()
    assert (await show(world))["state"] == "ready"


async def test_the_next_upload_answers_under_the_same_name(world: GatewayWorld, key: str) -> None:
    world.engine.fail_load((await world.push("team-x"))["digest"])
    await world.gateway.fleet.poll()
    assert (await show(world))["state"] == "quarantined"
    assert (await world.push("team-x"))["promoted"]
    answer = await world.complete("team-x", "answer", key)
    assert (answer.status_code, answer.headers["x-loraplex-model"]) == (200, "team-x/default@2")
    assert await list_models(world, key) == [BASE, "team-x"]
    assert code(await world.complete("team-x/default@1", "answer", key)) == (409, "adapter_quarantined")


async def test_release_makes_the_engines_forget_and_holds(world: GatewayWorld, key: str) -> None:
    digest = (await world.push("team-x"))["digest"]
    for engine in world.engines:
        engine.fail_load(digest)
    await world.gateway.fleet.poll()
    assert code(await world.call("POST", f"{VERSIONS}/1/release", key=key)) == (403, "permission_denied")
    released = await world.call("POST", f"{VERSIONS}/1/release")
    assert (released.status_code, released.json()["state"]) == (200, "ready")
    assert [engine.asked_to_load for engine in world.engines] == [[digest], [digest]]
    await world.gateway.fleet.poll()
    assert (await world.complete("team-x", "answer", key)).status_code == 200
    world.engine.fail_load(digest)
    await world.gateway.fleet.poll()
    assert code(await world.complete("team-x", "answer", key)) == (409, "adapter_quarantined")
    assert len(await quarantines(world)) == 2


async def test_admin_takes_a_version_out_and_no_other_answers_for_it(world: GatewayWorld, key: str) -> None:
    await world.push("team-x")
    await world.push("team-x", promote="always")
    assert (await world.call("POST", f"{VERSIONS}/2/quarantine")).json()["state"] == "quarantined"
    answer = await world.complete("team-x", "answer", key)
    assert code(answer) == (409, "adapter_quarantined")
    assert "by_admin" in answer.json()["error"]["message"]
    answer = await world.complete("team-x/default@1", "answer", key)
    assert answer.headers["x-loraplex-model"] == "team-x/default@1"


async def test_what_one_engine_quarantined_goes_to_another_that_holds_it(world: GatewayWorld, key: str) -> None:
    digest = (await world.push("team-x"))["digest"]
    first, second = world.engines
    first.quarantined[digest] = {"reason": "non-finite logits in 3 requests", "strikes": 3}
    second.resident = [digest]
    await world.gateway.fleet.poll()
    for _ in range(3):
        assert (await world.complete("team-x", "answer", key)).status_code == 200
    assert (len(first.calls), len(second.calls)) == (0, 3)
    assert (await show(world))["state"] == "ready"
    second.resident = []
    await world.gateway.fleet.poll()
    answer = await world.complete("team-x", "refuse 409 adapter_quarantined 1", key)
    assert code(answer) == (409, "adapter_quarantined")
    assert (len(first.calls), len(second.calls)) == (1, 3)
    assert [used["prompt_tokens"] for used in await world.usage() if used["outcome"] == "error"] == [0]
    assert (await world.call("POST", f"{VERSIONS}/1/release")).status_code == 200
    assert (first.asked_to_load, second.asked_to_load) == ([digest], [])


async def test_quarantine_waits_for_a_registry_that_is_away(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.engine.fail_load((await world.push("team-x"))["digest"])

    async def refuse(*_: Any) -> int:
        raise UnavailableError

    with monkeypatch.context() as broken:
        broken.setattr(world.gateway._registry, "quarantine_failed", refuse)
        await world.gateway.fleet.poll()
    assert (await show(world))["state"] == "ready"

    async def is_quarantined() -> bool:
        return (await show(world))["state"] == "quarantined"

    await until(is_quarantined)


@pytest.fixture
def run(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], Awaitable[str]]:
    """Run a `loraplex` command as admin and return all that it prints."""
    monkeypatch.setenv("LORAPLEX_URL", world.url)
    monkeypatch.setenv("LORAPLEX_API_KEY", ADMIN_KEY)

    async def run(command: str) -> str:
        assert await asyncio.to_thread(main, command.split()) == 0
        printed = capsys.readouterr()
        return " ".join((printed.out + printed.err).split())

    return run


async def test_command_line_shows_state_and_cause_and_releases(
    world: GatewayWorld, run: Callable[[str], Awaitable[str]]
) -> None:
    digest = (await world.push("team-x"))["digest"]
    first, second = world.engines
    first.fail_load(digest)
    second.fail_load(digest, is_final=False, attempts=1, retry_in_s=2.0, reason="The registry does not answer.")
    second.quarantined["sha256:" + "b" * 64] = {"reason": "numbers that are not finite", "strikes": 3}
    await world.gateway.fleet.poll()
    status = await run("status")
    short = digest[:19]
    assert f"{first.url} {short} not loaded, 5 tries, given up The adapter's bytes do not match its digest" in status
    assert f"{second.url} {short} not loaded, 1 try, again in 2 s The registry does not answer." in status
    assert "sha256:bbbbbbbbbbbb quarantined here after 3 strikes numbers that are not finite" in status
    assert "team-x/default yes 1 1 tiny" in await run("adapters list team-x")

    second.failed.clear()
    await world.gateway.fleet.poll()
    assert "team-x/default yes 1, quarantined 1 tiny" in await run("adapters list team-x")
    assert "quarantined (load_failed)" in await run("adapters show team-x")
    shown = await run("adapters show team-x@1")
    assert "state quarantined (load_failed) because The adapter's bytes do not match its digest" in shown
    assert "ready" in await run("adapters release team-x@1")
    assert short not in await run("status")
    assert "release team-x/default@1" in await run("adapters quarantine team-x@1")
    assert "quarantined (by_admin)" in await run("adapters show team-x")
