"""Says now and then that work is still going on, so that others may take it over once that has stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

from loraplex_registry.errors import RegistryError
from loraplex_registry.wire.ending import end_tasks

_BEAT_S = 10.0
DEAD_AFTER = timedelta(seconds=60)
"""Work not heard of for that long has died with its process: several beats, and what a database may be away."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def beating(beat: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call `beat` every ten seconds while the body runs; one that fails is logged and the next one tries again."""
    task = asyncio.create_task(_beat_for_ever(beat))
    try:
        yield
    finally:
        await end_tasks([task])


async def _beat_for_ever(beat: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(_BEAT_S)
        try:
            await beat()
        except RegistryError as error:
            _log.warning("work that goes on cannot say so: %s", error)
