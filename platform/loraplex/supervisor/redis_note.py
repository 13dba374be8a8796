"""What `loraplex up` says of a Redis that was named and does not help: one that is away, or beside SQLite."""

from __future__ import annotations

from collections.abc import Mapping

from loraplex.client.connection import Connection
from loraplex.client.location import Location
from loraplex.client.management import LOST_REDIS, Management

_IN_MEMORY = "memory://"


def describe_redis(settings: Mapping[str, str], location: Location) -> str | None:
    """Return what is to be said, None where there is nothing.

    Args:
        settings: Those of `up`, by key.
        location: The gateway, which serves.
    """
    if settings.get("redis_url", _IN_MEMORY) == _IN_MEMORY:
        return None
    if settings.get("database_url", "sqlite").startswith("sqlite"):
        return "LORAPLEX_REDIS_URL is not used: with SQLite there is one gateway, which counts limits by itself."
    with Connection(location) as connection:
        is_lost = Management(connection).has_lost_redis()
    return f"Redis {LOST_REDIS}." if is_lost else None
