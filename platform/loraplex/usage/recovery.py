"""Settles requests that a gateway left open when it died: from the engine's event, else as `lost`.

Knows rows and a way to ask engines; the way is given, so that this needs no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import request
from loraplex.errors import LoraplexError
from loraplex.usage.record import Done, RequestRow, Settlement

FindDone = Callable[[RequestRow], Awaitable[tuple[Done, str] | None]]
"""Ask the engines how a request ended (ending it if it runs), and which of them had it. None: no engine knows it.

Raises OSError while an engine that may know it does not answer.
"""

_RETRY_EVERY_S = 2.0
_FINISH_TO_OUTCOME = {"abort": "cancelled", "error": "error"}
_log = logging.getLogger(__name__)


class LateLedger(Protocol):
    """Takes the settlements of requests that this gateway did not run to their end."""

    async def settle(self, row: RequestRow, settlement: Settlement) -> None:
        """As `Ledger.settle`."""


class OpenRequest(msgspec.Struct, frozen=True):
    """A row without settlement and the progress last written."""

    row: RequestRow
    tokens_seen: int


async def find_open_requests(database: Database, before: datetime, gateway: str | None = None) -> list[OpenRequest]:
    """Return the requests that were opened before an instant and never settled, oldest first.

    Args:
        database: Has the rows.
        before: The instant.
        gateway: Those of this gateway only; of an empty id are rows without one.
    """
    query = (
        sa.select(request)
        .where(request.c.settled_at.is_(None), request.c.created_at < before)
        .order_by(request.c.created_at)
    )
    if gateway is not None:
        query = query.where(sa.func.coalesce(request.c.gateway, "") == gateway)
    async with database.read() as connection:
        rows = (await connection.execute(query)).mappings().all()
    return [OpenRequest(_read_row(dict(row)), row["tokens_seen"]) for row in rows]


async def settle_open_requests(
    ledger: LateLedger, found: list[OpenRequest], find_done: FindDone, patience_s: float = 60.0
) -> None:
    """Settle each of `found`; engines get `patience_s` to answer, then the rest is lost."""
    give_up_at = time.monotonic() + patience_s
    for item in found:
        settlement, replica = await _find_settlement(item, find_done, give_up_at)
        await _settle(ledger, msgspec.structs.replace(item.row, replica=replica), settlement)
    if found:
        _log.info("settled %d requests that were open at the last stop", len(found))


async def _settle(ledger: LateLedger, row: RequestRow, settlement: Settlement) -> None:
    """Settle one request; neither a database that is away nor a row that it refuses keeps the others from theirs."""
    while True:
        try:
            await ledger.settle(row, settlement)
        except LoraplexError as error:
            _log.warning("%s cannot be settled yet: %s", row.request_id, error.message)
            await asyncio.sleep(_RETRY_EVERY_S)
        except Exception:  # noqa: BLE001 - whatever is wrong with one row, the others are settled
            _log.exception("%s cannot be settled", row.request_id)
            return
        else:
            return


async def _find_settlement(item: OpenRequest, find_done: FindDone, give_up_at: float) -> tuple[Settlement, str]:
    """Return how a request ended, and the engine that had it."""
    while True:
        try:
            found = await find_done(item.row)
            break
        except Exception as error:  # noqa: BLE001 - an engine that answers nonsense is one that does not answer
            if not isinstance(error, OSError):
                _log.warning("%s: an engine's answer makes no sense: %r", item.row.request_id, error)
            if time.monotonic() >= give_up_at:
                found = None
                break
            await asyncio.sleep(_RETRY_EVERY_S)
    if found is None:
        return Settlement(outcome="lost", done=Done(completion_tokens=item.tokens_seen)), item.row.replica
    done, replica = found
    # Nobody read the end of it, but what was sampled counts.
    return Settlement(outcome=_FINISH_TO_OUTCOME.get(done.finish or "", "ok"), done=done), replica


def _read_row(row: dict[str, Any]) -> RequestRow:
    return RequestRow(**{name: row[name] for name in RequestRow.__struct_fields__})
