"""Clients that go in every phase of a request, in every way: what they asked for ends with them, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from byte_client import LEAVES, ByteClient, build_request, connected
from loraplex_registry.http import protocol
from scripted_core import BASE, Rig, running_rig, sign, until
from toy_tokenizers import write_byte_level

CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "n": 2}
PATH = "/v1/chat/completions"
FIRST_TEXT = b'"content":"'


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base"), max_model_len=10_000_000) as running:
        yield running


def request(**fields: Any) -> bytes:
    headers = {"authorization": f"Bearer {sign()}"}
    return build_request(PATH, json.dumps(CHAT | fields).encode(), headers)


async def wait_gone(rig: Rig, num_aborted: int) -> None:
    """Everything of the request has ended, within a second, by so many aborts."""
    await until(lambda: not rig.core.num_running and not rig.front.log.num_open, 10)
    assert [reason for _, reason in rig.core.aborted] == ["abort"] * num_aborted
    assert (await rig.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_goes_before_the_first_token_ends_its_request(
    rig: Rig, how: str, *, is_stream: bool
) -> None:
    rig.core.hangs_after = 0
    async with connected(rig.uds) as client:
        await client.send(request(stream=is_stream))
        await until(lambda: rig.core.num_running == 2)
        client.leave(how)
        await wait_gone(rig, 2)


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_goes_in_the_middle_ends_its_request(rig: Rig, how: str, *, is_stream: bool) -> None:
    rig.core.hangs_after = 2
    async with connected(rig.uds) as client:
        await client.send(request(stream=is_stream))
        if is_stream:
            await client.read_until(FIRST_TEXT)
        await until(lambda: rig.core.num_running == 2)
        await asyncio.sleep(0.05)
        client.leave(how)
        await wait_gone(rig, 2)


@pytest.mark.parametrize("how", LEAVES)
async def test_a_client_that_goes_with_much_unread_ends_its_request(rig: Rig, how: str) -> None:
    rig.core.answer = rig.core.encode("x y ") * 400_000
    async with connected(rig.uds) as client:
        client.writer.transport.pause_reading()
        await client.send(request(stream=True, n=1, max_tokens=5_000_000, logprobs=True, top_logprobs=20))
        # until the server's buffers are full
        await until(lambda: any(generation._pending_bytes > 100_000 for generation in rig.front.log.all_open()))
        client.leave(how)
        await wait_gone(rig, 1)


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("sent", [0, 20, -200, -1], ids=["nothing", "head", "body", "last"])
async def test_a_client_that_goes_while_it_asks_has_asked_nothing(
    rig: Rig, how: str, sent: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(rig.uds) as client:
        await client.send(request()[:sent])
        await asyncio.sleep(0.05)
        client.leave(how)
        await asyncio.sleep(0.05)
        await wait_gone(rig, 0)
    assert rig.core.added == []
    assert caplog.text == ""


@pytest.mark.parametrize("how", LEAVES)
async def test_a_client_that_goes_with_its_answer_aborts_nothing(rig: Rig, how: str) -> None:
    async with connected(rig.uds) as client:
        await client.send(request(stream=True))
        answer = await client.read_answer()
        assert answer.body.endswith(b"data: [DONE]\n\n")
        client.leave(how)
        await wait_gone(rig, 0)


async def test_a_half_closed_client_still_gets_an_answer_that_is_complete(rig: Rig) -> None:
    rig.core.answer = rig.core.encode("x y ") * 20_000
    async with connected(rig.uds) as client:
        client.writer.transport.pause_reading()
        await client.send(request(n=1, max_tokens=40_000))
        await until(lambda: rig.core.added and not rig.core.num_running)
        await until(lambda: not rig.front.log.num_open)
        await asyncio.sleep(0.05)
        client.leave("half")
        client.writer.transport.resume_reading()
        answer = await client.read_answer()
        assert answer.json()["usage"]["completion_tokens"] == 40_000
        assert await asyncio.wait_for(client.reader.read(), 10) == b""


@pytest.mark.parametrize("how", LEAVES)
async def test_a_client_that_goes_with_requests_in_line_ends_the_one_that_runs(rig: Rig, how: str) -> None:
    rig.core.hangs_after = 2
    async with connected(rig.uds) as client:
        await client.send(request(stream=False) + request(stream=True) + b"GET /healthz HTTP/1.1\r\nhost: e\r\n\r\n")
        await until(lambda: rig.core.num_running == 2)
        client.leave(how)
        await wait_gone(rig, 2)


async def test_requests_in_line_are_answered_in_turn(rig: Rig) -> None:
    async with connected(rig.uds) as client:
        await client.send(request(n=1) + request(stream=True) + request(n=3, stream=None))
        answers = [await client.read_answer() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert [len(answers[index].json()["choices"]) for index in (0, 2)] == [1, 3]


async def test_who_sends_on_and_on_while_it_is_answered_is_cut_off(rig: Rig) -> None:
    rig.core.hangs_after = 2
    async with connected(rig.uds) as client:
        await client.send(request())
        await until(lambda: rig.core.num_running == 2)
        # the socket's own buffer takes some, too
        with pytest.raises(ConnectionError):
            await client.send(b"".join(request(user="u" * 1000) for _ in range(1000)), piece=4096)
        await wait_gone(rig, 2)


async def read_some(client: ByteClient, num_bytes: int) -> None:
    client.writer.transport.resume_reading()
    await until(lambda: len(client.reader._buffer) >= num_bytes)
    client.writer.transport.pause_reading()


async def test_a_connection_that_is_to_end_does_not_wait_for_ever_for_its_client(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has read so much that the server may write again, and then stops with the rest in its buffers."""
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_S", 0.5)
    rig.core.answer = rig.core.encode("x y ") * 1000
    body = json.dumps(CHAT | {"n": 1, "max_tokens": 2000, "logprobs": True, "top_logprobs": 20}).encode()
    headers = {"authorization": f"Bearer {sign()}", "connection": "close"}
    connections = rig.server.server_state.connections
    async with connected(rig.uds) as client:
        client.writer.transport.pause_reading()
        await client.send(build_request(PATH, body, headers))
        await until(lambda: any(each.transport.is_closing() for each in connections))
        [connection] = [each for each in connections if each.transport.is_closing()]
        # the first time is up when the client has just taken some
        await asyncio.sleep(0.3)
        await read_some(client, 100_000)
        await until(lambda: connection not in connections, 10)
