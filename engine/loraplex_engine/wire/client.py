"""The HTTP client of one engine, for the gateway: opens generations, reads their events, and the internal routes.

`EngineClient` owns one connection pool. It knows the private headers and the done event, and nothing of tenants,
limits or retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from loraplex_engine.errors import ReplicaFailedError, UnreachableError
from loraplex_engine.wire import done
from loraplex_engine.wire.done import RequestDone, RequestStatus

__all__ = ["EngineAnswer", "EngineClient", "Event", "ReplicaFailedError", "UnreachableError"]
CONNECT_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 70.0
GAP_TIMEOUT_S = 30.0
_MAX_EVENT_BYTES = 16 << 20
_PRIVATE = (done.DONE,)


class Event(msgspec.Struct, frozen=True):
    """One whole event of a stream: its data, and its name if it has one."""

    data: bytes
    name: str = ""


class EngineAnswer:
    """An engine's answer to one generation: status and headers now, the body once, `done` when the body has ended."""

    def __init__(self, response: httpx.Response, gap_s: float) -> None:
        self._response = response
        self._gap_s = gap_s
        self.status = response.status_code
        self.is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        self.digest: str | None = response.headers.get(done.DIGEST)
        header = response.headers.get(done.DONE)
        self.done: RequestDone | None = done.decode_done(header) if header else None

    def header(self, name: str) -> str | None:
        """Return a response header; the private ones are never among them."""
        return None if name in _PRIVATE else self._response.headers.get(name)

    async def read(self) -> bytes:
        """Return the whole body of an answer that is no stream.

        Raises:
            ReplicaFailedError: The engine went away in the middle.
        """
        return b"".join([chunk async for chunk in self._chunks()])

    async def events(self) -> AsyncIterator[Event]:
        """Yield the whole events of a stream in order; the done event is kept in `done`, a cut one is dropped.

        The last one of a good stream is `[DONE]`; an error event is the last of a failed one.

        Raises:
            ReplicaFailedError: The engine went away, or sent nothing for the gap.
        """
        buffer = b""
        async for chunk in self._chunks():
            *blocks, buffer = (buffer + chunk).split(b"\n\n")
            if len(buffer) > _MAX_EVENT_BYTES:
                raise ReplicaFailedError("The engine sent an event without end.")
            for event in filter(None, map(_read_event, blocks)):
                if event.name == done.DONE_EVENT:
                    self.done = done.decode_done(event.data)
                else:
                    yield event

    async def _chunks(self) -> AsyncIterator[bytes]:
        chunks = self._response.aiter_raw()
        while True:
            try:
                async with asyncio.timeout(self._gap_s):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except (httpx.TransportError, TimeoutError) as error:
                raise ReplicaFailedError from error
            yield chunk


def _read_event(block: bytes) -> Event | None:
    name, data = "", []
    for line in block.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode()
    return Event(b"\n".join(data), name) if data else None


class EngineClient:
    """Calls one engine; `sign` makes the token for calls that the platform itself makes."""

    def __init__(
        self, base_url: str, sign: Callable[[], str], *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._sign = sign
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=4096, max_keepalive_connections=64),
            headers={"accept-encoding": "identity"},
            transport=transport,
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
        request = self._http.build_request(
            "POST",
            path,
            content=body,
            headers={**headers, "authorization": f"Bearer {token}", "content-type": "application/json", done.DONE: "1"},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, pool=CONNECT_TIMEOUT_S, write=GAP_TIMEOUT_S),
        )
        response = await self._open(request, deadline_s)
        try:
            yield EngineAnswer(response, gap_s)
        finally:
            await response.aclose()

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
