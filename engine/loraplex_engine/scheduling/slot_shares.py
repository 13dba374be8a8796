"""Which slots are whose, when tenants want more adapters than fit. `SlotShares` compares; it moves nothing.

A tenant within its share of the slots (by weight, among those that want or hold any, one at least) keeps them against
tenants that would go beyond theirs: those that its requests run on, and for a while those that they ran on last.
Among tenants above their shares, and among slots that nobody guards, it is a matter of turns.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection

from loraplex_engine.core.request import Request
from loraplex_engine.scheduling.policy import FairShare
from loraplex_engine.slots.table import Slot, SlotTable

GUARD_S = 2.0
"""For so long an idle slot of a tenant within its share waits for the tenant's next request."""
_MAX_KNOWN = 4096
_NONE: frozenset[str | None] = frozenset()


class SlotShares:
    """The shares of tenants in one table of slots."""

    def __init__(self, slots: SlotTable, share: FairShare, clock: Callable[[], float]) -> None:
        self._slots = slots
        self._share = share
        self._clock = clock
        self._digest_to_use: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._wanting: set[str] = set()
        self._tenant_to_guard: dict[str, frozenset[str | None]] = {}

    def note_use(self, request: Request) -> None:
        """A request of an adapter comes or ends."""
        assert request.digest is not None
        self._digest_to_use[request.digest] = (request.tenant_id, self._clock())
        self._digest_to_use.move_to_end(request.digest)
        if len(self._digest_to_use) > _MAX_KNOWN:
            self._digest_to_use.popitem(last=False)

    def begin(self, waiting: Collection[Request]) -> None:
        """Begin a step with these requests in the queue."""
        self._wanting = {request.tenant_id for request in waiting if request.digest is not None}
        self._tenant_to_guard = {}

    def note_bind(self) -> None:
        """A slot has changed hands."""
        self._tenant_to_guard = {}

    def find_guarded(self, tenant: str) -> frozenset[str | None]:
        """Digests whose slots a tenant may not take, nor wait for."""
        guarded = self._tenant_to_guard.get(tenant)
        if guarded is None:
            guarded = self._tenant_to_guard[tenant] = self._find_guarded(tenant)
        return guarded

    def find_within(self) -> set[str | None]:
        """Digests in slots of tenants that have no more of them than their shares."""
        tenant_to_slots = self._count()
        shares = self._find_shares(tenant_to_slots)
        within = {tenant for tenant, share in shares.items() if tenant_to_slots[tenant] <= share}
        return {slot.digest for slot in self._slots.slots if self._tenant_of(slot.digest) in within}

    def count_rounds(self, digests: Collection[str]) -> int:
        """In how many turns at most one more adapter has a slot, for the tenant for which it takes longest.

        Args:
            digests: those that wait for one already.
        """
        total = sum(not slot.keep for slot in self._slots.slots)
        tenant_to_waiting = Counter(map(self._tenant_of, digests))
        shares = self._find_shares(self._count() + tenant_to_waiting)
        rounds = [math.ceil((len(digests) + 1) / max(1, total))]
        for tenant, number in tenant_to_waiting.items():
            rounds.append(math.ceil((number + 1) / max(1, int(shares.get(tenant, total)))))
        return max(rounds)

    def _find_guarded(self, tenant: str) -> frozenset[str | None]:
        tenant_to_slots = self._count()
        shares = self._find_shares(tenant_to_slots)
        if not shares or tenant_to_slots[tenant] + 1 <= shares.get(tenant, 0.0):
            return _NONE
        return frozenset(
            slot.digest
            for slot in self._slots.slots
            if slot.digest is not None
            and (holder := self._tenant_of(slot.digest)) != tenant
            and tenant_to_slots[holder] <= shares.get(holder, 0.0)
            and self._is_used(slot)
        )

    def _count(self) -> Counter[str]:
        return Counter(
            self._tenant_of(slot.digest)
            for slot in self._slots.slots
            if slot.digest is not None and not slot.keep and self._is_used(slot)
        )

    def _find_shares(self, tenant_to_slots: Counter[str]) -> dict[str, float]:
        total = sum(not slot.keep for slot in self._slots.slots)
        return self._share.find_shares({*self._wanting, *tenant_to_slots}, total)

    def _is_used(self, slot: Slot) -> bool:
        assert slot.digest is not None
        _, used_at = self._digest_to_use.get(slot.digest, ("", -GUARD_S))
        return slot.num_pins > 0 or self._clock() - used_at < GUARD_S

    def _tenant_of(self, digest: str | None) -> str:
        return self._digest_to_use.get(digest or "", ("", 0.0))[0]
