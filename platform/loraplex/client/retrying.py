"""How often something is tried again and how long is waited between: long enough for a gateway to start again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime

import httpx

NUM_TRIES = 8
_FIRST_S, _LONGEST_S = 0.5, 20.0
_BRIEF = (408, 429)


def iterate_pauses(num_tries: int = NUM_TRIES) -> Iterator[float]:
    """Yield the seconds to wait after each failed try but the last: twice as long each time, with chance in it."""
    for i in range(num_tries - 1):
        yield min(_FIRST_S * 2**i, _LONGEST_S) * random.uniform(0.5, 1)  # noqa: S311 - no secret


def is_brief(status: int) -> bool:
    """Say whether an answer with this status may be another one soon."""
    return status in _BRIEF or status >= httpx.codes.INTERNAL_SERVER_ERROR


def read_retry_after_s(headers: httpx.Headers) -> float:
    """Return how long the server wants to be left alone, in seconds, within bounds; 0 where it does not say."""
    text = headers.get("retry-after", "")
    return min(float(text), _LONGEST_S) if text.isascii() and text.isdigit() else 0.0


def is_past(time: str | None) -> bool:
    """Say whether an RFC 3339 time is over; None and what is no time never are."""
    try:
        return time is not None and datetime.fromisoformat(time) <= datetime.now(UTC)
    except (ValueError, TypeError):
        return False
