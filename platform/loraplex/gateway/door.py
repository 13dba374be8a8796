"""The middleware in front of every route: who calls, and may it see the tenant in the path. Sets `state.identity`.

401 without a valid key (429 after too many of those), 403 for a suspended tenant, 404 for a tenant that is not the
caller's. Scopes are checked by the handlers, which know what they do.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from loraplex.errors import AuthenticationError, InvalidRequestError, NotFoundError, RateLimitExceededError
from loraplex.gateway.authentication import Authenticator, target
from loraplex.gateway.directory import Directory
from loraplex.gateway.tries import TryLimit
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.log import note
from loraplex_registry.wire.naming import is_name

_OPEN = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})
_INTERNAL = "/internal/"
_ARTIFACTS = "/internal/artifacts/"
_SLASHES = re.compile("//+")
_SINGLE = frozenset(
    {
        b"authorization",
        b"content-type",
        b"idempotency-key",
        b"if-match",
        b"if-none-match",
        b"x-amz-checksum-sha256",
        b"x-loraplex-canary-key",
        b"x-request-timeout",
    }
)
"""Headers of one meaning: of two, a proxy in front may take another than we."""


class Door(ASGIMiddleware):
    """Authenticates; see the module."""

    def __init__(
        self,
        authenticator: Authenticator,
        directory: Directory,
        engine_key: str | None,
        freshen_keys: Callable[[], Awaitable[None]],
        tries: TryLimit,
    ) -> None:
        self._authenticator = authenticator
        self._directory = directory
        self._engine_key = engine_key
        self._freshen_keys = freshen_keys
        self._tries = tries

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Let a request in, or raise."""
        _check_single(scope["headers"])
        if scope["path"] not in _OPEN:
            await self._freshen_keys()
            identity = scope["state"]["identity"] = await self._enter(scope)
            note(tenant=identity.tenant, key_id=identity.key_id)
        await next_app(scope, receive, send)

    async def _enter(self, scope: Scope) -> Identity:
        """Return who calls; who tries keys without end is told to wait, but a key that opens something always does."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        try:
            return self._identify(scope, authorization)
        except AuthenticationError:
            if not authorization:
                raise
            address, key = (scope["client"] or ("", 0))[0], authorization.partition(" ")[2].strip()
            wait_s = await self._tries.find_wait_s(address, key)
            if wait_s is None:
                await self._tries.note_failure(address, key)
                raise
            raise RateLimitExceededError(
                f"{self._tries.max_tries} calls a minute, from here or with this key, had one that opens nothing",
                retry_after_s=wait_s,
                headers={"x-should-retry": "false"},
            ) from None

    def _identify(self, scope: Scope, authorization: str) -> Identity:
        request_id = scope["state"]["request_id"]
        # the router takes several slashes for one
        path = _SLASHES.sub("/", scope["path"])
        if path.startswith(_INTERNAL):
            return self._identify_engine(path, authorization, request_id)
        identity = self._authenticator.authenticate(authorization, request_id)
        return self._aim(identity, scope["path_params"])

    def _identify_engine(self, path: str, authorization: str, request_id: str) -> Identity:
        """Engines read artifacts with their own key; nothing else is internal to this process' outside."""
        if not path.startswith(_ARTIFACTS):
            raise NotFoundError
        given = authorization.removeprefix("Bearer ").strip().encode("latin-1")
        expected = (self._engine_key or "").encode()
        if not hmac.compare_digest(given, expected) or not expected:
            raise AuthenticationError("The engine key is missing or not valid.")
        return Identity(
            role="engine",
            tenant_id=None,
            tenant=None,
            scopes=(),
            key_id="engine",
            actor="engine",
            request_id=request_id,
        )

    def _aim(self, identity: Identity, path_params: dict[str, Any]) -> Identity:
        if "tenant" not in path_params:
            return identity
        aimed = target(identity, path_params["tenant"], self._directory)
        if aimed is None:
            raise NotFoundError(_explain_no_tenant(identity, path_params["tenant"]), param="tenant")
        return aimed


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    seen: set[bytes] = set()
    for name, _ in headers:
        lowered = name.lower()
        if lowered in _SINGLE and lowered in seen:
            param = lowered.decode()
            raise InvalidRequestError(f"The header {param} is there twice; send it once", param=param)
        seen.add(lowered)


def _explain_no_tenant(identity: Identity, name: str) -> str:
    """Say what an admin can do; others are not told whether the tenant exists."""
    if identity.is_admin and is_name(name):
        return f"There is no tenant {name}. An admin creates it, as `loraplex tenants create {name}` does."
    return "There is no such tenant, or it is not yours."
