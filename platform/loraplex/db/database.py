"""Connections to the gateway's database: SQLite (WAL, FULL, one writer at a time) or Postgres, behind two verbs.

`Database.write()` is one transaction; nothing else here writes. Knows dialects, no tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from loraplex.errors import SettingsError, UnavailableError

_STATEMENT_TIMEOUT_MS = 5000
_LOCK_TIMEOUT_MS = 2000
_POOL_TIMEOUT_S = 2.0
_WRITES = "loraplex_writes"


class Database:
    """One database; create it in the running loop and close it there."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url)
        self._is_sqlite = self.engine.dialect.name == "sqlite"
        self._write_lock = asyncio.Lock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection for reading.

        Raises:
            UnavailableError: The database does not answer in time.
        """
        async with unavailable_on_failure(), self.engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a transaction that commits at the end, or not at all.

        Raises:
            UnavailableError: The database does not answer in time.
        """
        async with unavailable_on_failure(), self._one_writer(), self.engine.connect() as connection:
            await connection.execution_options(**{_WRITES: True})
            async with connection.begin():
                yield connection

    async def close(self) -> None:
        """Close all connections."""
        await self.engine.dispose()

    def _one_writer(self) -> AbstractAsyncContextManager[Any]:
        """SQLite has one writer: queue here in order instead of retrying there."""
        return self._write_lock if self._is_sqlite else nullcontext()


def create_engine(url: str) -> AsyncEngine:
    """Return an engine for `url` with the bounds of every wait set.

    Raises:
        SettingsError: The URL is not one of postgresql+psycopg or sqlite+aiosqlite.
    """
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise SettingsError("LORAPLEX_DATABASE_URL is not a database URL") from error
    if parsed.drivername == "sqlite+aiosqlite":
        engine = create_async_engine(parsed, pool_timeout=_POOL_TIMEOUT_S)
        sa.event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        sa.event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    if parsed.drivername == "postgresql+psycopg":
        options = f"-c statement_timeout={_STATEMENT_TIMEOUT_MS} -c lock_timeout={_LOCK_TIMEOUT_MS}"
        connect_args = {"options": options, "connect_timeout": int(_POOL_TIMEOUT_S)}
        return create_async_engine(
            parsed, connect_args=connect_args, pool_timeout=_POOL_TIMEOUT_S, pool_pre_ping=True, pool_size=8
        )
    raise SettingsError(
        f"LORAPLEX_DATABASE_URL: {parsed.drivername} is not supported; use postgresql+psycopg:// or sqlite+aiosqlite://"
    )


def _prepare_sqlite(connection: Any, record: Any) -> None:  # noqa: ARG001 - the event passes both
    """Take BEGIN into our own hands and set durability and waits."""
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        f"busy_timeout={_LOCK_TIMEOUT_MS}",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # Under WAL a deferred transaction that turns to writing fails at once when another writer came between.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@asynccontextmanager
async def unavailable_on_failure() -> AsyncIterator[None]:
    """Say `UnavailableError` of a database that does not answer; what it refuses stays as it is."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        raise UnavailableError("The database does not answer; try again shortly.") from error
    except DBAPIError as error:
        if error.connection_invalidated:
            raise UnavailableError("The database connection broke; try again shortly.") from error
        raise
