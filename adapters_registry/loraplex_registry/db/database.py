"""Connections and transactions: SQLite (WAL, FULL, one writer at a time) or Postgres, behind three verbs.

`Database.change` is the only way by which names change: it raises the names epoch in the same transaction and
publishes it after the commit. `NamesEpoch` is written here alone. Knows dialects, no rules.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from loraplex_registry.db.model import EpochRow
from loraplex_registry.errors import SettingError, UnavailableError

T = TypeVar("T")
_STATEMENT_TIMEOUT_MS = 5000
_LOCK_TIMEOUT_MS = 2000
_IDLE_TIMEOUT_MS = 10_000
_POOL_TIMEOUT_S = 2.0
_QUEUE_TIMEOUT_S = 10.0
DEFAULT_POOL_SIZE = 8
_TRIES = 4
_FIRST_WAIT_S = 0.02
# serialisation failure, deadlock, and what a server says that shuts down or that a failover made read-only
_PASSING = ("40001", "40P01", "57P01", "57P02", "57P03", "25006")
_WRITES = "loraplex_writes"
_log = logging.getLogger(__name__)
_RAISE_EPOCH = sa.update(EpochRow).where(EpochRow.id == 1).values(epoch=EpochRow.epoch + 1).returning(EpochRow.epoch)


class NamesEpoch:
    """The newest names epoch known to be committed; readers compare it with what they have seen."""

    def __init__(self) -> None:
        self.current = 0

    def advance(self, epoch: int) -> None:
        """Publish `epoch`; an older one changes nothing."""
        self.current = max(self.current, epoch)


@dataclass(frozen=True)
class Change:
    """A transaction that changes names; rows it touches carry `epoch`."""

    session: AsyncSession
    epoch: int


class Database:
    """One database; used from one event loop."""

    def __init__(self, url: str, pool_size: int = DEFAULT_POOL_SIZE) -> None:
        self.epoch = NamesEpoch()
        self.publish_epoch: Callable[[int], Awaitable[None]] = _tell_nobody
        """Tells other gateways of an epoch once it is committed; returns when none of them is behind it."""
        self._engine = create_engine(url, pool_size)
        self._is_sqlite = self._engine.dialect.name == "sqlite"
        self._write_lock = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Yield a session that sees one snapshot and whose changes are dropped.

        Raises:
            UnavailableError: The database does not answer in time.
        """
        async with _unavailable_on_failure(), AsyncSession(self._engine, expire_on_commit=False) as session:
            if not self._is_sqlite:
                await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    async def write(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """Run `work` in one transaction that touches no names (events, idempotency keys).

        A transaction that has begun ends even if the caller is cancelled. `work` runs again, in a new transaction,
        where the database gave up the one before for a cause that passes.

        Raises:
            UnavailableError: The database does not answer in time; nothing is committed, unless the connection broke
                during the commit: then nobody knows.
        """
        return await self._finish(self._write(work, nullcontext()))

    async def change(self, work: Callable[[Change], Awaitable[T]]) -> T:
        """Run `work` in one transaction that changes names, and publish the epoch it leads to before returning.

        The epoch's row is locked first, so all changes of names follow one another: commits become visible in the
        order of their epochs, and `work` sees no other writer. It may run again as in `write`.

        Raises:
            UnavailableError: As for `write`.
        """

        async def with_epoch(session: AsyncSession) -> tuple[T, int]:
            epoch = (await session.execute(_RAISE_EPOCH)).scalar_one()
            return await work(Change(session, epoch)), epoch

        async def run() -> T:
            # Changes queue here rather than there, where each would hold a connection and a short patience.
            result, epoch = await self._write(with_epoch, self._turn())
            self.epoch.advance(epoch)
            await self.publish_epoch(epoch)
            return result

        return await self._finish(run())

    async def refresh_epoch(self) -> int:
        """Publish the epoch that is committed, by whatever process, and return it."""
        async with self.read() as session:
            epoch: int = (await session.execute(sa.select(EpochRow.epoch))).scalar_one()
        self.epoch.advance(epoch)
        return epoch

    async def close(self) -> None:
        """Let running transactions end and close all connections."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._engine.dispose()

    async def _write(self, work: Callable[[AsyncSession], Awaitable[T]], turn: AbstractAsyncContextManager[Any]) -> T:
        async with _unavailable_on_failure(), self._turn() if self._is_sqlite else turn:
            for trial in range(1, _TRIES + 1):
                try:
                    return await self._try_write(work)
                except _CommitError as error:
                    # Whether it is committed, nobody knows: to do it again might do it twice.
                    raise error.cause from error
                except DBAPIError as error:
                    if trial == _TRIES or not _is_passing(error):
                        raise
                    _log.info("a transaction is tried again: %s", error.orig)
                await asyncio.sleep(_FIRST_WAIT_S * 2**trial * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        raise AssertionError("the last try returns or raises")

    async def _try_write(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        async with AsyncSession(self._engine, expire_on_commit=False) as session:
            await session.connection(execution_options={_WRITES: True})
            result = await work(session)
            await session.flush()
            try:
                await session.commit()
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise _CommitError(error) from error
                raise
            return result

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the other writers of this process, in order."""
        try:
            async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                await self._write_lock.acquire()
        except TimeoutError as error:
            raise UnavailableError from error
        try:
            yield
        finally:
            self._write_lock.release()

    async def _finish(self, running: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(running)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)


class _CommitError(Exception):
    """The connection broke during a commit."""

    def __init__(self, cause: DBAPIError) -> None:
        super().__init__()
        self.cause = cause


def _is_passing(error: DBAPIError) -> bool:
    return error.connection_invalidated or getattr(error.orig, "sqlstate", None) in _PASSING


async def _tell_nobody(epoch: int) -> None:
    """A registry that is the only one has nobody to tell."""


def create_engine(url: str, pool_size: int = DEFAULT_POOL_SIZE) -> AsyncEngine:
    """Return an engine for `url` with the bounds of every wait set, and at most `pool_size` connections to a server.

    Raises:
        SettingError: The URL is not one of postgresql+psycopg or sqlite+aiosqlite.
    """
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise SettingError("LORAPLEX_DATABASE_URL is not a database URL") from error
    if parsed.drivername == "sqlite+aiosqlite":
        engine = create_async_engine(parsed, pool_timeout=_POOL_TIMEOUT_S, hide_parameters=True)
        sa.event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        sa.event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    if parsed.drivername == "postgresql+psycopg":
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
    raise SettingError(
        f"LORAPLEX_DATABASE_URL: {parsed.drivername} is not supported; use postgresql+psycopg:// or sqlite+aiosqlite://"
    )


def _prepare_sqlite(connection: Any, record: Any) -> None:  # noqa: ARG001
    """Take BEGIN into our own hands and set durability and waits."""
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={_LOCK_TIMEOUT_MS}", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A deferred transaction that turns into a writing one fails at once under WAL if another writer came between.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@asynccontextmanager
async def _unavailable_on_failure() -> AsyncIterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        raise UnavailableError from error
    except DBAPIError as error:
        if error.connection_invalidated:
            raise UnavailableError from error
        raise
