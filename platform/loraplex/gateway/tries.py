"""How often keys may be tried that open nothing: so often a minute from one network, and with one key's id.

Only failures count, so that a team behind one proxy does not lock itself out by working. `TryLimit` is the only writer
of what this process has seen; with a Redis gateways see each other's, and without its answer each counts alone. Of a
key its id is kept, as a hash, and nothing of its secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from loraplex.db.redis_client import open_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis

WINDOW_S = 60
MAX_LOGINS, MAX_BEARERS = 5, 600
"""Failures in `WINDOW_S`: of logins, after which none is tried; of bearer keys, which are then told to wait."""
_MAX_SUBJECTS = 10_000
_KEY_ID_LEN = len("lpx_") + 10
_NETWORK_BITS = 64
_TIMEOUT_S = 0.25


class SharedTries(Protocol):
    """Failures of all gateways; what it cannot say it leaves out."""

    async def find(self, subjects: Sequence[str], num: int) -> Iterable[float]:
        """Return when the `num`-th youngest failure of each subject was, if there were so many."""

    async def note(self, subjects: Sequence[str], num: int, at: float) -> None:
        """Keep one more of each, and the `num` youngest."""


class TryLimit:
    """At most `max_tries` failures a minute of each subject; `clock` is the time of day."""

    def __init__(self, max_tries: int, clock: Callable[[], float] = time.time) -> None:
        self.max_tries = max_tries
        self.shared: SharedTries | None = None
        self._clock = clock
        self._tries: dict[str, deque[float]] = {}

    async def find_wait_s(self, address: str, key: str) -> int | None:
        """Return in how many seconds this key may be tried from here, None for now."""
        now, subjects = self._clock(), _list_subjects(address, key)
        known = [self._tries[name] for name in subjects if name in self._tries]
        oldest = [tries[0] for tries in known if len(tries) == self.max_tries]
        if not any(_is_young(at, now) for at in oldest) and self.shared is not None:
            oldest += await self.shared.find(subjects, self.max_tries)
        return max((int(at + WINDOW_S - now) + 1 for at in oldest if _is_young(at, now)), default=None)

    async def note_failure(self, address: str, key: str) -> None:
        """Count a try that failed."""
        now, subjects = self._clock(), _list_subjects(address, key)
        if len(self._tries) >= _MAX_SUBJECTS:
            self._forget_old(now)
        for name in subjects:
            self._tries.setdefault(name, deque(maxlen=self.max_tries)).append(now)
        if self.shared is not None:
            await self.shared.note(subjects, self.max_tries, now)

    def _forget_old(self, now: float) -> None:
        """Forget what is over; if all of it is of this minute, forget the older half."""
        self._tries = {name: tries for name, tries in self._tries.items() if _is_young(tries[-1], now)}
        if len(self._tries) >= _MAX_SUBJECTS:
            self._tries = dict(list(self._tries.items())[_MAX_SUBJECTS // 2 :])


class RedisTries:
    """`SharedTries` in lists of a Redis server, which end by themselves.

    Args:
        redis: The server.
        name: Tells platforms apart that share it.
        kind: Of the tries.
    """

    def __init__(self, redis: Redis, name: str, kind: str) -> None:
        self._redis = redis
        self._prefix = f"loraplex:{name}:tries:{kind}:"

    async def find(self, subjects: Sequence[str], num: int) -> Iterable[float]:
        """See `SharedTries`."""
        found = await self._ask([("LINDEX", self._prefix + name, num - 1) for name in subjects])
        return [at for text in found if (at := _read_instant(text)) is not None]

    async def note(self, subjects: Sequence[str], num: int, at: float) -> None:
        """See `SharedTries`."""
        keys = [self._prefix + name for name in subjects]
        commands = [
            command
            for key in keys
            for command in (("LPUSH", key, repr(at)), ("LTRIM", key, 0, num - 1), ("EXPIRE", key, WINDOW_S))
        ]
        await self._ask(commands)

    async def _ask(self, commands: Iterable[tuple[str | int, ...]]) -> Sequence[object]:
        from redis.exceptions import RedisError

        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found: object = await pipeline.execute()
        except (RedisError, OSError, TimeoutError):
            return ()
        return found if isinstance(found, list) else ()


def _is_young(at: float, now: float) -> bool:
    # clocks of gateways differ; one that is far ahead keeps nobody out
    return -WINDOW_S < now - at < WINDOW_S


def _read_instant(text: object) -> float | None:
    try:
        return float(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _list_subjects(address: str, key: str) -> tuple[str, str]:
    """The network of an address, and the id of a key."""
    key_id = hashlib.sha256(key[:_KEY_ID_LEN].encode("utf-8", "surrogatepass")).hexdigest()
    return f"from:{_find_network(address)}", f"key:{key_id[:32]}"


def _find_network(address: str) -> str:
    """An IPv6 host has a whole network of addresses to try from."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(found), _NETWORK_BITS), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)


class Tries:
    """Both limits of one gateway."""

    def __init__(self) -> None:
        self.logins, self.bearers = TryLimit(MAX_LOGINS), TryLimit(MAX_BEARERS)
        self._redis: Redis | None = None

    def share(self, url: str, name: str) -> None:
        """Count with the other gateways of the platform `name` from now on."""
        self._redis = open_redis(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self.logins.shared = RedisTries(self._redis, name, "login")
        self.bearers.shared = RedisTries(self._redis, name, "bearer")

    async def close(self) -> None:
        """Close the connections."""
        if self._redis is not None:
            await self._redis.aclose()
