"""What was asked for lately: counts that halve every minute, bounded."""

from __future__ import annotations

import pytest

from loraplex.fleet import traffic as traffic_module
from loraplex.fleet.traffic import HALF_LIFE_S, Demand, Traffic


class Clock:
    """Time that tests move."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_counts_halve_and_the_rare_are_forgotten() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    traffic.note("base", "a", 8, times=8)
    traffic.note("base", "b", 16)
    traffic.note("other", "c")
    assert traffic.demands("base") == [Demand("a", 8, 8.0), Demand("b", 16, 1.0)]
    clock.now += 3 * HALF_LIFE_S
    assert traffic.demands("base") == [Demand("a", 8, 1.0)]


def test_a_share_counts_the_base_too_and_needs_some_requests() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    traffic.note("base", "a", times=4)
    assert traffic.share("base", "a") == 0.0
    traffic.note("base", None, times=12)
    assert traffic.share("base", "a") == pytest.approx(0.25)
    assert traffic.share("base", None) == pytest.approx(0.75)
    assert traffic.share("base", "unknown") == traffic.share("unknown", "a") == 0.0
    assert [one.digest for one in traffic.demands("base")] == ["a"]
    clock.now += 2 * HALF_LIFE_S
    assert traffic.share("base", "a") == 0.0


def test_what_is_known_is_bounded_and_the_frequent_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "_MAX_KNOWN", 100)
    traffic = Traffic(Clock())
    for index in range(1000):
        traffic.note("base", "often")
        traffic.note("base", f"d{index}")
    demands = traffic.demands("base")
    assert demands[0].digest == "often"
    assert len(demands) <= 100
