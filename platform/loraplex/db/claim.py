"""One gateway at a time on one database: `Claim` holds the database from the start of the process to its end.

An advisory lock of a session on Postgres, with a connection of its own; a locked file beside a SQLite database. Both
end with their process, however it ends. Knows nothing of what gateways would do to each other.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from loraplex.db.database import unavailable_on_failure
from loraplex.errors import DatabaseInUseError, SettingsError, UnavailableError

_LOCK_ID = 0x10_7A_91_ED
_PATIENCE_S = 2.0
_RETRY_EVERY_S = 0.2
_LOOK_EVERY_S = 5.0
_LOOK_TIMEOUT_S = 5.0
# A gateway whose machine vanished holds the lock until the server misses it: half a minute, not the usual two hours.
_SESSION = "-c statement_timeout=5000 -c tcp_keepalives_idle=15 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
_MEMORY = ("", ":memory:")
_log = logging.getLogger(__name__)


class Claim:
    """The right to be the gateway of the database at `url`."""

    def __init__(self, url: str) -> None:
        self._url = sa.make_url(url)
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._descriptor: int | None = None
        self._connection: AsyncConnection | None = None

    async def take(self) -> None:
        """Take the database; waits a moment for a gateway that is just ending.

        Raises:
            DatabaseInUseError: Another gateway has it.
            SettingsError: The file beside a SQLite database cannot be made.
            UnavailableError: The database does not answer.
        """
        give_up_at = time.monotonic() + _PATIENCE_S
        while not await self._try_take():
            if time.monotonic() >= give_up_at:
                raise DatabaseInUseError
            await asyncio.sleep(_RETRY_EVERY_S)

    async def release(self) -> None:
        """Let another gateway have the database; fine if it was never taken."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.invalidate()
            await connection.close()

    async def watch(self, on_lost: Callable[[], None]) -> None:
        """Take the database again whenever its connection broke, and call `on_lost` if another gateway was faster."""
        while not self._is_sqlite:
            await asyncio.sleep(_LOOK_EVERY_S)
            if await self._is_held():
                continue
            try:
                await self.release()
                await self.take()
            except UnavailableError:
                continue
            except DatabaseInUseError as error:
                _log.error("the database was away, and now: %s", error.message)
                on_lost()
                return

    async def _try_take(self) -> bool:
        return self._try_lock_file() if self._is_sqlite else await self._try_lock_session()

    def _try_lock_file(self) -> bool:
        if (self._url.database or "") in _MEMORY:
            return True
        path = Path(f"{Path(self._url.database or '').resolve()}.gateway")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"LORAPLEX_DATABASE_URL: {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    async def _try_lock_session(self) -> bool:
        engine = create_async_engine(
            self._url,
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"options": _SESSION, "connect_timeout": 2},
        )
        async with unavailable_on_failure(), AsyncExitStack() as stack:
            connection = await stack.enter_async_context(engine.connect())
            is_ours = bool(await connection.scalar(sa.select(sa.func.pg_try_advisory_lock(_LOCK_ID))))
            if is_ours:
                stack.pop_all()
                self._connection = connection
        return is_ours

    async def _is_held(self) -> bool:
        if self._connection is None:
            return False
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S), unavailable_on_failure():
                await self._connection.scalar(sa.select(1))
        except (UnavailableError, TimeoutError):
            return False
        return True
