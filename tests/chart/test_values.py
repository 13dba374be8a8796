"""Values: all of them have a type and a meaning, wrong ones are refused, and none can weaken what stands fast."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from chart_page import PAGES, README, SHARED, render_page, resolve
from chart_values import BASE, CASES, ENGINE_SETTINGS, OBJECT_STORE, POOL, SCHEMA
from chart_world import CHART, ChartError, template, walk, write_values

VALIDATOR = Draft7Validator(SCHEMA)


def nest(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def with_store(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"objectStore": OBJECT_STORE, **values}


def read(name: str) -> dict[str, Any]:
    given = CASES[name]
    return dict(yaml.safe_load(given.read_text()) if isinstance(given, Path) else given)


def test_the_schema_is_one_and_takes_every_set_of_values() -> None:
    Draft7Validator.check_schema(SCHEMA)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert [error.message for error in VALIDATOR.iter_errors(defaults)] == []
    for name in CASES:
        assert [error.message for error in VALIDATOR.iter_errors(read(name))] == []


def rules_of(rule: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    rule = resolve(rule)
    yield path, rule
    for name, one in rule.get("properties", {}).items():
        if isinstance(one, dict):
            yield from rules_of(one, f"{path}.{name}".lstrip("."))
    if isinstance(rule.get("additionalProperties"), dict):
        yield from rules_of(rule["additionalProperties"], f"{path}.*")


def test_every_value_has_a_meaning_and_no_map_takes_unknown_names() -> None:
    for path, rule in rules_of(SCHEMA):
        if rule.get("properties") is not None and not path.endswith("Selector"):
            assert rule["additionalProperties"] is False, path
        if path and ".*" not in path:
            assert rule.get("description"), path


def test_the_schema_and_the_defaults_have_the_same_values() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(rule: dict[str, Any], value: Any, path: str) -> None:
        properties = resolve(rule).get("properties")
        if properties and isinstance(value, dict) and value:
            assert value.keys() == properties.keys() - ({"global"} if not path else set()), path
            for name, one in value.items():
                compare(properties[name], one, f"{path}.{name}")

    compare(SCHEMA, defaults, "")


def test_the_readme_has_the_values_as_they_are() -> None:
    assert README.read_text() == render_page(), "run .venv/bin/python tests/chart_page.py"
    text = README.read_text()
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, _ in walk(defaults):
        names = [name for name in path if not name.isdigit()]
        # a row for it, or for the map or list that it is in
        assert any(
            f"`{'.'.join(names[:end])}`" in text or names[end - 1] in SHARED for end in range(1, len(names) + 1)
        ), path
    assert all(f"`{title}`" in text for title in PAGES)


WRONG = {
    "gateway.replicas": ["2", 0, 1.5],
    "gateway.replica": [2],
    "gateway.config.parityGate": ["sometimes"],
    "gateway.config.purgeAfterDays": ["30", -1],
    "gateway.config.adminKey": ["secret"],
    "gateway.extraEnv": [
        [{"name": "LORAPLEX_LOG_LEVL", "value": "debug"}],
        [{"name": "LORAPLEX_TEST_HOOKS", "value": "1"}],
        [{"name": "HOME", "value": "/"}],
        [{"name": "A", "value": 1}],
    ],
    "gateway.extraVolumes": [[{"name": "x", "hostPath": {"path": "/"}}], [{"name": "secrets", "emptyDir": {}}]],
    "gateway.securityContext": [{"runAsUser": 0}],
    "gateway.service.type": ["ExternalName"],
    "gateway.drainSeconds": [3601, "600"],
    "security.runAsUser": [0, "10001"],
    "security.runAsNonRoot": [False],
    "image.controlPlane.digest": ["sha256:short", "latest"],
    "image.pullSecrets": [[{"name": "x"}]],
    "secrets.signingKey": ["-----BEGIN PRIVATE KEY-----", {"value": "x"}],
    "secrets.databaseUrl": ["postgresql://u:p@db/x"],
    "objectStore.url": ["https://bucket", "file:///x", "s3://key:secret@bucket"],
    "objectStore.credentials.secretAccessKey": ["x"],
    "redis.url": ["redis://:password@redis"],
    "engine.pools": [
        {"Main": POOL},
        {"main": {}},
        {"main": {"base": BASE, "model": {"name": "x"}}},
        {"main": {"base": {"name": "Not A Name"}}},
        {"main": {"base": "smollm2-135m"}},
        {"main": {**POOL, "gpu": {"count": 2}}},
        {"main": {**POOL, "config": {"maxLoraRank": 512}}},
        {"main": {**POOL, "config": {"maxLorras": 8}}},
        {"main": {**POOL, "config": {"tensorParallelSize": 2}}},
        {"main": {**POOL, "config": {"kvCacheMemoryBytes": "2Gi"}}},
        {"main": {**POOL, "config": {"gpuMemoryUtilization": 0.9, "kvCacheMemoryBytes": "2GiB"}}},
        {"main": {**POOL, "pin": [{"model": "x", "copies": 0}]}},
        {"main": {**POOL, "engines": ["https://a"]}},
        {"main": {**POOL, "autoscaling": {"cpu": 80}}},
    ],
    "engine.autoscaling.queueSeconds": ["1", 0],
    "engine.cache.size": ["50 GB", 50, "0Gi"],
    "ingress": [{"enabled": True, "hosts": []}, {"enabled": "yes", "hosts": ["a"]}],
    "httpRoute": [{"enabled": True, "parentRefs": []}],
    "networkPolicy.clients": [[{"cidr": "10.0.0.0/8"}], [{}]],
    "networkPolicy.egress.database.port": ["5432", 0],
    "monitoring.serviceMonitor.engineToken": ["token"],
    "trial.enabled": ["true", 1],
    "unknown": [1],
}
CASES_OF_WRONG = [(path, value) for path, values in WRONG.items() for value in values]


@pytest.mark.parametrize(
    ("path", "value"), CASES_OF_WRONG, ids=[f"{path}={json.dumps(value)[:50]}" for path, value in CASES_OF_WRONG]
)
def test_a_wrong_value_is_refused(path: str, value: Any) -> None:
    assert not VALIDATOR.is_valid(with_store(nest(path, value)))


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize(
    "path", ["gateway.replicas", "gateway.extraEnv", "engine.pools", "secrets.databaseUrl", "unknown"]
)
def test_helm_refuses_what_the_schema_refuses(
    find_program: Callable[[int], Path], tmp_path: Path, major: int, path: str
) -> None:
    """Both majors have a validator of their own, so each is asked about every form of rule."""
    value = WRONG[path][-1] if path == "engine.pools" else WRONG[path][0]
    with pytest.raises(ChartError, match="don't meet the specifications of the schema"):
        template(find_program(major), write_values(tmp_path, with_store(nest(path, value))))


def test_values_that_the_program_refuses_are_refused_by_the_schema() -> None:
    """The ranges are those of the program: what the engine's config refuses has no way into a release."""
    from loraplex_engine.config import _RANGES

    rules = SCHEMA["definitions"]["engineConfig"]["properties"]
    snake = {
        "".join("_" + letter.lower() if letter.isupper() else letter for letter in name): name
        for name in ENGINE_SETTINGS
    }
    for field, low, high in _RANGES:
        name = snake.get(field.removesuffix("_s"))
        rule = resolve(rules[name]) if name else {}
        if name and "minimum" in rule:
            assert (rule["minimum"], rule["maximum"]) == (low, high), name
