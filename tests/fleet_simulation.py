"""A fleet in simulated time: replicas with slots and seats, clients that send as soon as they are answered.

Adapters are asked for by Zipf's law. A replica loads what it does not hold, pushing out what was used longest ago; its
state is seen once a second. Knows placement and nothing of engines, so an hour of traffic takes a second.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from loraplex.fleet.placement import Outlook, Wish, count_homes, place
from loraplex.fleet.traffic import Traffic
from loraplex.fleet.view import FleetView, Replica
from loraplex.fleet.warming import Load, plan_loads

_POLL_S = 1.0
_ARRIVAL_S = 3.0
_RANK = 8


@dataclass
class SimulatedReplica:
    """One engine: `slots` hold digests, the one used longest ago first."""

    url: str
    num_slots: int
    num_seats: int
    slots: list[str] = field(default_factory=list)
    loading: set[str] = field(default_factory=set)
    running: dict[int, str] = field(default_factory=dict)
    waiting: list[tuple[str, float, Gateway]] = field(default_factory=list)
    owners: dict[int, Gateway] = field(default_factory=dict)
    num_loads: int = 0
    is_away: bool = False

    def describe(self, num_own: int) -> Replica:
        """What it says of itself."""
        return Replica(
            url=self.url,
            pool="p",
            base="base",
            problem="it cannot be reached" if self.is_away else None,
            resident=frozenset(self.slots),
            loading=frozenset(self.loading),
            num_slots=self.num_slots,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            max_running=self.num_seats,
            num_own=num_own,
        )


@dataclass(frozen=True)
class Setting:
    """What is simulated; seconds."""

    num_replicas: int = 3
    num_slots: int = 8
    num_adapters: int = 24
    num_clients: int = 16
    num_requests: int = 3000
    num_seats: int = 16
    load_s: float = 1.0
    service_s: float = 1.0
    hottest_share: float | None = None
    """The share of the first adapter; None: as Zipf's law has it."""
    has_prefixes: bool = False
    """Whether requests begin alike with others, so that some replica is preferred for each."""
    num_gateways: int = 1
    """How many gateways share the clients without knowing of each other."""
    outage: tuple[float, float] | None = None
    """From when to when the first replica is away; it comes back with nothing loaded."""


@dataclass(frozen=True)
class Result:
    """What came of it."""

    loads_per_request: float
    waits_s: list[float]
    shares: dict[str, float]
    """Each replica's part of the requests."""
    holders: int
    """How many replicas hold the first adapter in the end."""
    reasons: Counter[str]
    last_shares: dict[str, float]
    """The same of the last third of them."""

    def wait_s(self, percent: float) -> float:
        """A percentile of what requests waited before they ran."""
        return sorted(self.waits_s)[int(len(self.waits_s) * percent / 100)]


class Gateway:
    """What one gateway knows."""

    def __init__(self, clock: Callable[[], float], urls: list[str]) -> None:
        self.clock = clock
        self.traffic = Traffic(clock)
        self.view = FleetView()
        self.in_flight = dict.fromkeys(urls, 0)
        self.arriving: dict[str, dict[str, float]] = {url: {} for url in urls}

    def look(self, replicas: list[SimulatedReplica]) -> None:
        self.view = FleetView(tuple(one.describe(self.in_flight[one.url]) for one in replicas))
        oldest = self.clock() - _ARRIVAL_S
        self.arriving = {
            url: {digest: at for digest, at in sent.items() if at > oldest} for url, sent in self.arriving.items()
        }

    def plan_loads(self) -> list[Load]:
        demands = self.traffic.demands("base")
        shares = {one.digest: self.traffic.share("base", one.digest) for one in demands}
        return plan_loads("base", self.view, demands, shares, Outlook(in_flight=self.in_flight, arriving=self.arriving))


class Simulation:
    """One run; `turns` in place of placement sends to each replica in turn."""

    def __init__(self, setting: Setting, seed: int, *, takes_turns: bool = False) -> None:
        self._setting = setting
        self._random = random.Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._replicas = {
            url: SimulatedReplica(url, setting.num_slots, setting.num_seats)
            for url in (f"http://e{index}" for index in range(setting.num_replicas))
        }
        urls = list(self._replicas)
        self._gateways = [Gateway(lambda: self._now, urls) for _ in range(setting.num_gateways)]
        self._turns: Iterator[str] | None = itertools.cycle(urls) if takes_turns else None
        self._weights = [1 / (index + 1) for index in range(setting.num_adapters)]
        if setting.hottest_share is not None:
            self._weights[0] = setting.hottest_share / (1 - setting.hottest_share) * sum(self._weights[1:])
        self._served: list[str] = []
        self._reasons: Counter[str] = Counter()
        self._waits: list[float] = []

    def run(self) -> Result:
        """Simulate until so many requests have ended."""
        for index, gateway in enumerate(self._gateways):
            self._look(gateway, _POLL_S * (index + 1) / len(self._gateways))
        if self._setting.outage is not None:
            for at, act in zip(self._setting.outage, (self._leave, self._return), strict=True):
                self._later(at, act)
        for index in range(self._setting.num_clients):
            self._send(self._gateways[index % len(self._gateways)])
        while len(self._waits) < self._setting.num_requests:
            self._now, _, act = heapq.heappop(self._events)
            act()
        num_loads = sum(replica.num_loads for replica in self._replicas.values())
        return Result(
            loads_per_request=num_loads / len(self._waits),
            waits_s=self._waits,
            shares=self._share(self._served),
            holders=sum("d0" in replica.slots for replica in self._replicas.values()),
            reasons=self._reasons,
            last_shares=self._share(self._served[-len(self._served) // 3 :]),
        )

    def _share(self, served: Sequence[str]) -> dict[str, float]:
        return {url: served.count(url) / len(served) for url in self._replicas}

    def _leave(self) -> None:
        """Take the first replica away; what it had is sent again."""
        replica = next(iter(self._replicas.values()))
        lost = [*replica.owners.values(), *(gateway for _, _, gateway in replica.waiting)]
        replica.is_away = True
        for kept in (replica.slots, replica.loading, replica.running, replica.owners, replica.waiting):
            kept.clear()
        for gateway in self._gateways:
            gateway.look(list(self._replicas.values()))
        for gateway in lost:
            gateway.in_flight[replica.url] -= 1
            self._send(gateway)

    def _return(self) -> None:
        next(iter(self._replicas.values())).is_away = False

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._ids), act))

    def _look(self, gateway: Gateway, next_s: float = _POLL_S) -> None:
        gateway.look(list(self._replicas.values()))
        for load in gateway.plan_loads() if self._turns is None else ():
            if load.digest not in self._replicas[load.url].slots:
                self._load(self._replicas[load.url], load.digest)
        self._later(next_s, lambda: self._look(gateway))

    def _send(self, gateway: Gateway) -> None:
        (index,) = self._random.choices(range(self._setting.num_adapters), self._weights)
        digest = f"d{index}"
        url = self._choose(gateway, digest) if self._turns is None else next(self._turns)
        gateway.in_flight[url] += 1
        gateway.arriving[url][digest] = self._now
        self._served.append(url)
        self._replicas[url].waiting.append((digest, self._now, gateway))
        self._serve(self._replicas[url])

    def _choose(self, gateway: Gateway, digest: str) -> str:
        gateway.traffic.note("base", digest, _RANK)
        wish = Wish(
            base="base",
            digest=digest,
            rank=_RANK,
            prefix=str(self._random.randrange(50)) if self._setting.has_prefixes else "",
            num_homes=count_homes(gateway.traffic.share("base", digest), self._setting.num_replicas),
            draw=self._random.getrandbits(32),
        )
        found = place(wish, gateway.view, Outlook(in_flight=gateway.in_flight, arriving=gateway.arriving))
        assert found is not None
        self._reasons[found.reason] += 1
        return found.replica.url

    def _serve(self, replica: SimulatedReplica) -> None:
        """Start what can run, in order; begin the loads that are missing."""
        left = []
        for digest, sent_at, owner in replica.waiting:
            if digest in replica.slots and digest not in replica.loading and len(replica.running) < replica.num_seats:
                self._start(replica, owner, digest, sent_at)
                continue
            left.append((digest, sent_at, owner))
            if digest not in replica.slots:
                self._load(replica, digest)
        replica.waiting = left

    def _start(self, replica: SimulatedReplica, gateway: Gateway, digest: str, sent_at: float) -> None:
        replica.slots.remove(digest)
        replica.slots.append(digest)
        request = next(self._ids)
        replica.running[request], replica.owners[request] = digest, gateway
        wait_s = self._now - sent_at

        def end() -> None:
            if request not in replica.running:
                return
            del replica.running[request], replica.owners[request]
            gateway.in_flight[replica.url] -= 1
            self._waits.append(wait_s)
            self._serve(replica)
            self._send(gateway)

        self._later(self._random.expovariate(1 / self._setting.service_s), end)

    def _load(self, replica: SimulatedReplica, digest: str) -> None:
        if len(replica.slots) >= replica.num_slots:
            busy = {*replica.running.values(), *replica.loading}
            idle = [held for held in replica.slots if held not in busy]
            if not idle:
                return
            replica.slots.remove(idle[0])
        replica.slots.append(digest)
        replica.loading.add(digest)
        replica.num_loads += 1

        def end() -> None:
            replica.loading.discard(digest)
            self._serve(replica)

        self._later(self._setting.load_s, end)


def simulate(seed: int, *, takes_turns: bool = False, **changes: float | bool | None) -> Result:
    """Run a setting once."""
    return Simulation(Setting(**changes), seed, takes_turns=takes_turns).run()  # type: ignore[arg-type]
