"""The requests of this engine: those that run, and what the finished ones cost, for 15 minutes.

`RequestLog` is the only writer. It is bounded in time and in number.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from loraplex_engine.errors import ConflictError
from loraplex_engine.server.generation import Generation
from loraplex_engine.wire.done import RequestDone, RequestStatus

KEPT_S = 900.0
MAX_KEPT = 65_536


class RequestLog:
    """Open generations by request id, finished ones as their cost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, Generation] = {}
        self._finished: OrderedDict[str, tuple[float, RequestDone]] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Requests that have not closed."""
        return len(self._open)

    def add(self, generation: Generation, on_closed: Callable[[RequestDone], None] = lambda _: None) -> None:
        """Follow a generation that is about to start; `on_closed` hears what it cost.

        Raises:
            ConflictError: A request with its id runs already.
        """
        request_id = generation.spec.request_id
        if request_id in self._open:
            raise ConflictError("A request with this id is running already; choose a fresh id.")
        self._open[request_id] = generation

        def close(done: RequestDone) -> None:
            self._file(done)
            on_closed(done)

        generation.on_closed = close

    def find_open(self, request_id: str) -> Generation | None:
        """Return the generation that runs under this id."""
        return self._open.get(request_id)

    def all_open(self) -> list[Generation]:
        """Return all generations that run."""
        return list(self._open.values())

    def find(self, request_id: str) -> RequestStatus | None:
        """Return what is known of a request."""
        generation = self._open.get(request_id)
        if generation is not None:
            return RequestStatus(request_id, "running", generation.done())
        self._prune()
        kept = self._finished.get(request_id)
        return RequestStatus(request_id, "finished", kept[1]) if kept else None

    def _file(self, done: RequestDone) -> None:
        self._open.pop(done.request_id, None)
        self._finished[done.request_id] = (self._clock(), done)
        self._finished.move_to_end(done.request_id)
        self._prune()

    def _prune(self) -> None:
        oldest = self._clock() - KEPT_S
        while self._finished:
            filed_at, _ = next(iter(self._finished.values()))
            if filed_at >= oldest and len(self._finished) <= MAX_KEPT:
                return
            self._finished.popitem(last=False)
