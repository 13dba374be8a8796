"""The layer around each part's application: one path for each resource, bodies that arrive, headers of every answer.

It knows no routes. A path that another server on the way could take for another one is no address here: empty and
dotted segments, a slash at the end, and in disguise what needs none. So a rule of a proxy about a path holds.
"""

from __future__ import annotations

import asyncio
import json
import re
import string
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

BODY_IDLE_S = 30.0
"""Longest pause within a body."""
GRACE_S = 30.0
LEAST_BYTES_PER_S = 500
"""What a body brings on average once it has taken `GRACE_S` seconds."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""What an answer has that says nothing else about it."""
_RAW_HEADERS = tuple((name.encode(), value.encode()) for name, value in HEADERS.items())
_SEGMENT = rb"[A-Za-z0-9._~!$&'()*+,;=:@%-]"
_PATH = re.compile(rb"/(?:ui/)?|(?:/" + _SEGMENT + rb"+)+")
_DOTTED = re.compile(rb"/\.\.?(?:/|$)")
_ESCAPE = re.compile(rb"%(.{0,2})", re.DOTALL)
# they mean the same without disguise, or end a text, or are steps to elsewhere once it is taken off
_UNDISGUISED = {*string.ascii_letters, *string.digits, *"-._~%/\\\x7f", *map(chr, range(32))}
_ESCAPES = {b"%02x" % number for number in range(256) if chr(number) not in _UNDISGUISED}
# names of models hold slashes, also in disguise and where no name has one: that is said to be no model
_MODELS, _SLASH = b"/v1/models/", b"2f"
_MODEL_PATH = re.compile(rb"/v1/models/(?!/*$)(?:/|" + _SEGMENT + rb")+")
_NO_ADDRESS = "There is nothing at this address: paths are written plainly, without empty or dotted segments."

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]
_App = Callable[[Any, Any, Any], Awaitable[None]]


class Hardened:
    """Wraps an ASGI application.

    Args:
        app: Served behind it.
        build_slow: Makes the error of a body that does not arrive; the application's own, as it is raised there.
        build_gone: Makes that of a client that goes within its body; without it the application is told by a message.
    """

    def __init__(
        self, app: _App, build_slow: Callable[[], Exception], build_gone: Callable[[], Exception] | None = None
    ) -> None:
        self._app = app
        self._build_slow = build_slow
        self._build_gone = build_gone

    async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_hardened(message: _Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                names = {name.lower() for name, _ in given}
                message["headers"] = [*given, *(header for header in _RAW_HEADERS if header[0] not in names)]
            await send(message)

        if is_plain(scope["raw_path"]):
            await self._app(scope, self._bound(receive), send_hardened)
        else:
            await _refuse(send_hardened)

    def _bound(self, receive: _Receive) -> _Receive:
        """Let no body stall or drip. After the body waits are free."""
        is_complete, num_bytes, began_at = False, 0, time.monotonic()

        async def receive_in_time() -> _Message:
            nonlocal is_complete, num_bytes
            if is_complete:
                found: _Message = await receive()
                return found
            try:
                async with asyncio.timeout(BODY_IDLE_S):
                    message: _Message = await receive()
            except TimeoutError as error:
                raise self._build_slow() from error
            if message["type"] == "http.disconnect" and self._build_gone is not None:
                raise self._build_gone()
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            took_s = time.monotonic() - began_at
            if not is_complete and took_s > GRACE_S and num_bytes < took_s * LEAST_BYTES_PER_S:
                raise self._build_slow()
            return message

        return receive_in_time


def is_plain(path: bytes) -> bool:
    """Whether a path, as it was sent, is the one way to write it."""
    is_model = path.startswith(_MODELS)
    if (_MODEL_PATH if is_model else _PATH).fullmatch(path) is None or _DOTTED.search(path) is not None:
        return False
    allowed = _ESCAPES | {_SLASH} if is_model else _ESCAPES
    return b"%" not in path or all(escape.lower() in allowed for escape in _ESCAPE.findall(path))


async def _refuse(send: _Send) -> None:
    error = {"message": _NO_ADDRESS, "type": "invalid_request_error", "param": None, "code": "not_found"}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
