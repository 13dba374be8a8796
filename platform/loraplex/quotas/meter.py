"""The counts behind quotas. Two of one kind: `MemoryMeter` in this process, `RedisMeter` shared by gateways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loraplex.quotas.quota import Charge, Debt, Hold, Outcome, Quota, Standing

LEASE_LIFE_MS = 30_000
"""How long a lease counts after it was taken or renewed."""

MAX_PERIODS_OF_DEBT = 60
"""Minutes over which a debt is spread at most."""


class MeterError(Exception):
    """The meter did not answer in time, or it answered an error; what was asked may have been done or not."""


class Meter(Protocol):
    """Counts by one clock, its own; each call is one step that no other call can come between.

    A window of 60 seconds is kept in buckets of a second; a bucket counts until 60 seconds after its end, so that any
    60 seconds hold at most the limit. What is spent beyond a reservation is debt: it takes what room the window has
    now, and the rest is in the next windows from their start. A day or month begins with what the one before it had
    spent beyond its limit.
    """

    async def reserve(self, charges: Sequence[Charge], lease: str) -> Outcome:
        """Reserve all charges, or none of them.

        Args:
            charges: Each of another quota.
            lease: The name under which places of `concurrent_requests` are held for `LEASE_LIFE_MS`.

        Raises:
            MeterError: There is no answer.
        """

    async def settle(self, hold: Hold, spent: Sequence[int]) -> Sequence[Debt]:
        """Replace what each charge had reserved by what was spent, and give leases back.

        A count of a calendar that is no longer the one that was charged is forgotten: whoever asks next seeds it.

        Returns:
            The debts of calendars that have changed by it.

        Raises:
            MeterError: It is not known to be done.
        """

    async def look(self, quotas: Sequence[Quota]) -> Sequence[Standing | None]:
        """Return how quotas stand, and reserve nothing; None of a calendar whose count nobody has begun.

        Raises:
            MeterError: There is no answer.
        """

    async def renew(self, leases: Sequence[tuple[Quota, str]]) -> None:
        """Let leases live on, also those that were lost.

        Raises:
            MeterError: It is not known to be done.
        """

    async def seed(self, quota: Quota, used: int, carried: int = 0, owed: int = 0) -> None:
        """Begin the count of a calendar's period with what usage and debts say, unless it was begun meanwhile.

        Raises:
            MeterError: It is not known to be done.
        """

    async def forget(self, quotas: Sequence[Quota]) -> None:
        """Drop counts of calendars: whoever asks next seeds them.

        Raises:
            MeterError: It is not known to be done.
        """
