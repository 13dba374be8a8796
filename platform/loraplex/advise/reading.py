"""Facts that lie in the database: the latest calls, when adapters were called last, tokens of the day and the month."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa

from loraplex.advise.fact import Call
from loraplex.db.database import Database
from loraplex.db.tables import usage, version_outcome
from loraplex.usage.report import UsageQuery, sum_usage

MAX_CALLS = 10_000
_PAGE = 1_000
_COLUMNS = (
    "request_id",
    "created_at",
    "base",
    "tenant_id",
    "digest",
    "replica",
    "outcome",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "load_bytes",
    "prefill_s",
)


class Counted(NamedTuple):
    """Calls of one adapter: the minute of the last one, and how many."""

    last_at: datetime
    num_calls: int


async def read_calls(database: Database, since: datetime, tenant_id: str | None) -> list[Call]:
    """Return the latest settled requests that began since then, of one tenant or all, oldest first.

    They are read page by page, so that nobody waits for long meanwhile.
    """
    calls: list[Call] = []
    before: tuple[datetime, str] | None = None
    columns = [usage.c[name] for name in _COLUMNS]
    while len(calls) < MAX_CALLS:
        statement = sa.select(*columns).where(usage.c.created_at >= since)
        if tenant_id is not None:
            statement = statement.where(usage.c.tenant_id == tenant_id)
        if before is not None:
            began_at, request_id = before
            statement = statement.where(
                sa.or_(
                    usage.c.created_at < began_at,
                    sa.and_(usage.c.created_at == began_at, usage.c.request_id < request_id),
                )
            )
        statement = statement.order_by(usage.c.created_at.desc(), usage.c.request_id.desc()).limit(_PAGE)
        async with database.read() as connection:
            rows = (await connection.execute(statement)).all()
        calls += [
            Call(
                base=row.base,
                tenant_id=row.tenant_id,
                digest=row.digest,
                replica=row.replica,
                outcome=row.outcome,
                began_s=row.created_at.timestamp(),
                prompt_tokens=row.prompt_tokens,
                cached_tokens=row.cached_tokens,
                completion_tokens=row.completion_tokens,
                load_bytes=row.load_bytes,
                prefill_s=row.prefill_s,
            )
            for row in rows
        ]
        if len(rows) < _PAGE:
            break
        before = rows[-1].created_at, rows[-1].request_id
    calls.reverse()
    return calls


async def read_counted(database: Database) -> dict[str, Counted]:
    """Return how often each adapter was called in the days that are kept, by its id."""
    statement = sa.select(
        version_outcome.c.adapter_id,
        sa.func.max(version_outcome.c.minute),
        sa.func.sum(version_outcome.c.num_requests),
    ).group_by(version_outcome.c.adapter_id)
    async with database.read() as connection:
        rows = (await connection.execute(statement)).all()
    return {adapter_id: Counted(minute, int(count)) for adapter_id, minute, count in rows}


async def read_tokens(
    database: Database, now: datetime, tenant_id: str | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tokens of this day and of this month of UTC, each by the tenant's name."""
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    month = today.replace(day=1)
    found = []
    for start in (today, month):
        rows = await sum_usage(database, UsageQuery(tenant_id=tenant_id, start=start, group_by=["tenant"]))
        found.append({row["tenant"]: row["prompt_tokens"] + row["completion_tokens"] for row in rows})
    return found[0], found[1]
