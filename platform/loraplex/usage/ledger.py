"""Writes `request` and `usage` rows and counts outcomes, in group commits: callers that come together share one commit.

`Ledger` is the only writer of these tables. A row is on disk when `open` returns, and when `settle` does unless the
database is away: then the settlement is kept and tried again until it is back. While one commit runs the next group
gathers, so nobody waits for a timer and a lone caller waits for its own commit only. A row whose commit broke, so that
nobody knows whether it is there, is taken back: its request does not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from loraplex.db.database import Database
from loraplex.db.statement import Statement, Transaction
from loraplex.db.tables import request, usage
from loraplex.errors import LoraplexError
from loraplex.usage.outcomes import count_outcomes
from loraplex.usage.record import RequestRow, Settlement
from loraplex_registry.wire.ending import end_tasks

_MAX_GROUP = 256
_PROGRESS_EVERY_S = 1.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.25, 5.0
_LAST_TRY_S = 3.0
MAX_KEPT = 10_000
"""Settlements kept while the database is away, some 20 MB. Requests that it did not open do not run, so no more come
than were running when it went.
"""

_log = logging.getLogger(__name__)

_OPEN = Statement(lambda dialect: dialect.insert(request))
# Waits for a commit that is on its way still, so that what is taken back cannot come after.
_OPEN_AGAIN = Statement(lambda dialect: dialect.insert(request).on_conflict_do_nothing(index_elements=["request_id"]))
_TAKE_BACK = Statement(lambda _: sa.delete(request).where(request.c.request_id == sa.bindparam("id")))
_SETTLE = Statement(
    lambda dialect: (
        dialect.insert(usage).on_conflict_do_nothing(index_elements=["request_id"]).returning(usage.c.request_id)
    )
)
_CLOSE = Statement(
    lambda _: (
        sa.update(request).where(request.c.request_id == sa.bindparam("id")).values(settled_at=sa.bindparam("now"))
    )
)
_NOTE_PROGRESS = Statement(
    lambda _: (
        sa.update(request)
        .where(request.c.request_id == sa.bindparam("id"), request.c.settled_at.is_(None))
        .values(tokens_seen=sa.bindparam("tokens"))
    )
)


class _Entry(msgspec.Struct, eq=False):
    """One row to write and the caller that waits for its first try."""

    row: RequestRow
    settlement: Settlement | None
    written: asyncio.Future[None]


class Ledger:
    """The record of all generations. Start it in the running loop; stop it after the last settle."""

    def __init__(self, database: Database, gateway: str | None = None) -> None:
        self._database = database
        self._gateway = gateway
        self._pending: list[_Entry] = []
        self._has_work = asyncio.Event()
        self._kept: dict[str, _Entry] = {}
        self._doubted: dict[str, RequestRow] = {}
        self._has_kept = asyncio.Event()
        self._seen: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to write."""
        works = (self._write_groups(), self._write_kept(), self._write_progress())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        """Write what is pending, and what was kept if the database is back, then end."""
        while self._pending:
            await asyncio.wait([entry.written for entry in self._pending])
        await end_tasks(self._tasks)
        if self._kept or self._doubted:
            await self._write_last()

    async def open(self, row: RequestRow) -> None:
        """Commit that `row` is about to be dispatched.

        Raises:
            UnavailableError: The database does not answer; the request must not run.
        """
        await self._write(row, None)

    async def settle(self, row: RequestRow, settlement: Settlement) -> None:
        """Commit how `row` ended, or keep it until the database is back; a second settlement changes nothing.

        Raises:
            UnavailableError: The database is away and too much is kept; the row is settled after a restart.
        """
        self._seen.pop(row.request_id, None)
        await self._write(row, settlement)

    def note_progress(self, request_id: str, num_tokens: int) -> None:
        """Remember how far a running request is; written once a second, for rows that end as `lost`."""
        self._seen[request_id] = num_tokens

    async def _write(self, row: RequestRow, settlement: Settlement | None) -> None:
        entry = _Entry(row, settlement, asyncio.get_running_loop().create_future())
        self._pending.append(entry)
        self._has_work.set()
        # The commit goes on when the caller is cancelled: an open row must not vanish between queue and disk.
        await asyncio.shield(entry.written)

    async def _write_groups(self) -> None:
        while True:
            await self._has_work.wait()
            group = self._pending[:_MAX_GROUP]
            await self._write_group(group)
            del self._pending[: len(group)]
            if not self._pending:
                self._has_work.clear()

    async def _write_kept(self) -> None:
        """Try again what was kept; the wait doubles as long as the database stays away."""
        wait_s = _FIRST_RETRY_S
        while True:
            await self._has_kept.wait()
            await asyncio.sleep(wait_s)
            num_kept, num_left = len(self._kept), self._num_left
            await self._write_group(list(self._kept.values())[:_MAX_GROUP])
            await self._take_back()
            is_away = self._num_left >= num_left
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S) if is_away else _FIRST_RETRY_S
            if not self._num_left:
                self._has_kept.clear()
                if num_kept:
                    _log.info("the database is back; all usage is written")

    async def _write_last(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_TRY_S):
                num_left = 0
                while self._num_left and self._num_left != num_left:
                    num_left = self._num_left
                    await self._write_group(list(self._kept.values())[:_MAX_GROUP])
                    await self._take_back()
        if self._kept:
            _log.error("%d settlements could not be written; the next start asks the engines", len(self._kept))

    async def _write_group(self, group: list[_Entry]) -> None:
        """Commit a group; when the database refuses it, row by row, so that one bad row hurts only itself."""
        if not group:
            return
        try:
            await self._commit(group)
        except DBAPIError as error:
            if len(group) == 1:
                self._finish(group, error)
                return
            for entry in group:
                await self._write_group([entry])
        except (LoraplexError, OSError) as error:
            self._keep(group, error)
        except Exception as error:  # noqa: BLE001 - the writer must outlive any row
            _log.exception("the ledger failed to write %d rows", len(group))
            self._finish(group, error)
        else:
            self._finish(group, None)

    @property
    def _num_left(self) -> int:
        return len(self._kept) + len(self._doubted)

    def _keep(self, group: Sequence[_Entry], error: Exception) -> None:
        """Keep settlements as far as there is room; what was to be opened fails, as it must not run."""
        for entry in group:
            request_id = entry.row.request_id
            is_settlement = entry.settlement is not None
            if is_settlement and (request_id in self._kept or len(self._kept) < MAX_KEPT):
                if not self._kept:
                    _log.warning("the database is away; usage is kept until it is back: %s", error)
                self._kept.setdefault(request_id, entry)
                self._has_kept.set()
                _tell(entry, None)
            else:
                _tell(entry, error)

    def _finish(self, group: Sequence[_Entry], error: Exception | None) -> None:
        for entry in group:
            is_kept = entry.settlement is not None and self._kept.pop(entry.row.request_id, None) is not None
            if is_kept and error is not None:
                _log.error("%s could not be settled: %s", entry.row.request_id, error)
            _tell(entry, error)

    async def _commit(self, group: Sequence[_Entry]) -> None:
        opened = [_request_values(entry.row, self._gateway) for entry in group if entry.settlement is None]
        settled = [(entry.row, entry.settlement) for entry in group if entry.settlement is not None]

        is_written = False

        def write(transaction: Transaction) -> None:
            nonlocal is_written
            if opened:
                transaction.run(_OPEN, opened)
            if settled:
                _settle(transaction, settled)
            is_written = True

        try:
            await self._database.transact(write)
        except (LoraplexError, OSError):
            if is_written and opened:
                self._doubted |= {entry.row.request_id: entry.row for entry in group if entry.settlement is None}
                self._has_kept.set()
            raise

    async def _take_back(self) -> None:
        """Remove rows of requests that do not run, if they are there."""
        rows = list(self._doubted.values())[:_MAX_GROUP]
        if not rows:
            return

        def write(transaction: Transaction) -> None:
            transaction.run(_OPEN_AGAIN, [_request_values(row, self._gateway) for row in rows])
            transaction.run(_TAKE_BACK, [{"id": row.request_id} for row in rows])

        try:
            await self._database.transact(write)
        except (LoraplexError, OSError):
            return
        except Exception:  # noqa: BLE001 - the next start settles them
            _log.exception("%d requests that do not run could not be taken back", len(rows))
        for row in rows:
            del self._doubted[row.request_id]

    async def _write_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            seen, self._seen = self._seen, {}
            if not seen:
                continue
            try:
                await self._commit_progress(seen)
            except (LoraplexError, OSError):
                self._seen = seen | self._seen
            except Exception:  # noqa: BLE001 - it is for rows that end as `lost`, and the next second has more
                _log.exception("progress could not be written")

    async def _commit_progress(self, seen: dict[str, int]) -> None:
        values = [{"id": key, "tokens": count} for key, count in seen.items()]
        await self._database.transact(lambda transaction: transaction.run(_NOTE_PROGRESS, values))


def _tell(entry: _Entry, error: Exception | None) -> None:
    """Answer the caller, which hears of the first try only."""
    if entry.written.done():
        return
    if error is None:
        entry.written.set_result(None)
    else:
        entry.written.set_exception(error)
        # The caller may be gone; an exception nobody fetches would be logged with the row in it.
        entry.written.exception()


def _settle(transaction: Transaction, settled: Sequence[tuple[RequestRow, Settlement]]) -> None:
    now = datetime.now(UTC)
    values = [_usage_values(row, settlement, now) for row, settlement in settled]
    # what was settled before, by whomever, is counted already
    new = set(transaction.run(_SETTLE, values))
    first = {row.request_id: (row, settlement) for row, settlement in reversed(settled) if row.request_id in new}
    count_outcomes(transaction, list(first.values()), now)
    transaction.run(_CLOSE, [{"id": row.request_id, "now": now} for row, _ in settled])


def _request_values(row: RequestRow, gateway: str | None) -> dict[str, Any]:
    return msgspec.structs.asdict(row) | {"tokens_seen": 0, "settled_at": None, "gateway": gateway}


def _usage_values(row: RequestRow, settlement: Settlement, now: datetime) -> dict[str, Any]:
    counted = settlement.counted
    return msgspec.structs.asdict(row) | {
        "settled_at": now,
        "day": row.created_at.astimezone(UTC).date().isoformat(),
        "outcome": settlement.outcome,
        "error_code": settlement.code,
        "finish": counted.finish,
        "prompt_tokens": counted.prompt_tokens,
        "cached_tokens": counted.cached_tokens,
        "completion_tokens": counted.completion_tokens,
        "queue_s": counted.queue_s,
        "prefill_s": counted.prefill_s,
        "load_s": counted.load_s,
        "decode_s": counted.decode_s,
        "preemptions": counted.preemptions,
        "load_bytes": counted.load_bytes,
    }
