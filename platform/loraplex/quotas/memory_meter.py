"""The meter of one process, and the specification of `RedisMeter`: the same tests hold both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from loraplex.quotas.count import Calendar, Count, Leases, Window
from loraplex.quotas.quota import Charge, Debt, Hold, Outcome, Quota, Refusal, Standing, Unseeded

_SWEEP_EVERY_MS = 60_000


def read_clock() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class MemoryMeter:
    """A `Meter` in this process. `MemoryMeter` is the only writer of its counts.

    Args:
        clock: Milliseconds since 1970.
    """

    def __init__(self, clock: Callable[[], int] = read_clock) -> None:
        self._clock = clock
        self._counts: dict[str, Count] = {}
        self._swept_at_ms = 0
        self.num_sharers = 1
        """Among how many gateways each limit is divided while they cannot count together."""

    async def reserve(self, charges: Sequence[Charge], lease: str) -> Outcome:
        """See `Meter`."""
        now_ms = self._clock()
        self._sweep(now_ms)
        unseeded = tuple(charge.quota for charge in charges if self._find(charge.quota) is None)
        if unseeded:
            return Unseeded(unseeded, now_ms)
        charges = [Charge(self._share(charge.quota), charge.cost) for charge in charges]
        return self._refuse(charges, now_ms) or self._grant(charges, lease, now_ms)

    def note(self, hold: Hold) -> Hold:
        """Count what was granted elsewhere, whether it has room here or not, and return what to settle here for it.

        Calendars are left out: they are counts of usage.
        """
        now_ms = self._clock()
        self._sweep(now_ms)
        kept = [index for index, charge in enumerate(hold.charges) if not charge.quota.is_of_calendar]
        for charge in (hold.charges[index] for index in kept):
            count = self._get(charge.quota)
            if isinstance(count, Window):
                count.add(now_ms, hold.at_s, charge.cost)
            else:
                count.reserve(now_ms, charge.cost, charge.quota.limit, hold.lease)
        return msgspec.structs.replace(
            hold,
            charges=tuple(hold.charges[index] for index in kept),
            stamps=tuple(hold.stamps[index] for index in kept),
            standings=tuple(hold.standings[index] for index in kept),
        )

    def list_minutes(self) -> dict[str, dict[int, int]]:
        """Return the buckets of all minutes, by the name of their meter."""
        now_ms = self._clock()
        return {
            name: buckets
            for name, count in self._counts.items()
            if isinstance(count, Window) and (buckets := count.list_buckets(now_ms))
        }

    async def settle(self, hold: Hold, spent: Sequence[int]) -> Sequence[Debt]:
        """See `Meter`."""
        now_ms, debts = self._clock(), []
        for index, charge in enumerate(hold.charges):
            count = self._find(charge.quota)
            if count is None:
                continue
            if isinstance(count, Calendar) and not count.is_of(hold.stamps[index]):
                del self._counts[charge.quota.name]
                continue
            debt = count.settle(now_ms, hold, index, spent[index], charge.quota.limit)
            debts += [debt] if debt is not None else []
        return debts

    async def look(self, quotas: Sequence[Quota]) -> Sequence[Standing | None]:
        """See `Meter`; of what is shared with other gateways this one's part."""
        now_ms = self._clock()
        return [self._look(quota, now_ms) for quota in quotas]

    async def renew(self, leases: Sequence[tuple[Quota, str]]) -> None:
        """See `Meter`."""
        for quota, lease in leases:
            count = self._get(quota)
            assert isinstance(count, Leases), "only places are held by leases"
            count.renew(self._clock(), lease)

    async def seed(self, quota: Quota, used: int, carried: int = 0, owed: int = 0) -> None:
        """See `Meter`."""
        assert quota.is_of_calendar
        begun = time.monotonic_ns()
        count = Calendar(quota.shape, self._clock(), used, begun, carried=carried, owed=owed)
        self._counts.setdefault(quota.name, count)

    async def forget(self, quotas: Sequence[Quota]) -> None:
        """See `Meter`."""
        for quota in quotas:
            self._counts.pop(quota.name, None)

    def forget_calendars(self) -> None:
        """Drop the counts of all days and months."""
        for name in [name for name, count in self._counts.items() if isinstance(count, Calendar)]:
            del self._counts[name]

    def _look(self, quota: Quota, now_ms: int) -> Standing | None:
        count = self._counts.get(quota.name)
        if count is not None:
            return count.find_standing(now_ms, quota.limit)
        return None if quota.is_of_calendar else Standing(quota.limit, quota.limit, 0)

    def _grant(self, charges: Sequence[Charge], lease: str, now_ms: int) -> Hold:
        stamps = [self._get(charge.quota).reserve(now_ms, charge.cost, charge.quota.limit, lease) for charge in charges]
        return Hold(
            lease=lease,
            charges=tuple(charges),
            at_s=now_ms // 1000,
            stamps=tuple(stamps),
            standings=self._list_standings(charges, now_ms),
        )

    def _refuse(self, charges: Sequence[Charge], now_ms: int) -> Refusal | None:
        """Return why there is no room: the charge that has none for longest, and the first instant at which all have.

        An instant at which one has room may be one at which another has none any more, for debts begin at theirs.
        """
        fits = [self._find_fit(charge, now_ms, now_ms) for charge in charges]
        worst = max(range(len(fits)), key=lambda index: _order(fits[index]), default=None)
        if worst is None or fits[worst] == now_ms:
            return None
        at_ms = max(fits, key=_order)
        while at_ms is not None:
            later = max((self._find_fit(charge, at_ms, now_ms) for charge in charges), key=_order)
            if later == at_ms:
                break
            at_ms = later
        return Refusal(
            quota=charges[worst].quota,
            cost=charges[worst].cost,
            wait_ms=None if at_ms is None else at_ms - now_ms,
            charges=tuple(charges),
            standings=self._list_standings(charges, now_ms),
        )

    def _find_fit(self, charge: Charge, from_ms: int, now_ms: int) -> int | None:
        return self._get(charge.quota).find_fit(from_ms, now_ms, charge.cost, charge.quota.limit)

    def _list_standings(self, charges: Sequence[Charge], now_ms: int) -> tuple[Standing, ...]:
        return tuple(self._get(charge.quota).find_standing(now_ms, charge.quota.limit) for charge in charges)

    def _share(self, quota: Quota) -> Quota:
        """Return this gateway's part of a quota: of a calendar, its part of what is left."""
        if self.num_sharers == 1:
            return quota
        count = self._get(quota)
        before = min(quota.limit, count.seeded) if isinstance(count, Calendar) else 0
        part = max(1, (quota.limit - before) // self.num_sharers)
        return Quota(quota.subject, quota.kind, min(quota.limit, before + part))

    def _get(self, quota: Quota) -> Count:
        found = self._find(quota)
        assert found is not None, "it is seeded"
        return found

    def _find(self, quota: Quota) -> Count | None:
        found = self._counts.get(quota.name)
        if found is None and not quota.is_of_calendar:
            found = self._counts[quota.name] = Window() if quota.shape == "minute" else Leases()
        return found

    def _sweep(self, now_ms: int) -> None:
        if now_ms - self._swept_at_ms < _SWEEP_EVERY_MS:
            return
        self._swept_at_ms = now_ms
        for name in [name for name, count in self._counts.items() if count.is_idle(now_ms)]:
            del self._counts[name]


def _order(instant: int | None) -> float:
    """None is later than every instant."""
    return float("inf") if instant is None else instant
