"""The files for Prometheus and Grafana: each alert fires on what it is for, and names what there is."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import skip_or_fail
from promtool import PromtoolUnavailable, find_promtool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "helm" / "observability"
NO_SUBJECT = re.compile(r'^\w+|(?:part|outcome|le|state|stage|finish)="[^"]*"')
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


def read_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def read_alerts() -> list[dict[str, Any]]:
    return [rule for rule in read_rules() if "alert" in rule]


def read_panels() -> list[dict[str, Any]]:
    board = json.loads((FOLDER / "grafana.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def find_metrics(expression: str) -> set[str]:
    return {SUFFIXES.sub("", name) for name in re.findall(r"\bloraplex_\w+", expression)}


def test_alerts_fire_on_what_they_are_for_and_on_nothing_near_it() -> None:
    try:
        program = find_promtool()
    except PromtoolUnavailable as reason:
        skip_or_fail("promtool", str(reason))
    done = subprocess.run(
        [str(program), "test", "rules", "rules_test.yaml"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_series_that_fire_it_and_series_that_do_not() -> None:
    fired, silent = set(), set()
    for case in yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]:
        subjects = {NO_SUBJECT.sub("", series["series"]) for series in case["input_series"]}
        for check in case["alert_rule_test"]:
            if check["exp_alerts"]:
                fired.add(check["alertname"])
            if len(check["exp_alerts"]) < len(subjects):
                silent.add(check["alertname"])
    names = {alert["alert"] for alert in read_alerts()}
    assert fired == silent == names


def test_metrics_that_are_named_are_there() -> None:
    known = set(re.findall(r"`(loraplex_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    recorded = {rule["record"] for rule in read_rules() if "record" in rule}
    expressions = [rule["expr"] for rule in read_rules()]
    expressions += [target["expr"] for panel in read_panels() for target in panel["targets"]]
    for expression in expressions:
        assert find_metrics(expression) <= known, expression
        assert set(re.findall(r"loraplex:[\w:]+", expression)) <= recorded, expression


def test_the_eight_numbers_are_on_the_board() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    eight = re.findall(r"^\| `(loraplex_\w+)` \|", text[: text.index("## Engine")], re.MULTILINE)
    assert len(eight) == 8
    shown = {name for panel in read_panels() for target in panel["targets"] for name in find_metrics(target["expr"])}
    assert set(eight) <= shown


def test_panels_say_what_they_show_and_lie_beside_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in read_panels():
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@pytest.mark.parametrize("alert", read_alerts(), ids=lambda alert: alert["alert"])
def test_each_alert_leads_to_what_to_do(alert: dict[str, Any]) -> None:
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^## (.*)", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
