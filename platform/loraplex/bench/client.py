"""A client of one server: writes heads, keeps connections, and turns whatever goes wrong into an outcome's error."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from loraplex.bench.connection import Connection
from loraplex.bench.errors import BenchError
from loraplex.bench.outcome import ErrorDetail, Outcome
from loraplex.bench.workload import Request
from loraplex.version import __version__

_TLS, _PLAIN = 443, 80


@dataclass(frozen=True)
class Server:
    """Where a server is and with which key it is called; `url` is that of its root, without `/v1`."""

    url: str
    key: str = field(default="", repr=False)
    model_to_key: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Keys of models that have their own."""

    def key_of(self, model: str) -> str:
        """The key that may call a model."""
        return self.model_to_key.get(model, self.key)


def read_server(url: str, key: str = "") -> Server:
    """Return the server at a URL; a `/v1` at its end is left out.

    Raises:
        BenchError: It is no URL.
    """
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise BenchError(f"{url!r} is no URL: http://HOST:PORT or https://HOST.", param="url")
    return Server(url.rstrip("/").removesuffix("/v1").rstrip("/"), key)


class Client:
    """Sends requests; each has a connection of its own while it runs, taken from those that are free.

    HTTP_PROXY and its kin are not used: a proxy would be measured with the server.
    """

    def __init__(self, server: Server, path: str, timeout_s: float) -> None:
        where = urlsplit(server.url)
        is_tls = where.scheme == "https"
        self._host, self._port = where.hostname or "", where.port or (_TLS if is_tls else _PLAIN)
        self._tls = ssl.create_default_context() if is_tls else None
        self._server, self._timeout_s = server, timeout_s
        self._head = (
            f"POST {where.path}{path} HTTP/1.1\r\nHost: {where.netloc.rsplit('@', 1)[-1]}\r\n"
            f"User-Agent: loraplex-bench/{__version__}\r\nAccept: text/event-stream\r\n"
            "Content-Type: application/json\r\n"
        )
        self._free: list[Connection] = []

    async def send(self, request: Request, planned_at: float) -> Outcome:
        """Send one request and return what came of it."""
        outcome = Outcome(request.model, planned_at, started_at=time.perf_counter())
        key = self._server.key_of(request.model)
        allowed = f"Authorization: Bearer {key}\r\n" if key else ""
        data = f"{self._head}{allowed}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(data, outcome)
        except TimeoutError:
            outcome.fail("timeout", ErrorDetail(f"No end of the answer within {self._timeout_s:g} s."))
        except OSError as error:
            outcome.fail("connection", ErrorDetail(str(error)))
        outcome.end_at = outcome.end_at or time.perf_counter()
        outcome.finish()
        return outcome

    async def _ask(self, data: bytes, outcome: Outcome) -> None:
        connection = self._take_free()
        is_new = connection is None
        while True:
            if connection is None:
                connection = await self._connect()
            try:
                await connection.ask(data, outcome)
            finally:
                if connection.is_usable:
                    self._free.append(connection)
                else:
                    connection.close()
            if is_new or connection.has_answered or outcome.error != "cut":
                return
            # the server had closed a connection that was free
            connection, is_new = None, True
            outcome.error = outcome.message = ""
            outcome.end_at = 0.0

    def _take_free(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    def close(self) -> None:
        """End all connections that are free."""
        while self._free:
            self._free.pop().close()
