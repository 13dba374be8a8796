"""Answers that many wait for: made once every few seconds, however many ask meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
_MAX_KEPT = 64


class Memo(Generic[K, V]):
    """The latest answers by what was asked; one is fresh for so many seconds from when it was first asked for."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._answers: OrderedDict[K, tuple[float, asyncio.Task[V]]] = OrderedDict()

    async def get(self, key: K, make: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return the answer for `key`; who asks while it is made waits for the same one. Raises what `make` raises."""
        asked_at, task = self._answers.get(key, (0.0, None))
        if task is None or time.monotonic() - asked_at > self._fresh_s:
            task = asyncio.create_task(make())
            self._answers[key] = time.monotonic(), task
            self._answers.move_to_end(key)
            while len(self._answers) > _MAX_KEPT:
                self._answers.popitem(last=False)
        # one page that is closed takes the answer from no other
        return await asyncio.shield(task)
