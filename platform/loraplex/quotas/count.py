"""The counts of the in-process meter, one class for each shape. Each is the specification of its twin in Lua.

All times are milliseconds (`_ms`) or whole seconds (`_s`) since 1970. `find_fit` returns the first instant from the one
given on at which a cost has room if nothing else happens, None if it never has.
"""

from __future__ import annotations

from typing import Protocol

from loraplex.quotas.calendar import period_at, period_start_ms
from loraplex.quotas.meter import LEASE_LIFE_MS, MAX_PERIODS_OF_DEBT
from loraplex.quotas.quota import Debt, Hold, Quota, Shape, Stamp, Standing

KEPT_S = 61
"""A bucket counts in its own second and in the 60 after it."""

CALENDAR_LIFE_MS = 100 * 86_400_000
"""How long the count of a day or month is kept that nobody asks for."""

_FIRST_LOOK_MS = 1000
"""Nobody knows when a request that runs will end: look again after this."""


class Count(Protocol):
    """What the meter does with every count."""

    def find_fit(self, from_ms: int, now_ms: int, cost: int, limit: int) -> int | None:
        """See the module."""

    def find_standing(self, now_ms: int, limit: int) -> Standing:
        """Return how it stands; changes nothing."""

    def reserve(self, now_ms: int, cost: int, limit: int, lease: str) -> Stamp:
        """Take `cost`, whether it has room or not."""

    def settle(self, now_ms: int, hold: Hold, index: int, spent: int, limit: int) -> Debt | None:
        """Replace what charge `index` of a hold had reserved; return the debt of a calendar if it has changed."""

    def is_idle(self, now_ms: int) -> bool:
        """Whether it holds nothing that matters any more."""


class Window:
    """Amounts by second. Seconds to come hold debt."""

    def __init__(self) -> None:
        self._second_to_amount: dict[int, int] = {}

    def total(self, at_s: int) -> int:
        """Return what counts at a second."""
        return sum(amount for second, amount in self._second_to_amount.items() if at_s - KEPT_S < second <= at_s)

    def find_fit(self, from_ms: int, now_ms: int, cost: int, limit: int) -> int | None:  # noqa: ARG002
        """See `Count`: the total falls only when a bucket is dropped."""
        if cost > limit:
            return None
        from_s = from_ms // 1000
        if self.total(from_s) + cost <= limit:
            return from_ms
        ends = sorted(second + KEPT_S for second in self._second_to_amount)
        return next(end * 1000 for end in ends if end > from_s and self.total(end) + cost <= limit)

    def find_standing(self, now_ms: int, limit: int) -> Standing:
        """See `Count`."""
        end_ms = max((second + KEPT_S for second in self._second_to_amount), default=0) * 1000
        return Standing(limit, max(0, limit - self.total(now_ms // 1000)), max(0, end_ms - now_ms))

    def reserve(self, now_ms: int, cost: int, limit: int, lease: str) -> Stamp:  # noqa: ARG002
        """See `Count`."""
        self.add(now_ms, now_ms // 1000, cost)
        return Stamp()

    def add(self, now_ms: int, second: int, amount: int) -> None:
        """Let an amount count in that second and the 60 after it."""
        self._drop_old(now_ms // 1000)
        self._add(second, amount)

    def settle(self, now_ms: int, hold: Hold, index: int, spent: int, limit: int) -> None:
        """See `Count`."""
        self._drop_old(now_ms // 1000)
        excess = spent - hold.charges[index].cost
        if excess > 0:
            self._owe(now_ms // 1000, excess, limit)
        elif hold.at_s in self._second_to_amount:
            self._add(hold.at_s, max(excess, -self._second_to_amount[hold.at_s]))

    def is_idle(self, now_ms: int) -> bool:
        """See `Count`."""
        self._drop_old(now_ms // 1000)
        return not self._second_to_amount

    def list_buckets(self, now_ms: int) -> dict[int, int]:
        """Return what counts now or will: amounts by second."""
        self._drop_old(now_ms // 1000)
        return dict(self._second_to_amount)

    def _owe(self, now_s: int, amount: int, limit: int) -> None:
        second = now_s
        for _ in range(MAX_PERIODS_OF_DEBT):
            put = min(amount, max(0, limit - self.total(second)))
            self._add(second, put)
            amount -= put
            if amount == 0:
                return
            second += KEPT_S
        self._add(second, amount)

    def _add(self, second: int, amount: int) -> None:
        found = self._second_to_amount.pop(second, 0) + amount
        if found:
            self._second_to_amount[second] = found

    def _drop_old(self, now_s: int) -> None:
        for second in [second for second in self._second_to_amount if second <= now_s - KEPT_S]:
            del self._second_to_amount[second]


class Leases:
    """Names, each with the instant until which it counts."""

    def __init__(self) -> None:
        self._lease_to_end_ms: dict[str, int] = {}

    def find_fit(self, from_ms: int, now_ms: int, cost: int, limit: int) -> int | None:
        """See `Count`."""
        if self._count(now_ms) + cost <= limit:
            return from_ms
        return max(from_ms, now_ms + _FIRST_LOOK_MS)

    def find_standing(self, now_ms: int, limit: int) -> Standing:
        """See `Count`."""
        return Standing(limit, max(0, limit - self._count(now_ms)), 0)

    def reserve(self, now_ms: int, cost: int, limit: int, lease: str) -> Stamp:  # noqa: ARG002
        """See `Count`."""
        self.renew(now_ms, lease)
        return Stamp()

    def renew(self, now_ms: int, lease: str) -> None:
        """Let a lease count from now on, whether it was there or not."""
        self._lease_to_end_ms[lease] = now_ms + LEASE_LIFE_MS

    def settle(self, now_ms: int, hold: Hold, index: int, spent: int, limit: int) -> None:  # noqa: ARG002
        """See `Count`."""
        self._lease_to_end_ms.pop(hold.lease, None)

    def is_idle(self, now_ms: int) -> bool:
        """See `Count`."""
        return self._count(now_ms) == 0

    def _count(self, now_ms: int) -> int:
        for lease in [lease for lease, end_ms in self._lease_to_end_ms.items() if end_ms <= now_ms]:
            del self._lease_to_end_ms[lease]
        return len(self._lease_to_end_ms)


def carry(debt: Debt | None, quota: Quota, now_ms: int) -> tuple[int, int]:
    """Return what the period of now has to bear of the ones before, and what it owes itself: as if it was counted."""
    if debt is None:
        return 0, 0
    num_periods = period_at(quota.shape, now_ms) - debt.period
    if num_periods <= 0:
        return debt.carried, debt.owed
    carried = max(0, debt.owed - quota.limit * (num_periods - 1))
    return carried, max(0, carried - quota.limit)


class Calendar:
    """What was used in the period of now.

    `owed` of it is what answers cost beyond the limit, which the next period begins with; what is beyond it because it
    was lowered or set only now ends with the period. `carried` are debts of the periods before.
    """

    def __init__(self, shape: Shape, now_ms: int, used: int, begun: int, *, carried: int = 0, owed: int = 0) -> None:
        self._shape = shape
        self._period = period_at(shape, now_ms)
        self._used = used + carried
        self._owed = owed
        self._carried = carried
        self._begun = begun
        self.seeded = self._used

    def find_fit(self, from_ms: int, now_ms: int, cost: int, limit: int) -> int | None:  # noqa: ARG002
        """See `Count`: each period takes off the limit."""
        if cost > limit:
            return None
        if self._used + cost <= limit:
            return from_ms
        num_periods = max(1, -(-(self._debt(limit) + cost) // limit))
        return max(from_ms, period_start_ms(self._shape, self._period + num_periods))

    def find_standing(self, now_ms: int, limit: int) -> Standing:
        """See `Count`."""
        period, used = self._period_of(now_ms), self._used_of(now_ms, limit)
        return Standing(limit, max(0, limit - used), max(0, period_start_ms(self._shape, period + 1) - now_ms))

    def reserve(self, now_ms: int, cost: int, limit: int, lease: str) -> Stamp:  # noqa: ARG002
        """See `Count`."""
        self.roll(now_ms, limit)
        self._used += cost
        return Stamp(self._period, self._begun)

    def settle(self, now_ms: int, hold: Hold, index: int, spent: int, limit: int) -> Debt | None:
        """See `Count`; of a period that is over only its debt is here."""
        self.roll(now_ms, limit)
        before = self._carried, self._owed
        excess = spent - hold.charges[index].cost
        if excess < 0 and hold.stamps[index].period != self._period:
            excess = max(excess, -self._carried)
            self._carried += excess
        self._used = max(0, self._used + excess)
        self._owed += max(0, min(excess, self._used - limit))
        self._owed = self._debt(limit)
        if before == (self._carried, self._owed):
            return None
        quota = hold.charges[index].quota
        return Debt(quota=quota, period=self._period, carried=self._carried, owed=self._owed, at_ms=now_ms)

    def is_of(self, stamp: Stamp) -> bool:
        """Whether this is the count that was charged."""
        return stamp.begun == self._begun

    def roll(self, now_ms: int, limit: int) -> None:
        """Begin the period of now if another one is kept."""
        used, period = self._used_of(now_ms, limit), self._period_of(now_ms)
        if period != self._period:
            self._period, self._used, self._carried, self.seeded = period, used, used, used
            self._owed = max(0, used - limit)

    def is_idle(self, now_ms: int) -> bool:
        """See `Count`: by then no debt is left."""
        return now_ms - period_start_ms(self._shape, self._period) > CALENDAR_LIFE_MS

    def _period_of(self, now_ms: int) -> int:
        return max(self._period, period_at(self._shape, now_ms))

    def _used_of(self, now_ms: int, limit: int) -> int:
        num_periods = self._period_of(now_ms) - self._period
        return max(0, self._debt(limit) - limit * (num_periods - 1)) if num_periods else self._used

    def _debt(self, limit: int) -> int:
        return min(self._owed, max(0, self._used - limit))
