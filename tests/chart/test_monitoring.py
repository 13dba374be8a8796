"""What the chart tells Prometheus, KEDA and Grafana: the files of helm/observability, and metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from chart_values import SCHEMA
from chart_world import ROOT, Object, Rendering, matches
from conftest import skip_or_fail
from loraplex_engine.metrics import EngineMetrics, EngineSnapshot
from promtool import PromtoolUnavailable, find_promtool

OBSERVABILITY = ROOT / "helm" / "observability"
PRESSURE = {"requests": "AverageValue", "queue-time": "Value", "slot-pressure": "Value"}


def triggers_of(rendering: Rendering) -> list[Object]:
    return [trigger for one in rendering.of_kind("ScaledObject") for trigger in one["spec"]["triggers"]]


def test_rules_are_the_file_of_observability(render: Callable[[str], Rendering]) -> None:
    (rules,) = render("production").of_kind("PrometheusRule")
    assert rules["spec"] == yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())


def test_the_dashboard_is_the_file_of_observability(render: Callable[[str], Rendering]) -> None:
    board = render("production").get("ConfigMap", "dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["loraplex.json"]) == json.loads((OBSERVABILITY / "grafana.json").read_text())


@pytest.mark.parametrize("name", ["rules.yaml", "grafana.json"])
def test_there_is_one_place_of_truth(name: str) -> None:
    link = ROOT / "helm" / "loraplex" / "files" / name
    assert link.is_symlink()
    assert link.resolve() == OBSERVABILITY / name


@pytest.mark.parametrize("case", ["production", "everything"])
def test_engines_scale_by_queue_and_slots_never_by_cpu(render: Callable[[str], Rendering], case: str) -> None:
    rendering = render(case)
    workloads = {one["metadata"]["name"]: one for one in rendering.of_kind("StatefulSet")}
    for one in rendering.of_kind("ScaledObject"):
        target = one["spec"]["scaleTargetRef"]
        assert target["kind"] == "StatefulSet"
        assert "replicas" not in workloads[target["name"]]["spec"]
        found = {trigger["name"]: trigger["metricType"] for trigger in one["spec"]["triggers"]}
        is_full = one["metadata"]["labels"]["loraplex.io/pool"] == "full"
        assert found == {name: kind for name, kind in PRESSURE.items() if not is_full or name != "slot-pressure"}
        assert all(trigger["type"] == "prometheus" for trigger in one["spec"]["triggers"])
    assert not rendering.of_kind("HorizontalPodAutoscaler")
    assert triggers_of(rendering)


def test_triggers_ask_for_metrics_and_series_that_there_are(render: Callable[[str], Rendering]) -> None:
    engine = EngineMetrics()
    engine.watch(lambda: EngineSnapshot(0.0, *[0] * 15, *[{}] * 5))
    exported = set(re.findall(r"^# TYPE (loraplex_[a-z_]+) ", engine.to_text().decode(), re.MULTILINE))
    for case in ("production", "everything"):
        services = {one["metadata"]["name"] for one in render(case).of_kind("Service")}
        for trigger in triggers_of(render(case)):
            query = trigger["metadata"]["query"]
            named = re.findall(r"(loraplex_\w+)\{([^}]*)\}", query)
            assert {re.sub(r"_bucket$", "", metric) for metric, _ in named} <= exported
            assert len(named) == query.count("loraplex_"), "each metric is of one pool"
            for _, matchers in named:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
                assert labels.keys() == {"namespace", "service"}, "the labels that a ServiceMonitor gives"
                assert (labels["namespace"], labels["service"] in services) == ("prod", True)


CASES = """
rule_files: [rules.yaml]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {{series: 'loraplex_requests_running{{{series}}}', values: '{running}x40'}}
      - {{series: 'loraplex_requests_waiting{{{series}}}', values: '{waiting}x40'}}
      - {{series: 'loraplex_request_queue_seconds_bucket{{{series},le="1"}}', values: '{short}'}}
      - {{series: 'loraplex_request_queue_seconds_bucket{{{series},le="5"}}', values: '{long}'}}
      - {{series: 'loraplex_request_queue_seconds_bucket{{{series},le="+Inf"}}', values: '{long}'}}
      - {{series: 'loraplex_adapter_slots_overcommitted{{{series}}}', values: '{over}x40'}}
      - {{series: 'loraplex_adapter_slots{{{series},state="ready"}}', values: '8x40'}}
      - {{series: 'loraplex_adapter_slots{{{series},state="empty"}}', values: '8x40'}}
    promql_expr_test: {checks}
"""


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        # idle: no quantile of nothing, but 0
        ({"running": 0, "waiting": 0, "short": "0x40", "long": "0x40", "over": 0}, [0, 0, 0]),
        # long answers, and nobody who waited of late
        ({"running": 3, "waiting": 0, "short": "9x40", "long": "9x40", "over": 0}, [3, 0, 0]),
        # half of the requests wait above a second, and four adapters beyond sixteen slots
        ({"running": 10, "waiting": 6, "short": "0+5x40", "long": "0+10x40", "over": 4}, [16, 4.6, 0.25]),
    ],
    ids=["idle", "long answers", "busy"],
)
def test_prometheus_answers_the_triggers(
    render: Callable[[str], Rendering], tmp_path: Path, load: dict[str, object], expected: list[float]
) -> None:
    triggers = triggers_of(render("production"))
    series = 'namespace="prod",service="rel-loraplex-engine-main"'
    checks = [
        {"expr": trigger["metadata"]["query"], "eval_time": "9m", "exp_samples": [{"labels": "{}", "value": value}]}
        for trigger, value in zip(triggers, expected, strict=True)
    ]
    (tmp_path / "rules.yaml").write_text("groups: []\n")
    (tmp_path / "test.yaml").write_text(CASES.format(series=series, checks=json.dumps(checks), **load))
    try:
        program = find_promtool()
    except PromtoolUnavailable as reason:
        skip_or_fail("promtool", str(reason))
    done = subprocess.run(
        [program, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_lost_scrape_holds_the_number_of_engines(render: Callable[[str], Rendering]) -> None:
    """No series is an error to KEDA, not a zero, which would end engines that work."""
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in triggers_of(render("production"))} == {"false"}


def test_scrapes_carry_keys_by_reference(render: Callable[[str], Rendering]) -> None:
    rendering = render("production")
    monitors = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in rendering.of_kind("ServiceMonitor")
    }
    keys = {name: one["spec"]["endpoints"][0]["authorization"] for name, one in monitors.items()}
    assert keys == {
        "gateway": {"type": "Bearer", "credentials": {"name": "loraplex-metrics", "key": "gateway-key"}},
        "engine": {"type": "Bearer", "credentials": {"name": "loraplex-metrics", "key": "engine-token"}},
    }
    for one in monitors.values():
        services = [
            service
            for service in rendering.of_kind("Service")
            if matches(one["spec"]["selector"], service["metadata"]["labels"])
        ]
        assert all(endpoint["path"] == "/metrics" for endpoint in one["spec"]["endpoints"])
        assert services


def test_thresholds_can_be_set() -> None:
    rules = SCHEMA["definitions"]["autoscaling"]["properties"]
    assert {"queueSeconds", "slotPressure", "requestsPerReplica", "scaleDownSeconds"} <= rules.keys()
