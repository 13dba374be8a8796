"""Turns at one base's engines: one holder at a time, tenants one after the other, what one tenant has in its order.

A team that uploads a hundred versions at once delays another team's single one by the one that is measured, not by all.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantTurns:
    """Who may measure now; used from one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Tenants in the order in which they come next."""

    @asynccontextmanager
    async def take(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for this tenant's turn, hold it inside the block, and give it to the next."""
        await self._wait(tenant_id)
        try:
            yield
        finally:
            self._hand_on()

    async def _wait(self, tenant_id: str) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # the turn came in the moment of the cancellation
                self._hand_on()
            raise

    def _hand_on(self) -> None:
        while self._waiting:
            tenant_id, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant_id] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
