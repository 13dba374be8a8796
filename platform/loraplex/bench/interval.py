"""Confidence intervals of ratios between two sets of runs.

Requests of one run are not independent: they share its batches, its queue and whatever else the machine did then. So a
run is the unit. Its figure goes into Student's t on logarithms, by pairs where two servers took turns, else Welch's for
two groups; a bootstrap of five runs would be too narrow. Of fewer than three runs only blocks of requests can be drawn
again: that interval knows what happened within the run, and nothing of the difference between two runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.bench.errors import BenchError

MIN_RUNS = 3
_GRID, _HALVINGS, _FARTHEST_T = 1001, 40, 1e3
_NUM_DRAWS = 2000


@dataclass(frozen=True)
class Ratio:
    """After over before, and between what it lies with the confidence that was asked for."""

    value: float
    low: float
    high: float


def compare_groups(before: Sequence[float], after: Sequence[float], confidence: float) -> Ratio:
    """Return the ratio of geometric means of two independent groups of runs, by Welch's t on logarithms."""
    old, new = np.log(before), np.log(after)
    parts = [float(np.var(side, ddof=1)) / len(side) for side in (old, new)]
    total = sum(parts)
    weights = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (old, new), strict=True))
    # two groups without any spread differ as they differ
    freedom = total**2 / weights if weights else float(len(old) + len(new) - 2)
    return _around(float(np.mean(new) - np.mean(old)), math.sqrt(total), freedom, confidence)


def compare_pairs(before: Sequence[float], after: Sequence[float], confidence: float) -> Ratio:
    """Return the ratio of runs that were taken in pairs, by Student's t on logarithms of the pairs' ratios."""
    logs = np.log(after) - np.log(before)
    error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    return _around(float(np.mean(logs)), error, len(logs) - 1, confidence)


def compare_blocks(
    before: Sequence[float], after: Sequence[float], percent: float, num_open: int, confidence: float
) -> Ratio:
    """Return the ratio of a percentile of requests of two single runs, by drawing blocks of neighbours again.

    Args:
        before: Times of one run in the order of its requests.
        after: Of the other.
        percent: The percentile.
        num_open: Requests that shared the server: neighbours that near are no strangers.
        confidence: How sure, below 1.
    """
    rng = np.random.default_rng(0)
    draws = [
        np.percentile(_draw_blocks(np.asarray(side, float), num_open, rng), percent, axis=1) for side in (before, after)
    ]
    value = float(np.percentile(after, percent) / np.percentile(before, percent))
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws[1] / draws[0], [tail, 1 - tail])
    return Ratio(value, float(low), float(high))


def find_halfwidth(values: Sequence[float], confidence: float) -> float | None:
    """Return how far the mean of runs may be off, as a share of it; None of too few runs, or where one is 0."""
    if len(values) < MIN_RUNS or min(values) <= 0:
        return None
    error = float(np.std(np.log(values), ddof=1)) / math.sqrt(len(values))
    return math.expm1(find_t(confidence, len(values) - 1) * error)


def find_t(confidence: float, freedom: float) -> float:
    """Return between what Student's t of so many degrees of freedom lies, on both sides of 0."""
    low, high = 0.0, _FARTHEST_T
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _cover(middle, freedom) < confidence else (low, middle)
    return high


def _cover(t: float, freedom: float) -> float:
    """The probability that Student's t lies within -t to t."""
    # with x = sqrt(freedom) tan(u) the density's tail has an end
    angles = np.linspace(0.0, math.atan(t / math.sqrt(freedom)), _GRID)
    density = np.cos(angles) ** (freedom - 1)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return 2 * math.exp(log_scale) * float(np.trapezoid(density, angles))


def _around(middle: float, error: float, freedom: float, confidence: float) -> Ratio:
    reach = find_t(confidence, freedom) * error
    return Ratio(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def _draw_blocks(values: NDArray[np.float64], num_open: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return rows of as many values, each made of random blocks of neighbours."""
    length = min(len(values), max(num_open, math.ceil(len(values) ** (1 / 3))))
    if length * 2 > len(values):
        raise BenchError(
            f"A single run of {len(values)} requests with {num_open} at once says too little; take --repeats "
            f"{MIN_RUNS} or more on both sides."
        )
    num_blocks = math.ceil(len(values) / length)
    starts = rng.integers(0, len(values) - length + 1, size=(_NUM_DRAWS, num_blocks, 1))
    return values[(starts + np.arange(length)).reshape(_NUM_DRAWS, -1)[:, : len(values)]]
