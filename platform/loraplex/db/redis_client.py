"""Clients of Redis, of which a connection that was cut is an error of Redis, whichever event loop runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loraplex.errors import SettingsError

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool, Redis
    from redis.asyncio.connection import AbstractConnection


def open_redis(url: str, *, is_bounded: bool = False, **options: Any) -> Redis:
    """Return a client that connects when it is first asked.

    Args:
        url: redis://, rediss:// or unix://.
        is_bounded: Callers wait for one of `max_connections` instead of an error beyond them.
        options: Of redis-py's connections and pool.

    Raises:
        SettingsError: The address is none.
    """
    # It takes a tenth of a second to import, and a gateway on one machine has no use for it.
    from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis

    kind = BlockingConnectionPool if is_bounded else ConnectionPool
    try:
        pool: ConnectionPool = kind.from_url(url, decode_responses=True, **options)
    except (ValueError, TypeError) as error:
        # the text of the error may hold the password
        raise SettingsError("LORAPLEX_REDIS_URL is not redis://, rediss://, unix:// or memory://") from error
    pool.connection_class = _tell_cuts(pool.connection_class)
    return Redis.from_pool(pool)


def _tell_cuts(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """A connection that raises redis-py's own error, which is tried again, where it was closed before it is written to.

    uvloop raises RuntimeError there.
    """
    from redis.exceptions import ConnectionError as NoConnectionError

    class Connection(kind):  # type: ignore[misc, valid-type]
        async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
            try:
                await super().send_packed_command(*arguments, **options)
            except RuntimeError as error:
                raise NoConnectionError("the connection was closed") from error

    return Connection
