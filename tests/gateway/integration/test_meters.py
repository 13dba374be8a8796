"""Both meters, held by the same tests: against a naive model, and in the cases that one would look up first."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import skip_or_fail
from examples import examples
from loraplex.quotas.calendar import find_period_start, period_at, period_start_ms
from loraplex.quotas.count import carry
from loraplex.quotas.memory_meter import MemoryMeter
from loraplex.quotas.meter import Meter, MeterError
from loraplex.quotas.quota import Charge, Hold, Lost, Quota, Refusal, Standing, Subject, Unseeded
from loraplex.quotas.redis_meter import RedisMeter
from quota_model import Model
from redis_world import RedisServer, RedisUnavailable, running_redis

TENANT = Subject("tenant", "t1")
KEY = Subject("key", "k1")
_names = itertools.count()


def instant(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


class Rig:
    """One meter whose clock the test moves."""

    def __init__(self, meter: Meter, now_ms: int) -> None:
        self.meter = meter
        self.now_ms = now_ms
        self._leases = itertools.count()
        self.advance(0)

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        if isinstance(self.meter, RedisMeter):
            self.meter.now_ms = self.now_ms

    async def ask(self, *charges: tuple[Quota, int]) -> Hold | Refusal:
        """Reserve, with calendars that begin at 0."""
        asked = tuple(Charge(quota, cost) for quota, cost in charges)
        outcome = await self.meter.reserve(asked, f"lease-{next(self._leases)}")
        if not isinstance(outcome, Unseeded):
            return outcome
        for quota in outcome.quotas:
            await self.meter.seed(quota, 0)
        return await self.ask(*charges)

    async def take(self, *charges: tuple[Quota, int]) -> Hold:
        outcome = await self.ask(*charges)
        assert isinstance(outcome, Hold), outcome
        return outcome

    async def wait_of(self, *charges: tuple[Quota, int]) -> int | None:
        outcome = await self.ask(*charges)
        assert isinstance(outcome, Refusal), outcome
        return outcome.wait_ms


async def open_meter(url: str, name: str, now_ms: int = 0) -> RedisMeter:
    """A meter that knows the data that are there."""
    meter = RedisMeter(url, name, now_ms)
    _, birth = await meter.beat("gw", 5_000)
    await meter.tell(birth, "test", {})
    return meter


@asynccontextmanager
async def running_rig(kind: str, url: str | None, now_ms: int) -> AsyncIterator[Rig]:
    if kind == "memory":
        rig = Rig(MemoryMeter(lambda: rig.now_ms), now_ms)
        yield rig
        return
    assert url is not None
    meter = await open_meter(url, f"rig-{next(_names)}")
    try:
        yield Rig(meter, now_ms)
    finally:
        await meter.close()


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[RedisServer]:
    try:
        with running_redis() as server:
            yield server
    except RedisUnavailable as reason:
        skip_or_fail("redis", str(reason))


@pytest.fixture(params=["memory", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> str | None:
    return None if kind == "memory" else str(request.getfixturevalue("shared_redis").url)


@pytest.fixture
async def rig(kind: str, url: str | None) -> AsyncIterator[Rig]:
    async with running_rig(kind, url, instant("2026-11-30T12:00:00.400")) as found:
        yield found


def minute(limit: int, of: str = "tokens", subject: Subject = TENANT) -> Quota:
    return Quota(subject, f"{of}_per_minute", limit)


def places(limit: int) -> Quota:
    return Quota(TENANT, "concurrent_requests", limit)


async def test_any_sixty_seconds_hold_at_most_the_limit(rig: Rig) -> None:
    quota = minute(100)
    rig.advance(550)  # 0.95 s into a second
    await rig.take((quota, 60))
    rig.advance(59_100)
    await rig.take((quota, 40))
    assert await rig.wait_of((quota, 1)) == 950
    # 60.95 s after the first: its second ended 60 s ago, not its own instant
    rig.advance(900)
    assert await rig.wait_of((quota, 60)) == 50
    rig.advance(50)
    await rig.take((quota, 60))
    assert await rig.wait_of((quota, 1)) == 60_000


async def test_the_wait_is_exact(rig: Rig) -> None:
    quota = minute(10)
    for cost in (3, 4, 3):
        await rig.take((quota, cost))
        rig.advance(7_300)
    for cost in (1, 3, 4, 8, 10):
        wait_ms = await rig.wait_of((quota, cost))
        assert wait_ms is not None
        rig.advance(wait_ms - 1)
        assert await rig.wait_of((quota, cost)) == 1
        rig.advance(1 - wait_ms)
    rig.advance(await rig.wait_of((quota, 10)) or 0)
    await rig.take((quota, 10))
    assert await rig.wait_of((quota, 11)) is None


async def test_all_or_nothing(rig: Rig) -> None:
    wide, narrow, one = minute(100), minute(10, subject=KEY), places(1)
    await rig.take((wide, 10), (one, 1))
    for _ in range(20):
        refusal = await rig.ask((wide, 11), (narrow, 11))
        assert isinstance(refusal, Refusal)
        assert refusal.quota == narrow
        refusal = await rig.ask((wide, 10), (one, 1))
        assert isinstance(refusal, Refusal)
        assert refusal.quota == one
    await rig.take((wide, 90))


async def test_a_settled_reservation_counts_as_what_was_spent(rig: Rig) -> None:
    quota, one = minute(100), places(1)
    hold = await rig.take((quota, 80), (one, 1))
    rig.advance(5_000)
    await rig.meter.settle(hold, [15, 1])
    await rig.take((quota, 85), (one, 1))
    # what was spent counts from the reservation on
    assert await rig.wait_of((quota, 15)) == 56_000 - 400


async def test_released_is_as_if_never_reserved(rig: Rig) -> None:
    quota, requests, one = minute(100), minute(1, "requests"), places(1)
    hold = await rig.take((quota, 100), (requests, 1), (one, 1))
    await rig.meter.settle(hold, [0, 0, 0])
    await rig.take((quota, 100), (requests, 1), (one, 1))


async def test_an_underestimate_is_debt_of_the_next_windows(rig: Rig) -> None:
    quota = minute(100)
    hold = await rig.take((quota, 10))
    await rig.meter.settle(hold, [260])
    # 10 are reserved, 90 fill the window, 100 the next one, and 60 lie in the one after it
    assert await rig.wait_of((quota, 1)) == 122_000 - 400
    rig.advance(122_000)
    await rig.take((quota, 40))
    assert await rig.wait_of((quota, 1)) == 61_000 - 400


async def test_a_debt_without_end_is_paid_within_an_hour(rig: Rig) -> None:
    quota = minute(1)
    await rig.meter.settle(await rig.take((quota, 1)), [10**9])
    wait_ms = await rig.wait_of((quota, 1))
    assert wait_ms is not None
    assert 3_600_000 <= wait_ms <= 61 * 61_000


async def test_leases_end_by_themselves_unless_renewed(rig: Rig) -> None:
    one = places(2)
    first, second = await rig.take((one, 1)), await rig.take((one, 1))
    assert await rig.wait_of((one, 1)) == 1_000
    rig.advance(20_000)
    await rig.meter.renew([(one, first.lease)])
    rig.advance(9_999)
    assert await rig.wait_of((one, 1)) == 1_000
    rig.advance(1)
    third = await rig.take((one, 1))
    assert await rig.wait_of((one, 1)) == 1_000
    await rig.meter.settle(second, [0])
    assert await rig.wait_of((one, 1)) == 1_000
    await rig.meter.settle(third, [1])
    await rig.take((one, 1))


async def test_a_lost_lease_comes_back_when_it_is_renewed(rig: Rig) -> None:
    one = places(1)
    await rig.meter.renew([(one, "lost")])
    assert await rig.wait_of((one, 1)) == 1_000


@pytest.mark.parametrize(("of", "begins"), [("day", "2026-12-01T00:00:00"), ("month", "2026-12-01T00:00:00")])
async def test_days_and_months_begin_with_the_debt_of_the_last(rig: Rig, of: str, begins: str) -> None:
    quota = Quota(TENANT, f"tokens_per_{of}", 1_000)
    hold = await rig.take((quota, 900))
    wait_ms = instant(begins) - rig.now_ms
    assert await rig.wait_of((quota, 101)) == wait_ms
    await rig.meter.settle(hold, [1_250])
    assert await rig.wait_of((quota, 750)) == wait_ms
    after = instant({"day": "2026-12-02T00:00:00", "month": "2027-01-01T00:00:00"}[of])
    assert await rig.wait_of((quota, 751)) == after - rig.now_ms
    rig.advance(wait_ms)
    await rig.take((quota, 750))
    assert await rig.wait_of((quota, 1)) == after - rig.now_ms


async def test_a_count_that_is_begun_anew_bears_the_debts_that_were_told(rig: Rig) -> None:
    quota, day_ms = Quota(TENANT, "tokens_per_day", 1_000), 86_400_000
    small = await rig.take((quota, 100))
    assert await rig.meter.settle(small, [50]) == []
    hold = await rig.take((quota, 900))
    (debt,) = await rig.meter.settle(hold, [1_250])
    assert (debt.quota, debt.carried, debt.owed, debt.at_ms) == (quota, 0, 300, rig.now_ms)
    midnight_ms = instant("2026-12-01T00:00:00") - rig.now_ms

    async def begin_anew(used: int) -> None:
        await rig.meter.forget([quota])
        await rig.meter.seed(quota, used, *carry(debt, quota, rig.now_ms))

    await begin_anew(1_300)
    assert await rig.wait_of((quota, 700)) == midnight_ms
    assert await rig.wait_of((quota, 701)) == midnight_ms + day_ms
    rig.advance(midnight_ms)
    for used in (0, 100):
        await begin_anew(used)
        assert await rig.wait_of((quota, 700 - used + 1)) == day_ms
    # what this day bears of the one before is told with its own
    (debt,) = await rig.meter.settle(await rig.take((quota, 1)), [701])
    assert (debt.carried, debt.owed) == (300, 101)
    await begin_anew(801)
    assert await rig.wait_of((quota, 899)) == day_ms
    assert await rig.wait_of((quota, 900)) == 2 * day_ms
    rig.advance(2 * day_ms)
    assert carry(debt, quota, rig.now_ms) == (0, 0)
    many = msgspec.structs.replace(debt, owed=2_500)
    assert carry(many, quota, rig.now_ms) == (1_500, 500)


async def test_a_limit_that_is_lowered_or_set_late_makes_no_debt_of_what_was_allowed(rig: Rig) -> None:
    before, lowered = Quota(TENANT, "tokens_per_day", 50_000), Quota(TENANT, "tokens_per_day", 100)
    hold = await rig.take((before, 500))
    midnight_ms = instant("2026-12-01T00:00:00") - rig.now_ms
    assert await rig.wait_of((lowered, 1)) == midnight_ms
    # what the answer costs beyond what it reserved is owed, the rest is not
    await rig.meter.settle(msgspec.structs.replace(hold, charges=(Charge(lowered, 500),)), [530])
    assert await rig.wait_of((lowered, 70)) == midnight_ms
    assert await rig.wait_of((lowered, 71)) == midnight_ms + 86_400_000
    rig.advance(midnight_ms)
    await rig.take((lowered, 70))

    month, end = Quota(TENANT, "tokens_per_month", 10), instant("2027-01-01T00:00:00")
    await rig.meter.seed(month, 1_000_000)
    assert await rig.wait_of((month, 10)) == end - rig.now_ms


async def test_what_was_reserved_yesterday_is_given_back_yesterday(rig: Rig) -> None:
    quota = Quota(TENANT, "tokens_per_day", 100)
    rig.advance(instant("2026-11-30T23:59:59") - rig.now_ms)
    holds = [await rig.take((quota, 50)), await rig.take((quota, 50))]
    rig.advance(2_000)
    await rig.take((quota, 10))
    await rig.meter.settle(holds[0], [5])
    assert await rig.wait_of((quota, 91)) is not None
    await rig.take((quota, 90))
    await rig.meter.settle(holds[1], [70])
    refusal = await rig.ask((quota, 1))
    assert isinstance(refusal, Refusal)
    # 20 of yesterday's answer are owed today
    assert refusal.wait_ms == instant("2026-12-02T00:00:00") - rig.now_ms
    assert await rig.wait_of((quota, 80)) == refusal.wait_ms
    assert await rig.wait_of((quota, 81)) == refusal.wait_ms + 86_400_000


async def test_a_count_that_was_begun_anew_is_not_corrected_by_what_it_never_had(rig: Rig) -> None:
    quota = Quota(TENANT, "tokens_per_month", 1_000)
    hold = await rig.take((quota, 500))
    await rig.meter.forget([quota])
    assert isinstance(await rig.meter.reserve([Charge(quota, 1)], "a"), Unseeded)
    await rig.meter.seed(quota, 400)
    await rig.meter.seed(quota, 0)
    assert await rig.wait_of((quota, 601)) is not None
    await rig.meter.settle(hold, [100])
    assert isinstance(await rig.meter.reserve([Charge(quota, 1)], "b"), Unseeded)


async def test_quotas_of_one_name_share_a_count_whatever_their_limit(rig: Rig) -> None:
    await rig.take((minute(100), 60))
    assert await rig.wait_of((minute(50), 1)) is not None
    await rig.take((minute(70), 10))
    await rig.take((minute(70, subject=KEY), 70))


async def test_who_looks_takes_nothing_and_begins_nothing(rig: Rig) -> None:
    day = Quota(TENANT, "tokens_per_day", 50)
    places = Quota(TENANT, "concurrent_requests", 2)
    asked = [minute(100), day, places]
    assert await rig.meter.look(asked) == [Standing(100, 100, 0), None, Standing(2, 2, 0)]
    assert isinstance(await rig.meter.reserve([Charge(day, 1)], "a"), Unseeded)
    await rig.take((minute(100), 30), (day, 30), (places, 1))
    for _ in range(2):
        found = [one.remaining for one in await rig.meter.look(asked) if one is not None]
        assert found == [70, 20, 1]


async def test_the_largest_limit_is_counted_exactly(rig: Rig) -> None:
    quota = Quota(TENANT, "tokens_per_day", 2**53 - 1)
    hold = await rig.take((quota, 2**53 - 2))
    assert hold.standings[0].remaining == 1
    assert await rig.wait_of((quota, 2)) is not None
    await rig.meter.settle(hold, [2**52])
    assert (await rig.take((quota, 0))).standings[0].remaining == 2**52 - 1


def test_days_and_months_are_those_of_the_calendar() -> None:
    for text in ("1970-01-01T00:00:00", "2000-02-29T23:59:59.999", "2026-12-31T23:59:59.999", "2100-03-01T00:00:00"):
        now_ms = instant(text)
        assert find_period_start("month", now_ms).isoformat() == f"{text[:8]}01T00:00:00+00:00"
        assert find_period_start("day", now_ms).isoformat() == f"{text[:10]}T00:00:00+00:00"
        assert period_start_ms("month", period_at("month", now_ms) + 1) > now_ms


_STARTS = tuple(map(instant, ("2026-11-30T23:58:00", "2024-02-28T23:59:30.5", "2026-12-31T23:59:59.9", "2027-06-15")))
_KINDS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day", "tokens_per_month")
_SHORT_MS = (1, 250, 999, 1_000, 1_500, 20_000, 29_999, 60_000, 61_000)
_LONG_MS = (3_600_000, 86_400_000, 31 * 86_400_000)
_acts = st.one_of(
    st.tuples(st.just("reserve"), st.integers(0, 14), st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("settle"), st.integers(0, 9), st.integers(0, 30)),
    st.tuples(st.just("release"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("renew"), st.integers(0, 9), st.just(0)),
    st.tuples(
        st.just("advance"), st.sampled_from([1, 250, 999, 1000, 1500, 20_000, 29_999, 60_000, 61_000]), st.just(0)
    ),
    st.tuples(st.just("sleep"), st.sampled_from([3_600_000, 86_400_000, 31 * 86_400_000]), st.just(0)),
)


async def _follow(rig: Rig, quotas: list[Quota], acts: list[tuple[str, int, Any]]) -> None:
    model = Model(rig.now_ms)
    running: list[tuple[Hold, Any]] = []

    async def end(index: int, tokens: int, *, counts: bool) -> None:
        hold, ticket = running.pop(index % len(running))
        spent = [tokens if charge.quota.is_of_tokens else int(counts) for charge in hold.charges]
        await rig.meter.settle(hold, spent)
        model.settle(ticket, spent)

    for act, number, more in acts:
        if act == "reserve":
            charges = tuple(
                Charge(quota, number if quota.is_of_tokens else 1) for quota in (quotas[index] for index in more)
            )
            wait_ms = model.find_wait(charges)
            before = tuple(model.stand(charge.quota) for charge in charges)
            outcome = await rig.ask(*((charge.quota, charge.cost) for charge in charges))
            if wait_ms == 0:
                assert isinstance(outcome, Hold), outcome
                running.append((outcome, model.admit(charges)))
                assert outcome.standings == tuple(model.stand(charge.quota) for charge in charges)
            else:
                assert isinstance(outcome, Refusal), outcome
                assert (outcome.wait_ms, outcome.standings) == (wait_ms, before)
            looked = await rig.meter.look([charge.quota for charge in charges])
            assert list(looked) == [model.stand(charge.quota) for charge in charges]
        elif act == "advance":
            rig.advance(number)
        elif act == "sleep":
            while running:
                await end(0, 3, counts=True)
            rig.advance(number)
        elif running and act == "renew":
            hold, ticket = running[number % len(running)]
            leases = [(charge.quota, hold.lease) for charge in hold.charges if charge.quota.shape == "lease"]
            await rig.meter.renew(leases)
            model.renew(ticket)
        elif running:
            await end(number, more, counts=act == "settle")
        model.now_ms = rig.now_ms


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limits=st.lists(st.integers(1, 25), min_size=6, max_size=6),
    start=st.sampled_from(_STARTS),
    acts=st.lists(_acts, min_size=5, max_size=40),
)
def test_the_meter_is_the_model(
    kind: str, url: str | None, limits: list[int], start: int, acts: list[tuple[str, int, Any]]
) -> None:
    kinds = [*_KINDS, "tokens_per_minute"]
    quotas = [Quota(KEY if i == 5 else TENANT, name, limits[i]) for i, name in enumerate(kinds)]

    async def follow() -> None:
        async with running_rig(kind, url, start) as rig:
            await _follow(rig, quotas, acts)

    asyncio.run(follow())


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limit=st.integers(1, 50), steps=st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 20)), max_size=60))
def test_whatever_comes_when_no_sixty_seconds_admit_more(
    kind: str, url: str | None, limit: int, steps: list[tuple[int, int]]
) -> None:
    async def drive() -> list[tuple[int, int]]:
        admitted = []
        async with running_rig(kind, url, instant("2026-11-30T12:00:00.1")) as rig:
            for by_ms, cost in steps:
                rig.advance(by_ms)
                if isinstance(await rig.ask((minute(limit), cost)), Hold):
                    admitted.append((rig.now_ms, cost))
        return admitted

    admitted = asyncio.run(drive())
    for end_ms, _ in admitted:
        assert sum(cost for at_ms, cost in admitted if end_ms - 60_000 <= at_ms <= end_ms) <= limit


class TestRedisMeter:
    """What is special about a server that others use, too."""

    async def test_callers_at_once_never_pass_the_limit(self, shared_redis: RedisServer) -> None:
        meters = [await open_meter(shared_redis.url, "crowd") for _ in range(4)]
        charges = [Charge(minute(100), 7), Charge(places(10), 1)]
        outcomes = await asyncio.gather(*(meters[i % 4].reserve(charges, f"{i}") for i in range(80)))
        holds = [outcome for outcome in outcomes if isinstance(outcome, Hold)]
        assert len(holds) == 10
        await asyncio.gather(*(meters[i % 4].settle(hold, [3, 1]) for i, hold in enumerate(holds)))
        outcomes = await asyncio.gather(*(meters[i % 4].reserve(charges, f"{i}") for i in range(80)))
        assert len([outcome for outcome in outcomes if isinstance(outcome, Hold)]) == 10
        for meter in meters:
            await meter.close()

    async def test_a_server_that_hangs_costs_a_quarter_of_a_second(self, redis_server: RedisServer) -> None:
        meter = await open_meter(redis_server.url, "hang")
        await meter.reserve([Charge(minute(100), 1)], "a")
        redis_server.freeze()
        begun = asyncio.get_running_loop().time()
        for _ in range(2):
            with pytest.raises(MeterError):
                await meter.reserve([Charge(minute(100), 1)], "a")
        assert asyncio.get_running_loop().time() - begun < 10
        redis_server.thaw()
        await meter.close()

    async def test_a_crowd_that_waits_for_a_server_that_hangs_waits_once(self, redis_server: RedisServer) -> None:
        meter = await open_meter(redis_server.url, "crowd")
        redis_server.freeze()
        begun = asyncio.get_running_loop().time()
        calls = (meter.reserve([Charge(minute(100), 1)], f"{i}") for i in range(300))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {MeterError}
        assert asyncio.get_running_loop().time() - begun < 10
        redis_server.thaw()
        await meter.close()

    async def test_a_process_that_is_busy_with_itself_does_not_blame_the_server(
        self, shared_redis: RedisServer
    ) -> None:
        meter = await open_meter(shared_redis.url, "busy")
        quota = minute(1000)
        await meter.reserve([Charge(quota, 1)], "a")
        call = asyncio.create_task(meter.reserve([Charge(quota, 1)], "b"))
        # so that it is sent
        await asyncio.sleep(0.001)
        time.sleep(0.4)  # noqa: ASYNC251 - the point
        assert isinstance(await call, Hold)
        crowd = await asyncio.gather(*(meter.reserve([Charge(quota, 1)], f"{i}") for i in range(500)))
        assert all(isinstance(hold, Hold) for hold in crowd)
        await meter.close()

    async def test_a_server_that_hung_does_not_reserve_for_who_has_gone(self, redis_server: RedisServer) -> None:
        meter = await open_meter(redis_server.url, "late")
        quota = minute(100)
        await meter.reserve([Charge(quota, 10)], "a")
        redis_server.freeze()
        with pytest.raises(MeterError):
            await meter.reserve([Charge(quota, 80)], "b")
        await asyncio.sleep(2)
        redis_server.thaw()
        hold = await meter.reserve([Charge(quota, 90)], "c")
        assert isinstance(hold, Hold)
        await meter.close()

    async def test_keys_end_by_themselves(self, shared_redis: RedisServer) -> None:
        meter = await open_meter(shared_redis.url, "ends")
        quotas = [minute(9), places(9), Quota(TENANT, "tokens_per_day", 9)]
        await meter.seed(quotas[2], 0)
        await meter.reserve([Charge(quota, 1) for quota in quotas], "a")
        await meter.beat("gw", 5_000)
        keys = await meter._redis.keys("loraplex:ends:*")
        assert len(keys) == 6
        assert min([await meter._redis.ttl(key) for key in keys]) > 0
        await meter.close()

    async def test_gateways_are_counted_while_they_beat(self, shared_redis: RedisServer) -> None:
        meter = RedisMeter(shared_redis.url, "beats", now_ms=instant("2026-11-30T12:00:00"))
        numbers = [(await meter.beat(gateway, 5_000))[0] for gateway in "aba"]
        assert numbers == [1, 2, 2]
        meter.now_ms += 5_000
        assert (await meter.beat("b", 5_000))[0] == 1
        await meter.close()

    async def test_data_that_were_lost_are_not_reserved_by_before_they_are_told(
        self, redis_server: RedisServer
    ) -> None:
        quota = minute(100)
        rig = Rig(await open_meter(redis_server.url, "lost"), instant("2026-11-30T12:00:00"))
        hold = await rig.take((quota, 90))
        own = MemoryMeter(lambda: rig.now_ms)
        own.note(hold)
        redis_server.kill()
        redis_server.start()
        meter = rig.meter
        assert isinstance(meter, RedisMeter)
        for _ in range(2):
            assert isinstance(await meter.reserve([Charge(quota, 1)], "a"), Lost)
        _, birth = await meter.beat("gw", 5_000)
        for _ in range(2):
            await meter.tell(birth, "once", own.list_minutes())
        assert await rig.wait_of((quota, 11)) is not None
        await rig.take((quota, 10))
        await meter.settle(hold, [20])
        await rig.take((quota, 70))
        with pytest.raises(MeterError):
            await meter.tell("of another time", "twice", {})
        await meter.close()
