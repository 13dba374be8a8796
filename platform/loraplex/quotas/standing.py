"""How quotas stand, as the headers of answers say it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.quotas.quota import Charge, Standing

_MINUTE_MS, _HOUR_MS = 60_000, 3_600_000


def build_headers(charges: Sequence[Charge], standings: Sequence[Standing]) -> dict[str, str]:
    """Return `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, each of the quota that has least left.

    Places of `concurrent_requests` have no such header.
    """
    headers: dict[str, str] = {}
    pairs = list(zip(charges, standings, strict=True))
    for unit, is_of_tokens in (("requests", False), ("tokens", True)):
        found = [
            standing
            for charge, standing in pairs
            if charge.quota.is_of_tokens is is_of_tokens and charge.quota.shape != "lease"
        ]
        if not found:
            continue
        tightest = min(found, key=lambda standing: standing.remaining)
        headers[f"x-ratelimit-limit-{unit}"] = str(tightest.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(tightest.remaining)
        headers[f"x-ratelimit-reset-{unit}"] = show_duration(tightest.reset_ms)
    return headers


def show_duration(duration_ms: int) -> str:
    """Return a time as OpenAI's headers have it, such as `0s`, `350ms`, `1.5s`, `6m0s`, `12h0m3s`."""
    if 0 < duration_ms < 1000:
        return f"{duration_ms}ms"
    hours, rest_ms = divmod(duration_ms, _HOUR_MS)
    minutes, rest_ms = divmod(rest_ms, _MINUTE_MS)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + seconds
