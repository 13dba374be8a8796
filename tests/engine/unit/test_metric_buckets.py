"""Buckets of the timers lie close enough where people look that a quantile read off them means something."""

from __future__ import annotations

import itertools
import re

import pytest

from loraplex_engine.metrics import EngineMetrics

TIMERS = {
    "loraplex_request_queue_seconds": (0.01, 5.0),
    "loraplex_request_prefill_seconds": (0.01, 5.0),
    "loraplex_time_to_first_token_seconds": (0.01, 5.0),
    "loraplex_inter_token_seconds": (0.005, 0.3),
    "loraplex_request_seconds": (0.1, 120.0),
}


@pytest.mark.parametrize("name", TIMERS)
def test_bounds_rise_and_lie_close_where_people_look(name: str) -> None:
    metrics = EngineMetrics()
    text = metrics.to_text().decode()
    shown = re.findall(rf'^{name}_bucket{{le="([^"]+)"}}', text, re.MULTILINE)
    bounds = [float(bound) for bound in shown[:-1]]
    low, high = TIMERS[name]
    assert shown[-1] == "+Inf"
    assert bounds == sorted(set(bounds))
    assert bounds[0] <= low / 2
    assert bounds[-1] >= 30
    steps = [after / before for before, after in itertools.pairwise(bounds) if low <= before < high]
    assert max(steps) <= 2
    assert len(bounds) < 30
