"""What quotas mean, written down so simply that one can see that it is right; the meters are held against it.

It remembers everything that ever happened, and finds instants by trying one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from loraplex.quotas.quota import Charge, Quota, Standing

_COUNTS_MS = 61_000
_LEASE_MS = 30_000
_TRIED_S = 1_200
_TRIED_PERIODS = 30


@dataclass
class Entry:
    """An amount that counts from the begin of a second, in the quota of that name."""

    name: str
    at_s: int
    amount: int


@dataclass
class Ticket:
    """One admitted request: what each charge reserved, and until when its lease counts."""

    charges: tuple[Charge, ...]
    entries: list[Entry]
    lease_end_ms: int
    is_open: bool = True


@dataclass
class Model:
    """All requests that were admitted."""

    now_ms: int
    tickets: list[Ticket] = field(default_factory=list)
    debts: list[Entry] = field(default_factory=list)

    def find_wait(self, charges: tuple[Charge, ...]) -> int | None:
        """Return the milliseconds until all have room, 0 if they have it now, None if never."""
        if any(charge.cost > charge.quota.limit for charge in charges if charge.quota.shape != "lease"):
            return None
        for at_ms in self._instants():
            if all(self._has_room(charge, at_ms) for charge in charges):
                return at_ms - self.now_ms
        raise AssertionError("it tries too few instants")

    def admit(self, charges: tuple[Charge, ...]) -> Ticket:
        """Count what was admitted."""
        at_s = self.now_ms // 1000
        entries = [Entry(charge.quota.name, at_s, charge.cost) for charge in charges]
        ticket = Ticket(charges, entries, self.now_ms + _LEASE_MS)
        self.tickets.append(ticket)
        return ticket

    def settle(self, ticket: Ticket, spent: list[int]) -> None:
        """Replace reservations: what was too much never was, what was too little is owed."""
        ticket.is_open = False
        for charge, entry, amount in zip(ticket.charges, ticket.entries, spent, strict=True):
            excess = amount - charge.cost
            if charge.quota.shape == "lease":
                continue
            entry.amount = min(amount, charge.cost)
            if excess > 0:
                self._owe(charge.quota, excess)

    def renew(self, ticket: Ticket) -> None:
        """Let its lease count from now on."""
        ticket.lease_end_ms = self.now_ms + _LEASE_MS

    def stand(self, quota: Quota) -> Standing:
        """Return how a quota stands now."""
        remaining = max(0, quota.limit - self._used(quota, self.now_ms))
        if quota.shape == "lease":
            return Standing(quota.limit, remaining, 0)
        if quota.shape == "minute":
            ends = [(entry.at_s * 1000 + _COUNTS_MS) for entry in self._entries(quota) if entry.amount]
            return Standing(quota.limit, remaining, max(0, max(ends, default=0) - self.now_ms))
        return Standing(quota.limit, remaining, self._period_starts(quota, 1)[0] - self.now_ms)

    def _owe(self, quota: Quota, amount: int) -> None:
        if quota.shape != "minute":
            self.debts.append(Entry(quota.name, self.now_ms // 1000, amount))
            return
        at_ms = self.now_ms // 1000 * 1000
        while amount:
            room = min(amount, max(0, quota.limit - self._used(quota, at_ms)))
            self.debts.append(Entry(quota.name, at_ms // 1000, room))
            amount -= room
            at_ms += _COUNTS_MS

    def _has_room(self, charge: Charge, at_ms: int) -> bool:
        if charge.quota.shape == "lease" and at_ms > self.now_ms:
            # nobody knows when a request ends: a second later is worth a look
            return at_ms >= self.now_ms + 1000 or self._has_room(charge, self.now_ms)
        return self._used(charge.quota, at_ms) + charge.cost <= charge.quota.limit

    def _used(self, quota: Quota, at_ms: int) -> int:
        if quota.shape == "lease":
            return sum(
                ticket.is_open and ticket.lease_end_ms > at_ms
                for ticket in self.tickets
                if any(charge.quota.name == quota.name for charge in ticket.charges)
            )
        if quota.shape == "minute":
            at_s = at_ms // 1000
            return sum(entry.amount for entry in self._entries(quota) if entry.at_s <= at_s < entry.at_s + 61)
        found = self._entries(quota)
        if not found:
            return 0
        period = _period(quota, min(entry.at_s for entry in found) * 1000)
        carried = 0
        while period < _period(quota, at_ms):
            carried = max(0, carried + self._sum_period(quota, period) - quota.limit)
            period += 1
        return carried + self._sum_period(quota, period)

    def _sum_period(self, quota: Quota, period: int) -> int:
        return sum(entry.amount for entry in self._entries(quota) if _period(quota, entry.at_s * 1000) == period)

    def _entries(self, quota: Quota) -> list[Entry]:
        every = [*self.debts, *(entry for ticket in self.tickets for entry in ticket.entries)]
        return [entry for entry in every if entry.name == quota.name]

    def _instants(self) -> Iterator[int]:
        now_s = self.now_ms // 1000
        found = {self.now_ms, self.now_ms + 1000, *((now_s + i) * 1000 for i in range(1, _TRIED_S))}
        for shape in ("day", "month"):
            found |= set(_list_starts(shape, self.now_ms, _TRIED_PERIODS))
        return iter(sorted(found))

    def _period_starts(self, quota: Quota, count: int) -> list[int]:
        return _list_starts(quota.shape, self.now_ms, count)


def _period(quota: Quota, at_ms: int) -> int:
    found = datetime.fromtimestamp(at_ms / 1000, UTC)
    return found.toordinal() if quota.shape == "day" else found.year * 12 + found.month


def _list_starts(shape: str, now_ms: int, count: int) -> list[int]:
    """The instants at which the next days or months begin."""
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    if shape == "day":
        first = datetime(now.year, now.month, now.day, tzinfo=UTC).timestamp()
        return [int(first + 86_400 * i) * 1000 for i in range(1, count + 1)]
    months = [now.year * 12 + now.month - 1 + i for i in range(1, count + 1)]
    return [int(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()) * 1000 for month in months]
