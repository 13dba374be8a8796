"""Amounts of money a month: numbers with at most two decimals in the API, whole cents in the database. Pure."""

from __future__ import annotations

import math
import re

from loraplex.errors import InvalidRequestError

DEFAULT_CURRENCY = "USD"
_MAX_CENTS = 10**14
_CURRENCY = re.compile(r"[A-Z]{3}")


def to_cents(amount: float, param: str) -> int:
    """Return an amount in cents.

    Raises:
        InvalidRequestError: It is negative, no number, too large, or has more than two decimals.
    """
    if not math.isfinite(amount) or not 0 <= amount * 100 <= _MAX_CENTS:
        raise InvalidRequestError(f"{param} is an amount from 0 on", param=param)
    cents = round(amount * 100)
    if abs(amount * 100 - cents) > 1e-4:
        raise InvalidRequestError(f"{param} has two decimals at most", param=param)
    return cents


def show_amount(cents: int | None) -> float | None:
    """Return cents as the API shows them."""
    return None if cents is None else cents / 100


def check_currency(code: str | None) -> str:
    """Return a currency's code.

    Raises:
        InvalidRequestError: It is not three capital letters.
    """
    if code is None:
        return DEFAULT_CURRENCY
    if _CURRENCY.fullmatch(code) is None:
        raise InvalidRequestError("currency is three capital letters, such as EUR", param="currency")
    return code
