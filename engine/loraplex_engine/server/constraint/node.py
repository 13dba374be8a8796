"""The parts of a checked JSON schema: which schemas lie within which."""

from __future__ import annotations

from typing import Any

from loraplex_engine.server.constraint import keyword

Schema = dict[str, Any]


def children(schema: Schema) -> list[tuple[tuple[str | int, ...], Any]]:
    """The schemas directly within a checked one, each with the names that lead to it."""
    found: list[tuple[tuple[str | int, ...], Any]] = []
    for name, value in schema.items():
        if name in keyword.SCHEMA_MAP_KEYWORDS:
            found.extend(((name, key), child) for key, child in value.items())
        elif name in keyword.SCHEMA_LIST_KEYWORDS or (name == "items" and isinstance(value, list)):
            found.extend(((name, index), child) for index, child in enumerate(value))
        elif name in keyword.SCHEMA_KEYWORDS:
            found.append(((name,), value))
    return found


def find_nodes(schema: Any) -> list[Schema]:
    """All schemas within a checked one, itself first."""
    if not isinstance(schema, dict):
        return []
    found, index = [schema], 0
    while index < len(found):
        found.extend(child for _, child in children(found[index]) if isinstance(child, dict))
        index += 1
    return found
