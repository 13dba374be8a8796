"""The HTTP client of one engine, for the gateway: opens generations, reads their events, and the internal routes.

`EngineClient` owns one connection pool for short calls; a generation has a connection of its own. It knows the private
headers and the done event, and nothing of tenants, limits or retries.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from loraplex_engine.errors import EngineRefusedError, ReplicaFailedError, UnreachableError
from loraplex_engine.wire import done
from loraplex_engine.wire.done import RequestDone, RequestStatus, UsageReport
from loraplex_engine.wire.stream import HttpStream, open_stream, parse_address
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.peft.unreadable import UNREADABLE

__all__ = ["EngineAnswer", "EngineClient", "EngineRefusedError", "Events", "ReplicaFailedError", "UnreachableError"]
CONNECT_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 70.0
PARITY_TIMEOUT_S = 310.0
"""Longer than an engine takes at most, its queue included."""
GAP_TIMEOUT_S = 30.0
_MAX_EVENT_BYTES = 16 << 20
_MAX_BODY_BYTES = 256 << 20
_PRIVATE = (done.DONE,)
_FRAMING = (b"content-encoding", b"content-length", b"transfer-encoding")
_SECONDS = re.compile(r"[0-9]{1,6}")
_T = TypeVar("_T")
_END = b"\n\n"
_DATA = re.compile(rb"^data:", re.MULTILINE)
# what is more than text for the client: no line of an event's JSON can begin so
_SPECIAL = re.compile(
    rb"^(?:(?P<done>event: %b\ndata: )|(?P<data>data: )(?:\[DONE\]|(?P<error>\{\"error\")))" % done.DONE_EVENT.encode(),
    re.MULTILINE,
)


class Events(msgspec.Struct, frozen=True):
    """Whole events of a stream, as they came.

    `count` of them have data, and came at `arrived_at` of `time.perf_counter`. The last ones of an answer are one event
    alone: `[DONE]`, or an error, whose JSON is `error`.
    """

    data: bytes
    count: int
    arrived_at: float
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
        self.done: RequestDone | None = _decode(header.encode("latin-1"), RequestDone) if header else None
        self._body: bytes | None = None

    def header(self, name: str) -> str | None:
        """Return a response header; the private ones are never among them."""
        return None if name in _PRIVATE else self._stream.headers.get(name)

    async def read(self) -> bytes:
        """Return the whole body of an answer that is no stream, as often as it is asked for.

        Raises:
            ReplicaFailedError: The engine went away in the middle.
        """
        if self._body is None:
            pieces: list[bytes] = []
            num_bytes = 0
            while piece := await self._stream.read(self._gap_s):
                num_bytes += len(piece)
                if num_bytes > _MAX_BODY_BYTES:
                    raise ReplicaFailedError("The engine sent an answer without end.")
                pieces.append(piece)
            self._body = b"".join(pieces)
        return self._body

    async def events(self) -> AsyncIterator[Events]:
        """Yield the whole events of a stream in order; the done event is kept in `done`, a cut one is dropped.

        Raises:
            ReplicaFailedError: The engine went away, or sent nothing for the gap.
        """
        rest = b""
        while piece := await self._stream.read(self._gap_s):
            arrived_at = time.perf_counter()
            arrived = rest + piece
            end = arrived.rfind(_END) + len(_END)
            if end < len(_END):
                end = 0
            whole, rest = arrived[:end], arrived[end:]
            if len(rest) > _MAX_EVENT_BYTES:
                raise ReplicaFailedError("The engine sent an event without end.")
            if _SPECIAL.search(whole) is None:
                if whole:
                    yield Events(whole, len(_DATA.findall(whole)), arrived_at)
                continue
            for events in self._sort(whole, arrived_at):
                yield events
                if events.is_last:
                    return

    def _sort(self, whole: bytes, arrived_at: float) -> Iterator[Events]:
        """Yield each of some events alone, without the done event."""
        for block in whole.split(_END)[:-1]:
            special = _SPECIAL.match(block)
            if special is None:
                yield Events(block + _END, len(_DATA.findall(block)), arrived_at)
            elif special["done"]:
                self.done = _decode(block[special.end() :], RequestDone)
            else:
                error = block[special.end("data") :] if special["error"] else b""
                yield Events(block + _END, 1, arrived_at, is_last=True, error=error)


class EngineClient:
    """Calls one engine; `sign` makes the token for calls that the platform itself makes."""

    def __init__(self, base_url: str, sign: Callable[[], str], *, uds: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._sign = sign
        self._address = parse_address(self.base_url, uds)
        self._waiting: set[HttpStream] = set()
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

    def give_up_waiting(self) -> None:
        """End the generations that have no answer yet, as if the engine had: it is known to be lost."""
        for stream in tuple(self._waiting):
            stream.close()

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
        self._waiting.add(stream)
        try:
            await stream.wait_head(deadline_s)
            self._waiting.discard(stream)
            yield EngineAnswer(stream, gap_s)
        finally:
            self._waiting.discard(stream)
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
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > _MAX_BODY_BYTES:
                        raise ReplicaFailedError("The engine sent an answer without end.")
        except (httpx.TransportError, httpx.DecodingError, TimeoutError) as error:
            raise ReplicaFailedError from error
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, headers=_keep(response.headers), content=bytes(body))

    async def abort(self, request_id: str) -> RequestDone | None:
        """End a request and return what it cost; None if the engine does not know it (any more)."""
        response = await self.call("POST", f"/internal/requests/{request_id}/abort")
        return _decode(response.content, RequestDone) if response.status_code == 200 else None

    async def find_request(self, request_id: str) -> RequestStatus | None:
        """Return what the engine knows of a request that runs or ended in the last 15 minutes."""
        response = await self.call("GET", f"/internal/requests/{request_id}")
        return _decode(response.content, RequestStatus) if response.status_code == 200 else None

    async def read_usage(self, within_s: float) -> UsageReport:
        """Return what all requests of the engine's process cost, and each that ended in the last `within_s` seconds.

        Raises:
            UnreachableError: No connection was made.
            ReplicaFailedError: The engine did not answer in time, or not with this.
        """
        response = await self.call("GET", f"/internal/usage?within_s={within_s}")
        if response.status_code != 200:
            raise ReplicaFailedError(f"The engine answered {response.status_code} for its usage.")
        return _decode(response.content, UsageReport)

    async def load_adapter(self, digest: str, *, pin: bool | None = None, forgive: bool = True) -> httpx.Response:
        """Make an adapter resident and wait for it; 200 when it is.

        Args:
            digest: Of the adapter.
            pin: Whether nothing may push it out; None: as it was.
            forgive: Forget failed loads and strikes before.
        """
        options = {} if pin is None else {"pin": pin}
        if not forgive:
            options["forgive"] = False
        return await self.call("PUT", f"/internal/adapters/{digest}", json=options, timeout_s=LOAD_TIMEOUT_S)

    async def drop_adapter(self, digest: str) -> httpx.Response:
        """Drain an adapter's requests and free its slot; 204 when it is gone."""
        return await self.call("DELETE", f"/internal/adapters/{digest}", timeout_s=LOAD_TIMEOUT_S)

    async def measure_parity(self, digest: str, *, timeout_s: float = PARITY_TIMEOUT_S) -> ParityResult:
        """Let the engine compare an adapter in its slots with base and merged deltas in float32.

        The adapter is loaded as for a request. A call that is given up is given up by the engine too.

        Raises:
            UnreachableError: No connection was made.
            ReplicaFailedError: The engine did not answer in time, or its core ended.
            EngineRefusedError: The engine does not measure it now; the code says why: `digest_mismatch` and
                `adapter_quarantined` blame the adapter's bytes, all others the moment.
        """
        response = await self.call("POST", f"/internal/parity/{digest}", timeout_s=timeout_s)
        if response.status_code != 200:
            raise _read_refusal(response)
        return _decode(response.content, ParityResult)

    async def state(self) -> dict[str, Any]:
        """Return slots, tiers, queue, KV and model facts."""
        response = await self.call("GET", "/internal/state")
        if response.status_code != 200:
            raise ReplicaFailedError(f"The engine answered {response.status_code} for its state.")
        return _decode(response.content, dict[str, Any])

    async def is_ready(self) -> bool:
        """Whether the engine serves now; False too when it cannot be reached."""
        try:
            return (await self.call("GET", "/readyz", timeout_s=2.0)).status_code == 200
        except (UnreachableError, ReplicaFailedError):
            return False

    async def metrics(self) -> str:
        """Return the engine's metrics as Prometheus text."""
        return (await self.call("GET", "/metrics")).text


def _keep(headers: httpx.Headers) -> list[tuple[bytes, bytes]]:
    """Those that still hold once the body is there as a whole."""
    return [(name, value) for name, value in headers.raw if name.lower() not in _FRAMING]


class _Problem(msgspec.Struct):
    message: str
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Problem


def _decode(content: bytes, kind: type[_T]) -> _T:
    """Return what an engine said; one that was taken over may say anything.

    Raises:
        ReplicaFailedError: It is something else.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise ReplicaFailedError("The engine's answer makes no sense.") from error


def _read_refusal(response: httpx.Response) -> EngineRefusedError | ReplicaFailedError:
    """The error that an engine answered."""
    try:
        problem = _decode(response.content, _Refusal).error
    except ReplicaFailedError:
        return ReplicaFailedError(f"The engine answered {response.status_code}.")
    if problem.code in (None, ReplicaFailedError.code):
        return ReplicaFailedError(problem.message)
    retry_after = response.headers.get("retry-after", "")
    return EngineRefusedError(
        problem.code, problem.message, int(retry_after) if _SECONDS.fullmatch(retry_after) else None
    )
