"""`kill -9` of Redis, Postgres, an engine and a gateway in turn under load: no hang, no wrong answer, nothing lost."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from chaos_world import CUT, TENANTS, Answer, ChaosWorld, count_ends
from conftest import skip_or_fail, upgrade_to_head
from databases import EmbeddedPostgres, Unavailable
from gateway_world import ADMIN_KEY
from loraplex.db.database import Database
from loraplex.db.tables import request, usage
from redis_world import RedisServer, RedisUnavailable, running_redis
from scripted_engine import echo

SETTLED_S = 30.0
"""Longest time until what a dead gateway left open is settled by the other one, which it does after six seconds."""


@dataclass(frozen=True)
class Victim:
    """What is killed, and how requests may end that run while it is away; `is_cut_at` limits cuts to one gateway."""

    name: str
    kill: Callable[[], None]
    start: Callable[[], None]
    ends: frozenset[str]
    is_cut_at: str = ""


@dataclass
class Outage:
    """When a victim was away, from its kill until it served again and others knew."""

    victim: Victim
    began_at: float
    ended_at: float


@pytest.fixture
def postgres() -> Iterator[EmbeddedPostgres]:
    with tempfile.TemporaryDirectory(prefix="lpx-pg-") as folder:
        try:
            server = EmbeddedPostgres(Path(folder))
            server.start()
        except Unavailable as reason:
            skip_or_fail("postgres", str(reason))
        yield server
        server.stop()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    try:
        with running_redis() as server:
            yield server
    except RedisUnavailable as reason:
        skip_or_fail("redis", str(reason))


@pytest.fixture
async def world(postgres: EmbeddedPostgres, redis: RedisServer, tmp_path: Path) -> AsyncIterator[ChaosWorld]:
    url = postgres.url.replace("postgresql://", "postgresql+psycopg://")
    upgrade_to_head(url)
    world = ChaosWorld(tmp_path, postgres, redis, url)
    try:
        await asyncio.to_thread(world.start)
        await world.prepare()
        yield world
    finally:
        world.stop()


def list_victims(world: ChaosWorld) -> list[Victim]:
    engine, gateway = world.engines[0], world.gateways[0]
    return [
        Victim("redis", world.redis.kill, world.redis.start, frozenset()),
        Victim("postgres", world.postgres.kill, world.postgres.start, frozenset({"unavailable"})),
        Victim("engine", engine.kill, engine.start, frozenset({"replica_failed"})),
        # one that has just begun may not have heard of its engines yet where the machine is busy
        Victim("gateway", gateway.kill, gateway.start, frozenset({CUT, "no_replica"}), gateway.url),
    ]


@pytest.mark.endure
async def test_each_part_may_die_under_load(world: ChaosWorld, long: Callable[[float, float], float]) -> None:
    outages = []
    num_rounds, away_s, calm_s = int(long(1, 10)), long(1.0, 4.0), long(1.0, 5.0)
    async with world.load():
        for _ in range(num_rounds):
            for victim in list_victims(world):
                await asyncio.sleep(calm_s)
                began_at = time.monotonic()
                await asyncio.to_thread(victim.kill)
                await asyncio.sleep(away_s)
                await asyncio.to_thread(victim.start)
                # a gateway looks at its engines and at its database once a second
                await asyncio.sleep(1.5)
                outages.append(Outage(victim, began_at, time.monotonic()))
        await asyncio.sleep(calm_s)
    await wait_until_settled(world)
    check_answers(world, outages)
    await check_changes(world)
    await check_usage(world)
    await check_limits(world)
    assert world.books.faults == []
    tell(world, outages)


async def wait_until_settled(world: ChaosWorld) -> None:
    deadline = time.monotonic() + SETTLED_S
    while rows := [row for row in await read(world, request) if row["settled_at"] is None]:
        assert time.monotonic() < deadline, f"never settled: {rows}"
        await asyncio.sleep(0.5)


async def read(world: ChaosWorld, table: sa.Table) -> list[dict[str, Any]]:
    database = Database(world.database_url)
    try:
        async with database.read() as connection:
            return [dict(row) for row in (await connection.execute(sa.select(table))).mappings()]
    finally:
        await database.close()


def check_answers(world: ChaosWorld, outages: list[Outage]) -> None:
    """Every answer is the right one as far as it goes, and only what ran during an outage ends as it may then."""
    for answer in world.books.answers:
        running = [outage for outage in outages if is_beside(answer, outage)]
        allowed = {"ok"}.union(*(outage.victim.ends for outage in running))
        assert answer.end in allowed, (answer, [outage.victim.name for outage in running])
        if answer.end == CUT:
            assert answer.gateway in {outage.victim.is_cut_at for outage in running}, answer
        if answer.text or answer.end == "ok":
            assert answer.digest in allowed_digests(world, answer), answer
            texts = list(echo(answer.digest or "", answer.word, answer.count))
            expected = "".join(texts if answer.end == "ok" else texts[: answer.num_read])
            assert answer.text == expected, answer
    ends = [
        end for at, end in world.books.management_ends if not any(o.began_at - 5 < at < o.ended_at for o in outages)
    ]
    assert set(ends) <= {"ok"}, ends


def is_beside(answer: Answer, outage: Outage) -> bool:
    return answer.began_at < outage.ended_at and outage.began_at < answer.ended_at


def allowed_digests(world: ChaosWorld, answer: Answer) -> set[str]:
    numbers = world.books.allowed(answer.began_at, answer.told_at) if answer.tenant == TENANTS[0] else {1}
    return {world.digests[answer.tenant][number] for number in numbers}


async def check_changes(world: ChaosWorld) -> None:
    """All that was acknowledged is there: the moves of the alias in their order, and every key, at both gateways."""
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with world.client() as client:
        for gateway in world.gateways:
            path = f"{gateway.url}/api/v1/tenants/{TENANTS[0]}/adapters/default/aliases/live/history"
            told: dict[int, int] = {}
            cursor = ""
            while True:
                page = (
                    await client.get(
                        path, params={"limit": 100, **({"cursor": cursor} if cursor else {})}, headers=admin
                    )
                ).json()
                told |= {item["revision"]: item["targets"][0]["version"] for item in page["data"]}
                cursor = page.get("next_cursor")
                if not cursor:
                    break
            assert sorted(told) == list(range(1, len(told) + 1))
            for change in world.books.changes:
                assert change.revision is None or told[change.revision] == change.number, change
            for tenant, keys in world.books.keys.items():
                for key in keys:
                    answer = await client.get(
                        f"{gateway.url}/v1/models/{tenant}", headers={"authorization": f"Bearer {key}"}
                    )
                    assert answer.status_code == 200, answer.text


async def check_usage(world: ChaosWorld) -> None:
    """One row for each request that ran: exact where a client read the whole answer, else from what it read to all."""
    rows = {row["request_id"]: row for row in await read(world, usage)}
    opened = {row["request_id"] for row in await read(world, request)}
    assert rows.keys() == opened
    known = {answer.request_id: answer for answer in world.books.answers if answer.request_id}
    for request_id, answer in known.items():
        row = rows.get(request_id)
        if answer.end == "ok":
            assert row is not None, answer
            assert (row["outcome"], row["completion_tokens"], row["digest"]) == ("ok", answer.count, answer.digest), row
        elif row is None:
            # refused before it was dispatched
            assert answer.text == "", answer
        else:
            assert answer.num_read <= row["completion_tokens"] or row["outcome"] == "lost", (answer, row)
            assert row["completion_tokens"] <= answer.count, (answer, row)
    cut = [answer for answer in world.books.answers if not answer.request_id]
    assert len(rows.keys() - known.keys()) <= len(cut)


async def check_limits(world: ChaosWorld) -> None:
    """The gateways count together again, and tell each other of changes."""
    async with world.client() as client:
        for gateway in world.gateways:
            metrics = (await client.get(f"{gateway.url}/metrics")).text
            assert "loraplex_limits_degraded 0.0" in metrics
            assert "loraplex_redis_up 1.0" in metrics


def tell(world: ChaosWorld, outages: list[Outage]) -> None:
    answers = world.books.answers
    print(f"{len(answers)} requests, {len(world.books.changes)} moves, {sum(map(len, world.books.keys.values()))} keys")
    for name in ("nothing", *dict.fromkeys(outage.victim.name for outage in outages)):
        beside = [outage for outage in outages if outage.victim.name == name]
        found = [
            answer
            for answer in answers
            if any(is_beside(answer, outage) for outage in (beside or outages)) == bool(beside)
        ]
        longest_s = max((answer.ended_at - answer.began_at for answer in found), default=0.0)
        print(f"beside {name}: {count_ends(found)}, the longest {longest_s:.2f} s")
