"""One table of hostile requests for all three servers: what they answer and close, and what reaches no route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from byte_client import ByteAnswer, connected
from http_world import Part, running_parts
from loraplex.dashboard.page import HEADERS as PAGE_HEADERS
from loraplex_registry.http import hardened, protocol

pytestmark = pytest.mark.asyncio(loop_scope="module")
PARTS = ("gateway", "registry", "engine")
SECOND = "GET /healthz HTTP/1.1\r\nhost: part\r\n\r\n"
CHUNKED = "transfer-encoding: chunked\r\n"
CHUNKS = "POST {path} HTTP/1.1\r\nhost: a\r\n" + CHUNKED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> AsyncIterator[dict[str, Part]]:
    async with running_parts(tmp_path_factory.mktemp("http"), sqlite_template) as found:
        yield found


@pytest.fixture(params=PARTS)
def part(parts: dict[str, Part], request: pytest.FixtureRequest) -> Part:
    return parts[request.param]


def check_refusal(answer: ByteAnswer, status: int, code: str) -> None:
    """The one shape of errors, and the headers that every answer has."""
    assert answer.status == status, answer
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


# Each stands for a request that two servers could cut or read differently (RFC 9112, 11.2); `{path}` takes JSON.
SMUGGLED = {
    "length and chunks": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 6\r\n" + CHUNKED + "\r\n0\r\n\r\nG",
    "chunks and length": CHUNKS + "content-length: 6\r\n\r\n0\r\n\r\nG",
    "two lengths": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nGG",
    "the same length twice": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nG",
    "a list of lengths": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 1, 1\r\n\r\nG",
    "a signed length": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\nG",
    "a negative length": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\nG",
    "a length in hex": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 0x1\r\n\r\nG",
    "a length beyond 64 bits": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999\r\n\r\nG",
    "no length": "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length:\r\n\r\nG",
    "identity": "POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\n\r\nG",
    "another coding": "POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding before chunks": "POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding after chunks": "POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, x\r\n\r\n0\r\n\r\n",
    "chunks twice": "POST {path} HTTP/1.1\r\nhost: a\r\n" + CHUNKED * 2 + "\r\n0\r\n\r\n",
    "a hidden coding": "POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": "POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": "POST {path} HTTP/1.0\r\nhost: a\r\n" + CHUNKED + "\r\n0\r\n\r\n",
    "a folded header": "POST {path} HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\ncontent-length: 2\r\n\r\n{{}}",
    "a folded coding": "POST {path} HTTP/1.1\r\nhost: a\r\ntransfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a bare LF": "GET /healthz HTTP/1.1\r\nhost: a\nx: b\r\n\r\n",
    "bare LFs alone": "GET /healthz HTTP/1.1\nhost: a\n\n",
    "a bare CR": "GET /healthz HTTP/1.1\r\nhost: a\rx: b\r\n\r\n",
    "NUL in a value": "GET /healthz HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
    "NUL in a name": "GET /healthz HTTP/1.1\r\nhost: a\r\nx\0: b\r\n\r\n",
    "NUL in the target": "GET /healthz\0 HTTP/1.1\r\nhost: a\r\n\r\n",
    "a header without a colon": "GET /healthz HTTP/1.1\r\nhost: a\r\nfoo\r\n\r\n",
    "a space before a header": "GET /healthz HTTP/1.1\r\n host: a\r\n\r\n",
    "no host": "GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": "GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "an empty host": "GET /healthz HTTP/1.1\r\nhost:\r\n\r\n",
    "a host with a path": "GET /healthz HTTP/1.1\r\nhost: a/b\r\n\r\n",
    "a host with a user": "GET /healthz HTTP/1.1\r\nhost: a@b\r\n\r\n",
    "HTTP/0.9": "GET /healthz\r\n\r\n",
    "HTTP/2 by name": "GET /healthz HTTP/2.0\r\nhost: a\r\n\r\n",
    "HTTP/2's preface": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a fragment": "GET /healthz#x HTTP/1.1\r\nhost: a\r\n\r\n",
    "CONNECT": "CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n",
    "tabs": "GET\t/healthz\tHTTP/1.1\r\nhost: a\r\n\r\n",
    "no ASCII": "GET /\xe9 HTTP/1.1\r\nhost: a\r\n\r\n",
    "no HTTP": "\x16\x03\x01\x02 nonsense\r\n\r\n",
    "a chunk of no size": CHUNKS + "\r\nZ\r\n\r\n",
    "a chunk of size 0x1": CHUNKS + "\r\n0x1\r\nG\r\n0\r\n\r\n",
    "a chunk of size -1": CHUNKS + "\r\n-1\r\nG\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": "POST {path} HTTP/1.1\r\nhost: a\r\n"
    + CHUNKED
    + "\r\nfffffffffffffffff\r\nG\r\n0\r\n\r\n",
    "a chunk that is longer": CHUNKS + "\r\n1\r\nGX0\r\n\r\n",
    "chunks with bare LFs": CHUNKS + "\r\n1\nG\n0\n\n",
    "an extension with a bare LF": CHUNKS + "\r\n1;a\nb\r\nG\r\n0\r\n\r\n",
}


async def test_what_two_servers_could_read_differently_is_refused_and_nothing_after_it_is_served(part: Part) -> None:
    async def check(name: str) -> None:
        host = "host: a\r\n"
        head = SMUGGLED[name].format(path=part.write)
        head = head.replace(host, f"{host}authorization: Bearer {part.authorize()}\r\n", 1)
        answers, is_closed = await part.ask_all((head + SECOND).encode("latin-1"))
        assert is_closed, name
        assert len(answers) == 1, (name, answers)
        check_refusal(answers[0], 400, "invalid_request_error")

    await asyncio.gather(*map(check, SMUGGLED))


async def test_what_means_one_thing_is_served(part: Part) -> None:
    good = part.build_head()
    chunked = part.build_head("POST", part.write, "transfer-encoding: Chunked")

    async def check(data: bytes, statuses: list[int]) -> None:
        answers, _ = await part.ask_all(data, 0.5)
        assert [answer.status for answer in answers] == statuses, data

    await asyncio.gather(
        check(good * 3, [200, 200, 200]),
        check(b"\r\n" + good, [200]),
        check(good.replace(b"GET /", b"GET http://elsewhere/"), [200]),
        check(good.replace(b"HTTP/1.1\r\nhost: part", b"HTTP/1.0"), [200]),
        check(chunked + b"2;a=b\r\n{}\r\n0\r\nx: y\r\n\r\n" + good, [400, 200]),
    )


async def test_an_offer_of_another_protocol_loses_neither_a_body_nor_what_follows(part: Part) -> None:
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABk")
    body = b'{"no_such_field": 1}'
    sent = part.build_head("POST", part.write, *offer, f"content-length: {len(body)}") + body
    sent += part.build_head("POST", part.write, *offer, "transfer-encoding: chunked") + b"14\r\n%b\r\n0\r\n\r\n" % body
    sent += part.build_head("GET", None, *offer) + part.build_head()
    for piece in (1 << 20, 7):
        async with connected(part.address) as client, asyncio.timeout(10):
            await client.send(sent, piece)
            first, second, third, fourth = [await client.read_answer() for _ in range(4)]
        assert (first.status, second.status) == (400, 400)
        assert "no_such_field" in first.json()["error"]["message"] + second.json()["error"]["message"]
        assert (third.status, fourth.status) == (200, 200)


SPOILS: tuple[Callable[[str], str], ...] = (
    lambda path: path + "/",
    lambda path: path + "//",
    lambda path: "/" + path,
    lambda path: path.replace("/", "//"),
    lambda path: "/." + path,
    lambda path: "/x/.." + path,
    lambda path: path + "/.",
    lambda path: path + "/x/..",
    lambda path: path + "/x/%2e%2e",
    lambda path: path + "/x/.%2E",
    lambda path: path + "/%2e",
    lambda path: "/" + path[1:].replace("/", "%2f"),
    lambda path: "/" + path[1:].replace("/", "%252f"),
    lambda path: "/" + path[1:].replace("/", "\\"),
    lambda path: "/" + path[1:].replace("/", "%5c"),
    lambda path: path + "%00",
    lambda path: path + "%20",
    lambda path: path + "%0a",
    lambda path: path + ";x=y",
    lambda path: path + ";/../healthz",
    lambda path: f"/%{ord(path[1]):02x}{path[2:]}",
    lambda path: path[:-1] + f"%{ord(path[-1]):02X}",
    lambda path: path.upper(),
    lambda path: path + "%",
    lambda path: path + "%zz",
    lambda path: "/healthz/.." + path,
    lambda path: "/ui/.." + path,
    lambda path: "*",
)


async def test_each_resource_has_one_path(part: Part) -> None:
    async def check(path: str) -> None:
        for key in (None, "no-key"):
            answer = await part.ask(part.build_head("GET", path, key=key))
            # who has no key may be told that first
            assert answer.status == 404 or (key is not None and answer.status == 401), (path, answer)
            check_refusal(answer, answer.status, "not_found" if answer.status == 404 else "invalid_api_key")

    await asyncio.gather(*(check(spoil(part.read)) for spoil in SPOILS))


async def test_the_head_of_a_request_is_bounded(part: Part) -> None:
    for lines in (
        [f"x-{number}: 1" for number in range(protocol.MAX_HEADERS)],
        ["x: " + "v" * protocol.MAX_HEAD_BYTES],
        ["n" * protocol.MAX_HEAD_BYTES + ": 1"],
    ):
        check_refusal(await part.ask(part.build_head("GET", None, *lines)), 431, "headers_too_large")
    check_refusal(await part.ask(part.build_head("GET", "/" + "u" * protocol.MAX_HEAD_BYTES)), 431, "headers_too_large")
    assert (await part.ask(part.build_head("GET", None, "x: " + "v" * 50_000))).status == 200


async def test_a_body_is_bounded_however_it_comes(part: Part) -> None:
    size = part.max_body_bytes + 1
    answer = await part.ask(part.build_head("POST", part.write, f"content-length: {size}"))
    check_refusal(answer, 413, "payload_too_large")
    chunk = b"%x\r\n%b\r\n" % (65536, b" " * 65536)
    async with connected(part.address) as client, asyncio.timeout(20):
        await client.send(part.build_head("POST", part.write, "transfer-encoding: chunked"))
        try:
            for _ in range(size // 65536 + 1):
                await client.send(chunk)
        except ConnectionError:
            pass
        check_refusal(await client.read_answer(), 413, "payload_too_large")


@pytest.mark.parametrize("begun", ["", "GET /healthz HTTP/1.1\r\nhost:", "GET /healthz HTTP/1.1\r\nhost: a\r\nx"])
async def test_a_slow_head_is_cut_off(part: Part, monkeypatch: pytest.MonkeyPatch, begun: str) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
    async with connected(part.address) as client, asyncio.timeout(5):
        await client.send(begun.encode())
        assert await client.reader.read() == b""


async def test_a_body_that_stalls_is_told_so(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardened, "BODY_IDLE_S", 0.2)
    check_refusal(
        await part.ask(part.build_head("POST", part.write, "content-length: 9") + b"{"), 408, "request_timeout"
    )


async def test_a_body_that_drips_is_told_so(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardened, "GRACE_S", 0.2)
    async with connected(part.address) as client, asyncio.timeout(10):
        await client.send(part.build_head("POST", part.write, "content-length: 500"))
        answer = asyncio.create_task(client.read_answer())
        while not answer.done():
            await client.send(b" ")
            await asyncio.sleep(0.02)
        check_refusal(answer.result(), 408, "request_timeout")


async def test_idle_connections_end(part: Part) -> None:
    assert part.server.config.timeout_keep_alive == protocol.KEEP_ALIVE_S == 75
    assert part.server.config.http is protocol.BoundedProtocol
    assert not part.server.config.proxy_headers


@pytest.mark.parametrize("header", ["x-http-method-override", "x-http-method", "x-method-override"])
async def test_a_method_is_the_one_of_the_request_line(part: Part, header: str) -> None:
    for method, other in (("POST", "GET"), ("GET", "DELETE")):
        plain = await part.ask(part.build_head(method, part.read + "x", "content-length: 0"))
        overridden = await part.ask(part.build_head(method, part.read + "x", f"{header}: {other}", "content-length: 0"))
        assert (plain.status, overridden.status) == (404, 404)
    answer = await part.ask(part.build_head("PUT", part.read, f"{header}: GET", "content-length: 0"))
    check_refusal(answer, 405, "method_not_allowed")


async def test_a_host_is_believed_nowhere(part: Part) -> None:
    named = part.build_head().replace(b"host: part", b"host: evil.example\r\nx-forwarded-host: evil.example")
    answer = await part.ask(named)
    assert answer.status == 200
    assert b"evil.example" not in answer.body + json.dumps(answer.headers).encode()


async def test_no_other_site_is_let_in(part: Part) -> None:
    asked = (
        "origin: https://evil.example",
        "access-control-request-method: GET",
        "access-control-request-headers: authorization",
    )
    for method in ("OPTIONS", "GET", "POST"):
        answer = await part.ask(part.build_head(method, None, *asked, "content-length: 0"))
        assert not any(name.startswith("access-control") for name in answer.headers), answer
    for method in ("TRACE", "TRACK", "PROPFIND"):
        assert (await part.ask(part.build_head(method))).status in (400, 404, 405)


async def test_every_answer_has_the_headers(part: Part) -> None:
    body = b"{"
    for data, status in (
        (part.build_head(), 200),
        (part.build_head("GET", "/healthz"), 200),
        (part.build_head("GET", None, key="no-key"), 401),
        (part.build_head("GET", "/nothing"), 404),
        (part.build_head("GET", "//"), 404),
        (part.build_head("PUT", None, "content-length: 0"), 405),
        (part.build_head("POST", part.write, "content-type: application/json", "content-length: 1") + body, 400),
        (part.build_head("POST", part.write, "content-type: text/html", "content-length: 1") + body, 415),
    ):
        answer = await part.ask(data)
        assert answer.status == status, answer
        assert {name: answer.headers.get(name) for name in hardened.HEADERS} == hardened.HEADERS
        assert "server" not in answer.headers


async def test_pages_have_headers_of_their_own_and_only_those(parts: dict[str, Part]) -> None:
    gateway = parts["gateway"]
    answer = await gateway.ask(gateway.build_head("GET", "/ui/login"))
    assert answer.status == 200
    assert {name: answer.headers.get(name) for name in PAGE_HEADERS} == PAGE_HEADERS
    assert answer.headers["cache-control"] == "no-store"
    assert "unsafe-inline" not in answer.headers["content-security-policy"]
