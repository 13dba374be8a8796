"""The requests of this engine: those that run, what the finished ones cost, for 15 minutes, and what all cost together.

`RequestLog` is the only writer. It is bounded in time and in number.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from loraplex_engine.errors import ConflictError
from loraplex_engine.server.generation import Generation
from loraplex_engine.wire.done import RequestDone, RequestStatus, UsageReport, UsageTotals

KEPT_S = 900.0
MAX_KEPT = 65_536


class RequestLog:
    """Open generations by request id, finished ones as their cost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, Generation] = {}
        self._finished: OrderedDict[str, tuple[float, RequestDone]] = OrderedDict()
        self._began_at = clock()
        self._totals = UsageTotals(secrets.token_hex(8), 0.0)

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
            self._file(done, generation.num_discarded)
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

    @property
    def totals(self) -> UsageTotals:
        """What all finished requests cost, also those that are forgotten."""
        return msgspec.structs.replace(self._totals, age_s=self._clock() - self._began_at)

    def report(self, within_s: float) -> UsageReport:
        """Return the totals and the requests of the last `within_s` seconds that are in them, the oldest first."""
        self._prune()
        since = self._clock() - within_s
        newest_first = itertools.takewhile(lambda kept: kept[0] >= since, reversed(self._finished.values()))
        return UsageReport(self.totals, [done for _, done in newest_first][::-1])

    def _file(self, done: RequestDone, num_discarded: int = 0) -> None:
        self._totals = add_done(self._totals, done, num_discarded)
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


def add_done(totals: UsageTotals, done: RequestDone, num_discarded: int) -> UsageTotals:
    """Return totals with one more request in them."""
    return msgspec.structs.replace(
        totals,
        requests=totals.requests + done.is_charged,
        free_requests=totals.free_requests + (not done.is_charged),
        prompt_tokens=totals.prompt_tokens + done.prompt_tokens,
        cached_tokens=totals.cached_tokens + done.cached_tokens,
        completion_tokens=totals.completion_tokens + done.completion_tokens,
        discarded_tokens=totals.discarded_tokens + num_discarded,
        load_bytes=totals.load_bytes + done.load_bytes,
    )
