"""Who may be a gateway of a database: one alone, or several that tell each other of changes. And which of them live.

`Claim` holds the database from the start of the process to its end, by advisory locks of a session on Postgres with a
connection of its own, by a locked file beside a SQLite database. Locks end with their process, however it ends. A
gateway that is alone holds one lock for itself; gateways beside each other share it, and each holds another one on its
own id, by which the others see that it lives. Knows nothing of what gateways would do to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from loraplex.db.database import unavailable_on_failure
from loraplex.errors import DatabaseInUseError, SettingsError, UnavailableError

_LOCK_ID = 0x10_7A_91_ED
_GATEWAYS = 0x10_7A
"""First half of the locks on ids of gateways."""
_PATIENCE_S = 2.0
_RETRY_EVERY_S = 0.2
_LOOK_EVERY_S = 1.0
_LOOK_TIMEOUT_S = 5.0
_UNLOCK_TIMEOUT_S = 1.0
# A gateway whose machine vanished holds the lock until the server misses it: half a minute, not the usual two hours.
_SESSION = "-c statement_timeout=5000 -c tcp_keepalives_idle=15 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
_MEMORY = ("", ":memory:")
_log = logging.getLogger(__name__)


class Claim:
    """The right to be a gateway of the database at `url`.

    Args:
        url: Of the database.
        gateway: The id of this gateway, of this start.
        is_shared: Whether others may be there that say so too.
    """

    def __init__(self, url: str, gateway: str = "", *, is_shared: bool = False) -> None:
        self._url = sa.make_url(url)
        self._gateway = gateway
        self._is_shared = is_shared
        self._turns = asyncio.Lock()
        self._is_sqlite = self._url.get_backend_name() == "sqlite"
        self._descriptor: int | None = None
        self._connection: AsyncConnection | None = None
        self._duties: dict[str, AsyncConnection] = {}

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
            if not connection.invalidated:
                await self._unlock(connection)
            if not connection.invalidated:
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
        lock = sa.func.pg_try_advisory_lock_shared if self._is_shared else sa.func.pg_try_advisory_lock
        async with unavailable_on_failure(), AsyncExitStack() as stack:
            connection = await stack.enter_async_context(engine.connect())
            is_ours = bool(await connection.scalar(sa.select(lock(_LOCK_ID))))
            if is_ours and self._is_shared:
                # whoever holds it is settling what we left open, since it took us for dead
                is_ours = bool(await connection.scalar(_try_lock(self._gateway)))
            if is_ours:
                stack.pop_all()
                self._connection = connection
        return is_ours

    @asynccontextmanager
    async def hold_dead(self, gateway: str) -> AsyncIterator[bool]:
        """Yield whether the gateway of that id is dead; while the block runs no other one finds it so.

        Raises:
            UnavailableError: The database does not answer.
        """
        assert self._is_shared, "a gateway that is alone need not ask"
        async with unavailable_on_failure():
            async with self._turns:
                connection = self._get_connection()
                is_dead = bool(await connection.scalar(_try_lock(gateway)))
            try:
                yield is_dead
            finally:
                if is_dead:
                    async with self._turns:
                        if connection is self._connection and not connection.invalidated:
                            await connection.scalar(sa.select(sa.func.pg_advisory_unlock(_GATEWAYS, _half(gateway))))

    async def try_lead(self, duty: str) -> bool:
        """Whether this gateway is the one of all that does `duty`; it is until it ends or its connection does.

        Raises:
            UnavailableError: The database does not answer.
        """
        if not self._is_shared:
            return True
        async with unavailable_on_failure(), self._turns:
            connection = self._get_connection()
            if self._duties.get(duty) is not connection:
                if not await connection.scalar(_try_lock(duty)):
                    return False
                self._duties[duty] = connection
        return True

    async def _unlock(self, connection: AsyncConnection) -> None:
        """Give the locks back while the server listens: the end of a connection it notices when it comes to it."""
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(_UNLOCK_TIMEOUT_S), unavailable_on_failure(), self._turns:
                await connection.scalar(sa.select(sa.cast(sa.func.pg_advisory_unlock_all(), sa.Text)))
                # while it is our turn: a question under way would wait for a socket that is closed
                await connection.invalidate()

    def _get_connection(self) -> AsyncConnection:
        # one that broke under somebody's hands would refuse everything until it is given back
        if self._connection is None or self._connection.invalidated:
            raise UnavailableError("The connection that holds the database broke.")
        return self._connection

    async def _is_held(self) -> bool:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S), unavailable_on_failure(), self._turns:
                await self._get_connection().scalar(sa.select(1))
        except (UnavailableError, TimeoutError):
            return False
        return True


def _half(gateway: str) -> sa.ColumnElement[int]:
    """An integer of four bytes made from an id: two ids that share it are taken for one, so for alive."""
    return sa.cast(zlib.crc32(gateway.encode()) - 2**31, sa.Integer)


def _try_lock(gateway: str) -> sa.Select[tuple[bool]]:
    return sa.select(sa.func.pg_try_advisory_lock(_GATEWAYS, _half(gateway)))
