"""Planted incidents on a whole gateway: its pages name the cause, and lead to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dashboard_incidents import CANARY, FLOOD, WANTED, plant_all, plant_tenants
from dashboard_world import Browser, read_tags, read_text
from gateway_world import ADMIN_KEY, GatewayWorld, running_world
from loraplex.keys.grant import SCOPES


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as found:
        yield found


async def log_in(world: GatewayWorld, key: str = ADMIN_KEY) -> Browser:
    browser = Browser(world)
    answer = await browser.log_in(key)
    assert answer.status_code == 303, answer.text
    return browser


async def read(browser: Browser, path: str = "/ui/") -> str:
    response = await browser.get(path)
    assert response.status_code == 200, response.text
    return response.text


async def test_a_platform_at_rest_asks_for_nothing(world: GatewayWorld) -> None:
    await plant_tenants(world)
    page = await read(await log_in(world))
    assert "Nothing asks for attention." in read_text(page)


async def test_planted_incidents_are_named_with_their_cause_and_a_way_there(world: GatewayWorld) -> None:
    await plant_all(world)
    browser = await log_in(world)
    page = await read(browser)
    text = read_text(page)
    name = "/".join(CANARY)
    replica = world.gateway.fleet.view.replicas[0].name
    assert f"{FLOOD} floods the engines" in text
    assert f"Adapters push each other out of the slots of {replica}" in text
    assert f"{WANTED[0]} (40 times), {WANTED[1]} (30 times), {WANTED[2]} (20 times)" in text
    assert f"The canary of {name} fails" in text
    assert "failed 70 of 100 calls (70.0 %) in the last hour; version 1 failed 1.1 %" in text
    links = {attributes.get("href") for tag, attributes in read_tags(page) if tag == "a"}
    assert {f"/ui/limits/{FLOOD}", "/ui/slots", f"/ui/adapters/{name}"} <= links
    adapter = read_text(await read(browser, f"/ui/adapters/{name}"))
    assert f"The canary of {name} fails." in adapter
    slots = read_text(await read(browser, "/ui/slots"))
    assert f"{WANTED[0]} 40 times" in slots


async def test_a_tenant_hears_of_its_own_adapters_alone(world: GatewayWorld) -> None:
    await plant_all(world)
    owner = await world.create_key(CANARY[0], scopes=list(SCOPES))
    other = await world.create_key("team-002", scopes=list(SCOPES))
    text = read_text(await read(await log_in(world, owner)))
    assert f"The canary of {'/'.join(CANARY)} fails" in text
    assert FLOOD not in text
    assert "slots" not in text
    assert "Nothing asks for attention." in read_text(await read(await log_in(world, other)))
