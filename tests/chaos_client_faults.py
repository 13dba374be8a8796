"""The faults of clients: slow, silent, half gone, and many; all at the first gateway, while others use it as ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from chaos_clients import FRESH
from chaos_fault import Fault
from chaos_reference import PROMPTS
from chaos_world import ADMIN_KEY, ChaosWorld

HEADERS_S = 10.0
"""In which a client must have sent its headers."""
NUM_IDLE = 2000
_LONG = 200
_BEAT_S = 0.5


class SlowClient:
    """One connection to a gateway, byte by byte."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 0
        self.is_closed_by_gateway = False
        self._socket = socket.socket()

    async def open(self, rcvbuf: int = 0) -> SlowClient:
        """Connect; with `rcvbuf` the kernel takes little of what nobody reads."""
        if rcvbuf:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self._socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self._socket, (self._host, self._port))
        return self

    async def send(self, data: bytes) -> None:
        """Send; the gateway may have closed meanwhile."""
        with self._watching():
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive(self, num_bytes: int) -> bytes:
        """Receive that many bytes at most, nothing at the end."""
        with self._watching():
            data = await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)
            self.is_closed_by_gateway |= not data
            return data
        return b""

    def half_close(self) -> None:
        """Send nothing more."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    @contextlib.contextmanager
    def _watching(self) -> Any:
        try:
            yield
        except OSError:
            self.is_closed_by_gateway = True


async def drip(client: SlowClient, data: bytes) -> None:
    """Send a byte at a time."""
    for byte in data:
        await client.send(bytes([byte]))
        await asyncio.sleep(_BEAT_S)


async def sip(client: SlowClient) -> None:
    """Receive a byte at a time."""
    while await client.receive(1):  # noqa: ASYNC110 - it reads
        await asyncio.sleep(_BEAT_S)


async def wait_closed(client: SlowClient) -> None:
    """Receive until the gateway closes."""
    while await client.receive(1 << 16):
        pass


def build_request(world: ChaosWorld, path: str, body: bytes, length: int = 0, kind: str = "application/json") -> bytes:
    """A request with the administrator's key, which may claim to be longer than it is."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: {urlsplit(world.clients.urls[0]).netloc}",
        f"authorization: Bearer {ADMIN_KEY}",
        f"content-type: {kind}",
        f"content-length: {length or len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def build_stream(world: ChaosWorld) -> bytes:
    """A long streamed generation."""
    fields = {"model": world.clients.models[0], "prompt": PROMPTS[0], "max_tokens": _LONG, "ignore_eos": True}
    return build_request(world, "/v1/completions", json.dumps({**fields, "stream": True}).encode())


def crowd(
    count: int,
    behave: Callable[[ChaosWorld, SlowClient], Coroutine[Any, Any, None]],
    rcvbuf: int = 0,
    *,
    must_close: bool = False,
) -> Callable[[ChaosWorld], Any]:
    """So many clients that behave alike while the fault is there; with `must_close` the gateway ends them all."""

    @asynccontextmanager
    async def act(world: ChaosWorld) -> AsyncIterator[None]:
        clients = [SlowClient(world.clients.urls[0]) for _ in range(count)]
        for client in clients:
            await client.open(rcvbuf)
        tasks = [asyncio.create_task(behave(world, client)) for client in clients]
        try:
            yield
            if must_close:
                num_open = sum(not client.is_closed_by_gateway for client in clients)
                assert not num_open, f"{num_open} of {count} connections are still open"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for client in clients:
                client.close()

    return act


async def read_slowly(world: ChaosWorld, client: SlowClient) -> None:
    """Ask for a long stream and read a byte or two a second."""
    await client.send(build_stream(world))
    await sip(client)


async def send_headers_slowly(_: ChaosWorld, client: SlowClient) -> None:
    """Begin a request and never end its headers."""
    reading = asyncio.create_task(wait_closed(client))
    await drip(client, b"GET /healthz HTTP/1.1\r\nx-a: " + b"b" * 1000)
    await reading


async def send_body_slowly(world: ChaosWorld, client: SlowClient) -> None:
    """Announce a body and send a byte or two of it a second."""
    await client.send(build_request(world, "/v1/completions", b"", length=2000))
    await drip(client, b" " * 1000)


async def upload_slowly(world: ChaosWorld, client: SlowClient) -> None:
    """Announce a large upload and send a byte or two of it a second."""
    tenant, _, adapter = FRESH.partition("/")
    path = f"/api/v1/tenants/{tenant}/adapters/{adapter}/versions"
    begin = b'--b\r\ncontent-disposition: form-data; name="files"; filename="adapter_model.safetensors"\r\n\r\n'
    await client.send(build_request(world, path, begin, length=50_000_000, kind="multipart/form-data; boundary=b"))
    await drip(client, bytes(1000))


async def half_close(world: ChaosWorld, client: SlowClient) -> None:
    """Ask for a long stream, say that nothing more comes, and read."""
    await client.send(build_stream(world))
    client.half_close()
    await wait_closed(client)


async def say_nothing(_: ChaosWorld, client: SlowClient) -> None:
    """Connect and wait."""
    await wait_closed(client)


CLIENTS = [
    Fault(
        "clients: 50 read 2 bytes a second",
        "their answers are computed and held, a megabyte each at most; nobody waits for them",
        crowd(50, read_slowly, rcvbuf=2048),
        held_s=5,
    ),
    Fault(
        "clients: 300 send headers at 2 bytes a second",
        f"all are closed after {HEADERS_S:g} s",
        crowd(300, send_headers_slowly, must_close=True),
        held_s=HEADERS_S + 3,
    ),
    Fault(
        "clients: 200 send bodies at 2 bytes a second",
        "nobody waits for them",
        crowd(200, send_body_slowly),
        held_s=5,
    ),
    Fault(
        "clients: 30 upload 50 MB at 2 bytes a second",
        "other uploads pass them",
        crowd(30, upload_slowly),
        held_s=5,
    ),
    Fault(
        "clients: 100 half-closed sockets",
        "each gets its answer or is closed; none is left at the engines",
        crowd(100, half_close, must_close=True),
        held_s=10,
    ),
    Fault(
        f"clients: {NUM_IDLE} idle connections",
        f"others are served; all are closed after {HEADERS_S:g} s",
        crowd(NUM_IDLE, say_nothing, must_close=True),
        held_s=HEADERS_S + 4,
    ),
]
