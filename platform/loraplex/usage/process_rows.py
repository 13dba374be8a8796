"""The usage rows of one engine's process: their sums, and one by one those that were settled lately.

A row is of a process if it names its address and began after it did. One that began earlier, and was sent there when
another engine had failed it, tells so by its stages: they lie between its settlement and the process's beginning.

`ProcessRows` remembers how far it has summed, so that a look costs what has happened since the last one. The first look
at a process goes through its past hour by hour, in statements that are short. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.tables import request, usage
from loraplex.usage.counted import Counted, add, count_row, select_rows, select_sums

MAX_LIFE = timedelta(seconds=3660)
"""No request runs longer: its time is cut to an hour."""

_SLICE = timedelta(hours=1)
_MAX_MARKS = 1000
_MAX_IDS = 500
_STAGES = ("queue_s", "load_s", "prefill_s", "decode_s")
_Rows = list[Mapping[str, Any]]


class RowsSeen(msgspec.Struct, frozen=True):
    """Rows of one process at one moment; `recent` are the latest of those in `counted`."""

    counted: Counted
    num_lost: int
    recent: dict[str, Counted]


class _Mark(msgspec.Struct, frozen=True):
    """Everything that was settled before `until`.

    `old_ids` began longer before it than any request runs, and were not settled then: if they are, it is long after.
    """

    process_id: str
    began_at: datetime
    until: datetime
    counted: Counted = Counted()
    num_lost: int = 0
    old_ids: tuple[str, ...] = ()


class ProcessRows:
    """Looks at the rows of any number of processes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._url_to_mark: dict[str, _Mark] = {}

    async def read(self, url: str, process_id: str, began_at: datetime, recent_at: datetime) -> RowsSeen:
        """Return the rows of a process.

        Args:
            url: Where it listens, as rows name it.
            process_id: Tells it from others at that address.
            began_at: When it began; the first time that is asked for it is kept.
            recent_at: Since when rows are listed. What was settled earlier is committed.
        """
        mark = self._url_to_mark.get(url)
        if mark is None or mark.process_id != process_id:
            mark = _Mark(process_id, began_at, began_at)
        recent_at = max(recent_at, mark.until)
        async with self._database.read() as connection:
            # in this order: what is open no more has a row
            open_ids = await _find_open(connection, mark, recent_at)
            sums, rows = await _sum_hours(connection, url, mark, recent_at)
            rows += await _list_early(connection, url, mark)
            rows += await _list_old(connection, url, mark)
        settled = [row for row in rows if row["settled_at"] < recent_at]
        recent = [row for row in rows if row["settled_at"] >= recent_at]
        mark = msgspec.structs.replace(
            mark,
            until=recent_at,
            counted=add([mark.counted, *map(count_row, [*sums, *settled])]),
            num_lost=mark.num_lost + sum(int(row["lost"]) for row in sums) + _count_lost(settled),
            old_ids=(*open_ids, *(row["request_id"] for row in recent if row["created_at"] < recent_at - MAX_LIFE)),
        )
        self._remember(url, mark)
        listed = {row["request_id"]: count_row(row) for row in recent}
        return RowsSeen(add([mark.counted, *listed.values()]), mark.num_lost + _count_lost(recent), listed)

    def _remember(self, url: str, mark: _Mark) -> None:
        self._url_to_mark.pop(url, None)
        self._url_to_mark[url] = mark
        while len(self._url_to_mark) > _MAX_MARKS:
            del self._url_to_mark[next(iter(self._url_to_mark))]


async def _sum_hours(connection: AsyncConnection, url: str, mark: _Mark, recent_at: datetime) -> tuple[_Rows, _Rows]:
    """Return sums of what was settled from the mark to `recent_at`, hour by hour, and the rows settled since."""
    sums: _Rows = []
    rows: _Rows = []
    at, now = max(mark.began_at, mark.until - MAX_LIFE), recent_at + MAX_LIFE
    while at < now:
        is_hour = (usage.c.replica == url) & (usage.c.created_at >= at) & (usage.c.created_at < at + _SLICE)
        found = await connection.execute(select_sums(recent_at).where(is_hour, usage.c.settled_at >= mark.until))
        sums.append(found.mappings().one())
        if sums[-1]["later"]:
            listed = _select().where(is_hour, usage.c.settled_at >= recent_at)
            rows += (await connection.execute(listed)).mappings()
        at += _SLICE
    return sums, rows


def _select(*more: sa.ColumnElement[Any]) -> sa.Select[Any]:
    return select_rows(usage.c.created_at, usage.c.settled_at, *more)


async def _list_early(connection: AsyncConnection, url: str, mark: _Mark) -> _Rows:
    """Return the rows since the mark that began before the process, and reached it after another engine."""
    if mark.until > mark.began_at + MAX_LIFE:
        return []
    stages = [usage.c[name] for name in _STAGES]
    query = _select(*stages).where(
        usage.c.replica == url,
        usage.c.created_at >= mark.began_at - MAX_LIFE,
        usage.c.created_at < mark.began_at,
        usage.c.settled_at >= mark.until,
        usage.c.finish.is_not(None),
        usage.c.outcome != "lost",
    )
    rows = (await connection.execute(query)).mappings()
    return [row for row in rows if row["settled_at"] - _sum_stages(row) >= mark.began_at]


async def _list_old(connection: AsyncConnection, url: str, mark: _Mark) -> _Rows:
    """Return the rows of requests that were open for too long at the mark, as those of a gateway that is gone."""
    found: _Rows = []
    for start in range(0, len(mark.old_ids), _MAX_IDS):
        some = mark.old_ids[start : start + _MAX_IDS]
        is_since = usage.c.settled_at >= mark.until
        query = _select().where(usage.c.request_id.in_(some), usage.c.replica == url, is_since)
        found += (await connection.execute(query)).mappings()
    return found


async def _find_open(connection: AsyncConnection, mark: _Mark, recent_at: datetime) -> tuple[str, ...]:
    query = sa.select(request.c.request_id).where(
        request.c.settled_at.is_(None),
        request.c.created_at >= mark.began_at,
        request.c.created_at < recent_at - MAX_LIFE,
    )
    return tuple((await connection.execute(query)).scalars())


def _sum_stages(row: Mapping[str, Any]) -> timedelta:
    return timedelta(seconds=sum(row[name] for name in _STAGES))


def _count_lost(rows: _Rows) -> int:
    return sum(row["outcome"] == "lost" for row in rows)
