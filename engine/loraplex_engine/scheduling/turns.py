"""Whose turn it is in the slots when more adapters are wanted than fit. `Turns` decides; it moves nothing itself.

1. A slot that nobody runs on goes to the first request in the queue that needs one. Only an adapter that has waiting
   requests of its own keeps it, until its lease is over.
2. Once an adapter has waited for a lease, slots whose own lease is over yield, as many as adapters wait, the one held
   longest first: what runs there runs on to its end, new requests for that adapter wait for their next turn.
3. Neither takes a slot from a tenant within its share of them for one that would go beyond its own, see `SlotShares`.

So an adapter in host memory waits for a lease and one request's length at most, times the rounds before its own. All
requests of an adapter that has its turn start together: a batch of them for each load, not a load for each of them. A
tenant that wants more adapters than its share waits for its own slots, in rounds of its own.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass

from loraplex_engine.core.request import Request
from loraplex_engine.lora.residency import Residency
from loraplex_engine.scheduling.policy import FairShare
from loraplex_engine.scheduling.slot_shares import SlotShares
from loraplex_engine.slots.table import Slot

_LOAD_SHARE = 0.1
"""With every slot changing hands at the end of its lease, the steps stand still for at most this share of the time."""
_MIN_LEASE_S, _MAX_LEASE_S = 1.0, 5.0
"""Shorter leases double the median wait near the engine's capacity and hardly help the 95th percentile (simulated)."""
_RECENT_S = 10.0
_FADING = 0.99
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotSchedule:
    """How the slots are shared at the moment; seconds and adapters.

    `mode` is `resident` while all recently wanted adapters fit, `turns` otherwise. An adapter that starts to wait now
    has its slot within `bound_s`, if no request takes longer than the longest of late, `request_s`.
    """

    mode: str
    slots: int
    working_set: int
    waiting_adapters: int
    yielding_adapters: int
    lease_s: float
    request_s: float
    load_s: float
    bound_s: float
    oldest_wait_s: float
    forced_turns: int


class Turns:
    """The turns of adapters in the slots of one residency."""

    def __init__(self, residency: Residency, clock: Callable[[], float], share: FairShare) -> None:
        self._residency = residency
        self._clock = clock
        self._shares = SlotShares(residency.slots, share, clock)
        self._wanted_at: OrderedDict[str, float] = OrderedDict()
        self._protected: set[str | None] = set()
        self._yielding: set[str | None] = set()
        self._longest_s = 0.0
        self._is_overcommitted = False
        self.num_forced = 0

    @property
    def lease_s(self) -> float:
        """Seconds for which an adapter may keep a slot that others wait for."""
        cost_s = self._residency.bind_s * len(self._residency.slots.slots)
        return min(_MAX_LEASE_S, max(_MIN_LEASE_S, cost_s / _LOAD_SHARE))

    def note_wanted(self, request: Request) -> None:
        """A request for an adapter has come."""
        assert request.digest is not None
        self._wanted_at[request.digest] = self._clock()
        self._wanted_at.move_to_end(request.digest)
        self._shares.note_use(request)

    def note_ended(self, request: Request) -> None:
        """A request gives its slot back; the longest of late tells how long a slot takes to become free."""
        self._shares.note_use(request)
        if request.started_at is not None:
            self._longest_s = max(self._clock() - request.started_at, _FADING * self._longest_s)

    def plan(self, waiting: Collection[Request]) -> None:
        """Decide for one step which adapters keep their slots and which take no new requests."""
        if not waiting and not self._is_overcommitted:
            self._protected, self._yielding = set(), set()
            return
        lease_began_at = self._clock() - self.lease_s
        slots = self._residency.slots.slots
        queued = {request.digest for request in waiting}
        self._protected = {slot.digest for slot in slots if slot.ready_at > lease_began_at and slot.digest in queued}
        self._shares.begin(waiting)
        yielding = self._find_yielding(waiting, lease_began_at)
        self.num_forced += len(yielding - self._yielding)
        self._yielding = yielding
        self._say_when_overcommitted(waiting)

    def _find_yielding(self, waiting: Collection[Request], lease_began_at: float) -> set[str | None]:
        """Adapters whose slots those that have waited for a lease take next; for each that finds none free, one."""
        late = self._find_waiting(waiting, lease_began_at)
        if not late:
            return set()
        slots = self._residency.slots.slots
        free = [slot for slot in slots if slot.digest is None or (slot.is_idle and slot.digest not in self._protected)]
        held = [slot for slot in slots if slot.num_pins > 0 and not slot.keep and slot.ready_at <= lease_began_at]
        within = self._shares.find_within()
        held.sort(key=lambda slot: (slot.digest in within, slot.ready_at))
        yielding = set()
        for request in waiting:
            if request.digest not in late:
                continue
            late.discard(request.digest)
            guarded = self._shares.find_guarded(request.tenant_id)
            if not _take(free, guarded) and (taken := _take(held, guarded)):
                yielding.add(taken[0].digest)
        return yielding

    def try_start(self, request: Request) -> bool:
        """Whether the request's adapter is in a slot, or just got one, and takes new requests."""
        assert request.digest is not None
        # a preempted request belongs to those that the slot waits for
        if request.digest in self._yielding and request.started_at is None:
            return False
        if self._residency.slots.find(request.digest) is not None:
            return self._residency.try_make_ready(request.digest) is not None
        guarded = self._shares.find_guarded(request.tenant_id)
        is_ready = self._residency.try_make_ready(request.digest, self._protected | guarded) is not None
        if is_ready:
            self._shares.note_bind()
        return is_ready

    def describe(self, waiting: Collection[Request]) -> SlotSchedule:
        """How the slots are shared, for `GET /internal/state`."""
        now = self._clock()
        slots = self._residency.slots.slots
        working_set = len(self.find_working_set())
        late = self._find_waiting(waiting, now)
        rounds = self._shares.count_rounds(late)
        waits = [now - request.load_wait_at for request in waiting if request.load_wait_at is not None]
        return SlotSchedule(
            mode="turns" if working_set > len(slots) else "resident",
            slots=len(slots),
            working_set=working_set,
            waiting_adapters=len(late),
            yielding_adapters=len(self._yielding),
            lease_s=self.lease_s,
            request_s=self._longest_s,
            load_s=self._residency.load_s,
            bound_s=self._residency.load_s + rounds * (self.lease_s + self._longest_s),
            oldest_wait_s=max(waits, default=0.0),
            forced_turns=self.num_forced,
        )

    def find_working_set(self) -> set[str]:
        """Adapters that requests wanted lately or hold now."""
        recent_at = self._clock() - _RECENT_S
        while self._wanted_at and next(iter(self._wanted_at.values())) < recent_at:
            self._wanted_at.popitem(last=False)
        return {*self._wanted_at, *self._residency.held_digests}

    def _say_when_overcommitted(self, waiting: Collection[Request]) -> None:
        is_overcommitted = len(self.find_working_set()) > len(self._residency.slots.slots)
        if is_overcommitted == self._is_overcommitted:
            return
        self._is_overcommitted = is_overcommitted
        now = self.describe(waiting)
        _log.info(
            "%d adapters for %d slots %s; longest wait by the requests of late: %.1f s, of which the lease is %.1f s",
            now.working_set,
            now.slots,
            "take turns" if is_overcommitted else "fit",
            now.bound_s,
            now.lease_s,
        )

    def _find_waiting(self, waiting: Collection[Request], since: float) -> set[str]:
        """Adapters in host memory whose requests have had their turn in the queue before `since`, but no slot."""
        residency = self._residency
        digests = {r.digest for r in waiting if r.load_wait_at is not None and r.load_wait_at <= since}
        return {
            digest
            for digest in digests
            if digest is not None and residency.is_in_host(digest) and residency.slots.find(digest) is None
        }


def _take(slots: list[Slot], guarded: Container[str | None]) -> list[Slot]:
    """Take the first slot that nobody guards out of some; none or one."""
    for index, slot in enumerate(slots):
        if slot.digest not in guarded:
            return [slots.pop(index)]
    return []
