"""Fuzz targets of HTTP: requests as bytes, paths, what engines and other servers answer."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools
import msgspec
import uvicorn

from fuzz_target import JSON_WORDS, Target, run_async
from loraplex.bench.connection import Connection
from loraplex.bench.outcome import Outcome
from loraplex.fleet.view import read_full_replica, read_replica
from loraplex.gateway.forwarded import find_client
from loraplex.gateway.problem import find_code
from loraplex.settings import read_networks
from loraplex_engine.errors import ReplicaFailedError
from loraplex_engine.wire.client import EngineAnswer
from loraplex_engine.wire.stream import HttpStream
from loraplex_registry.http.hardened import is_plain
from loraplex_registry.http.protocol import BoundedProtocol
from loraplex_registry.http.server import build_config


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def fuzz_http(data: bytes) -> None:
    """A connection's bytes, in pieces: what reaches the application is framed as a second parser frames it."""
    seen = run_async(_serve(data[1:], data[0] + 1 if data else 1))
    assert seen == run_async(_serve(data[1:], len(data) + 1)), "it depends on the pieces"
    theirs = _read_by_h11(data[1:])
    if theirs is not None and seen is not None and b"upgrade" not in data.lower():
        assert seen == theirs, (seen, theirs)


async def _serve(data: bytes, size: int) -> list[tuple[bytes, bytes, bytes]] | None:
    """Method, target and body of each request; None if anything was refused."""
    seen: list[tuple[bytes, bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        seen.append((scope["method"].encode(), scope["raw_path"], body))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = build_config(app, 1)
    config.load()
    protocol = BoundedProtocol(config, uvicorn.server.ServerState(), {}, asyncio.get_running_loop())
    transport = Transport()
    protocol.connection_made(transport)
    for start in range(0, len(data), size):
        if transport.is_closed:
            break
        protocol.data_received(data[start : start + size])
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    is_refused = b" 400 " in transport.written or b" 431 " in transport.written or transport.is_closed
    protocol.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    return None if is_refused else seen


def _read_by_h11(data: bytes) -> list[tuple[bytes, bytes, bytes]] | None:
    import h11

    server, found = h11.Connection(h11.SERVER), []
    try:
        server.receive_data(data)
        while True:
            event = server.next_event()
            if not isinstance(event, h11.Request):
                # an end, or a head that is not complete
                return found
            target, body = httptools.parse_url(event.target).path, b""
            while isinstance(event := server.next_event(), h11.Data):
                body += bytes(event.data)
            if not isinstance(event, h11.EndOfMessage):
                return found
            found.append((server.their_state and server._request_method, target, body))
            server.send(h11.Response(status_code=204, headers=[]))
            server.send(h11.EndOfMessage())
            server.start_next_cycle()
    except (h11.ProtocolError, httptools.HttpParserError, RuntimeError):
        return None


def fuzz_path(data: bytes) -> None:
    """Paths as they are sent: what is plain is not changed by whatever cleans paths up, once or twice."""
    if not is_plain(data):
        return
    once = unquote_to_bytes(data)
    assert unquote_to_bytes(once) == once or b"%" not in data
    if data not in (b"/", b"/ui/") and not data.startswith(b"/v1/models/"):
        assert posixpath.normpath(once) == once
        assert once.count(b"/") == data.count(b"/")
    assert not any(byte < 32 or byte == 127 for byte in once)


def fuzz_forwarded(data: bytes) -> None:
    """A peer and the values of X-Forwarded-For, one a line: a stranger stays who it is."""
    peer, *values = data.split(b"\n")
    stranger = peer.decode("latin-1")
    if not stranger.lower().startswith(("10.", "fd")) and "ffff:" not in stranger.lower():
        assert find_client(stranger, values, _PROXIES) == stranger
    found = find_client("10.0.0.1", values, _PROXIES)
    assert str(ip_address(found)) == found
    seen = [*values, b"203.0.113.5, 10.9.9.9"]
    assert find_client("10.0.0.1", seen, _PROXIES) == "203.0.113.5"


def _feed(data: bytes, make: Callable[[], Any]) -> Any:
    protocol, size = make(), data[0] + 1 if data else 1
    transport = Transport()
    protocol.connection_made(transport)
    for start in range(1, len(data), size):
        if transport.is_closed:
            break
        protocol.data_received(data[start : start + size])
    protocol.connection_lost(None)
    return protocol


def fuzz_engine_stream(data: bytes) -> None:
    """What an engine answers to a generation: head, body, events, what it cost."""

    async def read() -> None:
        stream: HttpStream = _feed(data, HttpStream)
        await stream.wait_head(0.1)
        answer = EngineAnswer(stream, 0.1)
        assert 200 <= answer.status < 600
        if answer.is_stream:
            async for events in answer.events():
                find_code(events.error)
        else:
            find_code(await answer.read())
        for name in ("content-type", "retry-after"):
            assert "\n" not in (answer.header(name) or "")

    run_async(read())


def fuzz_engine_state(data: bytes) -> None:
    """What an engine says of itself."""
    try:
        state = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if isinstance(state, dict):
        for replica in (
            read_replica("http://e", "pool", "tiny", state, "f"),
            read_full_replica("http://e", "pool", "full", state, ("d",)),
        ):
            assert isinstance(replica.load, int)
            assert isinstance(replica.num_foreign, int)
            replica.takes(4)
            msgspec.json.encode(replica)


def fuzz_bench_stream(data: bytes) -> None:
    """What any server answers to a benchmark."""

    async def read() -> None:
        outcome = Outcome("m", 0.0)
        connection = Connection()
        transport = Transport()
        connection.connection_made(transport)
        over = connection.ask(b"", outcome)
        for start in range(0, len(data), 50):
            if not transport.is_closed:
                connection.data_received(data[start : start + 50])
        connection.connection_lost(None)
        assert over.done()

    run_async(read())


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

_DONE = (
    b'{"request_id":"r","prompt_tokens":1,"cached_tokens":0,"completion_tokens":1,"queue_s":0,"prefill_s":0,"load_s":0,'
)

_DONE += b'"decode_s":0,"preemptions":0,"finish":"stop","digest":"base"}'

_EVENTS = b'data: {"choices": [{"text": "a"}]}\n\nevent: loraplex.done\ndata: ' + _DONE + b"\n\ndata: [DONE]\n\n"

_STREAM = _HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(_EVENTS), _EVENTS)

_WHOLE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-loraplex-done: %b\r\ncontent-length: 2\r\n\r\n{}" % _DONE
)

_REFUSED = b"HTTP/1.1 503 x\r\ncontent-type: application/json\r\nretry-after: 1\r\ncontent-length: 29\r\n\r\n"

_REFUSED += b'{"error":{"code":"draining"}}'

_GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer x\r\n\r\n"

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"

_CHUNKS = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nT: t\r\n\r\n"

_HTTP_WORDS = (
    b"\r\n",
    b"Transfer-Encoding: chunked",
    b"Content-Length: 5",
    b"Host: b",
    b"HTTP/1.0",
    b"HTTP/1.1",
    b"0\r\n\r\n",
    b"\r\n ",
    b"\t",
    b"Connection: close",
    b"Expect: 100-continue",
    b"Upgrade: h2c\r\nConnection: upgrade",
)

_PROXIES = read_networks("10.0.0.0/8, fd00:8::/32")

_STATE = b"""{"is_ready": true, "model": {"fingerprint": "f", "weights_digest": "w", "max_lora_rank": 8}, "slots":
[{"digest": "sha256:a", "state": "READY", "pins": 1}], "waiting": 1, "running": 2, "failed": {"d": {"message": "m"}},
"harmful": {}}"""

HTTP_TARGETS = (
    Target(
        "http_request",
        fuzz_http,
        (b"\x00" + _GET + _POST, b"\x05" + _CHUNKS + _GET, b"\xff" + _POST + _CHUNKS),
        words=_HTTP_WORDS,
    ),
    Target(
        "path",
        fuzz_path,
        (b"/v1/models/a%2Fb@1", b"/ui/", b"/api/v1/tenants/team-x", b"/a%20b"),
        words=(b"%2f", b"%2e", b"..", b"//", b"%25", b"%5c", b";"),
    ),
    Target(
        "forwarded",
        fuzz_forwarded,
        (
            b"192.0.2.1\n203.0.113.5, 10.0.0.2",
            b"10.0.0.1\n[2001:db8::1]:443\nfd00:8::1",
            b"::ffff:10.0.0.1\n10.0.0.2:80",
        ),
        words=(b", ", b"10.0.0.3", b"]:1", b"%eth0", b"::ffff:10.0.0.1", b"\n", b"unknown"),
    ),
    Target(
        "engine_stream",
        fuzz_engine_stream,
        (b"\x07" + _STREAM, b"\xff" + _STREAM, b"\x20" + _WHOLE, b"\xff" + _REFUSED),
        (ReplicaFailedError,),
        words=(*_HTTP_WORDS, b"\n\n", b"data: ", b"event: loraplex.done", b"HTTP/1.1 101 x", b"HTTP/1.1 100 x\r\n\r\n"),
    ),
    Target("engine_state", fuzz_engine_state, (_STATE, b"{}"), words=JSON_WORDS),
    Target("bench_stream", fuzz_bench_stream, (_STREAM, _REFUSED), words=_HTTP_WORDS),
)
