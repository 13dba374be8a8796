"""Values that every step observes are counted as Prometheus counts them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from loraplex_engine.metrics import FrequentHistogram

_BOUNDS = (0.001, 0.5, 1.0, 8.0)


@given(st.lists(st.floats(0, 16) | st.sampled_from(_BOUNDS), max_size=1200))
def test_counts_are_those_of_the_plain_histogram(values: list[float]) -> None:
    plain, frequent = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x_seconds", "X.", buckets=_BOUNDS, registry=plain)
    ours = FrequentHistogram("x_seconds", "X.", _BOUNDS)
    frequent.register(ours)
    for value in values[::2]:
        ours.observe(value)
    ours.observe_all(values[1::2])
    for value in (*values[::2], *values[1::2]):
        histogram.observe(value)
    assert _samples(frequent) == _samples(plain)


def _samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    name_to_value = {name: round(float(value), 6) for name, value in (line.rsplit(" ", 1) for line in lines)}
    return {name: value for name, value in name_to_value.items() if "_created" not in name}
