"""What a key may be given, and by whom: nobody gives away more than it has. Pure; knows no database.

Scopes and roles say what a key may do, its allowance how much of what its team has it may take, and how long. The
team's own limits are an administrator's and hold for all of its keys together, whatever these say of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from loraplex.errors import InvalidRequestError, PermissionDeniedError, UnsupportedParameterError
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.limits import RATE_LIMIT_TO_MAX, find_limit_fault, merge_limits

SCOPES = (
    "infer",
    "adapters:read",
    "adapters:write",
    "usage:read",
    "keys:write",
    "escalations:write",
    "metrics:read",
    "audit:read",
)
PLATFORM_ROLES = ("admin", "admin_readonly")
DEFAULT_SCOPES = ("infer",)
MIN_PRIORITY, MAX_PRIORITY = -8, 8


class Allowance(msgspec.Struct, frozen=True):
    """How much a key may take, and how long: None is no limit, no end; lower `priority` goes first, None is 0."""

    limits: dict[str, int] | None = None
    priority: int | None = None
    expires_at: datetime | None = None


def check_scopes(by: Identity, scopes: Sequence[str], role: str) -> None:
    """Return if `by` may give these scopes, or this role.

    Raises:
        InvalidRequestError: A scope or the role is unknown.
        PermissionDeniedError: It has less itself.
    """
    if role not in ("tenant", *PLATFORM_ROLES):
        raise InvalidRequestError(f"role is one of {', '.join(PLATFORM_ROLES)}, or absent", param="role")
    if role != "tenant" and not by.is_admin:
        raise PermissionDeniedError("Only an admin key may create platform keys", param="role")
    for scope in scopes:
        if scope not in SCOPES:
            text = f"{scope[:64]!a} is not a scope; scopes are {', '.join(SCOPES)}"
            raise InvalidRequestError(text, param="scopes")
        if not by.has_scope(scope):
            raise PermissionDeniedError(f"A key gives only scopes that it has; this one lacks {scope}", param="scopes")


def check_values(limits: Mapping[str, Any] | None, priority: int | None) -> None:
    """Return if these are limits and a priority, whoever gives them; None clears.

    Raises:
        UnsupportedParameterError: A limit is not known.
        InvalidRequestError: A value is out of range.
    """
    fault = find_limit_fault(limits or {}, RATE_LIMIT_TO_MAX)
    if fault is not None:
        raise (UnsupportedParameterError if fault.is_unknown else InvalidRequestError)(fault.message, param=fault.param)
    if priority is not None and not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        text = f"priority is a whole number from {MIN_PRIORITY} (first) to {MAX_PRIORITY} (last)"
        raise InvalidRequestError(text, param="priority")


def build_allowance(
    giver: Allowance, limits: Mapping[str, int | None] | None, priority: int | None, expires_at: datetime | None
) -> Allowance:
    """Return the allowance of a new key: what is asked for, and where nothing is asked for the giver's own."""
    inherited = None if giver.priority is None else max(giver.priority, 0)
    return Allowance(
        limits=merge_limits(giver.limits, limits or {}),
        priority=inherited if priority is None else priority,
        expires_at=giver.expires_at if expires_at is None else expires_at,
    )


def check_allowance(by: Identity, giver: Allowance, given: Allowance, before: Allowance | None = None) -> None:
    """Return if `by`, whose own allowance is `giver`, may give `given`; what was the same `before` is not its gift.

    Raises:
        PermissionDeniedError: A limit is above the giver's own, the priority goes before its own or before 0, or it
            would outlive the giver.
    """
    if by.is_admin:
        return
    for name, limit in (giver.limits or {}).items():
        value = (given.limits or {}).get(name)
        is_kept = before is not None and (before.limits or {}).get(name) == value
        if not is_kept and (value is None or value > limit):
            text = f"A key gives no more than it has, and {name} of this one is {limit}"
            raise PermissionDeniedError(text, param=f"limits.{name}")
    if before is None and _outlives(given, giver):
        raise PermissionDeniedError("A key makes none that outlives it", param="expires_at")
    is_kept = before is not None and (before.priority or 0) == (given.priority or 0)
    if not is_kept and (given.priority or 0) < max(giver.priority or 0, 0):
        text = "Only an admin key may give a priority before 0, and a key none before its own"
        raise PermissionDeniedError(text, param="priority")


def _outlives(one: Allowance, other: Allowance) -> bool:
    return other.expires_at is not None and (one.expires_at is None or one.expires_at > other.expires_at)
