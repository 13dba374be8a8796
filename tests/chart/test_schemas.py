"""Every object against Kubernetes' own strict schemas, of three versions; those of operators against what is known of
theirs (`tests/chart/crd`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from chart_tools import SCHEMA_VERSIONS, ToolUnavailable, find_schemas
from chart_values import CASES
from chart_world import Object, Rendering
from conftest import skip_or_fail

OWN = Path(__file__).parent / "crd"
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"}


@cache
def find_validator(version: str, kind: str, api_version: str) -> Draft202012Validator:
    """Return what judges an object, as `kubernetes-validate --strict` does."""
    try:
        folder = find_schemas(version)
    except ToolUnavailable as reason:
        skip_or_fail("kubernetes-schemas", str(reason))
    group, _, name = api_version.rpartition("/")
    file = "-".join([kind.lower(), *([group.split(".")[0]] if group else []), name])
    return Draft202012Validator(json.loads((folder / f"{file}.json").read_text()), registry=_read_registry(folder))


@cache
def _read_registry(folder: Path) -> Registry[Any]:
    definitions = json.loads((folder / "_definitions.json").read_text())
    resource = Resource.from_contents(definitions, default_specification=DRAFT202012)
    return Registry().with_resource("_definitions.json", resource)


def find_problems(found: Object, version: str) -> list[str]:
    """Return what is wrong with an object."""
    if found["kind"] in OF_OPERATORS:
        schema = json.loads((OWN / f"{found['kind'].lower()}.json").read_text())
        validator = Draft202012Validator(schema)
    else:
        validator = find_validator(version, found["kind"], found["apiVersion"])
    return [f"{found['kind']} {error.json_path}: {error.message}" for error in validator.iter_errors(found)]


@pytest.mark.parametrize("version", SCHEMA_VERSIONS)
def test_each_object_is_one_that_kubernetes_knows(
    render: Callable[[str], Rendering], version: str, long: Callable[[float, float], float]
) -> None:
    cases = CASES if long(1, 2) == 2 else ("everything", "trial")
    distinct = {json.dumps(one, sort_keys=True): one for name in cases for one in render(name).objects}
    assert len(distinct) > 40
    assert [problem for one in distinct.values() for problem in find_problems(one, version)] == []


@pytest.mark.parametrize("version", SCHEMA_VERSIONS[:1])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Deployment", {"spec": {"replica": 2}}),
        ("StatefulSet", {"spec": {"replicas": "2"}}),
        ("NetworkPolicy", {"spec": {"policytypes": []}}),
        ("PodDisruptionBudget", {"spec": {"maxUnavailable": [1]}}),
        ("ScaledObject", {"spec": {"maxReplicas": 2}}),
        ("ServiceMonitor", {"spec": {"endpoint": []}}),
        ("PrometheusRule", {"spec": {"groups": [{"name": 1}]}}),
        ("HTTPRoute", {"spec": {"hostname": "a"}}),
    ],
)
def test_the_schemas_find_faults(
    render: Callable[[str], Rendering], version: str, kind: str, change: dict[str, dict[str, Any]]
) -> None:
    whole = render("everything").of_kind(kind)[0]
    assert find_problems({**whole, "spec": {**whole["spec"], **change["spec"]}}, version)
