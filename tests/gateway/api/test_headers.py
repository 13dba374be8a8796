"""Headers that mean one thing: who sends two of them could be understood differently by a proxy and by us."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_world import ADMIN_KEY, GatewayWorld, check_error, enclosed_world

ALIAS = "/api/v1/tenants/team-x/adapters/default/aliases/live"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        await found.create_tenant("team-x")
        await found.push("team-x")
        yield found


async def test_a_header_of_one_meaning_is_refused_twice(world: GatewayWorld) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json", "if-match": "*"}
    headers |= {"idempotency-key": "a", "x-request-timeout": "9"}
    body = b'{"targets": [{"version": 1, "weight": 100}]}'
    once = await world.http.put(ALIAS, content=body, headers=headers)
    assert once.status_code == 200, once.text
    for name in ("Authorization", "Content-Type", "Idempotency-Key", "If-Match", "X-Request-Timeout"):
        twice = await world.http.put(ALIAS, content=body, headers=[*headers.items(), (name, headers[name.lower()])])
        assert name.lower() in check_error(twice, 400, "invalid_request_error", name.lower())


async def test_other_headers_may_be_there_twice(world: GatewayWorld) -> None:
    headers = [("authorization", f"Bearer {ADMIN_KEY}"), ("accept", "text/html"), ("accept", "application/json")]
    assert (await world.http.get(ALIAS, headers=headers)).status_code == 200
