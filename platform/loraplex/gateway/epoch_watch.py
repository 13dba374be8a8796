"""Lets no request be judged by names, keys or tenants older than those that some gateway has acknowledged.

With one gateway its own memory is the truth and there is nothing to ask. With several, each request asks Redis once,
and while Redis does not answer it asks the database; requests that come together share one question. Each gateway also
reads the database every second. Whoever cannot tell Redis of a change holds back its answer for that long: others may
reach a Redis that it does not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from loraplex.db.epoch_bus import BusError, EpochBus, Epochs
from loraplex.errors import LoraplexError, UnavailableError

_POLL_S = 1.0
_SLACK_S = 0.25
_READ_TIMEOUT_S = 2.0
_log = logging.getLogger(__name__)


class EpochWatch:
    """What is known of the epochs, and when it was read.

    Args:
        read: The epochs that the database has committed. Raises LoraplexError if it does not answer.
        take: Told of epochs that are newer than, or equal to, those before; makes readers look at the database.
        report: Told whether the bus works.
    """

    def __init__(
        self, read: Callable[[], Awaitable[Epochs]], take: Callable[[Epochs], None], report: Callable[[bool], None]
    ) -> None:
        self._bus: EpochBus | None = None
        self._read = read
        self._take = take
        self._report = report
        self._is_up = False
        self._last = Epochs(0, 0)
        self._polled_at = -_POLL_S
        self._lock = asyncio.Lock()

    async def catch_up(self) -> None:
        """Learn of every change that any gateway acknowledged before this call.

        Raises:
            UnavailableError: Neither Redis nor the database answers.
        """
        if self._bus is None:
            return
        if self._is_up and await self._catch_up_by(self._bus):
            return
        await self._poll(time.monotonic())

    async def publish(self, *, registry: int | None = None, gateway: int | None = None) -> None:
        """Tell all gateways of an epoch that is committed; when this returns, none answers by an older one."""
        if self._bus is None:
            return
        try:
            await self._bus.publish(registry=registry, gateway=gateway)
        except BusError as error:
            self._go_down(error)
            # each gateway reads the database at least once in that time
            await asyncio.sleep(_POLL_S + _SLACK_S)

    async def start(self, bus: EpochBus) -> None:
        """Tell others of changes and hear of theirs by `bus` from now on; without this, there are no others.

        Raises:
            UnavailableError: The database does not answer.
        """
        self._bus = bus
        await self._mend(bus)

    async def close(self) -> None:
        """Close the bus; fine if there is none."""
        if self._bus is not None:
            await self._bus.close()

    async def run(self) -> None:
        """Read the database every second and put what it says into Redis, until cancelled."""
        while self._bus is not None:
            await asyncio.sleep(_POLL_S)
            try:
                await self._mend(self._bus)
            except LoraplexError as error:
                _log.warning("the names epochs cannot be read: %s", error)

    async def _catch_up_by(self, bus: EpochBus) -> bool:
        """Whether the bus told what there is."""
        try:
            found = await bus.read()
        except BusError as error:
            self._go_down(error)
            return False
        if found is None:
            await self._mend(bus)
        else:
            self._take(found)
        return True

    async def _mend(self, bus: EpochBus) -> None:
        """Take what the database says, and raise the bus to it: it may have been lost, or away when it was told."""
        epochs = await self._poll(time.monotonic())
        try:
            await bus.publish(registry=epochs.registry, gateway=epochs.gateway)
            found = await bus.read()
            if found is not None and (found.registry > epochs.registry or found.gateway > epochs.gateway):
                # Nothing is published before it is committed, so either it just was, or the database was put back.
                await bus.put_back(found, await self._poll(time.monotonic()))
        except BusError as error:
            self._go_down(error)
            return
        if not self._is_up:
            _log.info("gateways tell each other of changes by Redis")
        self._is_up = True
        self._report(self._is_up)

    async def _poll(self, since: float) -> Epochs:
        """Return epochs that were read from the database after `since`; callers share what one of them reads."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S), self._lock:
                if self._polled_at <= since:
                    begun_at = time.monotonic()
                    self._last = await self._read()
                    self._polled_at = begun_at
                self._take(self._last)
                return self._last
        except TimeoutError as error:
            raise UnavailableError("The names epochs could not be read in time; try again shortly.") from error

    def _go_down(self, error: BusError) -> None:
        if self._is_up:
            _log.warning("Redis does not answer (%s); each request asks the database for changes", error)
        self._is_up = False
        self._report(self._is_up)
