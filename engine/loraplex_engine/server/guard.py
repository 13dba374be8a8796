"""Lets in only what the gateway vouches for: a valid identity token for the engine on everything but /healthz."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from loraplex_engine.errors import InvalidTokenError
from loraplex_registry.wire.identity import Identity, TokenError, TokenVerifier
from loraplex_registry.wire.log import note

AUDIENCE = "engine"


def build_guard(verifier: TokenVerifier) -> Any:
    """Return a guard that puts the caller's identity into `request.state.identity`."""

    def check_token(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        identity = connection.state.identity = read_identity(verifier, connection.headers.get("authorization", ""))
        note(request_id=identity.request_id, tenant=identity.tenant, key_id=identity.key_id)

    return check_token


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
