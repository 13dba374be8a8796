"""Work in threads, for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

_Result = TypeVar("_Result")


async def run_in_thread(work: Callable[[], _Result], executor: Executor | None = None) -> _Result:
    """Return what `work` returns in a thread: one of `executor`, or of the loop's own."""
    return await asyncio.get_running_loop().run_in_executor(executor, _run, work)


def _run(work: Callable[[], _Result]) -> _Result:
    """Let no StopIteration out: a future of asyncio takes none, and who waits for it would wait for ever."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("work in a thread ended with StopIteration") from error
