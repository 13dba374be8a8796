"""The limits of one gateway: reserves before a request runs and settles when it has, whatever meter answers.

`Limiter` chooses between the meter that gateways share and its own. While the shared one does not answer, this gateway
counts alone, each limit divided by the gateways that were last seen; it knows what it has granted itself, for its own
meter is told of everything. A shared one that has lost its data is told of it, too. Days and months are counts of
usage: whoever has lost one asks how much was used.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Protocol

from loraplex.errors import UnavailableError
from loraplex.quotas.calendar import find_period_start
from loraplex.quotas.count import carry
from loraplex.quotas.memory_meter import MemoryMeter, read_clock
from loraplex.quotas.meter import Meter, MeterError
from loraplex.quotas.quota import Charge, Debt, Hold, Lost, Quota, Refusal, Standing, Subject, Unseeded
from loraplex.quotas.redis_meter import RedisMeter
from loraplex.quotas.refusal import build_refusal
from loraplex.quotas.standing import build_headers
from loraplex_registry.wire.ending import end_tasks

_BEAT_EVERY_S = 1.0
_GATEWAY_LIFE_MS = 10_000
_RENEW_EVERY_S = 10.0
_MAX_TRIES = 4
_log = logging.getLogger(__name__)

CountUsed = Callable[[Subject, datetime], Awaitable[int]]
"""Tokens that usage has of a subject since an instant. Raises UnavailableError if the database does not answer."""


class Debts(Protocol):
    """Keeps debts of days and months where they outlive the meters."""

    async def save(self, debts: Sequence[Debt]) -> None:
        """Keep debts, in place of older ones of their quotas.

        Raises:
            UnavailableError: The database does not answer.
        """

    async def find(self, quota: Quota) -> Debt | None:
        """Return the last debt of a quota that was kept. Raises as `save`."""


class NoDebts:
    """Keeps none."""

    async def save(self, debts: Sequence[Debt]) -> None:
        """Forget them."""

    async def find(self, quota: Quota) -> Debt | None:  # noqa: ARG002
        """Return None."""
        return None


class Reservation:
    """What one request holds until it is settled, which it is once, however often it is asked."""

    def __init__(
        self,
        limiter: Limiter,
        own: Hold | None = None,
        shared: Hold | None = None,
        outage: MemoryMeter | None = None,
    ) -> None:
        self._limiter = limiter
        self._is_open = own is not None
        self.own = own
        self.shared = shared
        self.outage = outage
        self.alone = outage.note(own) if outage is not None and own is not None else None

    @property
    def headers(self) -> dict[str, str]:
        """What an answer says of the limits."""
        hold = self.shared or self.own
        return {} if hold is None else build_headers(hold.charges, hold.standings)

    @property
    def leases(self) -> list[tuple[Quota, str]]:
        """The places that it holds."""
        if self.own is None:
            return []
        charges = self.own.charges
        return [(charge.quota, self.own.lease) for charge in charges if charge.quota.shape == "lease"]

    async def settle(self, num_tokens: int, *, counts: bool = True) -> None:
        """Replace what was reserved by what was used; a request that does not count gives its place back, too."""
        if self._is_open:
            self._is_open = False
            await self._limiter.settle(self, num_tokens, counts=counts)

    async def release(self) -> None:
        """Give all back."""
        await self.settle(0, counts=False)


class Limiter:
    """Reserves by the quotas of a request. Start it in the running loop; stop it after the last settle.

    Args:
        count_used: Asks usage.
        report_degraded: Told whether this gateway counts alone though others are there.
        gateway: The id of this gateway, of this start.
        clock: Milliseconds since 1970, for what is counted here.
        debts: Keeps what usage does not say.
    """

    def __init__(
        self,
        count_used: CountUsed,
        report_degraded: Callable[[bool], None],
        gateway: str = "",
        clock: Callable[[], int] = read_clock,
        debts: Debts | None = None,
    ) -> None:
        self._clock = clock
        self._debts = debts or NoDebts()
        self._own = MemoryMeter(clock)
        # what was granted since the shared meter has gone
        self._alone = MemoryMeter(clock)
        self._num_outages = 0
        self._shared: RedisMeter | None = None
        self._is_up = False
        self._is_degraded = False
        self._count_used = count_used
        self._report_degraded = report_degraded
        self._gateway = gateway
        self._num_gateways = 1
        # one that nobody holds any more nobody settles: its leases must end
        self._reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()
        self._stale: dict[str, Quota] = {}
        self._seeding = asyncio.Lock()
        self._renewing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self, shared: RedisMeter | None = None) -> None:
        """Begin; with a meter that is shared if there are other gateways."""
        self._shared = shared
        if shared is not None:
            await self._beat(shared)
            if not self._is_up:
                self._go_down("it does not answer at the start")
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; fine if it was never started."""
        if self._task is not None:
            await end_tasks([self._task])
        if self._shared is not None:
            await self._shared.close()

    async def reserve(self, charges: Sequence[Charge], lease: str) -> Reservation:
        """Reserve all that a request may cost, or nothing.

        Raises:
            RateLimitExceededError: A limit of a minute, or of requests at once, has no room.
            QuotaExceededError: A limit of a day or month has no room.
            UnavailableError: What was used this day or month is not known, and the database does not answer.
        """
        if not charges:
            return Reservation(self)
        reservation = await self._reserve_shared(charges, lease)
        if reservation is None:
            own = await self._ask(self._own, charges, lease)
            reservation = Reservation(self, own, outage=self._alone if self._is_degraded else None)
        if reservation.leases:
            self._reservations.add(reservation)
        return reservation

    async def settle(self, reservation: Reservation, num_tokens: int, *, counts: bool) -> None:
        """See `Reservation.settle`."""
        own, shared = reservation.own, reservation.shared
        assert own is not None, "only what holds something is settled"
        # a renewal that is on its way would bring the lease back
        async with self._renewing:
            self._reservations.discard(reservation)
        debts = await self._own.settle(own, _list_spent(own, num_tokens, counts=counts))
        if self._shared is None:
            await self._save(debts)
            return
        if reservation.outage is not None and reservation.alone is not None:
            # told of or not, that outage's own count
            spent = _list_spent(reservation.alone, num_tokens, counts=counts)
            await reservation.outage.settle(reservation.alone, spent)
        try:
            if not self._is_up:
                raise MeterError("it is away")
            # what was granted here it has been told of since, but for days and months
            found = shared or reservation.alone
            if found is not None:
                await self._save(await self._shared.settle(found, _list_spent(found, num_tokens, counts=counts)))
            if shared is None:
                await self._shared.forget(_list_calendars(own))
        except MeterError as error:
            self._go_down(str(error))
            self._stale |= {quota.name: quota for quota in _list_calendars(shared or own)}

    async def _save(self, debts: Sequence[Debt]) -> None:
        """Keep debts; those that cannot be kept are known to the meter alone."""
        if not debts:
            return
        try:
            await self._debts.save(debts)
        except UnavailableError:
            _log.warning("a debt of %s could not be kept", debts[0].quota.name)

    async def look(self, quotas: Sequence[Quota]) -> Sequence[Standing | None]:
        """Return how quotas stand as the meter in charge counts them, and reserve nothing.

        None of a day or month that nothing was asked of since its count is kept: it is what usage says.
        """
        if self._shared is not None and self._is_up:
            try:
                return await self._shared.look(quotas)
            except MeterError as error:
                self._go_down(str(error))
        return await self._own.look(quotas)

    async def recount(self, subjects: Sequence[Subject]) -> None:
        """Have days and months counted anew from usage, in which something has changed that was not reserved here."""
        kinds = ("tokens_per_day", "tokens_per_month")
        quotas = [Quota(subject, kind, 1) for subject in subjects for kind in kinds]
        await self._own.forget(quotas)
        if self._shared is None:
            return
        try:
            await self._shared.forget(quotas)
        except MeterError:
            self._stale |= {quota.name: quota for quota in quotas}

    async def _reserve_shared(self, charges: Sequence[Charge], lease: str) -> Reservation | None:
        """Reserve at the shared meter; None if there is none, or it does not answer."""
        if self._shared is None or not self._is_up:
            return None
        try:
            hold = await self._ask(self._shared, charges, lease)
        except MeterError as error:
            self._go_down(str(error))
            # what may have been reserved there nobody settles
            self._stale |= {charge.quota.name: charge.quota for charge in charges if charge.quota.is_of_calendar}
            return None
        return Reservation(self, self._own.note(hold), hold)

    async def _ask(self, meter: Meter, charges: Sequence[Charge], lease: str) -> Hold:
        """Reserve at one meter, which is told what was used if it does not know."""
        outcome = await meter.reserve(charges, lease)
        if isinstance(outcome, Unseeded | Lost):
            # those that come meanwhile need not ask the same
            async with self._seeding:
                outcome = await self._prepare_and_reserve(meter, charges, lease)
        if isinstance(outcome, Refusal):
            raise build_refusal(outcome)
        return outcome

    async def _prepare_and_reserve(self, meter: Meter, charges: Sequence[Charge], lease: str) -> Hold | Refusal:
        for _ in range(_MAX_TRIES):
            outcome = await meter.reserve(charges, lease)
            if isinstance(outcome, Hold | Refusal):
                return outcome
            if isinstance(outcome, Lost):
                assert self._shared is not None, "only the shared meter loses what it had"
                await self._tell(self._shared)
                continue
            for quota in outcome.quotas:
                start = find_period_start(quota.shape, outcome.now_ms)
                used = await self._count_used(quota.subject, start)
                await meter.seed(quota, used, *carry(await self._debts.find(quota), quota, outcome.now_ms))
        raise UnavailableError("What was used this month could not be found out; try again shortly.")

    async def _tell(self, shared: RedisMeter) -> None:
        """Tell the shared meter of what it does not know: all of the last minute if it has lost its data."""
        self._num_gateways, birth = await shared.beat(self._gateway, _GATEWAY_LIFE_MS)
        is_lost = birth != shared.birth
        meter = self._own if is_lost else self._alone
        mark = f"{self._gateway}:{birth}:{'' if is_lost else self._num_outages}"
        await shared.tell(birth, mark, meter.list_minutes())
        await self._renew_at(shared)
        self._alone = MemoryMeter(self._clock)

    async def _run(self) -> None:
        """Beat, and renew leases, until cancelled."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + _RENEW_EVERY_S
        while True:
            await asyncio.sleep(_BEAT_EVERY_S)
            try:
                if self._shared is not None:
                    await self._beat(self._shared)
                if loop.time() >= renew_at:
                    renew_at = loop.time() + _RENEW_EVERY_S
                    await self._renew()
            except Exception:  # noqa: BLE001 - leases must be renewed whatever happens once
                _log.exception("the meters could not be kept")

    async def _beat(self, shared: RedisMeter) -> None:
        """Say that this gateway lives; if the meter was away, put right what it has missed."""
        try:
            self._num_gateways, birth = await shared.beat(self._gateway, _GATEWAY_LIFE_MS)
            if self._is_up and birth == shared.birth:
                return
            async with self._seeding:
                await self._tell(shared)
            while self._stale:
                some = dict(list(self._stale.items())[:100])
                await shared.forget(list(some.values()))
                self._stale = {name: quota for name, quota in self._stale.items() if name not in some}
        except MeterError as error:
            self._go_down(str(error))
            return
        if not self._is_up:
            _log.info("gateways count limits together, %d of them", self._num_gateways)
        self._is_up, self._is_degraded = True, False
        self._own.num_sharers = 1
        self._report_degraded(self._is_degraded)

    async def _renew(self) -> None:
        if self._shared is not None and self._is_up:
            try:
                await self._renew_at(self._shared)
            except MeterError as error:
                self._go_down(str(error))
        await self._renew_at(self._own)

    async def _renew_at(self, meter: Meter) -> None:
        async with self._renewing:
            await meter.renew([lease for reservation in self._reservations for lease in reservation.leases])

    def _go_down(self, cause: str) -> None:
        if not self._is_degraded:
            _log.warning(
                "Redis does not answer (%s); limits are divided by %d gateways and counted here",
                cause,
                self._num_gateways,
            )
            self._own.forget_calendars()
            self._num_outages += 1
        self._is_up, self._is_degraded = False, True
        self._own.num_sharers = self._num_gateways
        self._report_degraded(self._is_degraded)


def _list_spent(hold: Hold, num_tokens: int, *, counts: bool) -> list[int]:
    return [num_tokens if charge.quota.is_of_tokens else int(counts) for charge in hold.charges]


def _list_calendars(hold: Hold) -> list[Quota]:
    return [charge.quota for charge in hold.charges if charge.quota.is_of_calendar]
