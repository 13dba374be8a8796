"""Bounds what a request needs before it can start: by its deadline, and by its client's patience."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar import Request

from loraplex_engine.errors import ClientGoneError, DeadlineError
from loraplex_engine.server.call import Caller

_Result = TypeVar("_Result")


async def prepare(request: Request[Any, Any, Any], caller: Caller, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what `work` returns; the body must have been read.

    Raises:
        DeadlineError: It takes longer than the caller has.
        ClientGoneError: Nobody waits for it any more.
    """
    task = asyncio.ensure_future(work)
    # what it meets after its end is told to nobody
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    watcher = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watcher), timeout=caller.left_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError if watcher.done() else DeadlineError
    finally:
        task.cancel()
        watcher.cancel()


async def _wait_for_disconnect(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
