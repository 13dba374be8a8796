"""POST /api/v1/plan: the same figures as the command, for every key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_world import GatewayWorld, check_error, enclosed_world


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        await found.create_tenant("team-x")
        yield found


async def test_tenants_key_gets_the_worked_figures(world: GatewayWorld) -> None:
    key = await world.create_key("team-x")
    body = {"model": "llama-3.1-8b", "adapters": [{"count": 40, "rank": 16, "modules": ["q", "k", "v", "o"]}]}
    found = await world.call("POST", "/api/v1/plan", key=key, json=body)
    assert found.status_code == 200
    assert found.json()["copies"]["ratio_tenths"] == 5891
    assert found.json()["quoted"]["mixed_ratio"] == "560x"


async def test_field_that_is_wrong_is_named(world: GatewayWorld) -> None:
    for body, code, param in (
        ({"gpu": "h900"}, "invalid_request_error", "gpu"),
        ({"model": "nobody"}, "invalid_request_error", "model"),
        ({"adapters": [{"rank": 0}]}, "invalid_request_error", "adapters.rank"),
        ({"dtype": "int3"}, "invalid_request_error", "dtype"),
        ({"gpus": "h100"}, "unknown_parameter", "gpus"),
    ):
        check_error(await world.call("POST", "/api/v1/plan", json=body), 400, code, param)


async def test_without_a_key_nothing_is_planned(world: GatewayWorld) -> None:
    found = await world.call("POST", "/api/v1/plan", key="", json={})
    assert found.status_code == 401
