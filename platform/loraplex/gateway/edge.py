"""The outermost layer: gives each request its id, strips private headers, counts answers.

Refusals are counted here, whoever made them: the gateway, the registry inside it, or an engine.
Nothing that a client sends as `x-loraplex-*` passes, but the canary key. OPTIONS is a method that no address takes, so
a browser's question whether it may call from another site's page has no answer: its page would have to hold a key.
HEAD is answered wherever GET is, as GET without its body, which the server below keeps back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import cast

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.errors import BodyTimeoutError
from loraplex.gateway.forwarded import Forwarded
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.gateway.problem import find_code
from loraplex.settings import Network
from loraplex_registry.http.hardened import Hardened
from loraplex_registry.wire.ids import new_public_id
from loraplex_registry.wire.log import AccessLog, note

CANARY_HEADER = "x-loraplex-canary-key"
_PRIVATE_PREFIX = b"x-loraplex-"
_GONE = "The connection closed in the middle of the body."
_CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,200}")
_NO_ROUTE = "none"
# the framework would answer OPTIONS itself; TRACE it refuses, with the methods that there are
_METHODS = {"OPTIONS": "TRACE", "HEAD": "GET"}
_FIRST_ERROR = 400
_EVENT = b"data: "
_ERROR_EVENT = b'data: {"error"'


class Edge:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        request_id = new_public_id("req")
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["client_request_id"] = _find_client_id(scope["headers"])
        note(request_id=request_id, client_request_id=state["client_request_id"])
        scope["headers"] = [(name, value) for name, value in scope["headers"] if not _is_private(name)]
        # a copy: the server looks at its own for the method that the client sent
        inner = cast("Scope", {**scope, "method": _METHODS.get(scope["method"], scope["method"])})

        is_error = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_error
            if message["type"] == "http.response.start":
                is_error = message["status"] >= _FIRST_ERROR
                route = inner.get("path_template") or _NO_ROUTE
                note(route=route)
                self._metrics.count_answer(route, message["status"])
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                self._count_refusal(message.get("body", b""), is_error=is_error)
            await send(message)

        await self._app(inner, receive, send_with_id)

    def _count_refusal(self, body: bytes, *, is_error: bool) -> None:
        """Count the error that ends an answer: its whole body, or the last event of a stream."""
        if not is_error and not body.startswith(_ERROR_EVENT):
            return
        code = find_code(body.removeprefix(_EVENT))
        if code is not None:
            note(code=code)
            self._metrics.count_refusal(code)


def build_edge(app: ASGIApp, metrics: GatewayMetrics, proxies: Sequence[Network]) -> ASGIApp:
    """Return the layer around `app`, with a line in the log for each request; `proxies` say who calls."""
    hardened = Hardened(app, BodyTimeoutError, lambda: BodyTimeoutError(_GONE))
    logged: ASGIApp = AccessLog(Edge(hardened, metrics), "loraplex.access")
    return Forwarded(logged, proxies) if proxies else logged


def _is_private(name: bytes) -> bool:
    lowered = name.lower()
    return lowered.startswith(_PRIVATE_PREFIX) and lowered != CANARY_HEADER.encode()


def _find_client_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """A client's own id is kept if it is short and printable, for its logs; ours is always fresh."""
    given = next((value for name, value in headers if name.lower() == b"x-request-id"), b"")
    return given.decode() if _CLIENT_ID.fullmatch(given) else None
