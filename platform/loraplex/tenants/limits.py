"""The limits that a tenant may have: which there are, and which values they take."""

from __future__ import annotations

from typing import Any

from loraplex.errors import InvalidRequestError, UnsupportedParameterError
from loraplex_registry.wire.limits import RATE_LIMIT_TO_MAX, find_limit_fault

LIMIT_TO_MAX = {
    "adapter_bytes": 2**63 - 1,
    "adapter_versions": 2**31 - 1,
    "adapter_rank": 2**31 - 1,
    **RATE_LIMIT_TO_MAX,
}
"""Each limit and the highest value that it takes; see `AdapterLimits` and `RateLimits` for what they mean."""

MAX_WEIGHT = 1000
"""Highest weight: a tenant's share of an engine under load is its weight among those of all that wait."""


def check_limits(limits: dict[str, Any]) -> dict[str, int | None]:
    """Return limits as a client gave them; None clears one, which is then unlimited.

    Raises:
        UnsupportedParameterError: One is not known here.
        InvalidRequestError: One is no whole number from 1 on.
    """
    fault = find_limit_fault(limits, LIMIT_TO_MAX)
    if fault is None:
        return limits
    raise (UnsupportedParameterError if fault.is_unknown else InvalidRequestError)(fault.message, param=fault.param)


def check_weight(weight: int | None) -> int | None:
    """Return a weight as a client gave it; None is 1, as for every tenant.

    Raises:
        InvalidRequestError: It is out of range.
    """
    if weight is not None and not 1 <= weight <= MAX_WEIGHT:
        raise InvalidRequestError(f"weight is a whole number from 1 to {MAX_WEIGHT}", param="weight")
    return weight
