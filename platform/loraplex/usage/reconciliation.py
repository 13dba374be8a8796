"""Holds usage rows against what the engines themselves counted, exactly, also while requests run.

An engine counts a request when it ends there; its row is written a moment later. So rows are summed first, and the
engine is asked afterwards, for its totals and for the requests of the last minutes that are in them: what it names and
the rows lack is on its way (`pending`), if the books know that it began. What is left is the `difference`.

Which rows are of an engine's process is for `process_rows` to say. Reads only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import request, usage
from loraplex.usage.counted import NAMES, Counted, add, count_row, select_rows
from loraplex.usage.process_rows import ProcessRows, RowsSeen
from loraplex_engine.wire.done import RequestDone, UsageReport

ReadUsage = Callable[[float], Awaitable[UsageReport]]
"""Ask one engine for its totals and for the requests that ended in the last so many seconds. Raises OSError."""

MAX_NAMED = 20
"""Requests that a reconciliation names, at most."""

_WINDOW_S = 120.0
_RECENT = timedelta(seconds=_WINDOW_S + 60)
"""Rows settled so lately may be of requests in the window, also by a clock that is off by a minute."""

_MAX_TRIES = 3
_MAX_IDS = 500


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """One request that engine and rows see differently; None: one of them does not know it."""

    request_id: str
    engine: Counted | None
    usage: Counted | None


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's process against the rows: `difference` is what `engine` has beyond `usage` and `pending`.

    `num_lost` rows were settled without the engine's word. `mismatches` are the differences that can be named: those of
    the last two minutes.
    """

    began_at: datetime
    engine: Counted
    usage: Counted
    pending: Counted
    difference: Counted
    num_lost: int
    mismatches: list[Mismatch]

    @property
    def is_exact(self) -> bool:
        """Whether nothing is left to explain."""
        return self.difference == Counted() and not self.mismatches


class Reconciler:
    """Reconciles engines with their rows, again and again.

    Args:
        database: Has the rows.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows = ProcessRows(database)

    async def reconcile(self, url: str, read: ReadUsage) -> Reconciliation:
        """Return one engine's counts beside those of its rows.

        Args:
            url: The engine's address, as rows name it.
            read: Asks it.

        Raises:
            OSError: It does not answer, or starts anew all the time.
        """
        for _ in range(_MAX_TRIES):
            first = (await read(0.0)).totals
            now = datetime.now(UTC)
            began_at = now - timedelta(seconds=first.age_s)
            rows = await self._rows.read(url, first.process_id, began_at, now - _RECENT)
            report = await read(_WINDOW_S)
            if report.totals.process_id == first.process_id:
                return await _compare(self._database, url, began_at, rows, report)
        raise ConnectionError("it starts anew all the time")


async def _compare(
    database: Database, url: str, began_at: datetime, rows: RowsSeen, report: UsageReport
) -> Reconciliation:
    finished = {done.request_id: _count_done(done) for done in report.finished if done.is_charged}
    new = [request_id for request_id in finished if request_id not in rows.recent]
    open_ids, late = await _find_coming(database, url, new)
    engine = Counted(*(getattr(report.totals, name) for name in NAMES))
    pending = add(finished[request_id] for request_id in new if request_id in open_ids or request_id in late)
    booked = rows.recent | late
    mismatches = [
        Mismatch(request_id=request_id, engine=counted, usage=booked.get(request_id))
        for request_id, counted in finished.items()
        if booked.get(request_id) != counted and (request_id in booked or request_id not in open_ids)
    ]
    return Reconciliation(
        began_at=began_at,
        engine=engine,
        usage=rows.counted,
        pending=pending,
        difference=engine.minus(rows.counted).minus(pending),
        num_lost=rows.num_lost,
        mismatches=mismatches[:MAX_NAMED],
    )


async def _find_coming(database: Database, url: str, request_ids: Sequence[str]) -> tuple[set[str], dict[str, Counted]]:
    """Return which of some requests are open, and the rows of those at this engine that were settled just now."""
    open_ids: set[str] = set()
    late: dict[str, Counted] = {}
    for start in range(0, len(request_ids), _MAX_IDS):
        some = request_ids[start : start + _MAX_IDS]
        is_open = sa.select(request.c.request_id).where(request.c.request_id.in_(some), request.c.settled_at.is_(None))
        settled = select_rows().where(usage.c.request_id.in_(some), usage.c.replica == url)
        # in this order: what is open no more has a row
        async with database.read() as connection:
            open_ids.update((await connection.execute(is_open)).scalars())
            rows = (await connection.execute(settled)).mappings().all()
        late.update({row["request_id"]: count_row(row) for row in rows})
    return open_ids, late


def _count_done(done: RequestDone) -> Counted:
    return Counted(int(done.is_charged), *(getattr(done, name) for name in NAMES[1:]))
