"""How generations ended, counted by version and minute: what a canary is watched by, and rolled back on.

Counted once for each usage row, in the commit that writes it, in the minute of that commit: a minute that is over
changes no more. A version that is not called has no rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.statement import Statement, Transaction
from loraplex.db.tables import version_outcome
from loraplex.errors import LoraplexError
from loraplex.usage.record import RequestRow, Settlement

OUTCOMES = ("ok", "cancelled", "error", "lost")
_KEY = ("adapter_id", "version", "minute", "outcome")
_SWEEP_EVERY_S = 3600.0
_log = logging.getLogger(__name__)


def _build_count(dialect: Any) -> Any:
    """The statement that adds to counts."""
    insert = dialect.insert(version_outcome)
    total = version_outcome.c.num_requests + insert.excluded.num_requests
    return insert.on_conflict_do_update(index_elements=_KEY, set_={"num_requests": total})


_COUNT = Statement(_build_count)


class OutcomeQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which counts to read: of one adapter, in [start, stop), of one version or all.

    `before` (minute and version) is the last row of the page before; None begins with the newest minute.
    """

    adapter_id: str
    start: datetime
    stop: datetime
    version: int | None = None
    before: tuple[datetime, int] | None = None
    limit: int = 50


def count_outcomes(transaction: Transaction, settled: Sequence[tuple[RequestRow, Settlement]], now: datetime) -> None:
    """Add settled generations to their counts; those of bases are no version's.

    Args:
        transaction: The one that writes their usage.
        settled: Each for the first time.
        now: The instant of settlement.
    """
    minute = now.astimezone(UTC).replace(second=0, microsecond=0)
    counts = Counter(
        (row.adapter_id, row.version, settlement.outcome)
        for row, settlement in settled
        if row.adapter_id is not None and row.version is not None
    )
    if not counts:
        return
    # In one order everywhere: gateways that count the same versions wait for one another and never in a circle.
    values = [
        {"adapter_id": adapter_id, "version": version, "minute": minute, "outcome": outcome, "num_requests": count}
        for (adapter_id, version, outcome), count in sorted(counts.items())
    ]
    transaction.run(_COUNT, values)


async def read_outcomes(database: Database, query: OutcomeQuery) -> list[dict[str, Any]]:
    """Return one row per minute and version: both, `requests`, and how many of them ended each way; newest first."""
    table = version_outcome.c
    statement = (
        sa.select(table.minute, table.version, sa.func.sum(table.num_requests).label("requests"), *_count_each())
        .where(table.adapter_id == query.adapter_id, table.minute >= query.start, table.minute < query.stop)
        .group_by(table.minute, table.version)
        .order_by(table.minute.desc(), table.version.desc())
        .limit(query.limit)
    )
    if query.version is not None:
        statement = statement.where(table.version == query.version)
    if query.before is not None:
        minute, version = query.before
        statement = statement.where(
            sa.or_(table.minute < minute, sa.and_(table.minute == minute, table.version < version))
        )
    async with database.report() as connection:
        rows = (await connection.execute(statement)).mappings().all()
    return [_plain(dict(row)) for row in rows]


async def sum_outcomes(database: Database, start: datetime, stop: datetime) -> list[dict[str, Any]]:
    """Return one row per adapter and version called in [start, stop): both, `requests`, and how many ended each way."""
    table = version_outcome.c
    statement = (
        sa.select(table.adapter_id, table.version, sa.func.sum(table.num_requests).label("requests"), *_count_each())
        .where(table.minute >= start, table.minute < stop)
        .group_by(table.adapter_id, table.version)
    )
    async with database.report() as connection:
        rows = (await connection.execute(statement)).mappings().all()
    return [_plain(dict(row)) for row in rows]


def _count_each() -> list[sa.ColumnElement[Any]]:
    table = version_outcome.c
    return [
        sa.func.sum(sa.case((table.outcome == outcome, table.num_requests), else_=0)).label(outcome)
        for outcome in OUTCOMES
    ]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Sums are decimals in Postgres."""
    return row | {name: int(row[name]) for name in ("requests", *OUTCOMES)}


async def keep_outcomes_short(database: Database, keep_days: int) -> None:
    """Delete counts older than `keep_days` now and then, until cancelled."""
    while True:
        before = datetime.now(UTC) - timedelta(days=keep_days)
        try:
            async with database.write() as connection:
                await connection.execute(sa.delete(version_outcome).where(version_outcome.c.minute < before))
        except LoraplexError as error:
            _log.warning("old outcome counts stay for now: %s", error.message)
        await asyncio.sleep(_SWEEP_EVERY_S)
