"""Follows the grammars of all rows of a step together, one after the other in one thread, which is woken once.

A thread for each row, or native ones for all, would take more cores from the model, and for longer: on two that the
model uses both, a step with half its rows under a grammar took 1.06 of one without, and takes 1.02 in one thread. Rows
whose grammars are slow work alone, so that nobody's mask waits for theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple, Protocol

from loraplex_engine.core.guide import GuideState
from loraplex_engine.errors import RequestError

MAX_ROWS = 16
"""Rows of one round; their masks take 2 ms, which is less than the step of a model does. More rows are more rounds, in
half as many threads as the machine has cores."""
_NUM_ALONE = 2
"""One grammar that takes long holds up no other."""


class Outcome(NamedTuple):
    """What a piece of work led to."""

    state: GuideState
    error: RequestError | None = None


class Row(Protocol):
    """A grammar that has a token to take in."""

    def follow(self) -> Outcome:
        """Take in the token and find the next mask; called by one thread at a time. Faults are outcomes."""


class Rounds:
    """The threads that follow grammars."""

    def __init__(self) -> None:
        num_threads = max(1, (os.cpu_count() or 1) // 2)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._alone = ThreadPoolExecutor(_NUM_ALONE, thread_name_prefix="grammar-alone")
        self._lock = Lock()
        # NOTE: a round is asked for whenever its first row joins, so nobody waits without one
        self._waiting: list[tuple[Future[Outcome], Row]] = []

    def join(self, row: Row) -> Future[Outcome]:
        """Let `row` work in the next round that has room for it."""
        future: Future[Outcome] = Future()
        with self._lock:
            self._waiting.append((future, row))
            is_first = len(self._waiting) % MAX_ROWS == 1
        if is_first:
            self._threads.submit(self._run)
        return future

    def submit_alone(self, work: Callable[[], Outcome]) -> Future[Outcome]:
        """Let a thread do a piece of work of one row."""
        return self._alone.submit(work)

    def _run(self) -> None:
        with self._lock:
            joined, self._waiting = self._waiting[:MAX_ROWS], self._waiting[MAX_ROWS:]
        for future, row in joined:
            if future.set_running_or_notify_cancel():
                future.set_result(row.follow())
