"""The middleware in front of every page: which session, which key behind it, and did one of our own pages ask.

It opens by cookie alone: a bearer key opens nothing here, and the cookie nothing elsewhere. A session ends with the key
that it was opened with, with that key's tenant, and with its role. What changes something must come from a page of
this host: the browser says so in `Origin`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from litestar import Request, Response
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from loraplex.dashboard.cookie import build_cookie, read_cookie
from loraplex.dashboard.page import Pages
from loraplex.dashboard.session import Session, Sessions
from loraplex.dashboard.visit import SESSION, TOKEN, called, get_address, wants_json
from loraplex.errors import AuthenticationError, LoraplexError, PermissionDeniedError, UnavailableError
from loraplex.gateway.authentication import Authenticator
from loraplex_registry.wire.identity import Identity

LOGIN = "/ui/login"
_OPEN = ("/ui/login", "/ui/static/")
_HOME = "/"
_SAFE = ("GET", "HEAD")
_ENDED = "Your session has ended; log in again."
_NO_SESSION = "Log in to see this page."
_STREAMS = "/ui/live/"
_MAX_FACES = 1000


class SessionDoor(ASGIMiddleware):
    """Lets sessions in; see the module."""

    def __init__(
        self,
        sessions: Sessions,
        authenticator: Authenticator,
        freshen_keys: Callable[[], Awaitable[None]],
        pages: Pages,
    ) -> None:
        self._sessions = sessions
        self._authenticator = authenticator
        self._freshen_keys = freshen_keys
        self._pages = pages
        self._faces: OrderedDict[bytes, Identity] = OrderedDict()
        """Who was behind a token last, for the frame of a page that says that nobody can tell now; it opens nothing."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Let a request in, or answer it."""
        request: Request[Any, Any, Any] = Request(scope)
        answer = await self._enter(request)
        if answer is None:
            await next_app(scope, receive, send)
        else:
            await answer.to_asgi_response(None, request)(scope, receive, send)

    async def find(self, token: str, request_id: str, *, is_use: bool) -> tuple[Session, Identity] | None:
        """Return a session and whom its key stands for; None, and the session is over, if that opens nothing any more.

        Raises:
            UnavailableError: The database does not answer.
        """
        await self._freshen_keys()
        session = await self._sessions.find(token, is_use=is_use)
        if session is None:
            return None
        try:
            identity = self._authenticator.identify(session.key_id, request_id)
        except (AuthenticationError, PermissionDeniedError):
            identity = None
        if identity is None or identity.role != session.role:
            await self._sessions.close(session)
            return None
        return session, identity

    async def _enter(self, request: Request[Any, Any, Any]) -> Response[Any] | None:
        """Return the answer to a request that is not let in."""
        try:
            if request.method not in _SAFE:
                check_origin(request.headers.get("origin"), request.headers.get("host", ""))
            if request.url.path == _HOME or request.url.path.startswith(_OPEN):
                return None
            return await self._enter_session(request)
        except LoraplexError as error:
            return self._pages.show_error(request, error)

    async def _enter_session(self, request: Request[Any, Any, Any]) -> Response[Any] | None:
        host, scheme = called(request)
        token = read_cookie(host, scheme, request.headers.get("cookie", ""))
        if token is None:
            return self._bounce(request) or _send_to_login(request, _NO_SESSION)
        is_use, face = not request.url.path.startswith(_STREAMS), hashlib.sha256(token.encode()).digest()
        try:
            found = await self.find(token, request.state.request_id, is_use=is_use)
        except UnavailableError:
            if face in self._faces:
                request.state.identity = self._faces[face]
            raise
        if found is None:
            self._faces.pop(face, None)
            return _send_to_login(request, _ENDED, build_cookie(host, scheme, "", 0))
        request.state[SESSION], request.state.identity = found
        request.state[TOKEN] = token
        self._remember(face, found[1])
        return None

    def _remember(self, face: bytes, identity: Identity) -> None:
        self._faces[face] = identity
        self._faces.move_to_end(face)
        while len(self._faces) > _MAX_FACES:
            self._faces.popitem(last=False)

    def _bounce(self, request: Request[Any, Any, Any]) -> Response[Any] | None:
        """Browsers keep a strict cookie back when a link of another site leads here; they send it if we lead here."""
        is_followed = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if request.method not in _SAFE or not is_followed or request.headers.get("sec-fetch-mode") != "navigate":
            return None
        return self._pages.show_bare(request, "bounce.html", address=get_address(request))


def check_origin(origin: str | None, host: str) -> None:
    """Refuse what a page of another site makes a browser send.

    Raises:
        PermissionDeniedError: The origin is missing, or another one than the host that was called.
    """
    if not host or (origin or "").lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise PermissionDeniedError(
            "This did not come from a page of this address; behind a proxy, let it pass the Host header on as it is"
        )


def _send_to_login(request: Request[Any, Any, Any], reason: str, cookie: str | None = None) -> Response[Any]:
    headers = {"cache-control": "no-store"} | ({} if cookie is None else {"set-cookie": cookie})
    if wants_json(request) or request.method not in _SAFE:
        problem = {"message": reason, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
        return Response({"error": problem}, status_code=401, headers=headers | {"hx-redirect": LOGIN})
    ended = "&ended=1" if reason is _ENDED else ""
    location = f"{LOGIN}?next={quote(get_address(request), safe='/')}{ended}"
    return Response(b"", status_code=303, headers=headers | {"location": location})
