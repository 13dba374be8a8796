"""How a limiter gets along with a meter that others share: what it keeps alive, and what it does without it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pytest

from loraplex.errors import QuotaExceededError, RateLimitExceededError, UnavailableError
from loraplex.quotas.limiter import Limiter, Reservation
from loraplex.quotas.memory_meter import MemoryMeter
from loraplex.quotas.meter import MeterError
from loraplex.quotas.quota import Charge, Debt, Hold, Outcome, Quota, Stamp, Standing, Subject

TENANT = Subject("tenant", "t")
PLACE = Quota(TENANT, "concurrent_requests", 1)
MINUTE = Quota(TENANT, "requests_per_minute", 10)
DAY = Quota(TENANT, "tokens_per_day", 1_000)


class SharedMemory:
    """The face of the meter in Redis, over a meter in memory that can go away, with or without its data."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.birth = ""
        self.data = MemoryMeter(world.clock)
        self.born = "1"
        self.is_away = False
        self.num_gateways = 2

    def lose(self) -> None:
        """Forget all."""
        self.data, self.born = MemoryMeter(self._world.clock), self.born + "1"

    async def reserve(self, charges: Sequence[Charge], lease: str) -> Outcome:
        self._check()
        assert self.birth == self.born, "the tests tell before they reserve"
        return await self.data.reserve(charges, lease)

    async def settle(self, hold: Hold, spent: Sequence[int]) -> Sequence[Debt]:
        self._check()
        return await self.data.settle(hold, spent)

    async def renew(self, leases: Sequence[tuple[Quota, str]]) -> None:
        self._check()
        await self.data.renew(leases)

    async def seed(self, quota: Quota, used: int, carried: int = 0, owed: int = 0) -> None:
        self._check()
        await self.data.seed(quota, used, carried, owed)

    async def forget(self, quotas: Sequence[Quota]) -> None:
        self._check()
        await self.data.forget(quotas)

    async def beat(self, gateway: str, life_ms: int) -> tuple[int, str]:
        self._check()
        return self.num_gateways, self.born

    async def tell(self, birth: str, mark: str, minutes: Mapping[str, Mapping[int, int]]) -> None:
        self._check()
        self.birth = birth
        for name, buckets in minutes.items():
            kind, _, subject = name.split(":")
            for second, amount in buckets.items():
                charges = (Charge(Quota(Subject("tenant", subject), kind, 1), amount),)
                told: Any = {"stamps": (Stamp(),), "standings": (Standing(0, 0, 0),)}
                self.data.note(Hold(lease="told", charges=charges, at_s=second, **told))

    async def close(self) -> None:
        """Nothing to close."""

    def _check(self) -> None:
        if self.is_away:
            raise MeterError("away")


class World:
    """A limiter, the time, and what usage says."""

    def __init__(self) -> None:
        self.now_ms = 1_796_000_000_000
        self.used: int | None = 0
        self.degraded: list[bool] = []
        self.limiter = Limiter(self._count_used, self.degraded.append, "gw", self.clock)
        self.shared: Any = SharedMemory(self)
        self._num_calls = 0

    def clock(self) -> int:
        return self.now_ms

    async def join(self) -> None:
        """Let the limiter count with others, without its clock."""
        self.limiter._shared = self.shared
        await self.beat()

    async def beat(self) -> None:
        await self.limiter._beat(self.shared)

    async def take(self, *quotas: Quota, tokens: int = 100) -> Reservation:
        self._num_calls += 1
        charges = [Charge(quota, tokens if quota.is_of_tokens else 1) for quota in quotas]
        return await self.limiter.reserve(charges, f"req_{self._num_calls}")

    async def count(self, quota: Quota, tokens: int = 100) -> int:
        """Take until there is no more."""
        for number in range(1_000):
            try:
                await self.take(quota, tokens=tokens)
            except RateLimitExceededError:
                return number
        raise AssertionError("there is no limit")

    async def _count_used(self, subject: Subject, since: datetime) -> int:
        if self.used is None:
            raise UnavailableError
        return self.used


@pytest.fixture(params=["alone", "in company"])
async def world(request: pytest.FixtureRequest) -> World:
    found = World()
    if request.param == "in company":
        await found.join()
    return found


@pytest.fixture
async def company() -> World:
    found = World()
    await found.join()
    return found


async def test_a_place_is_kept_for_who_holds_it_and_for_nobody_else(world: World) -> None:
    kept = await world.take(PLACE)
    for _ in range(4):
        world.now_ms += 20_000
        await world.limiter._renew()
        with pytest.raises(RateLimitExceededError):
            await world.take(PLACE)
    del kept
    gc.collect()
    world.now_ms += 20_000
    await world.limiter._renew()
    world.now_ms += 20_000
    await world.take(PLACE)


async def test_what_is_settled_twice_counts_once(world: World) -> None:
    first = await world.take(PLACE, DAY)
    await first.settle(300)
    second = await world.take(PLACE, DAY)
    await first.settle(0)
    await first.release()
    with pytest.raises(RateLimitExceededError):
        await world.take(PLACE)
    await second.release()
    assert (await world.take(PLACE, DAY)).headers["x-ratelimit-remaining-tokens"] == "600"


async def test_a_day_begins_with_what_usage_says_or_not_at_all(world: World) -> None:
    world.used = None
    with pytest.raises(UnavailableError):
        await world.take(DAY, MINUTE)
    world.used = 850
    with pytest.raises(QuotaExceededError):
        await world.take(DAY, MINUTE, tokens=151)
    assert (await world.take(DAY, MINUTE, tokens=150)).headers["x-ratelimit-remaining-requests"] == "9"


async def test_without_others_each_has_its_part_of_what_is_left(company: World) -> None:
    for _ in range(2):
        await company.take(MINUTE)
    company.shared.is_away = True
    company.used = 400
    # half of 10, of which 2 are gone; half of the 600 that usage leaves
    assert await company.count(MINUTE) == 3
    assert await company.count(DAY) == 3
    assert company.degraded[-1] is True
    await company.beat()
    assert company.degraded[-1] is True


@pytest.mark.parametrize("is_lost", [False, True])
async def test_who_comes_back_knows_what_was_granted_meanwhile(company: World, is_lost: bool) -> None:
    before = await company.take(MINUTE, PLACE)
    company.shared.is_away = True
    meanwhile = await company.take(MINUTE)
    await meanwhile.release()
    running = await company.take(MINUTE)
    with pytest.raises(RateLimitExceededError):
        await company.take(PLACE)
    company.shared.is_away = False
    if is_lost:
        company.shared.lose()
    await company.beat()
    assert company.degraded[-1] is False
    with pytest.raises(RateLimitExceededError):
        await company.take(PLACE)
    # two run, and the one that ended meanwhile counts for nothing
    probe = await company.take(MINUTE)
    assert probe.headers["x-ratelimit-remaining-requests"] == "7"
    await probe.release()
    await before.release()
    await running.release()
    await company.take(PLACE)
    assert await company.count(MINUTE) == 10


async def test_days_are_counted_anew_after_an_outage(company: World) -> None:
    first = await company.take(DAY)
    company.shared.is_away = True
    await first.settle(10)
    company.used = 10
    second = await company.take(DAY)
    company.shared.is_away = False
    await company.beat()
    assert (await company.take(DAY)).headers["x-ratelimit-remaining-tokens"] == str(1_000 - 10 - 100)
    company.used = 30
    await second.settle(20)
    assert (await company.take(DAY)).headers["x-ratelimit-remaining-tokens"] == str(1_000 - 30 - 100)


async def test_a_limit_of_one_lets_one_through_at_each_gateway(company: World) -> None:
    company.shared.num_gateways = 50
    await company.beat()
    company.shared.is_away = True
    assert await company.count(MINUTE) == 1
