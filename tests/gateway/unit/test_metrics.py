"""Metrics: capped series, no label from clients."""

from __future__ import annotations

from loraplex.fleet.view import FleetView, Replica
from loraplex.gateway.metrics import GatewayMetrics


def test_adapters_beyond_the_cap_become_other() -> None:
    metrics = GatewayMetrics()
    for i in range(600):
        metrics.count_generation(f"team-{i}", "default", "ok", prompt_tokens=1, completion_tokens=2)
    text = metrics.render(FleetView()).decode()
    rows = [line for line in text.splitlines() if line.startswith("loraplex_adapter_requests_total{")]
    assert len(rows) == 501
    assert 'loraplex_adapter_requests_total{adapter="other",outcome="ok",tenant="other"} 100.0' in rows
    assert 'loraplex_tokens_total{direction="completion",tenant="other"} 200.0' in text


def test_replicas_that_are_gone_leave_no_series() -> None:
    metrics = GatewayMetrics()
    replica = Replica(url="http://a", pool="p", base="b", problem=None)
    assert (
        f'loraplex_replica_up{{pool="p",replica="{replica.name}"}} 1.0'
        in metrics.render(FleetView((replica,))).decode()
    )
    assert "replica_up{" not in metrics.render(FleetView()).decode()
