"""Settles what gateways beside this one left open when they died. Knows rows, and ways to ask who lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime

import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import request
from loraplex.errors import LoraplexError
from loraplex.usage.recovery import FindDone, LateLedger, find_open_requests, settle_open_requests

HoldDead = Callable[[str], AbstractAsyncContextManager[bool]]
"""Yields whether a gateway is dead, and keeps others from finding it so at the same time."""

_LOOK_EVERY_S = 2.0
_DEAD_AFTER_S = 6.0
"""A living gateway whose connection broke takes its lock again within a second or two."""

_log = logging.getLogger(__name__)


class DeadGateways:
    """Looks for open requests of gateways that are gone.

    Args:
        database: Has the rows.
        ledger: Settles them.
        gateway: The id of this gateway.
        hold_dead: Asks whether another one is dead.
        find_done: Asks the engines how a request ended.
    """

    def __init__(
        self, database: Database, ledger: LateLedger, gateway: str, hold_dead: HoldDead, find_done: FindDone
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._gateway = gateway
        self._hold_dead = hold_dead
        self._find_done = find_done
        self._dead_since: dict[str, float] = {}

    async def run(self) -> None:
        """Look every two seconds, until cancelled."""
        while True:
            try:
                await self.look()
            except LoraplexError as error:
                _log.warning("open requests of other gateways cannot be read: %s", error.message)
            except Exception:  # noqa: BLE001 - it must outlive any row
                _log.exception("open requests of other gateways cannot be settled")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self) -> None:
        """Settle the requests of each gateway that has been dead at every look for six seconds."""
        others = await self._list_others()
        self._dead_since = {gateway: since for gateway, since in self._dead_since.items() if gateway in others}
        for gateway in others:
            async with self._hold_dead(gateway) as is_dead:
                if not is_dead:
                    self._dead_since.pop(gateway, None)
                    continue
                since = self._dead_since.setdefault(gateway, time.monotonic())
                if time.monotonic() - since >= _DEAD_AFTER_S:
                    found = await find_open_requests(self._database, datetime.now(UTC), gateway)
                    await settle_open_requests(self._ledger, found, self._find_done)

    async def _list_others(self) -> set[str]:
        """Return the ids of gateways that have open requests; a row without one is of a program that wrote none."""
        query = sa.select(sa.func.coalesce(request.c.gateway, "")).where(request.c.settled_at.is_(None)).distinct()
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars()) - {self._gateway}
