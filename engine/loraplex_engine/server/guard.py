"""Lets in only what the gateway vouches for: a valid identity token for the engine on everything but the probes.

A token opens what it was made for: generations with the scope `infer`, `/metrics` with `metrics:read`, and what is
internal in the platform's name alone. So one that got out ends nobody else's requests and drains no engine.
"""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from loraplex_engine.errors import InvalidTokenError, PermissionDeniedError
from loraplex_registry.wire.identity import Identity, TokenError, TokenVerifier
from loraplex_registry.wire.log import note

AUDIENCE = "engine"
_INTERNAL = "/internal/"
_READ = ("GET", "HEAD")


def build_guard(verifier: TokenVerifier) -> Any:
    """Return a guard that puts the caller's identity into `request.state.identity`."""

    def check_token(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        identity = connection.state.identity = read_identity(verifier, connection.headers.get("authorization", ""))
        scope: Any = connection.scope
        check_reach(identity, scope["method"], scope["path"])
        note(request_id=identity.request_id, tenant=identity.tenant, key_id=identity.key_id)

    return check_token


def check_reach(identity: Identity, method: str, path: str) -> None:
    """Return if the caller may call this.

    Raises:
        PermissionDeniedError: It was vouched for something else.
    """
    if path.startswith(_INTERNAL):
        is_allowed = identity.is_platform if method in _READ else identity.is_admin
    elif path == "/metrics":
        is_allowed = identity.has_scope("metrics:read")
    else:
        is_allowed = path == "/readyz" or identity.has_scope("infer")
    if not is_allowed:
        raise PermissionDeniedError


def read_identity(verifier: TokenVerifier, authorization: str) -> Identity:
    """Return who calls.

    Raises:
        InvalidTokenError: There is no valid bearer token for this audience.
    """
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise InvalidTokenError
    try:
        return verifier.verify(token)
    except TokenError as error:
        raise InvalidTokenError from error
