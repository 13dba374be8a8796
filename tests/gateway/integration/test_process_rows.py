"""The rows of an engine's process, looked at again and again: as if summed at once, and at the price of what is new."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import request, usage
from loraplex.usage.counted import Counted, add
from loraplex.usage.process_rows import ProcessRows

URL, OTHER = "http://127.0.0.1:1", "http://127.0.0.1:2"
BEGAN = datetime(2027, 1, 31, 10, 0, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return BEGAN + timedelta(minutes=minutes)


def build(request_id: str, began: float, **changes: Any) -> dict[str, Any]:
    """What both tables have of a request."""
    fields = {
        "request_id": request_id, "tenant_id": "t", "tenant": "team-x", "adapter_id": None, "adapter": None,
        "version": None, "digest": None, "base": "base", "key_id": "key_1", "route": "/v1/completions",
        "model": "base", "is_stream": False, "client_request_id": None, "tags": None, "created_at": at(began),
        "replica": URL,
    }  # fmt: skip
    return fields | changes


async def write(database: Database, request_id: str, began: float, settled: float, **changes: Any) -> None:
    costs = {"prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 5, "load_bytes": 64, "preemptions": 0}
    stages = dict.fromkeys(("queue_s", "load_s", "prefill_s", "decode_s"), 0.0)
    settlement = {"outcome": "ok", "error_code": None, "finish": "stop", "day": "2027-01-31"}
    values = build(request_id, began) | costs | stages | settlement | {"settled_at": at(settled)} | changes
    async with database.write() as connection:
        await connection.execute(usage.insert(), values)
        closing = sa.update(request).where(request.c.request_id == request_id).values(settled_at=at(settled))
        await connection.execute(closing)


async def open_(database: Database, request_id: str, began: float) -> None:
    async with database.write() as connection:
        values = build(request_id, began) | {"tokens_seen": 0, "settled_at": None, "gateway": None}
        await connection.execute(request.insert(), values)


ONE = Counted(1, 7, 2, 5, 64)


async def test_looks_again_and_again_are_one_look(database: Database) -> None:
    rng, rows = random.Random(3), ProcessRows(database)
    waiting: list[tuple[float, float, str]] = []
    done: dict[str, float] = {}
    now, number = 0.0, 0
    for _ in range(30):
        now += rng.choice([0.1, 2.0, 30.0, 90.0])
        for _ in range(rng.randrange(4)):
            began = rng.uniform(max(0.0, now - 60), now)
            # some are settled by another gateway, long after
            ends = began + rng.choice([0.5, 20.0, 59.0, 400.0])
            waiting.append((ends, began, f"req_{number}"))
            await open_(database, f"req_{number}", began)
            number += 1
        for entry in [entry for entry in waiting if entry[0] <= now]:
            waiting.remove(entry)
            ends, began, request_id = entry
            await write(database, request_id, began, max(ends, now - 1.0))
            done[request_id] = max(ends, now - 1.0)
        seen = await rows.read(URL, "first", BEGAN, at(now - 3))
        assert seen.counted == add([ONE] * len(done)), now
        assert seen.recent == {key: ONE for key, settled in done.items() if settled >= max(0.0, now - 3)}
    assert number > 30


@pytest.mark.parametrize(
    ("began", "settled", "changes", "is_own"),
    [
        (1, 2, {}, True),
        (1, 2, {"replica": OTHER}, False),
        (-5, -1, {}, False),
        # it waited elsewhere, and was sent here after that
        (-5, 3, {"queue_s": 60.0, "decode_s": 60.0}, True),
        # the process before it had begun with it
        (-5, 3, {"queue_s": 60.0, "decode_s": 360.0}, False),
        (-5, 3, {"outcome": "lost", "finish": None}, False),
        (-5, 3, {"finish": None}, False),
    ],
)
async def test_whose_a_row_is(
    database: Database, began: float, settled: float, changes: dict[str, Any], is_own: bool
) -> None:
    await write(database, "req_1", began, settled, **changes)
    for recent_at in (at(0), at(10)):
        seen = await ProcessRows(database).read(URL, "first", BEGAN, recent_at)
        assert seen.counted == (ONE if is_own else Counted())


async def test_processes_that_begin_at_different_times_have_each_their_own(database: Database) -> None:
    rows = ProcessRows(database)
    await write(database, "req_1", 1, 2)
    await write(database, "req_2", 1, 2, replica=OTHER)
    await write(database, "req_3", 50, 51)
    assert (await rows.read(URL, "first", BEGAN, at(60))).counted.requests == 2
    assert (await rows.read(OTHER, "other", at(-600), at(60))).counted.requests == 1
    assert (await rows.read(URL, "second", at(40), at(61))).counted.requests == 1
    await write(database, "req_4", 62, 63, outcome="lost", finish=None)
    seen = await rows.read(URL, "second", at(40.001), at(70))
    assert (seen.counted.requests, seen.num_lost) == (2, 1)
    assert (await rows.read(OTHER, "other", at(-600), at(70))).counted.requests == 1


@pytest.fixture
def statements(database: Database) -> Iterator[list[str]]:
    found: list[str] = []

    def note(*arguments: Any) -> None:
        found.append(arguments[2])

    sa.event.listen(sa.engine.Engine, "before_cursor_execute", note)
    yield found
    sa.event.remove(sa.engine.Engine, "before_cursor_execute", note)


async def test_a_look_costs_what_has_happened_since_the_last_one(database: Database, statements: list[str]) -> None:
    rows, day = ProcessRows(database), 60 * 24
    await write(database, "req_1", 5, 6)
    await write(database, "req_2", day, day + 1)
    statements.clear()
    assert (await rows.read(URL, "first", BEGAN, at(2 * day))).counted.requests == 2
    assert 48 < sum("FROM usage" in text for text in statements) < 60
    statements.clear()
    assert (await rows.read(URL, "first", BEGAN, at(2 * day + 1))).counted.requests == 2
    assert sum("FROM usage" in text for text in statements) <= 4
