"""Makes engines give back content that no name means any more. It waits for nothing that a client waits for.

What an engine missed because it did not answer, it evicts by itself for adapters that are called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from loraplex.errors import LoraplexError
from loraplex.fleet.fleet import Fleet
from loraplex.gateway.names import NameIndex

_MAX_DROPS = 16
_log = logging.getLogger(__name__)


class Forgetting:
    """Drops digests from the engines of a base, in the background.

    Args:
        names: Says what is still named.
        fleet: Tells the engines.
    """

    def __init__(self, names: NameIndex, fleet: Fleet) -> None:
        self._names = names
        self._fleet = fleet
        self._turns = asyncio.Semaphore(_MAX_DROPS)
        self._tasks: set[asyncio.Task[None]] = set()

    def forget(self, base: str, digests: Iterable[str]) -> None:
        """Begin to drop those of `digests` that no living adapter has; returns at once."""
        for digest in digests:
            task = asyncio.create_task(self._drop(base, digest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Leave the rest to the engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drop(self, base: str, digest: str) -> None:
        async with self._turns:
            try:
                await self._names.ensure_fresh()
            except LoraplexError as error:
                _log.warning("engines keep %s for now, names cannot be read: %s", digest, error.message)
                return
            if not self._names.has_callable(base, digest):
                await self._fleet.drop(base, digest)
