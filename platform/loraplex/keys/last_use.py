"""When each key was last used, for whoever rotates keys or looks for forgotten ones.

Requests only note it in memory; it is written behind them, a key's at most once a minute. `LastUse` is the only writer
of `api_key.last_used_at`. What a gateway has noted and not written when it dies is lost: a minute of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import api_key
from loraplex.errors import UnavailableError

_LOOK_EVERY_S = 10.0
_REST_S = 60.0
_log = logging.getLogger(__name__)


class LastUse:
    """What this gateway has seen of keys and not written yet."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: dict[str, datetime] = {}
        self._written_at: dict[str, float] = {}

    def note(self, key_id: str) -> None:
        """Note that a key is used now."""
        self._seen[key_id] = datetime.now(UTC)

    async def run(self) -> None:
        """Write from time to time, for ever."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what is due; what cannot be written now is due again next time."""
        now = time.monotonic()
        self._written_at = {key: at for key, at in self._written_at.items() if now - at < _REST_S}
        due = {key: at for key, at in self._seen.items() if key not in self._written_at}
        if not due:
            return
        try:
            await self._write(due)
        except UnavailableError as error:
            _log.warning("the last use of %d keys could not be written: %s", len(due), error.message)
            return
        for key, at in due.items():
            self._written_at[key] = now
            if self._seen[key] == at:
                del self._seen[key]

    async def _write(self, due: dict[str, datetime]) -> None:
        """Leave alone what another gateway wrote within the minute."""
        is_old = api_key.c.last_used_at.is_(None) | (api_key.c.last_used_at <= sa.bindparam("before"))
        is_this = api_key.c.public_id == sa.bindparam("key")
        update = sa.update(api_key).where(is_this, is_old).values(last_used_at=sa.bindparam("at"))
        rest = timedelta(seconds=_REST_S)
        # in one order everywhere, so that two gateways never wait for each other
        rows = [{"key": found, "at": due[found], "before": due[found] - rest} for found in sorted(due)]
        async with self._database.write() as connection:
            await connection.execute(update, rows)
