"""What nobody can call any more is given back by the engines, and nothing else is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway_world import GatewayWorld, running_world, until

TENANTS = "/api/v1/tenants"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path, num_engines=2) as running:
        for tenant in ("team-x", "team-y"):
            await running.create_tenant(tenant)
        yield running


async def delete(world: GatewayWorld, path: str, **options: Any) -> None:
    response = await world.call("DELETE", f"{TENANTS}/{path}", **options)
    assert response.status_code in (200, 204), response.text


def dropped(world: GatewayWorld) -> list[list[str]]:
    return [sorted(engine.asked_to_drop) for engine in world.engines]


async def test_a_deleted_adapter_is_dropped_everywhere(world: GatewayWorld) -> None:
    digests = sorted([(await world.push("team-x"))["digest"], (await world.push("team-x"))["digest"]])
    await delete(world, "team-x/adapters/default")
    await until(lambda: dropped(world) == [digests, digests])


async def test_content_that_has_another_name_stays_until_that_is_gone_too(world: GatewayWorld) -> None:
    digest = (await world.push("team-x", "one"))["digest"]
    for tenant, adapter in (("team-x", "two"), ("team-y", "three")):
        assert (await world.push_again(tenant, adapter))["digest"] == digest
    other = (await world.push("team-x", "four"))["digest"]
    for adapter in ("one", "four"):
        await delete(world, f"team-x/adapters/{adapter}")
    await until(lambda: dropped(world) == [[other], [other]])
    await delete(world, "team-x", params={"cascade": "true"})
    await asyncio.sleep(0.3)
    assert dropped(world) == [[other], [other]]
    await delete(world, "team-y", params={"cascade": "true"})
    await until(lambda: dropped(world) == [sorted([other, digest])] * 2)


async def test_a_retired_version_is_dropped(world: GatewayWorld) -> None:
    digest = (await world.push("team-x"))["digest"]
    await world.push("team-x", promote="always")
    await delete(world, "team-x/adapters/default/versions/1")
    await until(lambda: dropped(world) == [[digest], [digest]])


async def test_no_answer_waits_for_an_engine(world: GatewayWorld) -> None:
    digest = (await world.push("team-x"))["digest"]
    world.engines[0].keeps_draining = True
    world.engines[1].state_changes = {"is_ready": False}
    await world.gateway.fleet.poll()
    started_at = time.monotonic()
    await delete(world, "team-x/adapters/default")
    assert time.monotonic() - started_at < 15
    await until(lambda: dropped(world) == [[digest], []])
