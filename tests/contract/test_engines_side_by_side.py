"""Engines of releases N and N+1 behind one gateway, and parts that speak only what the other does not, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines import EngineWorld
from gateway_world import GatewayWorld, running_world
from loraplex_engine.bases.pull import pull
from loraplex_registry.wire import protocol
from loraplex_registry.wire.client import ArtifactClient, ArtifactError
from scripted_core import running_rig
from scripted_engine import ScriptedEngine
from toy_tokenizers import write_byte_level

NEXT, AFTER_NEXT = f"{protocol.OLDEST}-{protocol.NEWEST + 1}", f"{protocol.NEWEST + 1}-{protocol.NEWEST + 2}"
BEFORE = f"{protocol.OLDEST - 1}-{protocol.OLDEST - 1}"
FUTURE = {"future": {"of": ["a newer release"]}}


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path, num_engines=4) as running:
        await running.create_tenant("team-x")
        yield running


def become_newer(engine: ScriptedEngine, spoken: str) -> None:
    """Speak another protocol too, and say more than this release knows, wherever something is said."""
    engine.state_changes |= {"protocol": spoken, **FUTURE}
    describe = engine.describe_done

    def describe_more(*of: Any) -> dict[str, Any]:
        return describe(*of) | FUTURE

    engine.describe_done = describe_more  # type: ignore[method-assign]


async def test_engines_of_both_releases_get_calls_and_strangers_none(world: GatewayWorld) -> None:
    today, newer, too_new, too_old = world.engines
    today.state_changes["protocol"] = protocol.SPOKEN
    become_newer(newer, NEXT)
    become_newer(too_new, AFTER_NEXT)
    too_old.state_changes["protocol"] = BEFORE
    await world.gateway.fleet.poll()
    key = await world.create_key("team-x")
    await world.push("team-x", promote="always")
    for asked, other in ((today, newer), (newer, today)):
        other.state_changes["is_draining"] = True
        await world.gateway.fleet.poll()
        assert (await world.complete("team-x", "answer", key)).status_code == 200
        async with world.stream("team-x", "answer", key) as streamed:
            text = (await streamed.aread()).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert "future" not in text
        assert len(asked.calls) == 2
        del other.state_changes["is_draining"]
    assert (too_new.calls, too_old.calls) == ([], [])
    assert [row["outcome"] for row in await world.usage()] == ["ok"] * 4
    await world.gateway.fleet.poll()
    fleet = (await world.call("GET", "/api/v1/fleet")).json()["data"]
    assert {each["url"]: each["problem"] for each in fleet} == {
        today.url: None,
        newer.url: None,
        too_new.url: f"it speaks protocol {AFTER_NEXT} and this program {protocol.SPOKEN}; upgrade this program",
        too_old.url: f"it speaks protocol {BEFORE} and this program {protocol.SPOKEN}; upgrade it",
    }


async def test_an_engine_that_no_longer_speaks_as_this_registry_names_both(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = (await world.push("team-x"))["digest"]
    client = ArtifactClient(world.url, "the-engine-key")
    assert (await asyncio.to_thread(client.manifest, digest)).digest == digest
    path = f"/internal/artifacts/{digest}"
    for place in (f"{path}/manifest", f"{path}/files/adapter_config.json"):
        answer = await world.call("GET", place, key="the-engine-key")
        assert (answer.status_code, answer.headers[protocol.HEADER]) == (200, protocol.SPOKEN)
    spoken = protocol.SPOKEN
    oldest, _, newest = AFTER_NEXT.partition("-")
    for name, value in {"OLDEST": int(oldest), "NEWEST": int(newest), "SPOKEN": AFTER_NEXT}.items():
        monkeypatch.setattr(protocol, name, value)
    expected = f"the registry speaks protocol {spoken} and this program {AFTER_NEXT}; upgrade the registry"
    for ask in (client.manifest, lambda digest: client.read_file(digest, "adapter_config.json", 1000)):
        with pytest.raises(ArtifactError, match=expected):
            await asyncio.to_thread(ask, digest)
    client.close()


async def test_todays_engine_says_what_it_speaks_and_all_that_an_older_gateway_reads(
    tmp_path: Path, tiny_llama: Path
) -> None:
    said = json.loads((Path(__file__).with_name("recorded") / f"protocol-{protocol.OLDEST}.json").read_text())
    core = EngineWorld(pull(str(tiny_llama), tmp_path / "bases"), tmp_path, cpu_threads=1).engine.state()
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as rig:
        state = (await rig.http.get("/internal/state")).json()
        usage = (await rig.http.get("/internal/usage")).json()
    assert state["protocol"] == protocol.SPOKEN
    assert state.keys() | core.keys() >= said["engine_state"].keys()
    assert core["slots"][0].keys() >= said["engine_state"]["slots"][0].keys()
    assert state["model"].keys() >= said["engine_state"]["model"].keys()
    assert usage["totals"].keys() >= said["usage_report"]["totals"].keys()
