"""The meter that gateways share: hashes of a Redis server, each call one script by the server's clock.

Redis holds only what may be lost: minutes and leases pass, days and months are counted anew from usage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

from loraplex.db.redis_client import open_redis
from loraplex.quotas.memory_meter import read_clock
from loraplex.quotas.meter import MeterError
from loraplex.quotas.quota import Charge, Debt, Hold, Lost, Outcome, Quota, Refusal, Stamp, Standing, Unseeded

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.commands.core import AsyncScript

TIMEOUT_S = 0.25
"""Longest wait for an answer, from when it is asked for."""

_NUM_CONNECTIONS = 8
_LAST_RESORT_S = 2.0
# The wait is counted in looks, between which the loop takes what has arrived: where this process, and not the server,
# is what takes long, it takes longer.
_NUM_LOOKS = 25
_MAX_LEASES = 500
_MAX_LOOKED_AT = 200
_PATIENCE_MS = 2_000
"""After this a server that takes a call no longer reserves by it."""

_REFUSED, _UNSEEDED, _LOST, _LATE = 1, 2, 3, 4
_NEVER = -1


class RedisMeter:
    """A `Meter` in a Redis server.

    Args:
        url: redis://, rediss:// or unix://.
        name: Tells platforms apart that share a server.
        now_ms: The time to count by, for tests; 0 is the server's.

    Raises:
        SettingsError: The URL is not valid.
    """

    def __init__(self, url: str, name: str, now_ms: int = 0) -> None:
        self._prefix = f"loraplex:{name}"
        self._birth_key = f"{self._prefix}:birth"
        self.birth = ""
        """Names the data that this gateway has told of what it granted; data that Redis has lost are born anew."""
        self._redis = _open(url)
        self._turns = asyncio.Semaphore(_NUM_CONNECTIONS)
        self._num_failures = 0
        # of the server's clock, before ours
        self._ahead_ms = 0
        self.now_ms = now_ms
        common = _read_script("meter")
        self._scripts = {
            step: self._redis.register_script(common + _read_script(step))
            for step in ("reserve", "settle", "look", "renew", "seed", "beat", "tell")
        }

    async def reserve(self, charges: Sequence[Charge], lease: str) -> Outcome:
        """See `Meter`."""
        rows = [(charge.quota.shape, charge.quota.limit, charge.cost) for charge in charges]
        keys = [self._key(charge.quota) for charge in charges]
        arguments = [self.birth, lease, self._find_end_ms(), *_flatten(rows)]
        answer = await self._run("reserve", [self._birth_key, *keys], arguments)
        with _making_sense():
            return _read_outcome(answer, charges, lease)

    async def settle(self, hold: Hold, spent: Sequence[int]) -> Sequence[Debt]:
        """See `Meter`."""
        rows = [
            (charge.quota.shape, charge.quota.limit, charge.cost, amount, stamp.period, stamp.begun)
            for charge, amount, stamp in zip(hold.charges, spent, hold.stamps, strict=True)
        ]
        keys = [self._key(charge.quota) for charge in hold.charges]
        answer = await self._run("settle", keys, [hold.lease, hold.at_s, *_flatten(rows)])
        with _making_sense():
            now_ms, *found = answer
            return [
                Debt(quota=hold.charges[index].quota, period=period, carried=carried, owed=owed, at_ms=now_ms)
                for index, period, carried, owed in found
            ]

    async def look(self, quotas: Sequence[Quota]) -> Sequence[Standing | None]:
        """See `Meter`."""
        found: list[Standing | None] = []
        for start in range(0, len(quotas), _MAX_LOOKED_AT):
            some = quotas[start : start + _MAX_LOOKED_AT]
            rows = [(quota.shape, quota.limit) for quota in some]
            standings = await self._run("look", [self._key(quota) for quota in some], _flatten(rows))
            pairs = zip(some, standings, strict=True)
            found += [Standing(quota.limit, *row) if row else None for quota, row in pairs]
        return found

    async def renew(self, leases: Sequence[tuple[Quota, str]]) -> None:
        """See `Meter`."""
        for start in range(0, len(leases), _MAX_LEASES):
            some = leases[start : start + _MAX_LEASES]
            names = [lease for _, lease in some]
            await self._run("renew", [self._key(quota) for quota, _ in some], [self._find_end_ms(), *names])

    async def seed(self, quota: Quota, used: int, carried: int = 0, owed: int = 0) -> None:
        """See `Meter`."""
        await self._run("seed", [self._key(quota)], [quota.shape, used, carried, owed])

    async def forget(self, quotas: Sequence[Quota]) -> None:
        """See `Meter`."""
        if quotas:
            await self._ask(lambda: self._redis.delete(*(self._key(quota) for quota in quotas)))

    async def beat(self, gateway: str, life_ms: int) -> tuple[int, str]:
        """Note that a gateway lives, for a time; return how many do, and the birth of the data that are there.

        Raises:
            MeterError: There is no answer.
        """
        keys = [self._birth_key, f"{self._prefix}:gateways"]
        answer = await self._run("beat", keys, [gateway, life_ms])
        with _making_sense():
            num, birth, now_ms = answer
            self._ahead_ms = int(now_ms) - read_clock()
            return int(num), str(birth)

    async def tell(self, birth: str, mark: str, minutes: Mapping[str, Mapping[int, int]]) -> None:
        """Add what was granted without data, and reserve by them from now on.

        Args:
            birth: Names the data.
            mark: What was told under a mark is not added again.
            minutes: Amounts by second, by the name of their meter.

        Raises:
            MeterError: It is not known to be done, or the data are others by now.
        """
        keys = [self._birth_key, f"{self._prefix}:told", *(f"{self._prefix}:{name}" for name in minutes)]
        rows = [
            (index, second, amount)
            for index, buckets in enumerate(minutes.values())
            for second, amount in buckets.items()
        ]
        if not await self._run("tell", keys, [birth, mark, *_flatten(rows)]):
            raise MeterError("it has lost its data again")
        self.birth = birth

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    def _find_end_ms(self) -> int:
        """Return when the server need not begin any more with what is asked now, by its clock."""
        return (self.now_ms or read_clock() + self._ahead_ms) + _PATIENCE_MS

    def _key(self, quota: Quota) -> str:
        return f"{self._prefix}:{quota.name}"

    async def _run(self, step: str, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        script: AsyncScript = self._scripts[step]
        return await self._ask(lambda: script(keys=list(keys), args=[self.now_ms, *arguments]))

    async def _ask(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer; who waited in line for a server that meanwhile failed waits no longer."""
        num_failures = self._num_failures
        async with self._turns:
            if self._num_failures != num_failures:
                raise MeterError("it did not answer others")
            try:
                return await _wait(ask())
            except MeterError:
                self._num_failures += 1
                raise


def _read_outcome(answer: Any, charges: Sequence[Charge], lease: str) -> Outcome:
    """Return what came of a reservation."""
    status, now_ms, *rest = answer
    if status == _LATE:
        raise MeterError("it took the call too late")
    if status == _LOST:
        return Lost()
    if status == _UNSEEDED:
        return Unseeded(tuple(charges[index].quota for index in rest), now_ms)
    limits = [charge.quota.limit for charge in charges]
    standings = tuple(Standing(limit, *row[:2]) for limit, row in zip(limits, rest[-1], strict=True))
    if status == _REFUSED:
        worst = charges[rest[0]]
        return Refusal(
            quota=worst.quota,
            cost=worst.cost,
            wait_ms=None if rest[1] == _NEVER else rest[1],
            charges=tuple(charges),
            standings=standings,
        )
    return Hold(
        lease=lease,
        charges=tuple(charges),
        at_s=now_ms // 1000,
        stamps=tuple(Stamp(row[2], int(row[3])) for row in rest[-1]),
        standings=standings,
    )


@contextmanager
def _making_sense() -> Iterator[None]:
    """Take an answer that is of another form, as others may write there, for none.

    Raises:
        MeterError: It is.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise MeterError("its answer makes no sense") from error


async def _wait(call: Awaitable[Any]) -> Any:
    """Return the answer, if it comes in time.

    Raises:
        MeterError: It does not, or it is an error.
    """
    from redis.exceptions import RedisError

    task = asyncio.ensure_future(call)
    try:
        for _ in range(_NUM_LOOKS):
            if (await asyncio.wait([task], timeout=TIMEOUT_S / _NUM_LOOKS))[0]:
                return task.result()
        raise MeterError("no answer in time")
    except (RedisError, OSError, TimeoutError) as error:
        raise MeterError(type(error).__name__) from error
    finally:
        if not task.done():
            task.cancel()
            # it closes its connection, on which an answer may still come
            await asyncio.wait([task], timeout=TIMEOUT_S)


def _open(url: str) -> Redis:
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as NoConnectionError

    return open_redis(
        url,
        is_bounded=True,
        max_connections=_NUM_CONNECTIONS,
        # the bound of a call is the meter's own; these only keep a lost one from staying for ever
        timeout=_LAST_RESORT_S,
        socket_timeout=_LAST_RESORT_S,
        socket_connect_timeout=_LAST_RESORT_S,
        # once more where a connection of before has gone; what timed out may have been done, and is not repeated
        retry=Retry(NoBackoff(), 1, supported_errors=(NoConnectionError,)),
    )


def _read_script(name: str) -> str:
    return resources.files("loraplex.quotas").joinpath("script", f"{name}.lua").read_text(encoding="utf-8")


def _flatten(rows: Sequence[Sequence[str | int]]) -> list[str | int]:
    return [value for row in rows for value in row]
