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


def count_series(text: str) -> int:
    return len([line for line in text.splitlines() if line and not line.startswith("#")])


def test_adapters_that_are_gone_leave_no_series_and_make_room() -> None:
    metrics = GatewayMetrics()
    alive = {("team-x", "default"), ("team-x", "base"), ("platform", "base")}
    for tenant, adapter in sorted(alive):
        metrics.count_generation(tenant, adapter, "ok", prompt_tokens=1, completion_tokens=2)
    before = count_series(metrics.render(FleetView()).decode())
    for generation in range(3):
        for i in range(500):
            for outcome in ("ok", "cancelled", "error", "lost"):
                tenant, adapter = f"team-{i % 50}", f"a-{generation}-{i}"
                metrics.count_generation(tenant, adapter, outcome, prompt_tokens=1, completion_tokens=2)
        shown = metrics.render(FleetView()).decode()
        # three of the places are taken by what stays
        assert f'adapter="a-{generation}-496"' in shown
        assert f'adapter="a-{generation}-497"' not in shown
        metrics.forget_gone(lambda tenant, adapter: (tenant, adapter) in alive)
    left = metrics.render(FleetView()).decode()
    assert 'adapter="a-' not in left
    assert 'tenant="team-7"' not in left
    # the four outcomes of `other` and its two directions
    assert count_series(left) == before + 6
    assert 'loraplex_adapter_requests_total{adapter="default",outcome="ok",tenant="team-x"} 1.0' in left


def test_the_largest_scrape_is_below_a_megabyte() -> None:
    metrics = GatewayMetrics()
    for i in range(600):
        for outcome in ("ok", "cancelled", "error", "lost"):
            metrics.count_generation(f"{i:063}", "a" * 63, outcome, prompt_tokens=1, completion_tokens=2)
    assert len(metrics.render(FleetView())) < 1 << 20


def test_a_tenant_sees_its_own_series_and_none_that_are_of_many() -> None:
    metrics = GatewayMetrics()
    metrics.count_generation("team-x", "default", "ok", prompt_tokens=1, completion_tokens=2)
    metrics.count_generation("team-y", "default", "ok", prompt_tokens=1, completion_tokens=2)
    metrics.count_generation("other", "other", "ok", prompt_tokens=1, completion_tokens=2)
    metrics.count_answer("/v1/models", 200)
    own = metrics.render_tenant("team-x").decode()
    assert count_series(own) == 3
    assert "team-y" not in own
    assert "http_requests" not in own
    assert metrics.render_tenant("other") == b""
    assert metrics.render_tenant("nobody") == b""


def test_who_is_trusted_and_what_decided_is_counted() -> None:
    metrics = GatewayMetrics()
    replicas = tuple(Replica(url=url, pool="p", base="b", problem=None) for url in ("http://a", "http://b"))
    metrics.count_placement("spread")
    text = metrics.render(FleetView(replicas), ejected={"http://a"}).decode()
    assert 'loraplex_placements_total{reason="spread"} 1.0' in text
    for replica, trusted in zip(replicas, ("0.0", "1.0"), strict=True):
        assert f'loraplex_replica_trusted{{pool="p",replica="{replica.name}"}} {trusted}' in text


def test_canaries_are_counted_by_their_part_until_their_adapter_is_gone() -> None:
    metrics = GatewayMetrics()
    for i in range(510):
        metrics.count_canary("team-x", f"a-{i}", "canary", "error")
    metrics.count_canary("team-x", "a-0", "main", "ok")
    text = metrics.render(FleetView()).decode()
    assert text.count("loraplex_canary_requests_total{") == 501
    assert 'loraplex_canary_requests_total{adapter="a-0",outcome="ok",part="main",tenant="team-x"} 1.0' in text
    metrics.forget_gone(lambda _, adapter: adapter == "a-0")
    assert metrics.render(FleetView()).decode().count("loraplex_canary_requests_total{") == 2


def test_states_without_escalations_are_shown_as_such() -> None:
    metrics = GatewayMetrics()
    metrics.show_escalations(["active", "overdue", "overdue"])
    metrics.show_escalations(["active"])
    text = metrics.render(FleetView()).decode()
    assert 'loraplex_escalations{state="active"} 1.0' in text
    assert 'loraplex_escalations{state="overdue"} 0.0' in text
