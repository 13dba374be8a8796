"""Limits on calls, as tenants, keys and adapters have them: their names, their values, and how a patch merges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = [
    "MAX_LIMIT",
    "RATE_LIMITS",
    "RATE_LIMIT_TO_MAX",
    "LimitFault",
    "RateLimits",
    "find_limit_fault",
    "merge_limits",
    "read_limits",
]

MAX_LIMIT = 2**53 - 1
"""Highest value of a limit: what a script of Redis still counts exactly."""


class RateLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What may be called: None is no limit of its own.

    `requests_per_minute` and `tokens_per_minute` hold in any 60 seconds, `tokens_per_day` and `tokens_per_month` in
    days and months of UTC, `concurrent_requests` at any instant.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


RATE_LIMITS = RateLimits.__struct_fields__
"""Names of the limits."""

RATE_LIMIT_TO_MAX = dict.fromkeys(RATE_LIMITS, MAX_LIMIT)
"""Each limit and the highest value that it takes."""

_SHOWN_LEN = 64


class LimitFault(msgspec.Struct, frozen=True):
    """What is wrong with one limit: its name as an error's `param`, one sentence, and whether nobody knows it."""

    param: str
    message: str
    is_unknown: bool


def find_limit_fault(limits: Mapping[str, Any], name_to_max: Mapping[str, int]) -> LimitFault | None:
    """Return the first fault of limits as a client gave them; None clears one, which is then unlimited.

    Args:
        limits: By name.
        name_to_max: The limits that there are here, each with the highest value that it takes.
    """
    for name, value in limits.items():
        param = f"limits.{name[:_SHOWN_LEN]}"
        if name not in name_to_max:
            known = ", ".join(name_to_max)
            return LimitFault(param, f"There is no limit {name[:_SHOWN_LEN]}; limits are: {known}", is_unknown=True)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_whole and 1 <= value <= name_to_max[name]):
            text = f"{name} is a whole number from 1 to {name_to_max[name]}, or null for no limit"
            return LimitFault(param, text, is_unknown=False)
    return None


def merge_limits(old: Mapping[str, int] | None, new: Mapping[str, int | None] | None) -> dict[str, int] | None:
    """Return the limits after a merge patch; None clears all. None is returned where none is left."""
    if new is None:
        return None
    merged = {**(old or {}), **new}
    return {name: value for name, value in merged.items() if value is not None} or None


def read_limits(stored: Mapping[str, int] | None) -> RateLimits | None:
    """Return the limits on calls among those that a row holds; None if there are none."""
    found = {name: value for name, value in (stored or {}).items() if name in RATE_LIMITS}
    return RateLimits(**found) if found else None
