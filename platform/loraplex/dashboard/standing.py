"""How tenants, keys and adapters stand against their limits: as the meters count, which refuse. Reads only.

Meters count what running requests have reserved, too. What has no limit has no meter: there settled usage says how much
was used, as it does of days and months that nothing was asked of since a meter began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Protocol

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import request, usage
from loraplex.quotas.quota import Quota, Standing, Subject, list_quotas
from loraplex_registry.wire.limits import RATE_LIMITS, RateLimits

Scope = Literal["tenant", "key", "adapter"]
_COLUMNS: dict[Scope, str] = {"tenant": "tenant_id", "key": "key_id", "adapter": "adapter_id"}
# a request that has been open for longer is one of a gateway that died, and holds nothing
_OPEN_S = 3600


class Limit(msgspec.Struct, frozen=True):
    """One limit and how much of it is used; None is not limited."""

    kind: str
    used: int
    limit: int | None

    @property
    def ratio(self) -> float:
        """The part that is used."""
        return 0.0 if not self.limit else self.used / self.limit


class Holder(msgspec.Struct, frozen=True):
    """Whose limits: by which id usage knows it, as whom its meters count it, and what it is given."""

    id: str
    subject: Subject
    limits: RateLimits | None


class Meters(Protocol):
    """What counts."""

    async def look(self, quotas: Sequence[Quota]) -> Sequence[Standing | None]:
        """Return how quotas stand; None of those whose count has not begun."""


Used = Mapping[str, Mapping[str, int]]
"""How much of each kind of limit is used, by the id of whose it is."""


async def read_limits_of(
    database: Database, meters: Meters, scope: Scope, holders: Sequence[Holder]
) -> list[list[Limit]]:
    """Return all kinds of limits of each, with what is used of them.

    Raises:
        UnavailableError: The database does not answer.
    """
    used = await read_used(database, scope, [holder.id for holder in holders])
    quotas = list_quotas([(holder.subject, holder.limits) for holder in holders])
    standings = zip(quotas, await meters.look(quotas), strict=True)
    name_to_taken = {quota.name: quota.limit - one.remaining for quota, one in standings if one is not None}
    return [
        [_describe(holder, kind, used.get(holder.id, {}).get(kind, 0), name_to_taken) for kind in RATE_LIMITS]
        for holder in holders
    ]


def _describe(holder: Holder, kind: str, settled: int, name_to_taken: Mapping[str, int]) -> Limit:
    limit = getattr(holder.limits, kind) if holder.limits else None
    if limit is None:
        return Limit(kind, settled, None)
    quota = Quota(holder.subject, kind, limit)
    taken = name_to_taken.get(quota.name, settled)
    # a meter says no more than that all is used; what was used before a limit was lowered, usage knows
    return Limit(kind, max(taken, settled) if quota.is_of_calendar else taken, limit)


async def read_used(database: Database, scope: Scope, ids: Collection[str], *, now: datetime | None = None) -> Used:
    """Return what some tenants, keys or adapters have used by now, as settled usage and open requests say it.

    Raises:
        UnavailableError: The database does not answer.
    """
    if not ids:
        return {}
    now = now or datetime.now(UTC)
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    async with database.read() as connection:
        for kinds, statement in _list_statements(_COLUMNS[scope], ids, now):
            for row in (await connection.execute(statement)).mappings():
                found[row["id"]].update({kind: int(row[kind]) for kind in kinds})
    return found


def _list_statements(column: str, ids: Collection[str], now: datetime) -> list[tuple[tuple[str, ...], sa.Select[Any]]]:
    minute, day = now - timedelta(minutes=1), now.replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    kinds = ("tokens_per_minute", "tokens_per_day", "tokens_per_month")
    sums = [_sum_tokens(start).label(kind) for kind, start in zip(kinds, (minute, day, month), strict=True)]
    spent = sa.select(usage.c[column].label("id"), *sums).where(
        usage.c[column].in_(ids), usage.c.created_at >= min(minute, month)
    )
    asked = sa.select(request.c[column].label("id"), sa.func.count().label("requests_per_minute")).where(
        request.c[column].in_(ids), request.c.created_at >= minute
    )
    held = sa.select(request.c[column].label("id"), sa.func.count().label("concurrent_requests")).where(
        request.c[column].in_(ids),
        request.c.settled_at.is_(None),
        request.c.created_at >= now - timedelta(seconds=_OPEN_S),
    )
    return [
        (kinds, spent.group_by(usage.c[column])),
        (("requests_per_minute",), asked.group_by(request.c[column])),
        (("concurrent_requests",), held.group_by(request.c[column])),
    ]


def _sum_tokens(start: datetime) -> sa.ColumnElement[int]:
    tokens = usage.c.prompt_tokens + usage.c.completion_tokens
    return sa.func.coalesce(sa.func.sum(sa.case((usage.c.created_at >= start, tokens), else_=0)), 0)
