"""What a caller may do, as one line in a handler: each check raises with the scope or role that is missing."""

from __future__ import annotations

from typing import Any

from litestar import Request

from loraplex.errors import PermissionDeniedError
from loraplex_registry.wire.identity import Identity


def get_identity(request: Request[Any, Any, Any]) -> Identity:
    """Return who calls, as the door found."""
    identity: Identity = request.state.identity
    return identity


def require_scope(request: Request[Any, Any, Any], *scopes: str) -> Identity:
    """Return who calls, if it has one of `scopes`.

    Raises:
        PermissionDeniedError: It has none of them.
    """
    identity = get_identity(request)
    if not any(identity.has_scope(scope) for scope in scopes):
        raise PermissionDeniedError(f"This key lacks the scope {' or '.join(scopes)}")
    return identity


def require_admin(request: Request[Any, Any, Any]) -> Identity:
    """Return who calls, if it is an admin.

    Raises:
        PermissionDeniedError: It is not.
    """
    identity = get_identity(request)
    if not identity.is_admin:
        raise PermissionDeniedError("Only an admin key may do this")
    return identity


def require_platform(request: Request[Any, Any, Any]) -> Identity:
    """Return who calls, if it is an admin or a read-only admin.

    Raises:
        PermissionDeniedError: It is neither.
    """
    identity = get_identity(request)
    if not identity.is_platform:
        raise PermissionDeniedError("Only a platform key may read this")
    return identity
