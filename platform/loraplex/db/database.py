"""Connections to the gateway's database: SQLite (WAL, FULL, one writer at a time) or Postgres, behind four verbs.

`Database.write()` and `Database.transact()` are one transaction each; nothing else here writes. Knows dialects, no
tables.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from loraplex.db.statement import SqlTransaction, Transaction, transact
from loraplex.errors import SettingsError, UnavailableError

_STATEMENT_TIMEOUT_MS = 5000
_LOCK_TIMEOUT_MS = 2000
_IDLE_TIMEOUT_MS = 10_000
_POOL_TIMEOUT_S = 2.0
DEFAULT_POOL_SIZE = 8
REPORT_SHARE = 4
"""One of so many connections is for reports."""

_REPORT_WAIT_S = 10.0
_WRITES = "loraplex_writes"
_MEMORY = (None, "", ":memory:")
_DRIVERS = ("postgresql+psycopg", "sqlite+aiosqlite")
T = TypeVar("T")

RAISED_EPOCH = "loraplex_raised_epoch"
"""Where a transaction notes on its connection the epoch that it leads to."""


async def _tell_nobody(epoch: int) -> None:
    """A gateway that is the only one has nobody to tell."""


class Database:
    """One database; create it in the running loop and close it there."""

    def __init__(self, url: str, pool_size: int = DEFAULT_POOL_SIZE) -> None:
        self.engine = create_engine(url, pool_size)
        self._is_sqlite = self.engine.dialect.name == "sqlite"
        self._write_lock = asyncio.Lock()
        self._reports = asyncio.Semaphore(max(1, pool_size // REPORT_SHARE))
        self._writer = _SqliteWriter(url) if self._is_sqlite and self.engine.url.database not in _MEMORY else None
        self.publish_epoch: Callable[[int], Awaitable[None]] = _tell_nobody
        """Tells other gateways of an epoch once it is committed; returns when none of them is behind it."""

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection for reading.

        Raises:
            UnavailableError: The database does not answer in time.
        """
        async with unavailable_on_failure(), self.engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def report(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection for reading what may take long: a few at a time, so that calls always find one.

        Raises:
            UnavailableError: Too many others read, or the database does not answer in time.
        """
        try:
            async with asyncio.timeout(_REPORT_WAIT_S):
                await self._reports.acquire()
        except TimeoutError as error:
            raise UnavailableError("Many reports are being read; try again shortly.") from error
        try:
            async with self.read() as connection:
                yield connection
        finally:
            self._reports.release()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a transaction that commits at the end, or not at all.

        Raises:
            UnavailableError: The database does not answer in time.
        """
        async with unavailable_on_failure(), self._one_writer(), self.engine.connect() as connection:
            await connection.execution_options(**{_WRITES: True})
            notes = (await connection.get_raw_connection()).info
            notes.pop(RAISED_EPOCH, None)
            async with connection.begin():
                yield connection
            epoch = notes.pop(RAISED_EPOCH, None)
        if epoch is not None:
            await self.publish_epoch(epoch)

    async def transact(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction and return what it returns; it changes no names, keys or tenants.

        On SQLite it runs in a thread from begin to commit, as each step by itself would cost more than all of them.

        Raises:
            UnavailableError: The database does not answer in time.
        """
        if self._writer is None:
            async with self.write() as connection:
                return await connection.run_sync(lambda connection: work(SqlTransaction(connection)))
        async with unavailable_on_failure(), self._write_lock:
            return await self._writer.run(work)

    async def close(self) -> None:
        """Close all connections."""
        if self._writer is not None:
            await self._writer.close()
        await self.engine.dispose()

    def _one_writer(self) -> AbstractAsyncContextManager[Any]:
        """SQLite has one writer: queue here in order instead of retrying there."""
        return self._write_lock if self._is_sqlite else nullcontext()


class _SqliteWriter:
    """One connection in a thread of its own, which ends with `close` or with the process.

    An executor would do, but takes longer to pass a transaction on than this takes to write a small one.
    """

    def __init__(self, url: str) -> None:
        self._path = sa.make_url(url).database or ""
        self._connection: sqlite3.Connection | None = None
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="ledger", daemon=True)

    async def run(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[T] = loop.create_future()

        def write() -> None:
            try:
                result = transact(self._connect, work)
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                loop.call_soon_threadsafe(_tell, written.set_exception, written, error)
            else:
                loop.call_soon_threadsafe(_tell, written.set_result, written, result)

        if self._thread.ident is None:
            self._thread.start()
        self._works.put(write)
        return await written

    async def close(self) -> None:
        """Wait for what runs and end the thread."""
        if self._thread.ident is not None:
            self._works.put(None)
            await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        while (write := self._works.get()) is not None:
            write()
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self._path)
            _prepare_sqlite(connection, None)
            self._connection = connection
        return self._connection


def _tell(set_it: Callable[[Any], None], written: asyncio.Future[Any], value: Any) -> None:
    """Nobody waits for what was cancelled."""
    if not written.done():
        set_it(value)


def create_engine(url: str, pool_size: int = DEFAULT_POOL_SIZE) -> AsyncEngine:
    """Return an engine for `url` with the bounds of every wait set, and at most `pool_size` connections to a server.

    Raises:
        SettingsError: The URL is not one of postgresql+psycopg or sqlite+aiosqlite.
    """
    parsed = check_database_url(url)
    if parsed.drivername == "sqlite+aiosqlite":
        engine = create_async_engine(parsed, pool_timeout=_POOL_TIMEOUT_S, hide_parameters=True)
        sa.event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        sa.event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    options = (
        f"-c statement_timeout={_STATEMENT_TIMEOUT_MS} -c lock_timeout={_LOCK_TIMEOUT_MS} "
        f"-c idle_in_transaction_session_timeout={_IDLE_TIMEOUT_MS}"
    )
    return create_async_engine(
        parsed,
        connect_args={"options": options, "connect_timeout": int(_POOL_TIMEOUT_S)},
        pool_timeout=_POOL_TIMEOUT_S,
        pool_pre_ping=True,
        # errors are logged, and what is written is nobody's business there
        hide_parameters=True,
        pool_size=pool_size,
        max_overflow=0,
    )


def check_database_url(url: str) -> sa.URL:
    """Return a database's URL in its parts.

    Raises:
        SettingsError: The URL is not one of postgresql+psycopg or sqlite+aiosqlite.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        # the text of the error may hold the password
        raise SettingsError("LORAPLEX_DATABASE_URL is not a database URL") from error
    if parsed.drivername not in _DRIVERS:
        raise SettingsError(
            f"LORAPLEX_DATABASE_URL: {parsed.drivername} is not supported; use postgresql+psycopg:// or "
            "sqlite+aiosqlite://"
        )
    return parsed


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
