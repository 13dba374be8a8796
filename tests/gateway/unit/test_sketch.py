"""Quantiles of sketches are within their error of the exact ones, and merging changes nothing."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from loraplex.stats.sketch import RELATIVE_ERROR, Packed, Sketches
from loraplex.wire.stats import Quantiles


def _exact(values: list[float], q: float) -> float:
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


def _describe(sketches: Sketches, num_rows: int = 1) -> list[Quantiles]:
    return sketches.summarize(num_rows)


def _draw(kind: str, num: int) -> list[float]:
    rng = random.Random(kind)
    draws = {
        "lognormal": lambda: rng.lognormvariate(-3, 2),
        "uniform": lambda: rng.uniform(0.01, 0.02),
        "two humps": lambda: rng.gauss(0.008, 0.0005) if rng.random() < 0.9 else rng.gauss(30, 2),
        "tokens": lambda: rng.randrange(1, 131_072),
        "constant": lambda: 0.25,
    }
    return [float(draws[kind]()) for _ in range(num)]


@pytest.mark.parametrize("num", [1, 2, 3, 19, 20_000])
@pytest.mark.parametrize("kind", ["lognormal", "uniform", "two humps", "tokens", "constant"])
def test_quantiles_are_within_one_percent(kind: str, num: int) -> None:
    values = _draw(kind, num)
    sketches = Sketches()
    for value in values:
        sketches.add(0, value)
    (found,) = _describe(sketches)
    for q, estimate in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert estimate == pytest.approx(_exact(values, q), rel=RELATIVE_ERROR * 1.001)
    assert (found.count, found.max) == (num, max(values))
    assert found.mean == pytest.approx(sum(values) / num)


def test_merged_sketches_are_those_of_all_values_together() -> None:
    values = _draw("lognormal", 5000)
    whole, merged = Sketches(), Sketches()
    for part in range(5):
        one = Sketches()
        for value in values[part::5]:
            one.add(0, value)
            whole.add(0, value)
        merged.merge(one.pack(), np.array([0]))
    (found,), (expected,) = _describe(merged), _describe(whole)
    assert found.mean == pytest.approx(expected.mean)
    assert (found.count, found.p50, found.p95, found.p99, found.max) == (
        expected.count,
        expected.p50,
        expected.p95,
        expected.p99,
        expected.max,
    )


def test_rows_go_where_they_are_sent_or_nowhere() -> None:
    source = Sketches()
    for row, value in ((0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)):
        source.add(row, value)
    aim = Sketches()
    aim.merge(source.pack(), np.array([1, -1, 1, 0]))
    first, second = _describe(aim, 2)
    assert (first.count, first.max) == (1, 4.0)
    assert (second.count, second.mean, second.max) == (2, 2.0, 3.0)


def test_what_is_left_out_entirely_leaves_nothing() -> None:
    source = Sketches()
    source.add(0, 1.0)
    aim = Sketches()
    aim.merge(source.pack(), np.array([-1]))
    aim.merge(Packed(b"", b"", b"", b""), np.array([], np.int64))
    assert _describe(aim) == [Quantiles()]


def test_zero_and_less_than_a_microsecond_are_zero() -> None:
    sketches = Sketches()
    for value in (0.0, 1e-9, 1e-7):
        sketches.add(0, value)
    (found,) = _describe(sketches)
    assert (found.count, found.p99) == (3, 0.0)


def test_what_is_beyond_the_last_bucket_is_its_maximum_at_most() -> None:
    sketches = Sketches()
    sketches.add(0, 1e12)
    (found,) = _describe(sketches)
    assert found.max == 1e12
    assert 1e7 < found.p99 <= 1e12


def test_packing_changes_nothing_and_may_go_on() -> None:
    sketches = Sketches()
    for value in _draw("uniform", 100):
        sketches.add(2, value)
    assert sketches.pack() == sketches.pack()
    sketches.add(2, 5.0)
    *empty, found = _describe(sketches, 3)
    assert empty == [Quantiles(), Quantiles()]
    assert (found.count, found.max) == (101, 5.0)
