"""Sums of usage by tenant, adapter, version, key and day, and its rows. Reads `usage`, writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import usage
from loraplex.errors import InvalidRequestError

GROUPS = {
    "tenant": usage.c.tenant,
    "adapter": usage.c.adapter,
    "version": usage.c.version,
    "key": usage.c.key_id.label("key"),
    "day": usage.c.day,
}
MAX_ROWS = 10_000
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "load_bytes")
_SECONDS = ("queue_s", "load_s", "prefill_s", "decode_s")


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage to sum: of one tenant or all, in [start, stop) by the time the request began, by which groups."""

    tenant_id: str | None = None
    start: datetime | None = None
    stop: datetime | None = None
    group_by: Sequence[str] = ()


class RowQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows to list, as `UsageQuery`; `exact` are columns with the value that they must have.

    `before` (when it began, and request id) is the last row of the page before; None begins with the newest.
    """

    tenant_id: str | None = None
    start: datetime | None = None
    stop: datetime | None = None
    exact: dict[str, Any] = {}
    before: tuple[datetime, str] | None = None
    limit: int = 50


async def sum_usage(database: Database, query: UsageQuery) -> list[dict[str, Any]]:
    """Return one row per group: its keys, `requests` by outcome, tokens, bytes, seconds; ordered by the keys.

    Raises:
        InvalidRequestError: There are more groups than one answer holds.
    """
    keys: list[sa.ColumnElement[Any]] = [GROUPS[name] for name in query.group_by]
    statement = sa.select(*keys, *_sums()).group_by(*keys).order_by(*keys).limit(MAX_ROWS + 1)
    statement = statement.where(*_conditions(query.tenant_id, query.start, query.stop))
    async with database.report() as connection:
        rows = (await connection.execute(statement)).mappings().all()
    if len(rows) > MAX_ROWS:
        raise InvalidRequestError(
            f"There are more than {MAX_ROWS:,} groups; narrow from, to or tenant, or group by less",
            param="group_by",
        )
    return [_plain(dict(row)) for row in rows]


async def list_rows(database: Database, query: RowQuery) -> list[dict[str, Any]]:
    """Return up to `limit` rows of settled requests, those that began last first."""
    statement = (
        sa.select(usage)
        .where(*_conditions(query.tenant_id, query.start, query.stop))
        .where(*(usage.c[name] == value for name, value in query.exact.items()))
        .order_by(usage.c.created_at.desc(), usage.c.request_id.desc())
        .limit(query.limit)
    )
    if query.before is not None:
        began_at, request_id = query.before
        statement = statement.where(
            sa.or_(
                usage.c.created_at < began_at,
                sa.and_(usage.c.created_at == began_at, usage.c.request_id < request_id),
            )
        )
    async with database.report() as connection:
        return [dict(row) for row in (await connection.execute(statement)).mappings()]


async def count_loads(database: Database, since: datetime, replica: str, limit: int) -> list[tuple[str, int]]:
    """Return the adapters that were put into slots of an engine most often, and how often: by settled requests.

    Args:
        database: Has the usage.
        since: From when on requests began.
        replica: The engine's URL.
        limit: How many adapters.
    """
    num_loads = sa.func.count().label("num_loads")
    statement = (
        sa.select(usage.c.tenant, usage.c.adapter, num_loads)
        .where(usage.c.created_at >= since, usage.c.replica == replica, usage.c.load_bytes > 0)
        .group_by(usage.c.tenant, usage.c.adapter)
        .order_by(num_loads.desc(), usage.c.tenant, usage.c.adapter)
        .limit(limit)
    )
    async with database.report() as connection:
        rows = (await connection.execute(statement)).all()
    return [(f"{row.tenant}/{row.adapter}", row.num_loads) for row in rows]


def _sums() -> list[sa.ColumnElement[Any]]:
    sums = [sa.func.coalesce(sa.func.sum(usage.c[name]), 0).label(name) for name in (*_COUNTS, *_SECONDS)]
    outcomes = [
        sa.func.count(sa.case((usage.c.outcome == name, 1))).label(f"requests_{name}")
        for name in ("ok", "cancelled", "error", "lost")
    ]
    return [sa.func.count().label("requests"), *outcomes, *sums]


def _conditions(tenant_id: str | None, start: datetime | None, stop: datetime | None) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = []
    if tenant_id is not None:
        found.append(usage.c.tenant_id == tenant_id)
    if start is not None:
        found.append(usage.c.created_at >= start)
    if stop is not None:
        found.append(usage.c.created_at < stop)
    return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Postgres sums are decimals; JSON wants integers. Seconds to the millisecond."""
    return {name: round(float(value), 3) if name in _SECONDS else _read(value) for name, value in row.items()}


def _read(value: Any) -> Any:
    return value if isinstance(value, str | None) else int(value)
