"""Makes engines give back content that no name means any more; what may be restored, a while after.

It waits for nothing that a client waits for. Requests that run on the content end on it: engines let them.

What an engine missed because it did not answer, it evicts by itself for adapters that are called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from loraplex.errors import LoraplexError
from loraplex.fleet.fleet import Fleet
from loraplex.gateway.names import NameIndex
from loraplex_registry.wire.ending import end_tasks

_MAX_DROPS = 16
_log = logging.getLogger(__name__)


class Forgetting:
    """Drops digests from the engines of a base, in the background.

    Args:
        names: Says what is still named.
        fleet: Tells the engines.
        warm_s: How long content stays loaded that is retired: a restore or a rollback finds it so, seconds.
    """

    def __init__(self, names: NameIndex, fleet: Fleet, warm_s: float) -> None:
        self._names = names
        self._fleet = fleet
        self._warm_s = warm_s
        self._turns = asyncio.Semaphore(_MAX_DROPS)
        self._tasks: set[asyncio.Task[None]] = set()

    def forget(self, base: str, digests: Iterable[str]) -> None:
        """Begin to drop those of `digests` that nothing can be called by; returns at once."""
        for digest in digests:
            task = asyncio.create_task(self._drop(base, digest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Leave the rest to the engines."""
        await end_tasks(self._tasks)

    async def _drop(self, base: str, digest: str) -> None:
        try:
            await self._names.ensure_fresh()
            if self._names.has_retired(base, digest):
                await asyncio.sleep(self._warm_s)
                await self._names.ensure_fresh()
        except LoraplexError as error:
            _log.warning("engines keep %s for now, names cannot be read: %s", digest, error.message)
            return
        async with self._turns:
            if not self._names.has_callable(base, digest):
                await self._fleet.drop(base, digest)
