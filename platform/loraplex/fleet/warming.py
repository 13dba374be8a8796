"""Loads adapters before they are asked for: more copies of the hot ones, and what a replica that came back may expect.

`plan_loads` is a pure function of what replicas hold and of what was asked for lately. `Warmer` carries its plans out,
a few loads at a time; a request never waits for it. Several gateways may plan the same: a load is done once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from loraplex.fleet.placement import Outlook, count_free_slots, count_homes, order_homes
from loraplex.fleet.traffic import Demand
from loraplex.fleet.view import FleetView, Replica
from loraplex_registry.wire.ending import end_tasks

MAX_LOADS = 4
"""Loads at a time that a replica is asked for."""
IDLE = 0.75
"""Part of the mean of all replicas' traffic below which one with free slots takes over from others."""
_MIN_MEAN = 4.0
HOT = 2.0
"""How many times as often as what it pushes out an adapter's copy would have to be asked for."""
_PAUSE_S = 60.0
# adapters that are planned for, for each slot there is: rarer ones find no place anyhow
_MOST = 2
_log = logging.getLogger(__name__)


class Load(msgspec.Struct, frozen=True):
    """An adapter that a replica should have."""

    url: str
    digest: str


class _Plan:
    """What one base's replicas would hold, load by load."""

    def __init__(self, replicas: Sequence[Replica], demands: Sequence[Demand], outlook: Outlook) -> None:
        self._replicas = replicas
        self._outlook = outlook
        self._counts = {demand.digest: demand.count for demand in demands}
        self._held = {
            replica.url: {*replica.resident, *replica.loading, *outlook.arriving.get(replica.url, ())}
            for replica in replicas
        }
        self._free = {replica.url: count_free_slots(replica, outlook) for replica in replicas}
        self._num_loads: defaultdict[str, int] = defaultdict(int)
        self._num_holders: defaultdict[str, int] = defaultdict(int)
        for held in self._held.values():
            for digest in held:
                self._num_holders[digest] += 1

    def has_homes(self, demand: Demand, num_homes: int) -> bool:
        """Whether an adapter is on so many replicas, or there is no place for one more of it."""
        num_holders = self._num_holders[demand.digest]
        if num_holders >= num_homes or not self._is_willing():
            return True
        return num_holders == 0 and not self.has_free_slots

    def add(self, demand: Demand, num_homes: int) -> list[Load]:
        """Plan the loads that an adapter lacks."""
        loads = []
        for replica in self._order(demand):
            if self._num_holders[demand.digest] >= num_homes:
                break
            if self._has_room(replica, demand, num_homes):
                self._take(replica, demand.digest)
                loads.append(Load(replica.url, demand.digest))
        return loads

    def ease(
        self, demands: Sequence[Demand], num_homes: Mapping[str, int], may_load: Callable[[str], bool]
    ) -> list[Load]:
        """Plan the loads by which replicas that have little to do take over what prefers them from busier ones."""
        homes = {demand.digest: self._find_homes(demand.digest, num_homes[demand.digest]) for demand in demands}
        busy = {replica.url: 0.0 for replica in self._replicas}
        for demand in demands:
            for home in homes[demand.digest]:
                busy[home.url] += demand.count / len(homes[demand.digest])
        mean = sum(busy.values()) / len(busy) if busy else 0.0
        loads = []
        idle = [replica for replica in self._replicas if busy[replica.url] < IDLE * mean and mean >= _MIN_MEAN]
        for replica in sorted(idle, key=lambda replica: busy[replica.url]):
            for demand in demands:
                if busy[replica.url] >= mean or self._free[replica.url] <= 0 or self._is_full(replica):
                    break
                current = homes[demand.digest]
                if not current or not self._prefers(demand, replica, current[-1]):
                    continue
                part, giver = demand.count / len(current), current[-1].url
                if busy[giver] - part >= busy[replica.url] + part and may_load(demand.digest):
                    self._take(replica, demand.digest)
                    homes[demand.digest] = []
                    busy[giver], busy[replica.url] = busy[giver] - part, busy[replica.url] + part
                    loads.append(Load(replica.url, demand.digest))
        return loads

    def _find_homes(self, digest: str, num_homes: int) -> list[Replica]:
        holders = [replica for replica in self._replicas if digest in self._held[replica.url]]
        return order_homes(digest, holders)[:num_homes]

    def _prefers(self, demand: Demand, replica: Replica, other: Replica) -> bool:
        """Whether requests for an adapter would gather on one replica rather than on the other."""
        is_able = replica.takes(demand.rank, demand.weights) and demand.digest not in replica.failed
        is_new = demand.digest not in self._held[replica.url]
        return is_able and is_new and order_homes(demand.digest, (replica, other))[0] is replica

    def _is_full(self, replica: Replica) -> bool:
        return self._num_loads[replica.url] >= MAX_LOADS

    @property
    def has_free_slots(self) -> bool:
        """Whether a replica can take an adapter without giving up another."""
        return any(free > 0 for free in self._free.values())

    def _is_willing(self) -> bool:
        return not all(map(self._is_full, self._replicas))

    def _order(self, demand: Demand) -> list[Replica]:
        able = [
            replica
            for replica in self._replicas
            if replica.takes(demand.rank, demand.weights)
            and demand.digest not in self._held[replica.url]
            and demand.digest not in replica.failed
            and not self._is_full(replica)
        ]
        preferred = order_homes(demand.digest, able)
        return sorted(preferred, key=lambda replica: self._free[replica.url] <= 0)

    def _has_room(self, replica: Replica, demand: Demand, num_homes: int) -> bool:
        """Whether a slot is free, or the rarest adapter there is asked for much less than this copy would be."""
        if self._free[replica.url] > 0:
            return True
        is_copy = self._num_holders[demand.digest] > 0
        held = self._held[replica.url]
        if not is_copy or not held:
            return False
        return HOT * min(self._counts.get(digest, 0.0) for digest in held) < demand.count / num_homes

    def _take(self, replica: Replica, digest: str) -> None:
        held = self._held[replica.url]
        if self._free[replica.url] > 0:
            self._free[replica.url] -= 1
        else:
            rarest = min(held, key=lambda known: (self._counts.get(known, 0.0), known))
            held.discard(rarest)
            self._num_holders[rarest] -= 1
        held.add(digest)
        self._num_holders[digest] += 1
        self._num_loads[replica.url] += 1


def plan_loads(
    base: str,
    view: FleetView,
    demands: Sequence[Demand],
    shares: Mapping[str, float],
    outlook: Outlook,
    may_load: Callable[[str], bool] = lambda _: True,
) -> list[Load]:
    """Return the loads that would bring each adapter to as many replicas as it should be on, the most wanted first.

    An adapter that nobody holds goes into free slots only: whoever asks for it first may push out another. A copy of a
    hot one may push out what is asked for much less. A replica that has free slots and little to do, such as one that
    has just come, takes over adapters that prefer it. What any replica has quarantined, or one has failed to load, is
    left to it.

    Args:
        base: Served name of the base.
        view: What is known of the replicas.
        demands: What was asked for lately.
        shares: Each adapter's part of all requests; one that is missing has too few to say.
        outlook: What this gateway knows beyond the view.
        may_load: Whether a digest is still one to load; asked only about those that lack a home.
    """
    able = [
        replica
        for replica in view.replicas
        if replica.base == base
        and replica.model is None
        and replica.problem is None
        and replica.num_slots > 0
        and replica.url not in outlook.ejected
    ]
    quarantined = {digest for replica in able for digest in replica.quarantined}
    plan = _Plan(able, demands, outlook)
    loads: list[Load] = []
    most = _MOST * sum(replica.num_slots for replica in able)
    wanted = [demand for demand in demands[:most] if demand.digest not in quarantined]
    num_homes = {demand.digest: count_homes(shares.get(demand.digest, 0.0), len(able)) for demand in wanted}
    for demand in wanted:
        if not plan.has_homes(demand, num_homes[demand.digest]) and may_load(demand.digest):
            loads += plan.add(demand, num_homes[demand.digest])
    return loads + (plan.ease(wanted, num_homes, may_load) if plan.has_free_slots else [])


class Warmer:
    """Asks replicas to load what was planned.

    Args:
        load: Makes the engine at a URL load a digest; returns None, or why it did not.
    """

    def __init__(
        self, load: Callable[[str, str], Awaitable[str | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._clock = clock
        self._tasks: dict[Load, asyncio.Task[None]] = {}
        self._paused_until: dict[Load, float] = {}
        self.num_loads = 0

    @property
    def num_running(self) -> int:
        """Loads that are on their way."""
        return len(self._tasks)

    def begin(self, loads: Sequence[Load]) -> None:
        """Begin those loads that are not on their way, and did not fail a moment ago; returns at once."""
        now = self._clock()
        self._paused_until = {load: until for load, until in self._paused_until.items() if until > now}
        for load in loads:
            num_running = sum(running.url == load.url for running in self._tasks)
            if load in self._tasks or load in self._paused_until or num_running >= MAX_LOADS:
                continue
            self._tasks[load] = asyncio.create_task(self._carry_out(load))

    async def stop(self) -> None:
        """Leave the rest to the engines."""
        await end_tasks(self._tasks.values())

    async def _carry_out(self, load: Load) -> None:
        try:
            problem = await self._load(load.url, load.digest)
        finally:
            self._tasks.pop(load, None)
            self._paused_until[load] = self._clock() + _PAUSE_S
        if problem is None:
            self.num_loads += 1
            _log.info("engine %s holds %s for what is to come", load.url, load.digest)
        else:
            _log.info("engine %s does not hold %s: %s", load.url, load.digest, problem)
