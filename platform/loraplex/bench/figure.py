"""Percentiles of times, and when there are enough of them to say one.

A percentile is told only from so many values that, with 95 % confidence, one of them lies beyond it: `q ** n <= 0.05`,
which is 5 for p50, 59 for p95, 299 for p99 (Wilks 1941). With fewer it would be the largest of a few by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

PERCENTS = (50, 95, 99)
_DOUBT = 0.05


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one kind, seconds; what too few values cannot tell is None."""

    num: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    def at(self, percent: int) -> float | None:
        """One of the percentiles."""
        value: float | None = getattr(self, f"p{percent}")
        return value


def count_needed(percent: float) -> int:
    """Return how many values a percentile needs."""
    return math.ceil(math.log(_DOUBT) / math.log(percent / 100))


def find_percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile, linear between the two nearest ranks; None of too few values."""
    return None if len(values) < count_needed(percent) else float(np.percentile(values, percent))


def spread(values: Sequence[float], num: int | None = None) -> Spread:
    """Return the spread of values; `num` where they are quantiles that stand for more."""
    found = {f"p{percent}": find_percentile(values, percent) for percent in PERCENTS}
    return Spread(
        num=len(values) if num is None else num, mean=float(np.mean(values)) if len(values) else None, **found
    )


def thin(values: Sequence[float], most: int) -> list[float]:
    """Return the values in order, or as many evenly spaced quantiles of more."""
    if len(values) <= most:
        return sorted(values)
    return [float(value) for value in np.quantile(values, np.linspace(0, 1, most))]
