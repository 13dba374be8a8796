"""Limits that two gateways share, with Redis and without it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from company_world import running_company
from gateway_world import ADMIN_KEY, GatewayWorld, until
from limit_calls import Streams, ask, make_team
from loraplex.client.location import Location
from loraplex.supervisor.redis_note import describe_redis
from redis_world import RedisServer
from support import free_port


@pytest.fixture
def dialect() -> str:
    return "postgresql"


@pytest.fixture
async def pair(database_url: str, redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[list[GatewayWorld]]:
    async with running_company(database_url, redis_server.url, tmp_path) as worlds:
        yield worlds


def is_degraded(world: GatewayWorld) -> bool:
    return b"loraplex_limits_degraded 1.0" in world.gateway.metrics.render(world.gateway.fleet.view)


async def count_answered(world: GatewayWorld, key: str, num_calls: int) -> int:
    """Make calls at once and return how many were answered; none takes long, and the others are told when to come."""
    begun = time.monotonic()
    answers = await asyncio.gather(*(ask(world, key) for _ in range(num_calls)))
    assert time.monotonic() - begun < 30
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    return sum(answer.status_code == 200 for answer in answers)


async def test_requests_at_once_are_counted_over_all_gateways(pair: list[GatewayWorld]) -> None:
    key = await make_team(pair[0], concurrent_requests=3)
    both = [Streams(world) for world in pair]
    await asyncio.gather(*(streams.open(key) for _, streams in zip(range(12), itertools.cycle(both), strict=False)))
    assert len(both[0].opened) + len(both[1].opened) == 3
    assert len(pair[0].engine.calls) == 3
    for streams in both:
        await streams.finish()
    again = [Streams(world) for world in pair]
    await asyncio.gather(*(streams.open(key) for _, streams in zip(range(12), itertools.cycle(again), strict=False)))
    assert len(again[0].opened) + len(again[1].opened) == 3
    for streams in again:
        await streams.finish()


async def test_two_gateways_share_a_minute_and_a_month_exactly(pair: list[GatewayWorld]) -> None:
    key = await make_team(pair[0], requests_per_minute=10, tokens_per_month=10_000)
    counts = await asyncio.gather(*(count_answered(world, key, 15) for world in pair))
    assert sum(counts) == 10
    await pair[1].call("PATCH", "/api/v1/tenants/team-x", json={"limits": {"requests_per_minute": 11}})
    last = await ask(pair[0], key)
    assert last.headers["x-ratelimit-remaining-tokens"] == str(10_000 - 10 * 12 - 50)
    assert (await ask(pair[1], key)).status_code == 429


async def test_without_redis_each_gateway_has_its_part_and_an_empty_redis_is_told(
    pair: list[GatewayWorld], redis_server: RedisServer
) -> None:
    key = await make_team(pair[0], requests_per_minute=10, tokens_per_month=1_000_000)
    for world in pair:
        # so that each has seen the other one
        await world.gateway.limiter._beat(world.gateway.limiter._shared)  # type: ignore[arg-type]
    assert await count_answered(pair[0], key, 2) == 2
    redis_server.kill()
    # half of 10, of which 2 are gone
    assert await count_answered(pair[0], key, 9) == 3
    assert await count_answered(pair[1], key, 9) == 5
    assert is_degraded(pair[0])
    assert is_degraded(pair[1])
    redis_server.start()
    await until(lambda: not is_degraded(pair[0]) and not is_degraded(pair[1]))
    assert await count_answered(pair[0], key, 5) + await count_answered(pair[1], key, 5) == 0
    await pair[1].call("PATCH", "/api/v1/tenants/team-x", json={"limits": {"requests_per_minute": 11}})
    last = await ask(pair[1], key)
    assert last.headers["x-ratelimit-remaining-tokens"] == str(1_000_000 - 10 * 12 - 50)


async def test_a_redis_that_hangs_holds_nobody_up_and_learns_what_it_has_missed(
    pair: list[GatewayWorld], redis_server: RedisServer
) -> None:
    key = await make_team(pair[0], requests_per_minute=10, concurrent_requests=8)
    for world in pair:
        await world.gateway.limiter._beat(world.gateway.limiter._shared)  # type: ignore[arg-type]
    assert await count_answered(pair[0], key, 1) == 1
    running = Streams(pair[0])
    await running.open(key)
    redis_server.freeze()
    try:
        assert await count_answered(pair[0], key, 6) == 3
        # so long that what was asked of it is of no use any more
        await asyncio.sleep(2)
    finally:
        redis_server.thaw()
    await until(lambda: not is_degraded(pair[0]) and not is_degraded(pair[1]))
    # what runs holds its place, and comes to its end by a Redis that never saw it begin
    assert await count_answered(pair[1], key, 7) + await count_answered(pair[1], key, 7) == 5
    await running.finish()
    assert await count_answered(pair[0], key, 3) == 0


async def test_a_redis_that_was_emptied_under_way_is_told_before_anything_is_granted(
    pair: list[GatewayWorld], redis_server: RedisServer
) -> None:
    key = await make_team(pair[0], requests_per_minute=10)
    assert await count_answered(pair[0], key, 4) == 4
    redis_server.kill()
    redis_server.start()
    assert await count_answered(pair[0], key, 12) == 6


async def test_a_redis_that_is_away_at_the_start_is_told_in_the_log_and_to_whoever_asks(
    database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    async with running_company(database_url, url, tmp_path, num_gateways=1) as (world,):
        location = Location(world.url, ADMIN_KEY)
        settings = {"redis_url": url, "database_url": database_url}
        said = await asyncio.to_thread(describe_redis, settings, location)
        beside_sqlite = await asyncio.to_thread(describe_redis, settings | {"database_url": "sqlite:///x"}, location)
        assert await asyncio.to_thread(describe_redis, {"redis_url": "memory://"}, location) is None
    assert said == "Redis does not answer: each gateway counts limits alone and asks the database for changes."
    assert beside_sqlite is not None
    assert "is not used" in beside_sqlite
    lines = [record for record in caplog.records if record.message.startswith("Redis does not answer")]
    assert [(line.levelname, line.name) for line in lines] == [("WARNING", "loraplex.quotas.limiter")]
