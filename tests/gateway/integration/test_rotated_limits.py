"""Limits of a key hold for the whole line of keys that replace one another: a rotation gives nobody more."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway_world import GatewayWorld, running_world
from limit_calls import TEAM, ask, code_of, make_team

KEYS = f"/api/v1/tenants/{TEAM}/keys"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


async def rotate(world: GatewayWorld, key_id: str) -> tuple[str, str]:
    """Return the id and the text of the key that replaces another one."""
    made = (await world.call("POST", f"{KEYS}/{key_id}/rotate", json={})).json()
    return made["id"], made["key"]


async def test_a_rotation_gives_no_second_day_and_no_second_minute(database_url: str, tmp_path: Path) -> None:
    async with running_world(database_url, tmp_path) as world:
        await make_team(world)
        limits = {"tokens_per_day": 100, "requests_per_minute": 3}
        made = (await world.call("POST", KEYS, json={"name": "app", "limits": limits})).json()
        first = made["key"]
        assert (await ask(world, first)).headers["x-ratelimit-remaining-tokens"] == str(100 - 50)
        second_id, second = await rotate(world, made["id"])
        # both work, of one quota
        answer = await ask(world, second)
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - 12 - 50)
        _, third = await rotate(world, second_id)
        assert (await ask(world, first)).headers["x-ratelimit-remaining-requests"] == "0"
        for key in (first, second, third):
            refused = await ask(world, key)
            assert (refused.status_code, code_of(refused)) == (429, "rate_limit_exceeded")
        unlimited = await world.call("PATCH", f"{KEYS}/{second_id}", json={"limits": None})
        assert unlimited.status_code == 200
        assert (await ask(world, second)).status_code == 200
    # days are counted anew from usage, of whatever key of the line
    async with running_world(database_url, tmp_path) as world:
        assert (await ask(world, third)).headers["x-ratelimit-remaining-tokens"] == str(100 - 4 * 12 - 50)
