"""Ends background tasks for certain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

_log = logging.getLogger(__name__)
_PATIENCE_S = 2.0
_MOST_TRIES = 5


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; what they failed with is not raised.

    A task may miss a cancellation: until Python 3.12 `asyncio.wait_for`, which libraries use, loses one that comes as
    its answer does, and a loop then goes on for ever. So it is cancelled again, after two seconds in which it may tidy
    up; one that still runs after ten seconds is logged and left.
    """
    waiting = set(tasks)
    for _ in range(_MOST_TRIES):
        if not waiting:
            return
        for task in waiting:
            task.cancel()
        done, waiting = await asyncio.wait(waiting, timeout=_PATIENCE_S)
        for task in done:
            # else asyncio complains that nobody looked at it
            _ = task.cancelled() or task.exception()
    if waiting:
        _log.error("tasks do not end: %s", ", ".join(sorted(task.get_name() for task in waiting)))
