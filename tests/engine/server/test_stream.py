"""The gateway's own HTTP client of streams against servers that are only bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from loraplex_engine.wire import stream as module
from loraplex_engine.wire.client import EngineAnswer, EngineClient, Events, ReplicaFailedError, UnreachableError
from loraplex_engine.wire.done import RequestDone, encode_done
from loraplex_engine.wire.stream import parse_address

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = RequestDone("req_a", 7, 2, 3, 0.0, 0.1, 0.0, 0.2, 0, "stop", "base")
DONE_EVENT = b"event: loraplex.done\ndata: %b\n\n" % encode_done(DONE)
LAST = b"data: [DONE]\n\n"

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def say(*pieces: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            # lets the other side read each piece alone
            await asyncio.sleep(0)
        writer.close()

    return answer


@asynccontextmanager
async def asked(
    folder: Path, answer: Answer, *, gap_s: float = 5.0, deadline_s: float = 5.0
) -> AsyncIterator[EngineAnswer]:
    serving: list[asyncio.Task[None]] = []

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.ensure_future(answer(reader, writer)))

    server = await asyncio.start_unix_server(serve, str(folder / "engine"))
    client = EngineClient("http://engine", lambda: "t", uds=str(folder / "engine"))
    try:
        call = client.generate("/v1/completions", b"{}", token="t", headers={}, deadline_s=deadline_s, gap_s=gap_s)
        async with call as found:
            yield found
    finally:
        await client.close()
        server.close()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)


def text_event(text: str) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"text": text}]}).encode()


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
async def test_events_do_not_depend_on_how_they_arrive(tmp_path: Path, size: int) -> None:
    told = [text_event("a"), b": \n\n", text_event("b"), text_event("c")]
    body = b"".join(told) + DONE_EVENT + LAST
    pieces = [chunked(body[start : start + size]) for start in range(0, len(body), size)]
    async with asked(tmp_path, say(HEAD, *pieces, b"0\r\n\r\n")) as answer:
        found = [events async for events in answer.events()]
    assert answer.is_stream
    assert b"".join(events.data for events in found[:-1]) == b"".join(told)
    assert sum(events.count for events in found[:-1]) == 3
    assert found[-1] == Events(LAST, 1, found[-1].arrived_at, is_last=True)
    assert answer.done == DONE


async def test_an_error_event_is_the_last_and_says_why(tmp_path: Path) -> None:
    error = b'{"error": {"code": "x"}}'
    body = text_event("a") + DONE_EVENT + b"data: %b\n\n" % error
    async with asked(tmp_path, say(HEAD, chunked(body), b"0\r\n\r\n")) as answer:
        found = [events async for events in answer.events()]
    assert [(events.data, events.count, events.is_last, events.error) for events in found] == [
        (text_event("a"), 1, False, b""),
        (b"data: %b\n\n" % error, 1, True, error),
    ]


async def test_events_that_came_together_say_so(tmp_path: Path) -> None:
    async def say_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunked(text_event("a") + text_event("b")))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(chunked(text_event("c") + DONE_EVENT + LAST) + b"0\r\n\r\n")
        writer.close()

    async with asked(tmp_path, say_slowly) as answer:
        found = [events async for events in answer.events()]
    (first, then, last) = (events.arrived_at for events in found)
    assert then == last
    assert then - first >= 0.04


@pytest.mark.parametrize(
    "text", ["data: [DONE]", "\ndata: [DONE]\n\n", 'data: {"error"', "event: loraplex.done\ndata: {}"]
)
async def test_what_a_model_says_is_never_taken_for_the_engine_s_word(tmp_path: Path, text: str) -> None:
    async with asked(tmp_path, say(HEAD, chunked(text_event(text) + LAST), b"0\r\n\r\n")) as answer:
        found = [events async for events in answer.events()]
    assert [events.is_last for events in found] == [False, True]
    assert found[0].data == text_event(text)


def test_the_loop_that_serves_reads_streams(tmp_path: Path) -> None:
    async def read() -> list[Events]:
        pieces = (HEAD, chunked(text_event("a")), chunked(DONE_EVENT + LAST), b"0\r\n\r\n")
        async with asked(tmp_path, say(*pieces)) as answer:
            return [events async for events in answer.events()]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert b"".join(events.data for events in runner.run(read())) == text_event("a") + LAST


async def test_a_whole_answer_is_read_to_its_end(tmp_path: Path) -> None:
    head = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 10\r\nRetry-After: 3\r\nx-loraplex-done: %b\r\n\r\n"
    async with asked(tmp_path, say(head % encode_done(DONE), b"01234", b"56789")) as answer:
        assert (answer.status, answer.header("retry-after"), answer.done) == (429, "3", DONE)
        assert answer.header("x-loraplex-done") is None
        assert await answer.read() == b"0123456789"


async def test_a_whole_answer_that_is_cut_is_an_error(tmp_path: Path) -> None:
    async with asked(tmp_path, say(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", b"01234")) as answer:
        with pytest.raises(ReplicaFailedError):
            await answer.read()


async def test_what_comes_behind_an_answer_is_nobody_s(tmp_path: Path) -> None:
    first = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-a: 1\r\n\r\n{}"
    behind = b"HTTP/1.1 500 X\r\ncontent-length: 3\r\nx-a: 2\r\nretry-after: 9\r\n\r\nabc"
    async with asked(tmp_path, say(first + behind)) as answer:
        assert (answer.status, answer.header("x-a"), answer.header("retry-after")) == (200, "1", None)
        assert await answer.read() == b"{}"


async def test_headers_of_what_is_informational_are_not_the_answer_s(tmp_path: Path) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nretry-after: 9\r\n\r\n"
    async with asked(tmp_path, say(early, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"{}")) as answer:
        assert (answer.status, answer.header("retry-after")) == (200, None)
        assert await answer.read() == b"{}"


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        b"HTTP/1.1 700 X\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_a_failed_replica(tmp_path: Path, said: bytes) -> None:
    with pytest.raises(ReplicaFailedError):
        async with asked(tmp_path, say(said)):
            pass


async def test_a_head_that_does_not_come_in_time_is_a_failed_replica(tmp_path: Path) -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"authorization: Bearer t" in await reader.readuntil(b"\r\n\r\n")
        # until the client has hung up
        await reader.read()
        writer.close()

    with pytest.raises(ReplicaFailedError):
        async with asked(tmp_path, wait, deadline_s=0.05):
            pass


async def test_a_reader_that_lags_stops_the_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_UNREAD_BYTES", 1000)
    num_sent, num_pieces = 0, 400
    event = text_event("x" * 10_000)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for num_sent in range(1, num_pieces + 1):  # noqa: B007 - read outside
            writer.write(chunked(event))
            await writer.drain()
        writer.write(chunked(LAST) + b"0\r\n\r\n")
        writer.close()

    async with asked(tmp_path, flood) as answer:
        before = -1
        while before != num_sent:
            before = num_sent
            await asyncio.sleep(0.05)
        assert num_sent < num_pieces / 2
        found = [events async for events in answer.events()]
    assert (sum(events.count for events in found), num_sent) == (num_pieces + 1, num_pieces)


async def test_nobody_listening_is_told_from_somebody_failing(tmp_path: Path) -> None:
    client = EngineClient("http://engine", lambda: "t", uds=str(tmp_path / "none"))
    with pytest.raises(UnreachableError):
        async with client.generate("/v1/completions", b"", token="t", headers={}, deadline_s=1):
            pass
    await client.close()


@pytest.mark.parametrize("value", ["a\r\nx-other: 1", "a\nb", "é", "\x00"])
async def test_no_header_can_begin_another(tmp_path: Path, value: str) -> None:
    client = EngineClient("http://engine", lambda: "t", uds=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="x-asked"):
        async with client.generate("/v1/completions", b"", token="t", headers={"x-asked": value}, deadline_s=1):
            pass
    await client.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8100", ("127.0.0.1", 8100, "", False)),
        ("https://engine.example/base", ("engine.example", 443, "/base", True)),
        ("http://[::1]:8100", ("::1", 8100, "", False)),
        ("http://engine", ("engine", 80, "", False)),
    ],
)
def test_addresses_are_read_from_urls(url: str, expected: tuple[str, int, str, bool]) -> None:
    found = parse_address(url)
    assert (found.host, found.port, found.path, found.is_tls) == expected
