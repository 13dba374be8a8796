"""Writes `request` and `usage` rows in group commits: callers that come together share one commit.

`Ledger` is the only writer of both tables. A row is on disk when `open` or `settle` returns. While one commit runs the
next group gathers, so nobody waits for a timer and a lone caller waits for its own commit only.
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
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.tables import request, usage
from loraplex.errors import LoraplexError
from loraplex.usage.record import RequestRow, Settlement

_MAX_GROUP = 256
_PROGRESS_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class _Entry(msgspec.Struct, eq=False):
    """One row to write and the caller that waits for it."""

    row: RequestRow
    settlement: Settlement | None
    written: asyncio.Future[None]


class Ledger:
    """The record of all generations. Start it in the running loop; stop it after the last settle."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending: list[_Entry] = []
        self._has_work = asyncio.Event()
        self._seen: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to write."""
        self._tasks = [asyncio.create_task(self._write_groups()), asyncio.create_task(self._write_progress())]

    async def stop(self) -> None:
        """Write what is pending, then end."""
        while self._pending:
            await asyncio.wait([entry.written for entry in self._pending])
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def open(self, row: RequestRow) -> None:
        """Commit that `row` is about to be dispatched.

        Raises:
            UnavailableError: The database does not answer; the request must not run.
        """
        await self._write(row, None)

    async def settle(self, row: RequestRow, settlement: Settlement) -> None:
        """Commit how `row` ended; a second settlement of one request changes nothing.

        Raises:
            UnavailableError: The database does not answer; the row stays open and is settled after a restart.
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

    async def _write_group(self, group: list[_Entry]) -> None:
        """Commit a group; when the database refuses it, row by row, so that one bad row hurts only itself."""
        try:
            await self._commit(group)
        except DBAPIError as error:
            if len(group) == 1:
                _finish(group, error)
                return
            for entry in group:
                await self._write_group([entry])
        except (LoraplexError, OSError) as error:
            _finish(group, error)
        except Exception as error:  # noqa: BLE001 - the writer must outlive any row
            _log.exception("the ledger failed to write %d rows", len(group))
            _finish(group, error)
        else:
            _finish(group, None)

    async def _commit(self, group: Sequence[_Entry]) -> None:
        opened = [_request_values(entry.row) for entry in group if entry.settlement is None]
        settled = [(entry.row, entry.settlement) for entry in group if entry.settlement is not None]
        async with self._database.write() as connection:
            if opened:
                await connection.execute(request.insert(), opened)
            if settled:
                await _settle(connection, settled)

    async def _write_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            seen, self._seen = self._seen, {}
            if seen:
                with contextlib.suppress(LoraplexError):
                    await self._commit_progress(seen)

    async def _commit_progress(self, seen: dict[str, int]) -> None:
        update = (
            sa.update(request)
            .where(request.c.request_id == sa.bindparam("id"), request.c.settled_at.is_(None))
            .values(tokens_seen=sa.bindparam("tokens"))
        )
        async with self._database.write() as connection:
            await connection.execute(update, [{"id": key, "tokens": count} for key, count in seen.items()])


def _finish(group: Sequence[_Entry], error: Exception | None) -> None:
    for entry in group:
        if error is None:
            entry.written.set_result(None)
        else:
            entry.written.set_exception(error)
            # The caller may be gone; an exception nobody fetches would be logged with the row in it.
            entry.written.exception()


async def _settle(connection: AsyncConnection, settled: Sequence[tuple[RequestRow, Settlement]]) -> None:
    now = datetime.now(UTC)
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    values = [_usage_values(row, settlement, now) for row, settlement in settled]
    await connection.execute(insert(usage).on_conflict_do_nothing(index_elements=["request_id"]), values)
    ids = [row.request_id for row, _ in settled]
    await connection.execute(sa.update(request).where(request.c.request_id.in_(ids)).values(settled_at=now))


def _request_values(row: RequestRow) -> dict[str, Any]:
    return msgspec.structs.asdict(row) | {"tokens_seen": 0, "settled_at": None}


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
    }
