"""The playground's route: models as any client of the key calls them, and nothing besides."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboard_world import Browser, find_unsafe
from gateway_world import GatewayWorld, running_world, until


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as found:
        for tenant in ("team-x", "team-y"):
            await found.create_tenant(tenant)
            await found.push(tenant, "style")
        yield found


class Player(Browser):
    """A browser that asks models."""

    def __init__(self, world: GatewayWorld) -> None:
        super().__init__(world)
        self.world = world

    async def ask(self, model: str, text: str = "say hello there", **changes: Any) -> httpx.Response:
        headers = {"host": "gateway", "origin": "http://gateway", "cookie": self.cookie or ""}
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "stream": True} | changes
        return await self.world.http.post("/ui/playground/answer", json=body, headers=headers)


async def log_in(world: GatewayWorld, tenant: str, **key: Any) -> Player:
    player = Player(world)
    await player.log_in(await world.create_key(tenant, **key))
    return player


def read_said(response: httpx.Response) -> str:
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    return "".join(one["choices"][0]["delta"].get("content", "") for one in events if one["choices"])


async def test_an_answer_streams_and_is_usage_of_the_session_s_key(world: GatewayWorld) -> None:
    player = await log_in(world, "team-x", owner="ada")
    response = await player.ask("team-x/style@1")
    assert response.status_code == 200, response.text
    assert read_said(response) == "hello there "
    assert response.headers["x-loraplex-model"] == "team-x/style@1"
    assert response.headers["x-loraplex-digest"].startswith("sha256:")
    assert response.headers["content-security-policy"]
    await until(lambda: _has_usage(world))
    (row,) = await world.usage()
    assert (row["tenant"], row["adapter"], row["version"], row["outcome"]) == ("team-x", "style", 1, "ok")
    key = (await world.call("GET", "/api/v1/tenants/team-x/keys")).json()["data"][0]
    assert row["key_id"] == key["id"]


async def _has_usage(world: GatewayWorld) -> bool:
    return bool(await world.usage())


async def test_others_models_are_not_there_and_errors_are_the_api_s(world: GatewayWorld) -> None:
    player = await log_in(world, "team-x")
    for model, status, code in (("team-y/style", 404, "model_not_found"), ("nobody", 404, "model_not_found")):
        response = await player.ask(model)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert (await player.ask("team-x/style", temperatur=1)).json()["error"]["code"] == "unknown_parameter"
    assert (await log_in_without_scope(world)).status_code == 403
    assert (await Player(world).ask("team-x/style")).status_code == 401


async def log_in_without_scope(world: GatewayWorld) -> httpx.Response:
    player = await log_in(world, "team-x", scopes=["adapters:read"])
    return await player.ask("team-x/style")


async def test_limits_hold_here_too(world: GatewayWorld) -> None:
    await world.call("PATCH", "/api/v1/tenants/team-x", json={"limits": {"requests_per_minute": 1}})
    player = await log_in(world, "team-x")
    assert (await player.ask("team-x/style")).status_code == 200
    refused = await player.ask("team-x/style")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_the_page_names_what_the_key_may_call(world: GatewayWorld) -> None:
    page = (await (await log_in(world, "team-x")).get("/ui/playground?left=team-x/style&right=team-x/style@1")).text
    assert find_unsafe(page) == []
    assert 'value="team-x/style@1"' in page
    assert "team-y" not in page
