"""Streams that keep pages current: server-sent events, sent when something has changed, ended with their session.

A session has few of them, as browsers open few connections to one host: one more ends the oldest. A stream is no use
of a session; a page that lies open does not keep it alive.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from litestar.response import Stream

from loraplex.dashboard.door import SessionDoor
from loraplex.dashboard.visit import Visit
from loraplex.errors import LoraplexError, UnavailableError
from loraplex.gateway.drain import Drain
from loraplex.gateway.problem import describe
from loraplex_registry.wire.identity import Identity

MAX_PER_SESSION = 4
_MAX_STREAMS = 1000
_STEP_S = 1.0
_CHECK_EVERY_S = 5.0
_BEAT_EVERY_S = 15.0
_RETRY = b"retry: 3000\n\n"
_BEAT = b": beat\n\n"
ENDED, MOVED, PROBLEM = "ended", "moved", "problem"
"""The session has ended; another stream took this one's place; what is shown could not be read."""


class Event(msgspec.Struct, frozen=True):
    """What a stream sends under a name: text, or anything that becomes JSON."""

    name: str
    data: str


Make = Callable[[Identity], Awaitable[Sequence[Event]]]
"""Makes the events of the moment for whoever looks. Raises LoraplexError."""


class Streams:
    """All open streams. `Streams` is the only writer of their list."""

    def __init__(self, door: SessionDoor, drain: Drain) -> None:
        self._door = door
        self._drain = drain
        self._places: defaultdict[str, list[asyncio.Event]] = defaultdict(list)

    @property
    def num_open(self) -> int:
        """Streams that are open now."""
        return sum(map(len, self._places.values()))

    def open(self, visit: Visit, make: Make, every_s: float) -> Stream:
        """Return a stream of what `make` makes every so many seconds, as far as it differs from the time before.

        Raises:
            UnavailableError: There are too many already.
        """
        if self.num_open >= _MAX_STREAMS:
            raise UnavailableError("Too many pages are open here; close some, or reload this one later.")
        return Stream(
            self._run(visit, make, every_s),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _run(self, visit: Visit, make: Make, every_s: float) -> AsyncIterator[bytes]:
        session_id, moved = str(visit.session.id), asyncio.Event()
        places = self._places[session_id]
        for oldest in places[: len(places) + 1 - MAX_PER_SESSION]:
            oldest.set()
        places.append(moved)
        try:
            yield _RETRY
            async for event in self._follow(visit, make, every_s, moved):
                yield event
        finally:
            places.remove(moved)
            if not places:
                self._places.pop(session_id, None)

    async def _follow(self, visit: Visit, make: Make, every_s: float, moved: asyncio.Event) -> AsyncIterator[bytes]:
        identity, sent = visit.identity, dict[str, str]()
        check_at, make_at, beat_at = time.monotonic() + _CHECK_EVERY_S, 0.0, 0.0
        while not self._drain.has_begun:
            now = time.monotonic()
            if now >= check_at:
                found = await self._find(visit)
                if found is None:
                    yield _encode(Event(ENDED, ""))
                    return
                identity, check_at = found, now + _CHECK_EVERY_S
            if now >= make_at:
                make_at = now + every_s
                for event in await _make(make, identity):
                    if sent.get(event.name) != event.data:
                        sent[event.name] = event.data
                        beat_at = now + _BEAT_EVERY_S
                        yield _encode(event)
            if now >= beat_at:
                beat_at = now + _BEAT_EVERY_S
                yield _BEAT
            if await _wait(moved, min(_STEP_S, every_s)):
                yield _encode(Event(MOVED, ""))
                return

    async def _find(self, visit: Visit) -> Identity | None:
        try:
            found = await self._door.find(visit.token, visit.identity.request_id, is_use=False)
        except LoraplexError:
            # the next look says; what is shown meanwhile the session has seen before
            return visit.identity
        return None if found is None else found[1]


async def _make(make: Make, identity: Identity) -> Sequence[Event]:
    try:
        return [Event(PROBLEM, ""), *await make(identity)]
    except Exception as error:  # noqa: BLE001 - the registry's errors are of another tree, and a page outlives them all
        return [Event(PROBLEM, describe(error).message)]


async def _wait(moved: asyncio.Event, wait_s: float) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            return await moved.wait()
    except TimeoutError:
        return False


def _encode(event: Event) -> bytes:
    lines = "".join(f"data: {line}\n" for line in event.data.split("\n"))
    return f"event: {event.name}\n{lines}\n".encode()
