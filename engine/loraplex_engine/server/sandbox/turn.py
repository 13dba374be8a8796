"""Who may run next: a few tasks at a time, tenants in rotation, waits bounded.

`Turns` is the only writer of its queues. A tenant whose tasks all take their full time holds up only itself, as long as
there is a second place.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loraplex_engine.errors import NotReadyError


class Turns:
    """At most `num_places` tasks at once, and of one tenant all places but one."""

    def __init__(self, num_places: int, max_wait_s: float) -> None:
        self._num_places = num_places
        self._places_of_one = max(1, num_places - 1)
        self._max_wait_s = max_wait_s
        self._running: Counter[str] = Counter()
        # the tenant that waits longest for its turn is first
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    @asynccontextmanager
    async def take(self, tenant_id: str) -> AsyncIterator[None]:
        """Hold a place.

        Raises:
            NotReadyError: None became free in time.
        """
        if self._waiting or not self._is_free_for(tenant_id):
            await self._wait(tenant_id)
        else:
            self._running[tenant_id] += 1
        try:
            yield
        finally:
            self._leave(tenant_id)

    async def _wait(self, tenant_id: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        self._admit()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except TimeoutError:
            self._withdraw(tenant_id, turn)
            raise NotReadyError("Too many prompts and grammars wait to be prepared; try again.") from None
        except asyncio.CancelledError:
            self._withdraw(tenant_id, turn)
            raise

    def _withdraw(self, tenant_id: str, turn: asyncio.Future[None]) -> None:
        """Leave the queue, or give the place back that came too late."""
        if turn.done() and not turn.cancelled():
            self._leave(tenant_id)
            return
        queue = self._waiting.get(tenant_id)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[tenant_id]

    def _leave(self, tenant_id: str) -> None:
        self._running[tenant_id] -= 1
        if not self._running[tenant_id]:
            del self._running[tenant_id]
        self._admit()

    def _admit(self) -> None:
        for tenant_id in list(self._waiting):
            queue = self._waiting[tenant_id]
            while queue and self._is_free_for(tenant_id):
                turn = queue.popleft()
                if not turn.done():
                    self._running[tenant_id] += 1
                    turn.set_result(None)
                    self._waiting.move_to_end(tenant_id)
                    break
            if not queue:
                del self._waiting[tenant_id]

    def _is_free_for(self, tenant_id: str) -> bool:
        is_free = sum(self._running.values()) < self._num_places
        return is_free and self._running[tenant_id] < self._places_of_one
