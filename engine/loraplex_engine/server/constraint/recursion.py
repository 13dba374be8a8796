"""Finds schemas that no finite text satisfies: an object that must hold an object of its own kind, and so on.

The grammar of such a schema is in order, yet an answer never ends. Source: the least fixed point by which useless
symbols of context-free grammars are found.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from loraplex_engine.server.constraint.node import Schema, children

_MAX_DIGITS = 4
_SCALARS = frozenset(("boolean", "integer", "null", "number", "string"))


def can_end(schema: Schema) -> bool:
    """Whether some finite value may satisfy a checked schema; references are followed, bounds are not looked at."""
    targets = _find_targets(schema)
    finite: set[str] = set()
    while True:
        more = {ref for ref, target in targets.items() if ref not in finite and _is_finite(target, finite)}
        if not more:
            return _is_finite(schema, finite)
        finite |= more


def find_stray(schema: Schema) -> str | None:
    """Return a reference of a checked schema to something in it that is no schema."""
    return next((ref for ref, target in _find_targets(schema).items() if target is None), None)


def _find_targets(schema: Schema) -> dict[str, Any]:
    """Each reference with the schema that it points to, None where something else is there, True where nothing is."""
    refs: set[str] = set()
    nodes: set[int] = set()
    anchors: dict[str, Any] = {}
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            nodes.add(id(node))
            if "$ref" in node:
                refs.add(node["$ref"])
            if "$anchor" in node:
                anchors[f"#{node['$anchor']}"] = node
            waiting.extend(child for _, child in children(node))
    targets = {ref: anchors.get(ref, _resolve(schema, ref)) for ref in refs}
    return {ref: one if isinstance(one, bool) or id(one) in nodes else None for ref, one in targets.items()}


def _resolve(schema: Schema, ref: str) -> Any:
    target: Any = schema
    for step in ref.removeprefix("#").split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and len(name) <= _MAX_DIGITS and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return True
    return target


def _is_finite(schema: Any, finite: set[str]) -> bool:
    if not isinstance(schema, dict):
        # one that nothing satisfies is the grammar library's to refuse
        return True
    if "$ref" in schema and schema["$ref"] not in finite:
        return False
    if not all(_is_finite(one, finite) for one in schema.get("allOf", ())):
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(_is_finite(one, finite) for one in schema[name]):
            return False
    if "const" in schema or "enum" in schema:
        return True
    types = schema.get("type", "null")
    return any(_is_finite_type(one, schema, finite) for one in ([types] if isinstance(types, str) else types))


def _is_finite_type(kind: str, schema: Schema, finite: set[str]) -> bool:
    if kind in _SCALARS:
        return True
    if kind == "object":
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if schema.get("patternProperties"):
            others = True
        return all(_is_finite(properties.get(name, others), finite) for name in schema.get("required", ()))
    least = schema.get("minItems", 0)
    items = schema.get("items", True)
    first = schema.get("prefixItems", items if isinstance(items, list) else [])
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    needed = [*first[:least], *([rest] if least > len(first) else [])]
    return all(_is_finite(one, finite) for one in needed)
