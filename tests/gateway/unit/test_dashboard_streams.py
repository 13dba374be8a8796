"""Live streams of the dashboard: what they send, and when they end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from loraplex.dashboard import live
from loraplex.dashboard.live import MAX_PER_SESSION, Event, Streams
from loraplex.dashboard.session import Session
from loraplex.dashboard.visit import Visit
from loraplex.errors import UnavailableError
from loraplex.gateway.drain import Drain
from loraplex_registry.errors import StoreUnavailableError
from loraplex_registry.wire.identity import Identity

WHO = Identity(role="admin", tenant_id=None, tenant=None, scopes=(), key_id="key_1", actor="ada", request_id="req_1")


class OpenDoor:
    """Finds the session until it is told that it is over."""

    def __init__(self) -> None:
        self.is_over = False
        self.uses: list[bool] = []

    async def find(self, token: str, request_id: str, *, is_use: bool) -> Any:
        self.uses.append(is_use)
        return None if self.is_over else (None, WHO)


@pytest.fixture
def door() -> OpenDoor:
    return OpenDoor()


@pytest.fixture
def drain() -> Drain:
    return Drain()


@pytest.fixture
def streams(door: OpenDoor, drain: Drain, monkeypatch: pytest.MonkeyPatch) -> Streams:
    for name, value in (("_STEP_S", 0.001), ("_CHECK_EVERY_S", 0.0), ("_BEAT_EVERY_S", 0.0)):
        monkeypatch.setattr(live, name, value)
    return Streams(door, drain)  # type: ignore[arg-type]


@pytest.fixture
def visit() -> Visit:
    return Visit(WHO, Session(uuid.uuid4(), "key_1", "admin", datetime.now(UTC)), "token")


def begin(streams: Streams, visit: Visit, make: Any) -> AsyncIterator[bytes]:
    found: Any = streams.open(visit, make, 0.001).iterator
    return found


async def take(stream: AsyncIterator[bytes], name: str) -> str:
    """Return the data of the next event of that name."""
    async with asyncio.timeout(60):
        async for chunk in stream:
            kind, *lines = chunk.decode().splitlines()
            if kind == f"event: {name}":
                return "\n".join(line.removeprefix("data: ") for line in lines if line)
    raise AssertionError(f"the stream ended before {name}")


async def nothing(_: Identity) -> Sequence[Event]:
    return []


async def test_what_has_not_changed_is_not_sent_again(streams: Streams, visit: Visit) -> None:
    values = iter(["a\nb", "a\nb", "a\nb", "c", "d"])

    async def make(_: Identity) -> Sequence[Event]:
        return [Event("part", next(values, "d")), Event("same", "x")]

    stream = begin(streams, visit, make)
    assert [await take(stream, "part") for _ in range(3)] == ["a\nb", "c", "d"]
    await stream.aclose()  # type: ignore[attr-defined]
    assert streams.num_open == 0


async def test_it_beats_while_nothing_changes(streams: Streams, visit: Visit) -> None:
    stream = begin(streams, visit, nothing)
    async with asyncio.timeout(60):
        chunks = [await anext(stream) for _ in range(4)]
    assert chunks[0] == b"retry: 3000\n\n"
    assert b": beat\n\n" in chunks
    await stream.aclose()  # type: ignore[attr-defined]


async def test_it_ends_with_its_session_and_is_no_use_of_it(streams: Streams, visit: Visit, door: OpenDoor) -> None:
    stream = begin(streams, visit, nothing)
    await take(stream, "problem")
    door.is_over = True
    assert await take(stream, "ended") == ""
    assert [chunk async for chunk in stream] == []
    assert set(door.uses) == {False}
    assert streams.num_open == 0


async def test_one_more_than_a_session_may_have_ends_the_oldest(streams: Streams, visit: Visit) -> None:
    opened = [begin(streams, visit, nothing) for _ in range(MAX_PER_SESSION + 1)]
    for stream in opened:
        await anext(stream)
    assert await take(opened[0], "moved") == ""
    other = Visit(WHO, Session(uuid.uuid4(), "key_1", "admin", datetime.now(UTC)), "token")
    await anext(begin(streams, other, nothing))
    for stream in opened[1:]:
        await take(stream, "problem")


async def test_it_ends_when_the_gateway_does(streams: Streams, visit: Visit, drain: Drain) -> None:
    stream = begin(streams, visit, nothing)
    await take(stream, "problem")
    drain.begin()
    async with asyncio.timeout(60):
        assert b"event" not in b"".join([chunk async for chunk in stream])


async def test_what_cannot_be_read_is_said_and_read_again(streams: Streams, visit: Visit) -> None:
    fails = iter([True, False])

    async def make(_: Identity) -> Sequence[Event]:
        if next(fails, False):
            raise UnavailableError("The database does not answer; try again shortly.")
        return []

    stream = begin(streams, visit, make)
    assert await take(stream, "problem") == "The database does not answer; try again shortly."
    assert await take(stream, "problem") == ""


async def test_it_outlives_what_another_part_cannot_read(streams: Streams, visit: Visit) -> None:
    fails = iter([True, False])

    async def make(_: Identity) -> Sequence[Event]:
        if next(fails, False):
            raise StoreUnavailableError("The store does not answer.")
        return []

    stream = begin(streams, visit, make)
    assert await take(stream, "problem") == "The store does not answer."
    assert await take(stream, "problem") == ""


async def test_all_together_are_bounded(streams: Streams, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MAX_STREAMS", 1)
    await anext(begin(streams, visit, nothing))
    with pytest.raises(UnavailableError, match="Too many pages"):
        streams.open(visit, nothing, 1.0)
