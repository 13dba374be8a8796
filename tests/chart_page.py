"""Writes the chart's values into its README, from schema and defaults: `.venv/bin/python tests/chart_page.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from chart_values import SCHEMA
from chart_world import CHART

README = CHART / "README.md"
_LONG = 90
BEGIN, END = "<!-- values: written by tests/chart_page.py -->", "<!-- end of values -->"
Rule = dict[str, Any]
SHARED = {
    "podLabels": "Labels of the pods.",
    "podAnnotations": "Annotations of the pods.",
    "nodeSelector": "Labels of the nodes that the pods go to.",
    "tolerations": "Taints that the pods tolerate.",
    "affinity": "Affinity of the pods.",
    "priorityClassName": "Priority class of the pods.",
    "extraEnv": "Further variables; `LORAPLEX_*` are refused.",
    "extraVolumes": "Further volumes.",
    "extraVolumeMounts": "Where they are mounted.",
    "resources": "Requests and limits.",
    "tmpSizeLimit": "Largest `/tmp`.",
}
"""What most components have; told of once."""

PAGES = {
    "engine.pools.NAME": "pool",
    "gateway.config": "gatewayConfig",
    "registry.config": "partConfig",
    "engine.config": "engineConfig",
}
"""Maps that are empty by default, and what may be in them."""


def resolve(rule: Rule) -> Rule:
    """Return a rule with what it refers to; its own description wins."""
    while "$ref" in rule or "allOf" in rule:
        (reference,) = [rule] if "$ref" in rule else rule["allOf"]
        found = SCHEMA["definitions"][reference["$ref"].rpartition("/")[2]]
        rule = {**found, **{name: one for name, one in rule.items() if name not in ("$ref", "allOf")}}
    return rule


def render_table() -> str:
    """Return the tables."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = [
        row
        for name, rule in SCHEMA["properties"].items()
        if name != "global"
        for row in _rows(name, rule, values[name])
    ]
    lines = [f"| `{path}` | {text} | {default} |" for path, text, default in rows]
    parts = ["| value | meaning | default |", "|---|---|---|", *lines]
    parts += [
        "",
        "Of all pods (`gateway`, `registry`, `engine` and its pools, `migration`, `registration`, `test`, `trial`):",
        "",
    ]
    parts += ["| value | meaning |", "|---|---|", *(f"| `*.{name}` | {text} |" for name, text in SHARED.items())]
    for title, name in PAGES.items():
        parts += ["", f"`{title}`:", "", "| value | meaning |", "|---|---|"]
        known = SCHEMA["properties"]["engine"]["properties"] if name == "pool" else {}
        rules = {key: rule for key, rule in SCHEMA["definitions"][name]["properties"].items() if key not in known}
        parts += [f"| `{key}` | {resolve(rule)['description']} |" for key, rule in rules.items()]
        parts += ["| all others | As `engine.*`, for this pool. |"] if name == "pool" else []
    return "\n".join(parts)


def _rows(path: str, rule: Rule, default: Any) -> Iterator[tuple[str, str, str]]:
    rule = resolve(rule)
    if path.rpartition(".")[2] in SHARED and "." in path:
        return
    properties = rule.get("properties")
    if properties and isinstance(default, dict) and default:
        for name, one in properties.items():
            yield from _rows(f"{path}.{name}", one, default[name])
        return
    text = "" if default == "" else f"`{json.dumps(default)}`"
    yield path, rule["description"], text if len(text) < _LONG else "`values.yaml`"


def render_page() -> str:
    """Return the README with the tables as they are now."""
    before, _, rest = README.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{render_table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(render_page())
