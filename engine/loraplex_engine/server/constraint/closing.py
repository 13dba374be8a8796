"""Closes objects: one that names its properties and does not say whether there may be others gets no others.

Each answer that remains is valid, and a model that invents names would never come to an end.
"""

from __future__ import annotations

from loraplex_engine.server.constraint.node import Schema, find_nodes

_OBJECT_KEYWORDS = frozenset(("additionalProperties", "patternProperties", "properties", "required", "minProperties"))
_COMBINERS = frozenset(("$ref", "allOf", "anyOf", "oneOf"))


def close_objects(schema: Schema) -> Schema:
    """Return the checked schema with its objects closed, or as it is where closing one could forbid all answers."""
    if not _is_closable(schema):
        return schema
    for node in find_nodes(schema):
        properties = node.get("properties")
        if properties and not ({"additionalProperties", "patternProperties"} & node.keys()):
            listed = set(node.get("required", ())) <= properties.keys()
            if listed and node.get("minProperties", 0) <= len(properties):
                node["additionalProperties"] = False
    return schema


def _is_closable(schema: Schema) -> bool:
    """Whether no object is described by several schemas at once, each of which would forbid what another names.

    Nor by `oneOf`, whose alternatives exclude each other by what they allow.
    """
    return all(
        "oneOf" not in node
        and len(node.get("allOf", ())) <= 1
        and not (_COMBINERS & node.keys() and (_OBJECT_KEYWORDS & node.keys() or len(_COMBINERS & node.keys()) > 1))
        for node in find_nodes(schema)
    )
