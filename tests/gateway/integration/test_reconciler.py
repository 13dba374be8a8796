"""Planted differences between what is wanted of the fleet and what it is: each is gone in time, and told of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from app_server import running_app
from gateway_world import ADMIN_KEY, BASE, GatewayWorld, running_world, until
from loraplex.cli.app import main
from loraplex.fleet import reconciler as reconciler_module
from loraplex.fleet.fleet import Fleet
from loraplex.gateway import desired_state as desired_module
from loraplex_registry.errors import UnavailableError
from planted import purge_by_hand
from scripted_engine import ScriptedEngine

GONE_S = 10.0
ALL, ONE, CANARY = "team-all", "team-one", "team-two/default@canary"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


class FleetWorld:
    """A gateway that pins, with two engines of four slots that hold what they are told; they can die and come back."""

    def __init__(self, world: GatewayWorld, engines: list[ScriptedEngine], stops: list[AsyncExitStack]) -> None:
        self.world = world
        self.engines = engines
        self._stops = stops

    async def kill(self, index: int) -> None:
        """End an engine at once; what it held is lost."""
        await self._stops[index].aclose()
        engine = self.engines[index]
        engine.resident, engine.pinned = [], set()

    async def start(self, index: int) -> None:
        """Start it again under its address."""
        self._stops[index] = AsyncExitStack()
        port = int(self.engines[index].url.rpartition(":")[2])
        await self._stops[index].enter_async_context(running_app(self.engines[index], port=port))

    async def show(self) -> dict[str, Any]:
        """What the API says of the fleet."""
        shown: dict[str, Any] = (await self.world.call("GET", "/api/v1/fleet")).json()
        return shown

    async def kinds(self) -> list[str]:
        return [found["kind"] for found in (await self.show())["differences"]]

    async def events(self, action: str) -> list[dict[str, Any]]:
        """Events of one action, the newest first."""
        answer = await self.world.call("GET", "/api/v1/audit", params={"action": f"fleet.{action}"})
        return list(answer.json()["data"])

    async def wait(self, condition: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait until a difference is gone."""
        await until(condition, GONE_S)

    async def told(self, action: str, subject: str) -> dict[str, Any]:
        """Wait for the event of a repair, and return its details."""

        async def is_told() -> bool:
            return any(event["subject"] == subject for event in await self.events(action))

        await self.wait(is_told)
        event = next(event for event in await self.events(action) if event["subject"] == subject)
        assert (event["actor"], event["key_id"]) == ("gateway", "gateway")
        assert event["details"]["after_s"] < GONE_S
        details: dict[str, Any] = event["details"]
        return details

    def name(self, index: int) -> str:
        """The engine's name in the API."""
        return next(one.name for one in self.world.gateway.fleet.view.replicas if one.url == self.engines[index].url)

    def holders(self, digest: str) -> list[int]:
        """Which engines hold a digest pinned."""
        return [i for i, engine in enumerate(self.engines) if digest in engine.pinned and digest in engine.resident]

    async def is_clean(self) -> bool:
        """Whether all that is left is what only an operator can end."""
        return all(found["is_repaired_by"] == "operator" for found in (await self.show())["differences"])


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FleetWorld]:
    monkeypatch.setattr(reconciler_module, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(reconciler_module, "_START_S", 0.0)
    monkeypatch.setattr(reconciler_module, "_PAUSE_S", 0.4)
    monkeypatch.setattr(desired_module, "_FIND_EVERY_S", 2.0)
    async with AsyncExitStack() as stack:
        engines, stops = [], []
        for _ in range(2):
            engine, stop = ScriptedEngine(), AsyncExitStack()
            engine.is_faithful, engine.num_slots = True, 4
            engine.url = await stop.enter_async_context(running_app(engine))
            stack.push_async_callback(lambda index: stops[index].aclose(), len(stops))
            engines.append(engine)
            stops.append(stop)
        pins = [ALL, {"model": ONE, "copies": 1}, CANARY]
        urls = [engine.url for engine in engines]
        pools = json.dumps({"main": {"base": BASE, "engines": urls, "pin": pins}})
        world = await stack.enter_async_context(running_world(database_url, tmp_path, num_engines=0, pools=pools))
        yield FleetWorld(world, engines, stops)


@pytest.fixture
async def digest(fleet: FleetWorld) -> str:
    """Version 1 of what every engine is to hold; they do."""
    await fleet.world.create_tenant(ALL)
    found: str = (await fleet.world.push(ALL))["digest"]
    await fleet.wait(lambda: fleet.holders(found) == [0, 1])
    await fleet.wait(fleet.is_clean)
    return found


async def test_a_pinned_adapter_that_is_missing_is_loaded(fleet: FleetWorld, digest: str) -> None:
    fleet.engines[0].resident, fleet.engines[0].pinned = [], set()
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])
    details = await fleet.told("adapter_loaded", fleet.name(0))
    assert (details["kind"], details["digest"]) == ("adapter_missing", digest)
    assert f"{ALL}/default@1" in details["desired"]


async def test_a_pin_that_is_missing_is_set(fleet: FleetWorld, digest: str) -> None:
    fleet.engines[1].pinned.clear()
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])
    assert (await fleet.told("adapter_pinned", fleet.name(1)))["digest"] == digest


async def test_a_pin_that_nobody_wants_is_taken_away(fleet: FleetWorld, digest: str) -> None:
    await fleet.world.create_tenant("team-other")
    other = (await fleet.world.push("team-other"))["digest"]
    fleet.engines[0].resident.append(other)
    fleet.engines[0].pinned.add(other)
    assert (await fleet.told("adapter_unpinned", fleet.name(0)))["digest"] == other
    assert other in fleet.engines[0].resident
    assert other not in fleet.engines[0].pinned
    assert fleet.holders(digest) == [0, 1]


async def test_a_pin_on_the_former_version_moves_to_the_one_that_is_live(fleet: FleetWorld, digest: str) -> None:
    new = (await fleet.world.push(ALL, promote="always"))["digest"]
    await fleet.wait(lambda: fleet.holders(new) == [0, 1] and fleet.holders(digest) == [])
    for index in (0, 1):
        assert (await fleet.told("adapter_unpinned", fleet.name(index)))["digest"] == digest


async def test_an_adapter_that_no_name_means_is_dropped(fleet: FleetWorld, digest: str) -> None:
    unknown = "sha256:" + "e" * 64
    fleet.engines[0].resident.append(unknown)
    await fleet.wait(lambda: unknown not in fleet.engines[0].resident)
    assert (await fleet.told("adapter_dropped", fleet.name(0)))["digest"] == unknown
    assert fleet.holders(digest) == [0, 1]


async def test_an_adapter_that_was_deleted_while_its_engine_was_away_is_dropped(fleet: FleetWorld) -> None:
    await fleet.world.create_tenant("team-gone")
    gone = (await fleet.world.push("team-gone"))["digest"]
    await fleet.kill(1)
    await fleet.told("replica_lost", fleet.name(1))
    assert (await fleet.world.call("DELETE", "/api/v1/tenants/team-gone/adapters/default")).status_code == 204
    fleet.engines[1].resident = [gone]
    await fleet.start(1)
    await fleet.wait(lambda: fleet.engines[1].resident == [])
    assert (await fleet.told("adapter_dropped", fleet.name(1)))["digest"] == gone


async def test_the_copy_of_a_dead_replica_is_made_on_another_and_goes_back(fleet: FleetWorld) -> None:
    await fleet.world.create_tenant(ONE)
    digest = (await fleet.world.push(ONE))["digest"]
    await fleet.wait(lambda: len(fleet.holders(digest)) == 1)
    (home,) = fleet.holders(digest)
    await fleet.kill(home)
    await fleet.wait(lambda: fleet.holders(digest) == [1 - home])
    details = await fleet.told("replica_lost", fleet.name(home))
    assert (details["kind"], details["actual"]) == ("replica_down", "it cannot be reached")
    assert "replica_down" in await fleet.kinds()

    await fleet.start(home)
    await fleet.wait(lambda: fleet.holders(digest) == [home])
    await fleet.told("replica_back", fleet.name(home))
    assert "replica_down" not in await fleet.kinds()


async def test_a_replica_that_came_back_empty_gets_all_its_pins(fleet: FleetWorld, digest: str) -> None:
    await fleet.kill(0)
    await fleet.told("replica_lost", fleet.name(0))
    await fleet.start(0)
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])
    assert (await fleet.told("adapter_loaded", fleet.name(0)))["digest"] == digest


async def test_an_alias_to_a_purged_version_goes_back(fleet: FleetWorld, digest: str, database_url: str) -> None:
    world = fleet.world
    await world.push(ALL, promote="always")
    key = await world.create_key(ALL)
    await purge_by_hand(database_url, "default", [2])

    async def answers() -> bool:
        answer = await world.complete(ALL, "answer", key)
        return (answer.status_code, answer.headers.get("x-loraplex-model")) == (200, f"{ALL}/default@1")

    details = await fleet.told("alias_mended", f"{ALL}/default@live")
    assert (details["actual"], details["now"]) == ("it leads to 2 (100 %)", "it leads to 1 (100 %)")
    await fleet.wait(answers)
    await fleet.wait(fleet.is_clean)
    own = (await world.call("GET", "/api/v1/audit", params={"tenant": ALL, "action": "fleet.alias_mended"})).json()
    assert len(own["data"]) == 1
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])


async def test_an_alias_that_never_led_to_what_is_there_is_deleted(fleet: FleetWorld, database_url: str) -> None:
    await fleet.world.create_tenant(ONE)
    await fleet.world.push(ONE)
    await purge_by_hand(database_url, "default", [1])
    assert "it is deleted" in (await fleet.told("alias_mended", f"{ONE}/default@live"))["now"]
    aliases = await fleet.world.call("GET", f"/api/v1/tenants/{ONE}/adapters/default/aliases")
    assert aliases.json()["data"] == []


async def test_a_replica_with_another_model_is_told_of_and_gets_nothing(fleet: FleetWorld) -> None:
    await fleet.world.create_tenant(ONE)
    digest = (await fleet.world.push(ONE))["digest"]
    await fleet.wait(lambda: len(fleet.holders(digest)) == 1)
    (home,) = fleet.holders(digest)
    fleet.engines[home].state_changes = {"model": {"name": "tiny", "fingerprint": "another"}}
    await fleet.wait(lambda: 1 - home in fleet.holders(digest))
    assert "another model" in (await fleet.told("replica_refused", fleet.name(home)))["actual"]
    fleet.engines[home].state_changes = {}
    await fleet.told("replica_back", fleet.name(home))
    await fleet.wait(fleet.is_clean)


async def test_a_replica_that_gave_up_what_another_has_loaded_tries_again(fleet: FleetWorld, digest: str) -> None:
    fleet.engines[0].resident, fleet.engines[0].pinned = [], set()
    fleet.engines[0].fail_load(digest)
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])
    assert (await fleet.told("load_retried", fleet.name(0)))["digest"] == digest
    version = await fleet.world.call("GET", f"/api/v1/tenants/{ALL}/adapters/default/versions/1")
    assert version.json()["state"] == "ready"


async def test_a_pin_does_not_hide_that_an_adapter_cannot_be_loaded(fleet: FleetWorld, digest: str) -> None:
    engine = fleet.engines[0]
    engine.resident, engine.pinned = [], set()
    engine.fail_load(digest, is_final=False, attempts=2, retry_in_s=1.0)
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])
    assert digest in engine.failed

    for engine in fleet.engines:
        engine.resident, engine.pinned, engine.is_faithful = [], set(), False
        engine.fail_load(digest)

    async def is_quarantined() -> bool:
        found = (await fleet.show())["differences"]
        return any(one["kind"] == "pin_unknown" and "is quarantined" in one["actual"] for one in found)

    await fleet.wait(is_quarantined)


async def test_a_replica_that_left_its_name_is_no_difference(
    fleet: FleetWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.kill(1)
    name = fleet.name(1)
    await fleet.told("replica_lost", name)
    gateway: Fleet = fleet.world.gateway.fleet
    (pool,) = gateway.pools
    monkeypatch.setattr(gateway, "pools", (type(pool)(pool.name, pool.base, pool.engines[:1], None, ()),))
    await fleet.told("replica_removed", name)
    assert name not in [found["subject"] for found in (await fleet.show())["differences"]]
    assert (await fleet.show())["desired"][0]["engines"] == [fleet.engines[0].url]


async def test_a_repair_that_fails_is_told_once_and_tried_again(fleet: FleetWorld, digest: str) -> None:
    engine = fleet.engines[0]
    engine.refuses_loads, engine.resident, engine.pinned = True, [], set()
    details = await fleet.told("repair_failed", fleet.name(0))
    assert (details["kind"], details["problem"]) == ("adapter_missing", "Every slot is in use.")

    async def is_tried_again() -> bool:
        differences = (await fleet.show())["differences"]
        return any(found["attempts"] > 2 and found["problem"] == "Every slot is in use." for found in differences)

    await fleet.wait(is_tried_again)
    assert len(await fleet.events("repair_failed")) == 1
    engine.refuses_loads = False
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])
    await fleet.wait(fleet.is_clean)


async def test_desired_and_actual_are_shown_and_counted(fleet: FleetWorld, digest: str) -> None:
    await fleet.world.create_tenant("team-two")
    first = (await fleet.world.push("team-two"))["digest"]
    second = (await fleet.world.push("team-two"))["digest"]
    path = "/api/v1/tenants/team-two/adapters/default/aliases/canary"
    targets = {"targets": [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]}
    put = await fleet.world.call("PUT", path, json=targets, headers={"if-none-match": "*"})
    assert put.status_code == 201
    await fleet.wait(lambda: fleet.holders(first) == fleet.holders(second) == [0, 1])
    await fleet.wait(fleet.is_clean)
    shown = await fleet.show()
    assert [found["kind"] for found in shown["differences"]] == ["pin_unknown"]
    assert shown["differences"][0]["is_repaired_by"] == "operator"
    assert [replica["pinned"] for replica in shown["data"]] == [sorted([digest, first, second])] * 2
    (pool,) = shown["desired"]
    (every, one, canary) = pool["pins"]
    names = sorted([fleet.name(0), fleet.name(1)])
    assert (every["versions"], sorted(every["replicas"])) == (
        [{"model": f"{ALL}/default@1", "digest": digest}],
        names,
    )
    assert (one["copies"], one["versions"]) == (1, [])
    assert "team-one" in one["problem"]
    assert [version["digest"] for version in canary["versions"]] == [first, second]
    repairs = shown["repairs"]
    assert {repair["action"] for repair in repairs} == {"fleet.adapter_loaded"}
    assert all(repair["took_s"] < GONE_S for repair in repairs)
    metrics = (await fleet.world.call("GET", "/metrics")).text
    assert 'loraplex_fleet_differences{kind="pin_unknown"} 1.0' in metrics
    assert 'loraplex_fleet_differences{kind="adapter_missing"} 0.0' in metrics
    made = f'loraplex_fleet_repairs_total{{kind="adapter_missing",result="made"}} {float(len(repairs))}'
    assert made in metrics


async def test_the_command_line_shows_what_is_not_as_it_should_be(
    fleet: FleetWorld, digest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", fleet.world.url)
    monkeypatch.setenv("LORAPLEX_API_KEY", ADMIN_KEY)
    fleet.engines[0].refuses_loads, fleet.engines[0].resident = True, []
    await fleet.told("repair_failed", fleet.name(0))
    assert await asyncio.to_thread(main, ["status"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Not as it should be" in printed
    assert f"{fleet.name(0)} it holds {ALL}/default@1 it does not" in printed
    assert "failed: Every slot is in use." in printed
    assert await asyncio.to_thread(main, ["status", "--json"]) == 0
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert {(found["kind"], found["is_repaired_by"]) for found in differences} == {
        ("adapter_missing", "platform"),
        ("pin_unknown", "operator"),
    }


async def test_events_wait_for_a_database_that_is_away(
    fleet: FleetWorld, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciler = fleet.world.gateway.reconciler
    record = reconciler._record

    async def refuse(*_: Any) -> None:
        raise reconciler_module.LoraplexError("away")

    monkeypatch.setattr(reconciler, "_record", refuse)
    fleet.engines[0].pinned.clear()
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])
    assert await fleet.events("adapter_pinned") == []
    monkeypatch.setattr(reconciler, "_record", record)
    await fleet.told("adapter_pinned", fleet.name(0))


async def test_pins_hold_while_aliases_cannot_be_looked_at(
    fleet: FleetWorld, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> Any:
        raise UnavailableError

    monkeypatch.setattr(fleet.world.gateway._registry, "find_broken_aliases", refuse)
    fleet.engines[0].resident, fleet.engines[0].pinned = [], set()
    await fleet.wait(lambda: fleet.holders(digest) == [0, 1])


async def test_a_replica_that_answers_nothing_delays_no_other(fleet: FleetWorld, digest: str) -> None:
    nameless = [f"sha256:{number:064d}" for number in range(1, 9)]
    stuck, well = fleet.engines
    stuck.keeps_draining, stuck.num_slots = True, 16
    stuck.resident += nameless
    await fleet.wait(lambda: len(stuck.asked_to_drop) == 4)
    well.resident, well.pinned = [], set()
    await fleet.wait(lambda: 1 in fleet.holders(digest))
    assert len(stuck.asked_to_drop) == 4
