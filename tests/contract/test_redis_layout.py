"""Gateways of releases N and N+1 on one Redis: what the older one stored counts on for the newer one, and back.

`recorded/redis-1.json` is what release 0.1.0 stores after `play`; it never changes. A release that has to store
something else uses other keys, so that neither reads what it does not know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from loraplex.db.epoch_bus import Epochs, RedisBus
from loraplex.gateway.tries import RedisTries
from loraplex.quotas.quota import Charge, Hold, Quota, Refusal, Stamp, Subject
from loraplex.quotas.redis_meter import RedisMeter
from redis_world import RedisServer

RECORDED = Path(__file__).with_name("recorded") / "redis-1.json"
NAME, GATEWAY = "recorded", "gw-1"
T0_MS = 1_796_040_000_400
TENANT, KEY = Subject("tenant", "t1"), Subject("key", "k1")
REQUESTS = Quota(KEY, "requests_per_minute", 10)
TOKENS = Quota(TENANT, "tokens_per_minute", 1_000)
PLACES = Quota(TENANT, "concurrent_requests", 2)
DAY = Quota(TENANT, "tokens_per_day", 500)
MONTH = Quota(TENANT, "tokens_per_month", 100_000)
ALL = (REQUESTS, TOKENS, PLACES, DAY, MONTH)
READERS: dict[str, Callable[[Any, str], Awaitable[Any]]] = {
    "hash": lambda redis, key: redis.hgetall(key),
    "list": lambda redis, key: redis.lrange(key, 0, -1),
    "set": lambda redis, key: redis.sort(key, alpha=True),
    "string": lambda redis, key: redis.get(key),
}
WRITERS: dict[str, Callable[[Any, str, Any], Awaitable[Any]]] = {
    "hash": lambda redis, key, value: redis.hset(key, mapping=value),
    "list": lambda redis, key, value: redis.rpush(key, *value),
    "set": lambda redis, key, value: redis.sadd(key, *value),
    "string": lambda redis, key, value: redis.set(key, value),
}


class Rig:
    """A meter, a bus and tries of one release."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.meter = RedisMeter(url, NAME, T0_MS)
        self.bus = RedisBus(url, NAME)
        self.redis: Any = Redis.from_url(url, decode_responses=True)
        self.tries = RedisTries(self.redis, NAME, "login")

    async def greet(self) -> None:
        _, birth = await self.meter.beat(GATEWAY, 600_000)
        await self.meter.tell(birth, GATEWAY, {})

    async def play(self) -> Hold:
        """A few requests, settled at other amounts than were reserved; one is left open."""
        await self.greet()
        await self.meter.seed(DAY, 100, 20, 0)
        await self.meter.seed(MONTH, 5_000)
        first = await self.take(300, "lease-a")
        self.meter.now_ms = T0_MS + 2_000
        await self.meter.settle(first, [1, 260, 1, 520, 260])
        self.meter.now_ms = T0_MS + 3_000
        await self.meter.tell(self.meter.birth, GATEWAY + "-late", {TOKENS.name: {T0_MS // 1000: 40}})
        held = await self.take(50, "lease-b", (REQUESTS, TOKENS, PLACES, MONTH))
        await self.bus.publish(registry=7, gateway=9)
        await self.tries.note(["from:192.0.2.0/24"], 5, 1_796_040_000.25)
        await self.tries.note(["from:192.0.2.0/24"], 5, 1_796_040_001.5)
        return held

    async def take(self, num_tokens: int, lease: str, quotas: tuple[Quota, ...] = ALL) -> Hold:
        charges = tuple(Charge(quota, num_tokens if quota.is_of_tokens else 1) for quota in quotas)
        outcome = await self.meter.reserve(charges, lease)
        assert isinstance(outcome, Hold), outcome
        return outcome

    async def go_on(self, held: Hold) -> list[Any]:
        """What the gateways do with what `play` left: all that they answer."""
        await self.meter.renew([(PLACES, held.lease)])
        said: list[Any] = [await self.meter.look(ALL)]
        refused = await self.meter.reserve((Charge(DAY, 1),), "lease-c")
        assert isinstance(refused, Refusal), refused
        said.append(refused)
        said.append(await self.meter.settle(held, [1, 90, 1, 90]))
        said.append(await self.meter.look(ALL))
        said.append(await self.bus.read() or await self.bus.read())
        said.append(sorted(await self.tries.find(["from:192.0.2.0/24"], 2)))
        return said

    async def dump(self) -> dict[str, Any]:
        """All keys, each with its kind and what it holds."""
        found: dict[str, Any] = {}
        async for key in self.redis.scan_iter("*"):
            kind = await self.redis.type(key)
            assert await self.redis.pttl(key) > 0 or key.endswith(":epochs"), f"{key} stays for ever"
            found[key] = [kind, await READERS[kind](self.redis, key)]
        return dict(sorted(found.items()))

    async def restore(self, stored: dict[str, Any]) -> None:
        """What another release stored."""
        for key, (kind, value) in stored.items():
            await WRITERS[kind](self.redis, key, value)

    async def close(self) -> None:
        await asyncio.gather(self.meter.close(), self.bus.close(), self.redis.aclose())


@pytest.fixture
async def rig(redis_server: RedisServer) -> AsyncIterator[Rig]:
    rig = Rig(redis_server.url)
    yield rig
    await rig.close()


def read_recorded() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return stored


def without_clock(stored: dict[str, Any]) -> dict[str, Any]:
    """Births are instants of the server's own clock."""
    return {
        key: [kind, dict(value, begun="") if "begun" in value else "" if key.endswith(":birth") else value]
        for key, (kind, value) in stored.items()
    }


async def test_this_release_stores_what_an_older_one_reads(rig: Rig) -> None:
    await rig.play()
    assert without_clock(await rig.dump()) == without_clock(read_recorded())


async def test_what_an_older_release_stored_counts_on(rig: Rig) -> None:
    held = await rig.play()
    expected = await rig.go_on(held)
    await rig.redis.flushdb()
    stored = read_recorded()
    await rig.restore(stored)
    _, rig.meter.birth = await rig.meter.beat(GATEWAY, 600_000)
    assert rig.meter.birth == stored[f"loraplex:{NAME}:birth"][1]
    begun = [stored.get(f"loraplex:{NAME}:{charge.quota.name}", ["", {}])[1].get("begun", 0) for charge in held.charges]
    stamps = tuple(Stamp(stamp.period, int(at)) for stamp, at in zip(held.stamps, begun, strict=True))
    rig.meter.now_ms = T0_MS + 3_000
    assert await rig.go_on(msgspec.structs.replace(held, stamps=stamps)) == expected
    before, after, epochs = expected[0], expected[3], expected[4]
    assert [standing.remaining for standing in before] == [8, 650, 1, 0, 94_690]
    assert [standing.remaining for standing in after] == [8, 610, 2, 0, 94_650]
    assert epochs == Epochs(registry=7, gateway=9)
