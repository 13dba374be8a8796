"""Keeps escalations in time: once a second what was cut off is finished and what is due is done.

What has lost its adapter is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

from loraplex.errors import ConflictError, LoraplexError
from loraplex.escalations.clock import build_clock_identity
from loraplex.escalations.record import Row
from loraplex.escalations.service import EscalationService

_EVERY_S = 1.0
_SWEEP_EVERY_S = 3600.0
_NEWS_TIME = timedelta(seconds=10)
"""Longer than names of what was just registered take to be known everywhere."""

_ORPHAN = "Its adapter, or its full fine-tune, is gone."
_log = logging.getLogger(__name__)


class EscalationWatch:
    """Acts on escalations in the gateway's own name.

    Args:
        service: Moves them.
        freshen: Takes in every change of names that is acknowledged.
        is_there: Whether the adapter of an open escalation, and the full fine-tune that it has registered, are there
            still, as names were last read.
    """

    def __init__(
        self, service: EscalationService, freshen: Callable[[], Awaitable[None]], is_there: Callable[[Row], bool]
    ) -> None:
        self._service = service
        self._freshen = freshen
        self._is_there = is_there
        self.on_look: Callable[[list[str]], None] = lambda _: None
        """Called with the states of all open escalations."""
        self._swept_at = time.monotonic()

    async def run(self) -> None:
        """Look for ever; what fails is logged and the next look tries again."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.look()
            except LoraplexError as error:
                _log.warning("escalations could not be read: %s", error.message)

    async def look(self) -> None:
        """Do what is due.

        Raises:
            UnavailableError: The database does not answer.
        """
        for public_id in await self._service.list_unfinished():
            await self._try(public_id, self._service.finish(public_id))
        for row in await self._service.list_due():
            await self._try(row["public_id"], self._service.do_due(build_clock_identity(), row["public_id"]))
        settled_at = datetime.now(UTC) - _NEWS_TIME
        found = await self._service.list_open()
        self.on_look([row["state"] for row in found])
        rows = [row for row in found if row["changed_at"] < settled_at]
        await self._freshen()
        for row in rows:
            if not self._is_there(row):
                closing = self._service.close(build_clock_identity(), row["public_id"], _ORPHAN)
                await self._try(row["public_id"], closing)
        if time.monotonic() - self._swept_at > _SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            await self._service.sweep()

    async def _try(self, public_id: str, act: Coroutine[Any, Any, object]) -> None:
        """Act; one that cannot be moved now, or that another gateway is moving, does not stop the others."""
        try:
            await act
        except ConflictError as error:
            _log.info("escalation %s: %s", public_id, error.message)
        except Exception as error:  # noqa: BLE001 - versions and aliases have errors of their own
            _log.warning("escalation %s could not be moved: %r", public_id, error)
