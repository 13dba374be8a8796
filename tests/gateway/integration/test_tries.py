"""Tries of keys that open nothing: what a flood of them is told, that it keeps nobody out, and gateways together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from dashboard_world import Browser
from gateway_world import ADMIN_KEY, GatewayWorld, check_error, enclosed_world
from loraplex.gateway.tries import MAX_BEARERS, Tries
from loraplex.settings import read_networks
from redis_world import RedisServer


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        yield found


async def test_a_flood_of_keys_that_open_nothing_is_told_to_wait_and_keeps_no_other_key_out(
    world: GatewayWorld,
) -> None:
    assert world.gateway.tries.bearers.max_tries == MAX_BEARERS
    world.gateway.tries.bearers.max_tries = 20
    for number in range(20):
        check_error(await world.call("GET", "/v1/models", key=f"lpx_wrong{number:05}_x"), 401, "invalid_api_key")
    answer = await world.call("GET", "/v1/models", key="lpx_anotherone_x")
    check_error(answer, 429, "rate_limit_exceeded")
    assert 0 < int(answer.headers["retry-after"]) <= 61
    assert answer.headers["x-should-retry"] == "false"
    assert (await world.call("GET", "/v1/models", key=ADMIN_KEY)).status_code == 200
    # who brings no key tries none
    check_error(await world.call("GET", "/v1/models", key=None), 401, "invalid_api_key")
    # and logins are counted for themselves
    assert (await Browser(world).log_in()).status_code == 303


async def test_logins_and_bearers_do_not_add_up(world: GatewayWorld) -> None:
    for number in range(5):
        assert (await Browser(world).log_in(f"wrong-{number}")).status_code == 401
    assert (await Browser(world).log_in()).status_code == 429
    check_error(await world.call("GET", "/v1/models", key="wrong"), 401, "invalid_api_key")


async def call_from(world: GatewayWorld, forwarded: str, number: int) -> httpx.Response:
    headers = {"x-forwarded-for": forwarded}
    return await world.call("GET", "/v1/models", key=f"lpx_{number:010}_x", headers=headers)


# the tests call from 127.0.0.1
@pytest.mark.parametrize(("proxies", "is_believed"), [("127.0.0.0/8", True), ("10.0.0.0/8", False), ("", False)])
async def test_only_a_trusted_peer_says_who_calls(
    database_url: str, tmp_path: Path, proxies: str, is_believed: bool
) -> None:
    async with enclosed_world(database_url, tmp_path, trusted_proxies=read_networks(proxies)) as world:
        browser = Browser(world)
        for number in range(6):
            fields = {"key": f"wrong-{number}"}
            page = await browser.post("/ui/login", fields, x_forwarded_for=f"198.51.100.{number}")
        assert page.status_code == (401 if is_believed else 429)
        world.gateway.tries.bearers.max_tries = 3
        for number in range(4):
            answer = await call_from(world, f"198.51.100.{number}", number)
        check_error(answer, *((401, "invalid_api_key") if is_believed else (429, "rate_limit_exceeded")))
        # a client that says more is still the one that its proxy saw
        for number in range(10, 14):
            answer = await call_from(world, f"192.0.2.{number}, 203.0.113.5", number)
        check_error(answer, 429, "rate_limit_exceeded")
        # and nobody becomes this machine
        forwarded = {"x-forwarded-for": "127.0.0.1"}
        check_error(await world.call("GET", "/metrics", key=None, headers=forwarded), 401, "invalid_api_key")


async def test_gateways_count_together_and_alone_where_redis_is_away(redis_server: RedisServer) -> None:
    one, other, elsewhere = Tries(), Tries(), Tries()
    for tries, name in ((one, "platform"), (other, "platform"), (elsewhere, "another")):
        tries.share(redis_server.url, name)
    for number in range(5):
        await (one, other)[number % 2].logins.note_failure("10.0.0.1", f"key{number}")
    for tries in (one, other):
        assert 50 < (await tries.logins.find_wait_s("10.0.0.1", "x") or 0) <= 61
        assert await tries.logins.find_wait_s("10.0.0.2", "x") is None
        assert await tries.bearers.find_wait_s("10.0.0.1", "x") is None
    assert await elsewhere.logins.find_wait_s("10.0.0.1", "x") is None
    redis_server.kill()
    began_s = time.monotonic()
    assert await other.logins.find_wait_s("10.0.0.1", "x") is None
    for _ in range(5):
        await other.logins.note_failure("10.0.0.1", "x")
    assert await other.logins.find_wait_s("10.0.0.1", "x") is not None
    assert time.monotonic() - began_s < 10
    for tries in (one, other, elsewhere):
        await tries.close()
