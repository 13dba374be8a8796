"""Usage rows held against an engine's own counters, on both databases: exact while requests run, and not forgiving."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from loraplex.db.database import Database
from loraplex.usage.counted import Counted
from loraplex.usage.ledger import Ledger
from loraplex.usage.reconciliation import Mismatch, Reconciler
from loraplex.usage.record import Done, RequestRow, Settlement
from loraplex_engine.server.request_log import add_done
from loraplex_engine.wire.done import RequestDone, UsageReport, UsageTotals

URL = "http://127.0.0.1:1"
OTHER_URL = "http://127.0.0.1:2"


class CountingEngine:
    """Counts what ends at it; `on_read` happens just before it is asked."""

    def __init__(self) -> None:
        self.totals = UsageTotals("first", 60.0)
        self.finished: list[RequestDone] = []
        self.on_read: list[Callable[[], Awaitable[None]]] = []

    def end(self, request_id: str, *, tokens: int = 5, finish: str = "stop") -> RequestDone:
        is_free = not tokens and finish == "error"
        costs = (0, 0, 0) if is_free else (7, 2, tokens)
        done = RequestDone(request_id, *costs, 0.1, 0.2, 0.3, 0.4, 0, finish, "base", load_bytes=0 if is_free else 64)
        self.totals = add_done(self.totals, done, 0)
        self.finished.append(done)
        return done

    def restart(self, name: str = "second") -> None:
        self.totals, self.finished = UsageTotals(name, 0.0), []

    async def read(self, within_s: float) -> UsageReport:
        if self.on_read:
            await self.on_read.pop(0)()
        return UsageReport(self.totals, list(self.finished) if within_s else [])


async def nothing() -> None:
    """Nothing happens."""


def row(request_id: str, **changes: Any) -> RequestRow:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": "t-1",
        "tenant": "team-x",
        "adapter_id": None,
        "adapter": None,
        "version": None,
        "digest": None,
        "base": "base",
        "key_id": "key_1",
        "route": "/v1/completions",
        "model": "base",
        "is_stream": True,
        "client_request_id": None,
        "tags": None,
        "created_at": datetime.now(UTC),
        "replica": URL,
    }
    return RequestRow(**{**fields, **changes})


def settlement(done: RequestDone, outcome: str = "ok") -> Settlement:
    fields = msgspec.structs.asdict(done)
    return Settlement(outcome=outcome, done=Done(**{name: fields[name] for name in Done.__struct_fields__}))


async def answer(ledger: Ledger, engine: CountingEngine, request_id: str, **options: Any) -> None:
    await ledger.open(row(request_id))
    await ledger.settle(row(request_id), settlement(engine.end(request_id, **options)))


async def test_rows_are_what_the_engine_counted(database: Database, ledger: Ledger) -> None:
    engine = CountingEngine()
    for number in range(5):
        await answer(ledger, engine, f"req_{number}", tokens=number + 1)
    # neither refused requests, nor those of others, nor of an earlier process are this one's
    await ledger.settle(row("req_refused"), Settlement(outcome="error", code="queue_full"))
    # it refused one that another engine answered then
    engine.end("req_other", tokens=0, finish="error")
    elsewhere = settlement(CountingEngine().end("req_other"))
    await ledger.settle(row("req_other", replica=OTHER_URL), elsewhere)
    long = settlement(msgspec.structs.replace(CountingEngine().end("req_before"), decode_s=90.0))
    await ledger.settle(row("req_before", created_at=datetime.now(UTC) - timedelta(minutes=2)), long)
    # another engine had it before this one began, and failed it
    moved = settlement(engine.end("req_moved", tokens=2))
    await ledger.settle(row("req_moved", created_at=datetime.now(UTC) - timedelta(seconds=90)), moved)
    found = await Reconciler(database).reconcile(URL, engine.read)
    assert found.is_exact
    assert found.engine == found.usage == Counted(6, 42, 12, 17, 384)
    assert (found.pending, found.num_lost) == (Counted(), 0)
    assert abs(found.began_at - datetime.now(UTC) + timedelta(minutes=1)) < timedelta(seconds=10)


async def test_what_has_ended_and_is_not_written_yet_is_on_its_way(database: Database, ledger: Ledger) -> None:
    engine = CountingEngine()
    await answer(ledger, engine, "req_settled")
    await ledger.open(row("req_open"))
    engine.end("req_open", tokens=3)
    await ledger.open(row("req_between"))

    async def end_between() -> None:
        await ledger.settle(row("req_between"), settlement(engine.end("req_between", tokens=4)))

    engine.on_read = [nothing, end_between]
    found = await Reconciler(database).reconcile(URL, engine.read)
    assert (found.usage.completion_tokens, found.pending, found.is_exact) == (5, Counted(2, 14, 4, 7, 128), True)


async def test_difference_is_told_and_its_requests_are_named(database: Database, ledger: Ledger) -> None:
    engine = CountingEngine()
    await answer(ledger, engine, "req_good")
    engine.end("req_unknown", tokens=2)
    await ledger.open(row("req_less"))
    less = msgspec.structs.replace(engine.end("req_less", tokens=9), completion_tokens=6)
    await ledger.settle(row("req_less"), settlement(less))
    await ledger.open(row("req_lost"))
    await ledger.settle(row("req_lost"), Settlement(outcome="lost", done=Done(completion_tokens=1)))
    found = await Reconciler(database).reconcile(URL, engine.read)
    assert not found.is_exact
    # one request too few, and one too many, that no engine vouches for
    assert found.difference == Counted(0, 7, 2, 2 + 3 - 1, 64)
    assert found.num_lost == 1
    assert found.mismatches == [
        Mismatch(request_id="req_unknown", engine=Counted(1, 7, 2, 2, 64), usage=None),
        Mismatch(request_id="req_less", engine=Counted(1, 7, 2, 9, 64), usage=Counted(1, 7, 2, 6, 64)),
    ]


async def test_an_engine_that_starts_anew_meanwhile_is_asked_again(database: Database, ledger: Ledger) -> None:
    engine = CountingEngine()
    await answer(ledger, engine, "req_1")

    async def restart() -> None:
        engine.restart(f"process {len(engine.on_read)}")

    engine.on_read = [nothing, restart]
    found = await Reconciler(database).reconcile(URL, engine.read)
    assert (found.is_exact, found.engine, found.usage) == (True, Counted(), Counted())
    engine.on_read = [restart] * 6
    with pytest.raises(OSError, match="anew"):
        await Reconciler(database).reconcile(URL, engine.read)


async def test_it_is_exact_at_any_moment_of_a_busy_hour(database: Database, ledger: Ledger) -> None:
    rng, engine = random.Random(7), CountingEngine()
    is_over = asyncio.Event()

    async def send(number: int) -> None:
        request_id = f"req_{number}"
        await ledger.open(row(request_id))
        await asyncio.sleep(rng.random() * 0.02)
        done = engine.end(request_id, tokens=rng.randrange(9), finish=rng.choice(["stop", "length"]))
        await asyncio.sleep(rng.random() * 0.02)
        await ledger.settle(row(request_id), settlement(done, rng.choice(["ok", "cancelled"])))

    async def look() -> int:
        num_busy = 0
        while not is_over.is_set():
            found = await Reconciler(database).reconcile(URL, engine.read)
            assert found.is_exact, found
            num_busy += found.pending.requests > 0
        return num_busy

    looking = asyncio.create_task(look())
    for start in range(0, 80, 20):
        await asyncio.gather(*(send(number) for number in range(start, start + 20)))
    is_over.set()
    assert await looking > 0
    assert (await Reconciler(database).reconcile(URL, engine.read)).usage.requests == 80
