"""The HTTP client of one engine, for the gateway: opens generations, reads their events, and the internal routes.

`EngineClient` owns one connection pool for short calls; a generation has a connection of its own. It knows the private
headers and the done event, and nothing of tenants, limits or retries.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from loraplex_engine.errors import ReplicaFailedError, UnreachableError
from loraplex_engine.wire import done
from loraplex_engine.wire.done import RequestDone, RequestStatus
from loraplex_engine.wire.stream import HttpStream, open_stream, parse_address

__all__ = ["EngineAnswer", "EngineClient", "Events", "ReplicaFailedError", "UnreachableError"]
CONNECT_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 70.0
GAP_TIMEOUT_S = 30.0
_MAX_EVENT_BYTES = 16 << 20
_PRIVATE = (done.DONE,)
_END = b"\n\n"
_DATA = re.compile(rb"^data:", re.MULTILINE)
# what is more than text for the client: no line of an event's JSON can begin so
_SPECIAL = re.compile(
    rb"^(?:(?P<done>event: %b\ndata: )|(?P<data>data: )(?:\[DONE\]|(?P<error>\{\"error\")))" % done.DONE_EVENT.encode(),
    re.MULTILINE,
)


class Events(msgspec.Struct, frozen=True):
    """Whole events of a stream, as they came.

    `count` of them have data. The last ones of an answer are one event alone: `[DONE]`, or an error, whose JSON is
    `error`.
    """

    data: bytes
    count: int
    is_last: bool = False
    error: bytes = b""


class EngineAnswer:
    """An engine's answer to one generation: status and headers now, the body once, `done` when the body has ended."""

    def __init__(self, stream: HttpStream, gap_s: float) -> None:
        self._stream = stream
        self._gap_s = gap_s
        self.status = stream.status
        self.is_stream = stream.headers.get("content-type", "").startswith("text/event-stream")
        self.digest = stream.headers.get(done.DIGEST)
        header = stream.headers.get(done.DONE)
        self.done: RequestDone | None = done.decode_done(header) if header else None

    def header(self, name: str) -> str | None:
        """Return a response header; the private ones are never among them."""
        return None if name in _PRIVATE else self._stream.headers.get(name)

    async def read(self) -> bytes:
        """Return the whole body of an answer that is no stream.

        Raises:
            ReplicaFailedError: The engine went away in the middle.
        """
        pieces: list[bytes] = []
        while piece := await self._stream.read(self._gap_s):
            pieces.append(piece)
        return b"".join(pieces)

    async def events(self) -> AsyncIterator[Events]:
        """Yield the whole events of a stream in order; the done event is kept in `done`, a cut one is dropped.

        Raises:
            ReplicaFailedError: The engine went away, or sent nothing for the gap.
        """
        rest = b""
        while piece := await self._stream.read(self._gap_s):
            arrived = rest + piece
            end = arrived.rfind(_END) + len(_END)
            if end < len(_END):
                end = 0
            whole, rest = arrived[:end], arrived[end:]
            if len(rest) > _MAX_EVENT_BYTES:
                raise ReplicaFailedError("The engine sent an event without end.")
            if _SPECIAL.search(whole) is None:
                if whole:
                    yield Events(whole, len(_DATA.findall(whole)))
                continue
            for events in self._sort(whole):
                yield events
                if events.is_last:
                    return

    def _sort(self, whole: bytes) -> Iterator[Events]:
        """Yield each of some events alone, without the done event."""
        for block in whole.split(_END)[:-1]:
            special = _SPECIAL.match(block)
            if special is None:
                yield Events(block + _END, len(_DATA.findall(block)))
            elif special["done"]:
                self.done = done.decode_done(block[special.end() :])
            else:
                yield Events(
                    block + _END, 1, is_last=True, error=block[special.end("data") :] if special["error"] else b""
                )


class EngineClient:
    """Calls one engine; `sign` makes the token for calls that the platform itself makes."""

    def __init__(self, base_url: str, sign: Callable[[], str], *, uds: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._sign = sign
        self._address = parse_address(self.base_url, uds)
        self._tls = ssl.create_default_context() if self._address.is_tls else None
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=16),
            headers={"accept-encoding": "identity"},
            transport=None if uds is None else httpx.AsyncHTTPTransport(uds=uds),
            # a proxy of the environment would see the tokens
            trust_env=False,
        )

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, so that it calls nobody any more."""
        return self._http.is_closed

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    @asynccontextmanager
    async def generate(
        self,
        path: str,
        body: bytes,
        *,
        token: str,
        headers: Mapping[str, str],
        deadline_s: float,
        gap_s: float = GAP_TIMEOUT_S,
    ) -> AsyncIterator[EngineAnswer]:
        """Open one generation and yield its answer; leaving the block closes the connection, which aborts it.

        Args:
            path: `/v1/chat/completions` or `/v1/completions`.
            body: The JSON body, with `model` the base's name or a digest.
            token: The caller's identity for the audience `engine`.
            headers: Private headers of `wire.done`; the one that asks for the done event is added.
            deadline_s: Seconds until the first byte must be here.
            gap_s: Longest silence in seconds after it.

        Raises:
            UnreachableError: No connection was made; another replica may be tried.
            ReplicaFailedError: The engine went away before it answered.
        """
        every = {**headers, "authorization": f"Bearer {token}", "content-type": "application/json", done.DONE: "1"}
        stream = await self._connect(path, every, body)
        try:
            await stream.wait_head(deadline_s)
            yield EngineAnswer(stream, gap_s)
        finally:
            stream.close()

    async def _connect(self, path: str, headers: Mapping[str, str], body: bytes) -> HttpStream:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await open_stream(self._address, path, headers, body, self._tls)
        except TimeoutError as error:
            raise UnreachableError from error

    async def _open(self, request: httpx.Request, deadline_s: float) -> httpx.Response:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._http.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise UnreachableError from error
        except (httpx.TransportError, TimeoutError) as error:
            raise ReplicaFailedError from error

    async def call(
        self, method: str, path: str, *, json: Any = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> httpx.Response:
        """Make one short call in the platform's name and return the answer, whatever its status.

        Raises:
            UnreachableError: No connection was made.
            ReplicaFailedError: The engine did not answer in time.
        """
        content = None if json is None else msgspec.json.encode(json)
        headers = {"authorization": f"Bearer {self._sign()}"}
        if content is not None:
            headers["content-type"] = "application/json"
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        request = self._http.build_request(method, path, content=content, headers=headers, timeout=timeout)
        response = await self._open(request, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await response.aread()
        except (httpx.TransportError, TimeoutError) as error:
            raise ReplicaFailedError from error
        finally:
            await response.aclose()
        return response

    async def abort(self, request_id: str) -> RequestDone | None:
        """End a request and return what it cost; None if the engine does not know it (any more)."""
        response = await self.call("POST", f"/internal/requests/{request_id}/abort")
        return done.decode_done(response.content) if response.status_code == 200 else None

    async def find_request(self, request_id: str) -> RequestStatus | None:
        """Return what the engine knows of a request that runs or ended in the last 15 minutes."""
        response = await self.call("GET", f"/internal/requests/{request_id}")
        return msgspec.json.decode(response.content, type=RequestStatus) if response.status_code == 200 else None

    async def load_adapter(self, digest: str, *, pin: bool = False) -> httpx.Response:
        """Make an adapter resident and wait for it; 200 when it is."""
        path = f"/internal/adapters/{digest}"
        return await self.call("PUT", path, json={"pin": pin}, timeout_s=LOAD_TIMEOUT_S)

    async def drop_adapter(self, digest: str) -> httpx.Response:
        """Drain an adapter's requests and free its slot; 204 when it is gone."""
        return await self.call("DELETE", f"/internal/adapters/{digest}", timeout_s=LOAD_TIMEOUT_S)

    async def state(self) -> dict[str, Any]:
        """Return slots, tiers, queue, KV and model facts."""
        response = await self.call("GET", "/internal/state")
        if response.status_code != 200:
            raise ReplicaFailedError(f"The engine answered {response.status_code} for its state.")
        state: dict[str, Any] = msgspec.json.decode(response.content)
        return state

    async def is_ready(self) -> bool:
        """Whether the engine serves now; False too when it cannot be reached."""
        try:
            return (await self.call("GET", "/readyz", timeout_s=2.0)).status_code == 200
        except (UnreachableError, ReplicaFailedError):
            return False

    async def metrics(self) -> str:
        """Return the engine's metrics as Prometheus text."""
        return (await self.call("GET", "/metrics")).text
