"""Which engine has the last word on a request that a gateway left open."""

from __future__ import annotations

from typing import Any, cast

import pytest

from loraplex.fleet.fleet import Fleet
from loraplex.fleet.view import FleetView, Replica
from loraplex.gateway.recovery import DoneFinder
from loraplex.usage.record import RequestRow
from loraplex_engine.wire.client import UnreachableError
from loraplex_engine.wire.done import RequestDone, RequestStatus

REFUSED = RequestDone("req_1", 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0, "error", "base")
ANSWERED = RequestDone("req_1", 7, 2, 5, 0.0, 0.0, 0.0, 0.0, 0, "abort", "base", load_bytes=64)


class FakeEngine:
    def __init__(self, done: RequestDone | None, *, is_away: bool = False) -> None:
        self.done, self.is_away = done, is_away

    async def find_request(self, request_id: str) -> RequestStatus | None:
        if self.is_away:
            raise UnreachableError
        return None if self.done is None else RequestStatus(request_id, "finished", self.done)


class FakeFleet:
    def __init__(self, **engines: FakeEngine) -> None:
        self.engines = engines
        self.view = FleetView(tuple(Replica(url=url, pool="main", base="base", problem=None) for url in engines))

    def client(self, url: str) -> FakeEngine:
        return self.engines[url]


async def find(**engines: FakeEngine) -> tuple[int, str] | None:
    row = cast("RequestRow", type("Row", (), {"request_id": "req_1", "replica": "first"})())
    fleet = cast("Fleet", cast("Any", FakeFleet(**engines)))
    found = await DoneFinder(fleet).find(row)
    return None if found is None else (found[0].completion_tokens, found[1])


async def test_the_engine_that_answered_counts_not_the_one_that_was_tried_first() -> None:
    engines = {"first": FakeEngine(REFUSED), "second": FakeEngine(ANSWERED), "third": FakeEngine(None)}
    assert await find(**engines) == (5, "second")
    assert await find(first=FakeEngine(REFUSED), second=FakeEngine(None)) == (0, "first")
    assert await find(first=FakeEngine(None)) is None


async def test_an_engine_that_is_away_may_have_answered() -> None:
    away = FakeEngine(None, is_away=True)
    with pytest.raises(OSError, match="does not answer"):
        await find(first=FakeEngine(REFUSED), second=away)
    assert await find(first=FakeEngine(ANSWERED), second=away) == (5, "first")
