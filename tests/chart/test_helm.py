"""Real helm, two majors: the chart is clean, both make the same of it, and what cannot run is refused with words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_values import CASES, OBJECT_STORE, POOL, TRIAL_SETTINGS
from chart_world import CHART, NAMESPACE, RELEASE, ChartError, Rendering, run_helm, template, write_values
from loraplex.version import __version__

PROFILES = ("trial", "production")


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("major", [3, 4])
def test_a_profile_passes_lint(find_program: Callable[[int], Path], major: int, name: str) -> None:
    said = run_helm(find_program(major), "lint", str(CHART), "--strict", "-f", str(CHART / f"values-{name}.yaml"))
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said


@pytest.mark.parametrize("name", sorted(CASES))
def test_both_majors_make_the_same_objects(
    render: Callable[..., Rendering], name: str, long: Callable[[float, float], float]
) -> None:
    if name not in ("production", "everything") and long(1, 2) == 1:
        pytest.skip("make chart compares all cases")
    assert render(name, 3).objects == render(name, 4).objects


def test_the_chart_has_the_program_s_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "objectStore.url is the bucket"),
        ({"redis": {"enabled": False}}, "needs redis.enabled"),
        ({"engine": {"pools": {"a" * 32: POOL}}, "fullnameOverride": "b" * 20}, "52 are the most"),
        ({"engine": {"pools": {"main": {**POOL, "autoscaling": {"enabled": True}}}}}, "engine.prometheus.address"),
        (
            {
                "engine": {
                    "prometheus": {"address": "http://prometheus:9090"},
                    "pools": {"main": {**POOL, "autoscaling": {"enabled": True, "minReplicas": 9}}},
                }
            },
            "minReplicas is above",
        ),
        ({"engine": {"pools": {"main": {"model": {"name": "m"}, "pin": ["x"]}}}}, "nothing to pin"),
        ({"engine": {"pools": {"main": {**POOL, "replicas": 1, "engines": ["http://a:1"]}}}}, "which run elsewhere"),
        ({"engine": {"pools": {"main": {**POOL, "cache": {"kind": "existingClaim"}}}}}, "names the claim"),
        ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "scope metrics:read"),
        ({**TRIAL_SETTINGS, "engine": {"pools": {"main": POOL}}}, "engine.pools must be empty"),
    ],
)
def test_what_cannot_run_is_refused(helm: Path, tmp_path: Path, values: dict[str, Any], said: str) -> None:
    # the first case lacks what all others have
    complete = {"objectStore": OBJECT_STORE, **values} if values else values
    with pytest.raises(ChartError, match=re.escape(said)):
        template(helm, write_values(tmp_path, complete))


def test_the_packaged_chart_has_the_files_of_observability(helm: Path, tmp_path: Path) -> None:
    """Links of the repository become files of the package."""
    run_helm(helm, "package", str(CHART), "-d", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    values = ("-f", str(CHART / "values-production.yaml"))
    text = run_helm(helm, "template", RELEASE, str(package), "-n", NAMESPACE, *values)
    assert "LoraplexThrashing" in text
    assert '"title": "Loraplex"' in text


def test_notes_say_how_to_begin(helm: Path, tmp_path: Path) -> None:
    def read(*more: str) -> str:
        said = run_helm(helm, "install", RELEASE, str(CHART), "-n", NAMESPACE, "--dry-run=client", *more)
        return said.partition("NOTES:\n")[2]

    trial = read("-f", str(CHART / "values-trial.yaml"))
    assert "rollout status statefulset/rel-loraplex-trial" in trial
    assert "data/admin.key" in trial
    parts = read("-f", str(CHART / "values-production.yaml"))
    assert "https://llm.example.com/v1" in parts
    assert "get secret loraplex -o jsonpath='{.data.admin-key}'" in parts
    assert "NOTE" not in parts
    card = {"objectStore": OBJECT_STORE, "engine": {"pools": {"main": {**POOL, "gpu": {"count": 1}}}}}
    assert "the cards are idle" in read("-f", str(write_values(tmp_path, card)))
    empty = {"objectStore": OBJECT_STORE, "networkPolicy": {"enabled": False}}
    assert "503 no_replica" in read("-f", str(write_values(tmp_path, empty)))
