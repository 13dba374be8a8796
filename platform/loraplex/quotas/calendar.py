"""Days and months of UTC as numbers that follow one another. Pure."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from loraplex.quotas.quota import Shape

_EPOCH = date(1970, 1, 1)
_DAY_MS = 86_400_000


def period_at(shape: Shape, now_ms: int) -> int:
    """Return the number of the day (since 1970) or month (since year 0) that holds an instant."""
    day = now_ms // _DAY_MS
    if shape == "day":
        return day
    found = _EPOCH + timedelta(days=day)
    return found.year * 12 + found.month - 1


def period_start_ms(shape: Shape, period: int) -> int:
    """Return the instant at which a period begins."""
    if shape == "day":
        return period * _DAY_MS
    return (date(period // 12, period % 12 + 1, 1) - _EPOCH).days * _DAY_MS


def find_period_start(shape: Shape, now_ms: int) -> datetime:
    """Return when the period that holds an instant began."""
    return datetime.fromtimestamp(period_start_ms(shape, period_at(shape, now_ms)) / 1000, UTC)
