"""The names epochs in Redis, so that each gateway sees at once what another one has committed.

Redis holds a copy that may be lost or old; the database is the truth. Epochs in Redis only grow, unless the database
was put back to an older state. Knows Redis, no tables and no names.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, Protocol

import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.redis_client import open_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.connection import AbstractConnection

_TIMEOUT_S = 0.25
_FIELDS = ("registry", "gateway")
_RAISE = """
for i = 1, #ARGV, 2 do
  local known = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '-1')
  if tonumber(ARGV[i + 1]) > known then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
"""
_REPLACE = """
for i = 1, #ARGV, 3 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
end
"""


class Epochs(NamedTuple):
    """The pair: the epoch of the registry's tables and that of the gateway's own."""

    registry: int
    gateway: int


class BusError(Exception):
    """Redis did not answer in time, or it answered an error."""


class EpochBus(Protocol):
    """Where gateways tell each other of epochs; every call is bounded."""

    async def read(self) -> Epochs | None:
        """Return what is there now; None if that says nothing: it was lost, or may be older than it was.

        Raises:
            BusError: There is no answer.
        """

    async def publish(self, *, registry: int | None = None, gateway: int | None = None) -> None:
        """Raise what is there to these epochs.

        Raises:
            BusError: It is not known to be done.
        """

    async def put_back(self, seen: Epochs, actual: Epochs) -> None:
        """Replace what was `seen` there and never was in the database, which was put back to an older state.

        Raises:
            BusError: It is not known to be done.
        """

    async def close(self) -> None:
        """Close all connections."""


class RedisBus:
    """An `EpochBus` in one hash of a Redis server.

    Args:
        url: redis://, rediss:// or unix://.
        name: Tells platforms apart that share a server.

    Raises:
        SettingsError: The URL is not valid.
    """

    def __init__(self, url: str, name: str) -> None:
        self._key = f"loraplex:{name}:epochs"
        self._num_connects = 0
        self._num_connects_seen = 0
        self._running: asyncio.Task[Epochs | None] | None = None
        self._next: asyncio.Task[Epochs | None] | None = None
        self._redis = self._open(url)

    async def read(self) -> Epochs | None:
        """See `EpochBus`. Callers that come while one read is on its way share the next one."""
        if self._next is None:
            # What is on its way may have been answered before this caller's request began.
            self._next = asyncio.create_task(self._read_after(self._running))
            self._next.add_done_callback(_look_at)
        return await asyncio.shield(self._next)

    async def publish(self, *, registry: int | None = None, gateway: int | None = None) -> None:
        """See `EpochBus`."""
        given = zip(_FIELDS, (registry, gateway), strict=True)
        await self._eval(_RAISE, [text for name, value in given if value is not None for text in (name, str(value))])

    async def put_back(self, seen: Epochs, actual: Epochs) -> None:
        """See `EpochBus`."""
        rows = zip(_FIELDS, seen, actual, strict=True)
        lower = [(name, str(was), str(now)) for name, was, now in rows if was > now]
        await self._eval(_REPLACE, [text for row in lower for text in row])

    async def close(self) -> None:
        """See `EpochBus`."""
        await self._redis.aclose()

    def _open(self, url: str) -> Redis:
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        async def greet(connection: AbstractConnection) -> None:
            self._num_connects += 1
            await connection.on_connect()

        return open_redis(
            url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
            redis_connect_func=greet,
        )

    async def _read_after(self, former: asyncio.Task[Epochs | None] | None) -> Epochs | None:
        if former is not None:
            await asyncio.wait([former])
        self._running, self._next = self._next, None
        found = await self._ask(self._redis.hmget(self._key, list(_FIELDS)))  # type: ignore[arg-type]
        # A server that we had to connect to again may have started from an older copy of itself.
        is_new, self._num_connects_seen = self._num_connects != self._num_connects_seen, self._num_connects
        try:
            return None if is_new or None in found else Epochs(*map(int, found))
        except (ValueError, TypeError) as error:
            raise BusError("its answer makes no sense") from error

    async def _eval(self, script: str, arguments: list[str]) -> None:
        await self._ask(self._redis.eval(script, 1, self._key, *arguments))  # type: ignore[arg-type]

    @staticmethod
    async def _ask(call: asyncio.Future[list[str]]) -> list[str]:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            raise BusError(type(error).__name__) from error


def _look_at(task: asyncio.Task[Epochs | None]) -> None:
    """An exception that nobody waits for any more is no fault."""
    if not task.cancelled():
        task.exception()


async def name_database(database: Database) -> str:
    """Return what tells this Postgres database from every other one, whatever name its server is reached by.

    Raises:
        UnavailableError: The database does not answer.
    """
    query = sa.text("SELECT (SELECT system_identifier FROM pg_control_system()) || ':' || current_database()")
    async with database.read() as connection:
        return str((await connection.execute(query)).scalar_one())
