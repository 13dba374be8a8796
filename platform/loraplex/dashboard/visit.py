"""One request for a page: who asks, in which session, and how the browser asks. Reads what the door has left."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request

from loraplex.dashboard.session import Session
from loraplex_registry.wire.identity import Identity

TOKEN, SESSION = "session_token", "session"
"""Where the door leaves both in the state of a request."""


class Visit(msgspec.Struct, frozen=True):
    """Who is here; `token` is the session's, as the cookie has it."""

    identity: Identity
    session: Session
    token: str


def called(request: Request[Any, Any, Any]) -> tuple[str, str]:
    """Return the host that the browser called and its scheme, which decide about cookies."""
    return request.headers.get("host", ""), request.scope["scheme"]


def get_address(request: Request[Any, Any, Any]) -> str:
    """Return what was asked for: the path and what stands behind it."""
    query = request.scope["query_string"].decode("latin-1")
    return request.url.path + (f"?{query}" if query else "")


def get_visit(request: Request[Any, Any, Any]) -> Visit:
    """Return who asks; only for routes behind the door."""
    return Visit(request.state.identity, request.state[SESSION], request.state[TOKEN])


def find_identity(request: Request[Any, Any, Any]) -> Identity | None:
    """Return who asks, None for a page that anybody may see."""
    return request.scope["state"].get("identity")


def is_fragment(request: Request[Any, Any, Any]) -> bool:
    """Whether a script asks for a part of a page, not the browser for a whole one."""
    return request.headers.get("hx-request") == "true" and request.headers.get("hx-history-restore-request") != "true"


def wants_json(request: Request[Any, Any, Any]) -> bool:
    """Whether an error is to be read by a script."""
    return is_fragment(request) or "text/html" not in request.headers.get("accept", "text/html")
