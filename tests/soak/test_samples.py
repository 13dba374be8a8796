"""The soak finds what climbs, and takes noise, warm-up and one step for what they are."""

from __future__ import annotations

import os
import random

from soak_samples import Sampler, Series, show

NUM = 100


def build(kind: str, *values: float) -> Series:
    return Series("engine core", kind, values)


def test_a_leak_is_found_and_noise_is_not() -> None:
    chance = random.Random(1)
    noisy = build("memory", *(100 + chance.uniform(-10, 10) for _ in range(NUM)))
    leaking = build("memory", *(100 + 0.2 * index + chance.uniform(-10, 10) for index in range(NUM)))
    assert noisy.climb <= noisy.limit
    assert leaking.climb > leaking.limit


def test_what_fills_during_the_warm_up_counts_for_nothing() -> None:
    assert build("files", *range(30), *([30.0] * 70)).climb == 0


def test_gauges_are_kept_beside_what_processes_hold() -> None:
    sampler = Sampler(os.getpid())
    sampler.take({"KV blocks in use": 3})
    sampler.take({"KV blocks in use": 5})
    (held,) = [one for one in sampler.list_series() if one.kind == "held"]
    assert held.values == (3, 5)
    assert "| KV blocks in use | 3.0 | 5.0 | 5.0 |" in show([held])


def test_what_an_engine_keeps_of_requests_is_known() -> None:
    climb = [60 + 0.1 * index for index in range(NUM)]
    kept, unknown = Series("engine front", "memory", tuple(climb), known=3.0), Series("gateway", "memory", tuple(climb))
    assert kept.climb <= kept.limit
    assert unknown.climb > unknown.limit
