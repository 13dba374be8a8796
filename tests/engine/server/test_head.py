"""The bounds on what comes before a body, byte by byte, against the real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scripted_core import BASE, Rig, running_rig, sign, until
from toy_tokenizers import write_byte_level

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as running:
        yield running


async def talk(rig: Rig, data: bytes, piece: int = 1 << 20) -> bytes:
    """Send bytes in pieces until the server closes; return what it said."""
    reader, writer = await asyncio.open_unix_connection(rig.uds)
    try:
        for start in range(0, len(data), piece):
            writer.write(data[start : start + piece])
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def head(*lines: str) -> bytes:
    return "\r\n".join(["GET /healthz HTTP/1.1", "host: e", "connection: close", *lines, "", ""]).encode()


# no more than what is refused: the server closes, and bytes that it has not read would take its answer away
LIMIT = 65_536


@pytest.mark.parametrize(
    "data",
    [
        head(*(f"x-{number}: 1" for number in range(99))),
        head(f"x: {'v' * LIMIT}"),
        head(f"{'n' * LIMIT}: 1"),
        head(*(f"x-{number}: {'v' * 1005}" for number in range(65))),
        f"GET /{'u' * LIMIT} HTTP/1.1\r\nhost: e\r\n\r\n".encode(),
        b"GET /healthz HTTP/1.1\r\nx: " + b"v" * LIMIT,
        b"GET /" + b"u" * LIMIT,
    ],
    ids=["count", "value", "name", "sum", "target", "endless value", "endless target"],
)
@pytest.mark.parametrize("piece", [1 << 20, 4096])
async def test_a_head_that_is_too_large_is_431_and_the_end(rig: Rig, data: bytes, piece: int) -> None:
    answer = await talk(rig, data, piece)
    first, _, body = answer.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert (await rig.http.get("/healthz")).status_code == 200


async def test_a_head_within_the_bounds_is_served_and_a_later_one_is_counted_anew(rig: Rig) -> None:
    # host and connection are headers, too
    wide = [f"x-{number}: {'v' * 600}" for number in range(98)]
    one = head(*wide).replace(b"connection: close", b"connection: keep-alive")
    answer = await talk(rig, one * 3 + head(*wide), 4096)
    assert answer.count(b"HTTP/1.1 200 OK") == 4


async def test_what_is_no_http_is_still_400(rig: Rig) -> None:
    assert (await talk(rig, b"\x00\x01 nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("chunk", [1, 100_000])
async def test_a_long_body_is_no_head(rig: Rig, chunk: int) -> None:
    body = json.dumps(CHAT).encode() + b" " * 200_000

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:-20]
        for start in range(len(body) - 20, len(body), chunk):
            yield body[start : start + chunk]

    for content in (body, pieces()):
        answer = await rig.http.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200


async def test_trailers_without_end_are_cut_off(rig: Rig) -> None:
    lines = ["POST /v1/tokenize HTTP/1.1", "host: e", f"authorization: Bearer {sign()}", "transfer-encoding: chunked"]
    answer = await talk(rig, "\r\n".join([*lines, "", "1", "{", "0", "x: "]).encode() + b"t" * 1_000_000, 65536)
    assert b"200 OK" not in answer


async def test_a_client_that_leaves_within_its_body_leaves_no_traceback(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: e", f"authorization: Bearer {sign()}", "content-length: 99"]
    _, writer = await asyncio.open_unix_connection(rig.uds)
    writer.write("\r\n".join([*lines, "", "{"]).encode())
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()

    await until(lambda: b'code="cancelled"' in rig.front.metrics.render())
    assert caplog.text == ""


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity", 200)])
async def test_a_body_that_says_it_is_compressed_is_refused(rig: Rig, encoding: str, status: int) -> None:
    answer = await rig.post("/v1/chat/completions", CHAT, content_encoding=encoding)
    assert answer.status_code == status
