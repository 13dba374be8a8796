"""Statistics on both databases: pieces of several gateways and of one before and after a restart are one."""

from __future__ import annotations

import asyncio
import math
import random
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from gateway_world import until
from loraplex.db.database import Database
from loraplex.db.tables import stats_piece
from loraplex.errors import UnavailableError
from loraplex.stats import growing
from loraplex.stats import recorder as module
from loraplex.stats.piece import OTHER, EngineSample
from loraplex.stats.recorder import Ended, StatsRecorder
from loraplex.stats.report import StatsQuery, StatsReport, read_stats

pytestmark = pytest.mark.usefixtures("still_clock")
TEAM_X, TEAM_Y = ("t-x", "team-x"), ("t-y", "team-y")


class Place(msgspec.Struct, frozen=True):
    name: str


R1, R2 = Place("main-aaaaaa"), Place("main-bbbbbb")
EVERYTHING = StatsQuery(window_s=3600)


def serve(
    recorder: StatsRecorder,
    tenant: tuple[str, str] = TEAM_X,
    adapter: str | None = "default",
    replica: Place = R1,
    *,
    base: str = "tiny",
    gaps: tuple[float, ...] = (),
    waited_s: float = 0.0,
    **changes: Any,
) -> None:
    """One request from its arrival to its end."""
    began_at = time.perf_counter() - waited_s
    watch = recorder.watch(base, tenant, adapter, began_at)
    arrived_at = began_at + 0.5
    for gap in (0.0, *gaps) if gaps else ():
        arrived_at += gap
        watch.note_arrival(replica, arrived_at)
    watch.end(
        replica, Ended(**{"outcome": "ok", "prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 5, **changes})
    )


def sample(waiting: int = 0, **changes: int) -> EngineSample:
    return EngineSample(kv_usage=0.5, waiting=waiting, running=1, **changes)


async def ask(database: Database, *recorders: StatsRecorder, **query: Any) -> StatsReport:
    fresh = [piece for recorder in recorders for piece in recorder.fresh()]
    return await read_stats(database, StatsQuery(**{"window_s": 3600, **query}), fresh)


async def test_what_was_seen_is_told_before_it_is_written_and_after(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    serve(recorder, gaps=(0.02, 0.02, 0.04), waited_s=2.0, queue_s=0.25, prefill_s=0.125, preemptions=3)
    recorder.sample("main-aaaaaa", "tiny", sample(4))
    before = await ask(database, recorder)
    await recorder.flush()
    after = await ask(database, recorder)
    for report in (before, after):
        (row,) = report.rows
        assert row == msgspec.structs.replace(report.total, base="tiny")
        assert (row.requests, row.requests_ok, row.preemptions) == (1, 1, 3)
        assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (7, 2, 5)
        assert row.queue_s.p50 == pytest.approx(0.25, rel=0.01)
        assert row.prefill_s.p99 == pytest.approx(0.125, rel=0.01)
        assert row.time_to_first_token_s.p95 == pytest.approx(0.5, rel=0.01)
        assert 2.0 <= row.request_s.max < 3.0
        assert (row.inter_token_s.count, row.inter_token_s.max) == (3, pytest.approx(0.04))
        assert row.inter_token_s.p50 == pytest.approx(0.02, rel=0.01)
        assert (row.prompt_len.max, row.completion_len.max, row.request_len.max) == (7, 5, 12)
        assert row.engines is not None
        assert (row.engines.waiting_now, row.engines.kv_usage.p50, row.engines.replicas) == (4, 0.5, 1)
    assert before.rows == after.rows


async def test_gateways_and_a_restart_in_between_are_one(database: Database) -> None:
    rng = random.Random(7)
    waits = [rng.lognormvariate(-2, 1) for _ in range(3000)]
    first, again, other = (StatsRecorder(database, name) for name in ("gw_1", "gw_2", "gw_3"))
    for number, wait in enumerate(waits):
        if number == 1000:
            # the first ends and is started anew
            await first.flush(is_last=True)
        recorder = (other, again if number >= 1000 else first)[number % 2]
        serve(recorder, replica=(R1, R2)[number % 2], queue_s=wait)
        if number == 2000:
            await other.flush()
    report = await ask(database, again, other)
    exact = sorted(waits)
    for q, found in (
        (0.5, report.total.queue_s.p50),
        (0.95, report.total.queue_s.p95),
        (0.99, report.total.queue_s.p99),
    ):
        assert found == pytest.approx(exact[math.ceil(q * len(exact)) - 1], rel=0.0101)
    assert report.total.requests == report.total.queue_s.count == 3000
    assert {row.replica: row.requests for row in (await ask(database, again, other, by="replica")).rows} == {
        R1.name: 1500,
        R2.name: 1500,
    }


async def test_rows_are_by_what_was_asked(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    for _ in range(3):
        serve(recorder, TEAM_X, "default", R1)
    for _ in range(2):
        serve(recorder, TEAM_Y, "default", R2)
    serve(recorder, TEAM_Y, None, R2)
    serve(recorder, TEAM_Y, "other-base", R2, base="big")

    async def keys(**query: Any) -> list[tuple[Any, ...]]:
        rows = (await ask(database, recorder, **query)).rows
        return [(row.base, row.tenant, row.adapter, row.replica, row.requests) for row in rows]

    assert await keys(by="base") == [("tiny", None, None, None, 6), ("big", None, None, None, 1)]
    assert await keys(by="tenant") == [(None, "team-y", None, None, 4), (None, "team-x", None, None, 3)]
    assert await keys(by="adapter") == [
        ("tiny", "team-x", "default", None, 3),
        ("tiny", "team-y", "default", None, 2),
        ("big", "team-y", "other-base", None, 1),
        ("tiny", "team-y", None, None, 1),
    ]
    assert await keys(by="replica") == [
        ("tiny", None, None, R1.name, 3),
        ("tiny", None, None, R2.name, 3),
        ("big", None, None, R2.name, 1),
    ]
    assert await keys(by="adapter", tenant_id="t-y", base="tiny", adapter="default") == [
        ("tiny", "team-y", "default", None, 2)
    ]
    assert await keys(by="tenant", replica=R1.name) == [(None, "team-x", None, None, 3)]


async def test_one_tenant_sees_nothing_of_others_nor_of_engines(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    serve(recorder, TEAM_X, queue_s=1.0)
    serve(recorder, TEAM_Y, queue_s=9.0)
    # a tenant that had the name before
    serve(recorder, ("t-x-old", "team-x"), queue_s=5.0)
    recorder.sample(R1.name, "tiny", sample(4))
    for by in ("base", "tenant", "adapter", "replica"):
        report = await ask(database, recorder, by=by, tenant_id="t-x", has_series=True)
        (row,) = report.rows
        assert (row.requests, row.queue_s.max, row.engines) == (1, 1.0, None)
        assert (report.total.requests, report.total.queue_s.max, report.total.engines) == (1, 1.0, None)
        assert sum(point.requests for point in report.series) == 1
        assert all(point.engines is None for point in report.series)


async def test_what_there_is_no_room_for_is_counted_as_other(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "MAX_KEYS", 3)
    recorder = StatsRecorder(database, "gw_1")
    for number in range(10):
        serve(recorder, (f"t-{number}", f"team-{number}"), gaps=(0.01,), queue_s=1.0)
    report = await ask(database, recorder, by="tenant")
    assert {row.tenant: (row.requests, row.inter_token_s.count) for row in report.rows} == {
        OTHER: (7, 7),
        "team-0": (1, 1),
        "team-1": (1, 1),
        "team-2": (1, 1),
    }
    assert report.total.requests == 10
    assert (await ask(database, recorder, tenant_id="t-9")).rows == []


async def test_an_engine_that_all_gateways_hear_is_counted_once(database: Database) -> None:
    recorders = [StatsRecorder(database, name) for name in ("gw_1", "gw_2")]
    for count in (10, 25, 60):
        for recorder in recorders:
            recorder.sample(R1.name, "tiny", sample(3, preemptions=count, prefix_queries=10 * count, prefix_hits=count))
    report = await ask(database, *recorders)
    assert report.total.engines is not None
    assert report.total.engines.preemptions == 50
    assert (report.total.engines.prefix_queries, report.total.engines.prefix_hits) == (500, 50)
    assert (report.total.engines.waiting.p99, report.total.engines.waiting_now) == (3.0, 3)


async def test_an_engine_that_began_anew_began_at_zero(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    for count in (100, 110, 4):
        recorder.sample(R1.name, "tiny", sample(loads=count))
    # what grows from one piece to the next is in the later one
    await recorder.flush()
    recorder.sample(R1.name, "tiny", sample(loads=5, evictions=2))
    report = await ask(database, recorder)
    assert report.total.engines is not None
    assert (report.total.engines.loads, report.total.engines.evictions) == (15, 2)


async def test_queues_of_engines_add_up_and_idle_engines_are_rows(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = StatsRecorder(database, "gw_1")
    recorder.sample(R1.name, "tiny", sample(4, slots=8, slots_used=3))
    recorder.sample(R2.name, "tiny", sample(1, slots=8, slots_used=8))
    recorder.sample("big-cccccc", "big", sample(0))
    report = await ask(database, recorder, by="base")
    assert [row.base for row in report.rows] == ["big", "tiny"]
    tiny = report.rows[1].engines
    assert tiny is not None
    assert (tiny.replicas, tiny.waiting_now, tiny.running_now, tiny.slots, tiny.slots_used) == (2, 5, 2, 16, 11)
    assert tiny.waiting.max == 5.0
    by_replica = (await ask(database, recorder, by="replica")).rows
    assert [(row.replica, row.engines and row.engines.waiting_now) for row in by_replica] == [
        ("big-cccccc", 0),
        (R1.name, 4),
        (R2.name, 1),
    ]


async def test_series_tells_when(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000.0
    for at, num in ((now - 95, 2), (now - 30, 3), (now - 1, 1)):
        monkeypatch.setattr(module.time, "time", lambda at=at: at)
        recorder = StatsRecorder(database, f"gw_{num}")
        recorder.sample(R1.name, "tiny", sample(num))
        for _ in range(num):
            serve(recorder, completion_tokens=num)
        await recorder.flush()
    report = await read_stats(database, StatsQuery(window_s=600, has_series=True), now=now)
    assert (report.step_s, len(report.series)) == (10, 61)
    assert report.start == datetime.fromtimestamp(now - 600, UTC)
    shown = {(point.at.timestamp() - now): point for point in report.series if point.requests}
    assert {at: (point.requests, point.completion_tokens) for at, point in shown.items()} == {
        -100: (2, 4),
        -30: (3, 9),
        -10: (1, 1),
    }
    assert [point.engines and point.engines.waiting_now for point in shown.values()] == [2, 3, 1]
    assert report.series[0].engines is None
    last_minute = await read_stats(database, StatsQuery(window_s=60, has_series=True), now=now)
    assert (last_minute.total.requests, len(last_minute.series)) == (4, 7)
    assert (await read_stats(database, EVERYTHING, now=now)).step_s == 60
    assert (await read_stats(database, EVERYTHING, now=now + 3700)).total.requests == 0


async def read_hour(database: Database, now: float, *recorders: StatsRecorder) -> tuple[Any, ...]:
    fresh = [piece for recorder in recorders for piece in recorder.fresh()]
    report = await read_stats(database, StatsQuery(window_s=3600, by="adapter", has_series=True), fresh, now=now)
    engines = report.total.engines
    assert engines is not None
    points = [(point.requests, point.engines and point.engines.preemptions) for point in report.series]
    return report.rows, engines.waiting, engines.preemptions, [point for point in points if any(point)]


async def test_an_hour_is_read_by_the_minute_and_is_the_same_without(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_at = 1_800_000_000.0
    clock = began_at
    monkeypatch.setattr(module.time, "time", lambda: clock)
    recorder = StatsRecorder(database, "gw_1")
    for number in range(15):
        # two minutes and a half; waits are told, times that this test takes are not
        serve(recorder, TEAM_X if number % 2 else TEAM_Y, completion_tokens=0)
        recorder.sample(R1.name, "tiny", sample(number, preemptions=10 * number))
        clock += 10
        await recorder.flush()
    rows, waiting, preemptions, points = await read_hour(database, clock, recorder)
    assert sorted((row.tenant, row.requests) for row in rows) == [("team-x", 7), ("team-y", 8)]
    assert (waiting.count, waiting.max, preemptions) == (15 * 4, 14, 140)
    assert points == [(6, 50), (6, 60), (3, 30)]
    spans: list[int] = []
    for span_s in (10, 60):
        async with database.write() as connection:
            chosen = stats_piece.c.span_s == span_s
            spans.append(len((await connection.execute(sa.select(stats_piece.c.began_at).where(chosen))).all()))
            in_whole_minutes = stats_piece.c.began_at < datetime.fromtimestamp(began_at + 120, UTC)
            kept = (await connection.execute(sa.select(stats_piece).where(chosen, in_whole_minutes))).mappings().all()
            await connection.execute(sa.delete(stats_piece).where(chosen, in_whole_minutes))
        assert await read_hour(database, clock, recorder) == (rows, waiting, preemptions, points)
        async with database.write() as connection:
            await connection.execute(sa.insert(stats_piece), [dict(row) for row in kept])
    assert spans == [15, 2]


async def test_what_is_written_while_it_is_read_counts_once(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    serve(recorder)
    fresh = recorder.fresh()
    await recorder.stop()
    for window_s in (600, 3600):
        report = await read_stats(database, StatsQuery(window_s=window_s), fresh)
        assert report.total.requests == 1


async def test_requests_that_failed_count_and_have_no_times(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    serve(recorder, outcome="error", completion_tokens=0, prompt_tokens=0, queue_s=60.0)
    serve(recorder, outcome="cancelled", gaps=(0.01,), completion_tokens=2, queue_s=1.0)
    (row,) = (await ask(database, recorder)).rows
    assert (row.requests, row.requests_ok, row.requests_error, row.requests_cancelled) == (2, 0, 1, 1)
    assert (row.queue_s.count, row.queue_s.max) == (1, 1.0)


async def test_tokens_that_came_together_have_no_gap(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    watch = recorder.watch("tiny", TEAM_X, None, time.perf_counter())
    for at in (1.0, 1.0, 1.5, 1.5, 1.5, 2.0):
        watch.note_arrival(R1, at)
    (row,) = (await ask(database, recorder)).rows
    assert (row.inter_token_s.count, row.inter_token_s.mean) == (2, 0.5)


async def test_a_request_goes_on_from_one_piece_into_the_next(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    watch = recorder.watch("tiny", TEAM_X, None, time.perf_counter())
    for at in (1.0, 1.5, 2.0):
        watch.note_arrival(R1, at)
        await recorder.flush()
    watch.end(R1, Ended(outcome="ok", completion_tokens=3))
    report = await ask(database, recorder)
    assert (report.total.requests, report.total.inter_token_s.count) == (1, 2)


async def test_old_pieces_go(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = StatsRecorder(database, "gw_1"), StatsRecorder(database, "gw_2")
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now - 7300)
    old = StatsRecorder(database, "gw_1")
    serve(old)
    await old.flush()
    monkeypatch.undo()
    serve(new)
    await new.flush()
    await new._sweep()
    async with database.read() as connection:
        assert (await connection.execute(sa.select(stats_piece.c.gateway).distinct())).scalars().all() == ["gw_2"]


async def test_pieces_wait_while_the_database_is_away(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StatsRecorder(database, "gw_1")
    transact = database.transact

    async def refuse(_: Any) -> None:
        raise UnavailableError

    monkeypatch.setattr(database, "transact", refuse)
    for _ in range(3):
        serve(recorder)
        with pytest.raises(UnavailableError):
            await recorder.flush()
    assert (await ask(database, recorder)).total.requests == 3
    monkeypatch.setattr(database, "transact", transact)
    await recorder.flush()
    assert (await ask(database)).total.requests == 3


async def test_only_a_few_minutes_are_kept_without_a_database(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = StatsRecorder(database, "gw_1")

    async def refuse(_: Any) -> None:
        raise UnavailableError

    monkeypatch.setattr(database, "transact", refuse)
    for _ in range(100):
        serve(recorder)
        with pytest.raises(UnavailableError):
            await recorder.flush()
    assert 20 < len(recorder.fresh()) <= module._MAX_UNWRITTEN + 1


async def test_pieces_are_written_as_they_end(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    # just before a piece ends, for as long as this takes
    monkeypatch.setattr(module.time, "time", lambda: 1_800_000_009.95)
    recorder = StatsRecorder(database, "gw_1")
    work = asyncio.create_task(recorder.run())
    serve(recorder)

    async def is_written() -> bool:
        return (await ask(database)).total.requests == 1

    await until(is_written)
    work.cancel()


async def test_a_piece_that_another_release_wrote_is_passed_over(database: Database) -> None:
    recorder = StatsRecorder(database, "gw_1")
    serve(recorder)
    now = datetime.now(UTC)
    async with database.write() as connection:
        values = {"gateway": "gw_9", "span_s": 10, "began_at": now, "minute": now, "content": b"\xffsomething else"}
        await connection.execute(sa.insert(stats_piece).values(values))
    assert (await ask(database, recorder)).total.requests == 1
