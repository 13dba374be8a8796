"""The record of requests, on both databases: committed before dispatch, immutable after settlement, settled once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gateway_world import until
from loraplex.db.database import Database
from loraplex.db.statement import Statement
from loraplex.db.tables import request, usage, version_outcome
from loraplex.errors import InvalidRequestError, UnavailableError
from loraplex.usage import ledger as ledger_module
from loraplex.usage import recovery, report
from loraplex.usage.ledger import Ledger
from loraplex.usage.record import Done, RequestRow, Settlement
from loraplex.usage.recovery import find_open_requests, settle_open_requests
from loraplex.usage.report import RowQuery, UsageQuery, list_rows, sum_usage

NOW = datetime(2026, 5, 4, 23, 59, 30, tzinfo=UTC)


def row(request_id: str = "req_1", **changes: Any) -> RequestRow:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": "t-1",
        "tenant": "team-x",
        "adapter_id": "a-1",
        "adapter": "default",
        "version": 3,
        "digest": "sha256:" + "a" * 64,
        "base": "base",
        "key_id": "key_1",
        "route": "/v1/completions",
        "model": "team-x",
        "is_stream": True,
        "client_request_id": None,
        "tags": {"run": "7"},
        "created_at": NOW,
        "replica": "http://127.0.0.1:1",
    }
    return RequestRow(**{**fields, **changes})


async def read(database: Database, table: sa.Table) -> list[dict[str, Any]]:
    async with database.read() as connection:
        return [dict(found) for found in (await connection.execute(sa.select(table))).mappings()]


class Outage:
    """Takes a database away and gives it back."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._transact = database.transact

    def begin(self) -> None:
        async def refuse(work: Any) -> Any:
            raise UnavailableError

        self._database.transact = refuse  # type: ignore[method-assign]

    def break_commits(self) -> None:
        async def lose(work: Any) -> Any:
            await self._transact(work)
            raise UnavailableError

        self._database.transact = lose  # type: ignore[method-assign]

    def end(self) -> None:
        self._database.transact = self._transact  # type: ignore[method-assign]


DONE = Done(
    prompt_tokens=10, cached_tokens=4, completion_tokens=5, queue_s=0.5, decode_s=1.5, finish="stop", load_bytes=4096
)


async def test_a_request_is_on_disk_before_it_is_dispatched_and_settled_once(
    database: Database, ledger: Ledger
) -> None:
    await ledger.open(row())
    opened = await read(database, request)
    assert [(found["request_id"], found["settled_at"]) for found in opened] == [("req_1", None)]
    await ledger.settle(row(), Settlement(outcome="ok", done=DONE))
    await ledger.settle(row(), Settlement(outcome="cancelled", done=Done(completion_tokens=99)))
    (used,) = await read(database, usage)
    assert {
        name: used[name] for name in ("outcome", "completion_tokens", "cached_tokens", "day", "tags", "finish")
    } == {
        "outcome": "ok",
        "completion_tokens": 5,
        "cached_tokens": 4,
        "day": "2026-05-04",
        "tags": {"run": "7"},
        "finish": "stop",
    }
    assert (await read(database, request))[0]["settled_at"] is not None


async def test_many_callers_share_few_commits(database: Database, ledger: Ledger) -> None:
    commits = 0
    original = database.transact

    async def counted(work: Any) -> Any:
        nonlocal commits
        commits += 1
        return await original(work)

    database.transact = counted  # type: ignore[method-assign]
    rows = [row(f"req_{i}") for i in range(100)]
    await asyncio.gather(*(ledger.open(one) for one in rows))
    await asyncio.gather(*(ledger.settle(one, Settlement(outcome="ok", done=DONE)) for one in rows))
    assert len(await read(database, usage)) == 100
    assert commits <= 6


async def test_one_bad_row_hurts_only_itself(database: Database, ledger: Ledger) -> None:
    results = await asyncio.gather(
        ledger.open(row("req_good")),
        ledger.open(row("req_bad", base=None)),
        ledger.open(row("req_other")),
        return_exceptions=True,
    )
    assert [type(result) for result in results][::2] == [type(None)] * 2
    assert isinstance(results[1], Exception)
    assert {found["request_id"] for found in await read(database, request)} == {"req_good", "req_other"}


async def test_a_cancelled_caller_leaves_its_row_committed(database: Database, ledger: Ledger) -> None:
    task = asyncio.create_task(ledger.open(row()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await ledger.open(row("req_2"))
    assert {found["request_id"] for found in await read(database, request)} == {"req_1", "req_2"}


async def test_settlements_of_an_outage_are_written_after_it(database: Database, ledger: Ledger) -> None:
    rows = [row(f"req_{i}") for i in range(300)]
    await asyncio.gather(*(ledger.open(one) for one in rows))
    outage = Outage(database)
    outage.begin()
    await asyncio.gather(*(ledger.settle(one, Settlement(outcome="ok", done=DONE)) for one in rows))
    with pytest.raises(UnavailableError):
        await ledger.open(row("req_new"))
    await asyncio.sleep(0.6)
    outage.end()

    async def is_written() -> bool:
        return len(await read(database, usage)) == 300

    await until(is_written)
    assert {used["completion_tokens"] for used in await read(database, usage)} == {5}
    assert await find_open_requests(database, NOW + timedelta(days=1)) == []


async def test_a_row_whose_commit_broke_is_taken_back_as_its_request_does_not_run(
    database: Database, ledger: Ledger
) -> None:
    await ledger.open(row("req_before"))
    outage = Outage(database)
    outage.break_commits()
    opens = [ledger.open(row("req_1")), ledger.open(row("req_2"))]
    settles = [ledger.settle(row("req_before"), Settlement(outcome="ok", done=DONE))]
    results = await asyncio.gather(*opens, *settles, return_exceptions=True)
    assert [type(result) for result in results] == [UnavailableError, UnavailableError, type(None)]
    assert len(await read(database, request)) == 3
    outage.end()

    async def is_gone() -> bool:
        return [found["request_id"] for found in await read(database, request)] == ["req_before"]

    await until(is_gone)
    assert [used["request_id"] for used in await read(database, usage)] == ["req_before"]
    await ledger.open(row("req_after"))
    assert len(await read(database, request)) == 2


async def test_what_was_never_written_is_not_taken_back(database: Database) -> None:
    ledger, outage = Ledger(database), Outage(database)
    ledger.start()
    outage.begin()
    with pytest.raises(UnavailableError):
        await ledger.open(row())
    outage.end()
    await ledger.open(row())
    await ledger.stop()
    assert len(await read(database, request)) == 1


async def test_what_is_in_doubt_at_the_stop_is_taken_back_then(database: Database) -> None:
    ledger, outage = Ledger(database), Outage(database)
    ledger.start()
    outage.break_commits()
    with pytest.raises(UnavailableError):
        await ledger.open(row())
    outage.end()
    await ledger.stop()
    assert await read(database, request) == []


async def test_what_an_outage_left_is_written_at_the_stop(database: Database) -> None:
    ledger, outage = Ledger(database), Outage(database)
    ledger.start()
    outage.begin()
    await ledger.settle(row(), Settlement(outcome="ok", done=DONE))
    outage.end()
    await ledger.stop()
    assert [used["request_id"] for used in await read(database, usage)] == ["req_1"]


async def test_no_more_is_kept_than_there_is_room_for(
    database: Database, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_KEPT", 2)
    outage = Outage(database)
    outage.begin()
    settlement = Settlement(outcome="ok", done=DONE)
    await asyncio.gather(*(ledger.settle(row(f"req_{i}"), settlement) for i in (0, 1, 0)))
    with pytest.raises(UnavailableError):
        await ledger.settle(row("req_2"), settlement)
    outage.end()


async def test_progress_of_an_outage_is_not_lost(database: Database, ledger: Ledger) -> None:
    await ledger.open(row("req_1"))
    await ledger.open(row("req_2"))
    outage = Outage(database)
    outage.begin()
    ledger.note_progress("req_1", 17)
    ledger.note_progress("req_2", 3)
    await asyncio.sleep(1.3)
    ledger.note_progress("req_2", 4)
    outage.end()
    await wait_noted(database, {"req_1": 17, "req_2": 4})


async def wait_noted(database: Database, expected: dict[str, int]) -> None:
    async def is_noted() -> bool:
        found = await find_open_requests(database, NOW + timedelta(days=1))
        return {one.row.request_id: one.tokens_seen for one in found} == expected

    await until(is_noted)


@pytest.mark.parametrize("outcome", ["error", "cancelled"])
async def test_what_did_not_reach_its_first_token_costs_nothing(
    database: Database, ledger: Ledger, outcome: str
) -> None:
    await ledger.settle(row(), Settlement(outcome=outcome, code="queue_full", done=Done(prompt_tokens=7)))
    (used,) = await read(database, usage)
    assert (used["prompt_tokens"], used["completion_tokens"], used["error_code"]) == (0, 0, "queue_full")


async def test_open_requests_are_settled_after_a_restart(database: Database, ledger: Ledger) -> None:
    for number in range(4):
        await ledger.open(row(f"req_{number}", created_at=NOW + timedelta(seconds=number)))
    ledger.note_progress("req_1", 17)
    await wait_noted(database, {"req_0": 0, "req_1": 17, "req_2": 0, "req_3": 0})
    aborted = Done(completion_tokens=3, finish="abort")
    answers = {"req_0": (DONE, "http://127.0.0.1:1"), "req_1": None, "req_2": (aborted, "http://127.0.0.1:2")}
    tries = 0

    async def find_done(found: RequestRow) -> tuple[Done, str] | None:
        nonlocal tries
        if found.request_id == "req_3":
            tries += 1
            raise OSError
        return answers[found.request_id]

    found = await find_open_requests(database, NOW + timedelta(seconds=10))
    await settle_open_requests(ledger, found, find_done, patience_s=0)
    rows = await read(database, usage)
    used = {one["request_id"]: (one["outcome"], one["completion_tokens"]) for one in rows}
    assert used == {"req_0": ("ok", 5), "req_1": ("lost", 17), "req_2": ("cancelled", 3), "req_3": ("lost", 0)}
    # the row names the engine that had it last, whichever was tried first
    assert [one["replica"][-1] for one in sorted(rows, key=lambda one: str(one["request_id"]))] == ["1", "1", "2", "1"]
    assert tries == 1
    assert await find_open_requests(database, NOW + timedelta(seconds=10)) == []


async def test_one_request_that_cannot_be_settled_keeps_no_other_from_it(
    database: Database, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_RETRY_EVERY_S", 0.01)
    for number in range(4):
        await ledger.open(row(f"req_{number}", created_at=NOW + timedelta(seconds=number)))
    found = await find_open_requests(database, NOW + timedelta(seconds=10))
    settle, failures = ledger.settle, {"req_0": [UnavailableError()] * 2, "req_1": [ValueError("no such row")]}

    async def settle_badly(one: RequestRow, settlement: Settlement) -> None:
        if failures.get(one.request_id):
            raise failures[one.request_id].pop()
        await settle(one, settlement)

    async def find_done(one: RequestRow) -> tuple[Done, str] | None:
        if one.request_id == "req_2":
            raise ValueError("not an answer")
        return Done(completion_tokens=2, finish="error"), one.replica

    monkeypatch.setattr(ledger, "settle", settle_badly)
    await settle_open_requests(ledger, found, find_done, patience_s=0)
    used = {one["request_id"]: (one["outcome"], one["completion_tokens"]) for one in await read(database, usage)}
    assert used == {"req_0": ("error", 2), "req_2": ("lost", 0), "req_3": ("error", 2)}


async def test_usage_is_summed_by_its_groups(database: Database, ledger: Ledger) -> None:
    later = NOW + timedelta(minutes=1)
    rows = (row("req_1"), row("req_2", created_at=later), row("req_3", adapter="other"), row("req_4", tenant_id="t-2"))
    for one in rows:
        await ledger.settle(one, Settlement(outcome="ok", done=DONE))
    await ledger.settle(row("req_5"), Settlement(outcome="lost", done=Done(completion_tokens=1)))
    by_day = await sum_usage(database, UsageQuery(tenant_id="t-1", group_by=("adapter", "day")))
    assert [(found["adapter"], found["day"], found["requests"], found["completion_tokens"]) for found in by_day] == [
        ("default", "2026-05-04", 2, 6),
        ("default", "2026-05-05", 1, 5),
        ("other", "2026-05-04", 1, 5),
    ]
    (total,) = await sum_usage(database, UsageQuery())
    assert (total["requests"], total["requests_ok"], total["requests_lost"], total["prompt_tokens"]) == (5, 4, 1, 40)
    assert (total["load_bytes"], total["queue_s"], total["decode_s"], total["prefill_s"]) == (4 * 4096, 2.0, 6.0, 0.0)
    (window,) = await sum_usage(database, UsageQuery(start=later, stop=later + timedelta(seconds=1)))
    assert window["requests"] == 1


async def test_usage_is_told_key_by_key_and_row_by_row(database: Database, ledger: Ledger) -> None:
    began_at = [NOW, NOW, NOW + timedelta(seconds=1), NOW - timedelta(days=1)]
    for number, at in enumerate(began_at):
        one = row(f"req_{number}", key_id=f"key_{number % 2}", created_at=at)
        await ledger.settle(one, Settlement(outcome="ok", done=DONE))
    by_key = await sum_usage(database, UsageQuery(group_by=("key",)))
    assert [(found["key"], found["requests"], found["load_bytes"]) for found in by_key] == [
        ("key_0", 2, 8192),
        ("key_1", 2, 8192),
    ]
    seen: list[str] = []
    before = None
    while page := await list_rows(database, RowQuery(before=before, limit=2)):
        seen += [found["request_id"] for found in page]
        before = (page[-1]["created_at"], page[-1]["request_id"])
    assert seen == ["req_2", "req_1", "req_0", "req_3"]
    exact = RowQuery(tenant_id="t-1", start=NOW, exact={"key_id": "key_1"})
    assert [(found["request_id"], found["load_bytes"]) for found in await list_rows(database, exact)] == [
        ("req_1", 4096)
    ]


async def test_an_answer_that_ended_by_itself_is_charged_though_it_has_no_token(
    database: Database, ledger: Ledger
) -> None:
    scored = Done(prompt_tokens=7, finish="length")
    await ledger.settle(row("req_scored"), Settlement(outcome="ok", done=scored))
    # the client left just when it had ended: the engine counted it
    await ledger.settle(row("req_left"), Settlement(outcome="cancelled", done=scored))
    assert [used["prompt_tokens"] for used in await read(database, usage)] == [7, 7]


async def test_more_groups_than_an_answer_holds_are_refused_not_cut(
    database: Database, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_ROWS", 2)
    for name in ("a", "b"):
        await ledger.settle(row(f"req_{name}", adapter=name), Settlement(outcome="ok", done=DONE))
    assert len(await sum_usage(database, UsageQuery(group_by=("adapter",)))) == 2
    await ledger.settle(row("req_c", adapter="c"), Settlement(outcome="ok", done=DONE))
    with pytest.raises(InvalidRequestError, match="more than 2 groups") as caught:
        await sum_usage(database, UsageQuery(group_by=("adapter",)))
    assert caught.value.param == "group_by"
    assert len(await sum_usage(database, UsageQuery())) == 1


async def test_a_database_that_is_away_is_unavailable() -> None:
    away = Database("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    with pytest.raises(UnavailableError):
        async with away.read():
            pass
    await away.close()


async def test_outcomes_are_counted_once_for_each_request_that_is_settled(database: Database, ledger: Ledger) -> None:
    base = {"adapter_id": None, "adapter": None, "version": None, "digest": None}
    rows = [row(f"req_{number}") for number in range(40)] + [row("req_of_the_base", **base)]
    for one in rows:
        await ledger.open(one)
    outcomes = ["ok"] * 30 + ["error"] * 11
    settlements = [Settlement(outcome=outcome) for outcome in outcomes]
    for _ in range(2):
        await asyncio.gather(*(ledger.settle(one, end) for one, end in zip(rows, settlements, strict=True)))
    async with database.read() as connection:
        found = (await connection.execute(sa.select(version_outcome))).mappings().all()
    counted: dict[str, int] = {}
    for one in found:
        assert (one["adapter_id"], one["version"], one["minute"].second) == ("a-1", 3, 0)
        counted[one["outcome"]] = counted.get(one["outcome"], 0) + one["num_requests"]
    assert counted == {"ok": 30, "error": 10}


async def test_a_file_that_cannot_be_opened_or_has_no_tables_is_an_error_and_no_hang(tmp_path: Path) -> None:
    """The thread that writes outlives what it meets."""
    away = Database(f"sqlite+aiosqlite:///{tmp_path}/nowhere/db")
    for _ in range(2):
        with pytest.raises(UnavailableError):
            async with asyncio.timeout(60):
                await away.transact(lambda _: None)
    (tmp_path / "nowhere").mkdir()
    assert await away.transact(lambda _: 7) == 7
    # one of its own: a statement keeps the columns that it was first given
    statement = Statement(lambda dialect: dialect.insert(request))
    with pytest.raises(UnavailableError):
        await away.transact(lambda transaction: transaction.run(statement, [{"request_id": "req_1"}]))
    with pytest.raises(ValueError, match="ours"):
        await away.transact(_fail)
    await away.close()


def _fail(_: object) -> None:
    raise ValueError("a mistake of ours")
