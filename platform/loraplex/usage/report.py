"""Sums of usage by tenant, adapter, version and day. Reads `usage`, writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import usage
from loraplex.errors import InvalidRequestError

GROUPS = {"tenant": usage.c.tenant, "adapter": usage.c.adapter, "version": usage.c.version, "day": usage.c.day}
MAX_ROWS = 10_000


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage to sum: of one tenant or all, in [start, stop) by the time the request began, by which groups."""

    tenant_id: str | None = None
    start: datetime | None = None
    stop: datetime | None = None
    group_by: Sequence[str] = ()


async def sum_usage(database: Database, query: UsageQuery) -> list[dict[str, Any]]:
    """Return one row per group: its keys, `requests` by outcome, tokens; ordered by the keys.

    Raises:
        InvalidRequestError: There are more groups than one answer holds.
    """
    keys = [GROUPS[name] for name in query.group_by]
    statement = sa.select(*keys, *_sums()).group_by(*keys).order_by(*keys).limit(MAX_ROWS + 1)
    for condition in _conditions(query):
        statement = statement.where(condition)
    async with database.read() as connection:
        rows = (await connection.execute(statement)).mappings().all()
    if len(rows) > MAX_ROWS:
        raise InvalidRequestError(
            f"There are more than {MAX_ROWS:,} groups; narrow from, to or tenant, or group by less",
            param="group_by",
        )
    return [_plain(dict(row)) for row in rows]


def _sums() -> list[sa.ColumnElement[Any]]:
    tokens = [
        sa.func.coalesce(sa.func.sum(usage.c[name]), 0).label(name)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    ]
    outcomes = [
        sa.func.count(sa.case((usage.c.outcome == name, 1))).label(f"requests_{name}")
        for name in ("ok", "cancelled", "error", "lost")
    ]
    return [sa.func.count().label("requests"), *outcomes, *tokens]


def _conditions(query: UsageQuery) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = []
    if query.tenant_id is not None:
        found.append(usage.c.tenant_id == query.tenant_id)
    if query.start is not None:
        found.append(usage.c.created_at >= query.start)
    if query.stop is not None:
        found.append(usage.c.created_at < query.stop)
    return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Postgres sums are decimals; JSON wants integers."""
    return {name: value if isinstance(value, str | None) else int(value) for name, value in row.items()}
