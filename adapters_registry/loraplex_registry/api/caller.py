"""Who calls: the identity that a middleware left on the request, and what it may do."""

from __future__ import annotations

import hmac
from typing import Any

from litestar import Request

from loraplex_registry.adapters.tenant import TenantRef, find_target
from loraplex_registry.errors import PermissionDeniedError, TokenError
from loraplex_registry.wire.identity import Identity

READ = "adapters:read"
WRITE = "adapters:write"
SEE = (READ, WRITE)
"""Either shows what an adapter is: whoever changes one must see what it is now. The files themselves need READ."""


def find_caller(request: Request[Any, Any, Any]) -> Identity | None:
    """Return the identity that the middleware in front has verified."""
    identity = getattr(request.state, "identity", None)
    return identity if isinstance(identity, Identity) else None


def get_caller(request: Request[Any, Any, Any]) -> Identity:
    """Return the caller.

    Raises:
        TokenError: Nobody vouched for one.
    """
    identity = find_caller(request)
    if identity is None:
        raise TokenError
    return identity


def enter_tenant(request: Request[Any, Any, Any], tenant: str, *scopes: str) -> tuple[TenantRef, Identity]:
    """Return the tenant of the path and the caller, who may act there under one of `scopes`.

    Raises:
        NotFoundError: The tenant is not visible to the caller: also when it exists.
        PermissionDeniedError: The caller sees it but has none of the scopes.
    """
    caller = get_caller(request)
    return judge_entry(caller, tenant, *scopes), caller


def judge_entry(caller: Identity, tenant: str, *scopes: str) -> TenantRef:
    """Return the tenant that a caller names, who may act there under one of `scopes`.

    Raises:
        NotFoundError: The tenant is not visible to the caller: also when it exists.
        PermissionDeniedError: The caller sees it but has none of the scopes.
    """
    target = find_target(caller, tenant)
    if not any(caller.has_scope(scope) for scope in scopes):
        raise PermissionDeniedError(f"This key lacks the scope {' or '.join(scopes)}", param=None)
    return target


def check_admin(request: Request[Any, Any, Any], *, writes: bool) -> Identity:
    """Return the caller, who is an admin, one that may write if that is what it takes.

    Raises:
        PermissionDeniedError: The caller is not.
    """
    return judge_admin(get_caller(request), writes=writes)


def judge_admin(caller: Identity, *, writes: bool) -> Identity:
    """Return the caller if it is an admin, one that may write if that is what it takes.

    Raises:
        PermissionDeniedError: It is not.
    """
    if not (caller.is_admin or (caller.is_platform and not writes)):
        raise PermissionDeniedError("Only an admin key may do this")
    return caller


def check_engine(request: Request[Any, Any, Any], engine_key: str | None) -> None:
    """Return if the caller is an engine: by its identity, or by the engine key itself.

    Raises:
        TokenError: It is not.
    """
    identity = find_caller(request)
    if identity is not None and identity.role == "engine":
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer" and engine_key is not None
    if not is_bearer or not hmac.compare_digest(key.encode(), (engine_key or "").encode()):
        raise TokenError("only engines read artifacts, with the engine key")
