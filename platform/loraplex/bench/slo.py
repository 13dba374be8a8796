"""What a request must keep to count as good: bounds on its times, all of them."""

from __future__ import annotations

from collections.abc import Mapping

from loraplex.bench.errors import BenchError
from loraplex.bench.outcome import Outcome

KINDS = ("ttft", "itl", "gap", "request")


def read_slo(text: str) -> dict[str, float]:
    """Return the bounds in seconds that `ttft=0.5,itl=0.05` names.

    Raises:
        BenchError: It names a time that there is not, or no number above 0.
    """
    bounds = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            bounds[name] = float(value)
        except ValueError:
            bounds[name] = 0.0
        if name not in KINDS or not 0 < bounds[name] < float("inf"):
            raise BenchError(f"{part!r} is no bound: NAME=SECONDS with {', '.join(KINDS)}.", param="slo")
    return bounds


def is_good(outcome: Outcome, bounds: Mapping[str, float]) -> bool:
    """Say whether a request was answered within all bounds; `itl` is its mean, `gap` its longest."""
    if outcome.error:
        return False
    seen = {
        "ttft": outcome.first_s,
        "itl": outcome.token_s or 0.0,
        "gap": max(outcome.gaps_s, default=0.0),
        "request": outcome.request_s,
    }
    return all(seen[name] <= bound for name, bound in bounds.items())
