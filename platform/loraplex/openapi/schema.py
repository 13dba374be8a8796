"""JSON schemas: the shared ones as data, and components made from message types, closed and with their ranges.

Types say which fields there are; what types cannot say (ranges, patterns) stands in `REFINED`, by type and field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from loraplex_engine.wire import openai
from loraplex_registry.wire.naming import ALIAS_PATTERN, NAME_PATTERN

Schema = dict[str, Any]
_REF = "#/components/schemas/"
_MAX_INTEGER = (1 << 31) - 1

NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
ALIAS: Schema = {"type": "string", "pattern": f"^{ALIAS_PATTERN}$"}
TIME: Schema = {"type": "string", "format": "date-time"}
SHA256: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
FLAG: Schema = {"type": "string", "enum": ["true", "false"]}
TEXT: Schema = {
    "type": "string",
    "format": "shown-text",
    "minLength": 1,
    "maxLength": 200,
    "description": "In Unicode normal form C, without characters that cannot be shown.",
}
POSITIVE: Schema = {"type": "integer", "minimum": 1, "maximum": _MAX_INTEGER}

ERROR: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": {"type": "string"},
        "type": {
            "enum": [
                "invalid_request_error",
                "authentication_error",
                "permission_error",
                "rate_limit_error",
                "server_error",
            ]
        },
        "param": {"type": ["string", "null"]},
        "code": {"type": "string"},
    },
}


def _is_sent(kind: type) -> bool:
    """Whether a type of the engine's wire is part of a request."""
    is_closed = bool(getattr(getattr(kind, "__struct_config__", None), "forbid_unknown_fields", False))
    return is_closed or kind in (openai.ChatRequest, openai.CompletionRequest, openai.TokenizeRequest)


def ref(name: str) -> Schema:
    """Refer to a component."""
    return {"$ref": _REF + name}


def list_of(name: str) -> Schema:
    """One page of a list."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["data", "next_cursor"],
        "properties": {
            "data": {"type": "array", "items": ref(name)},
            "next_cursor": {"type": ["string", "null"]},
        },
    }


def build_components(
    types: Iterable[type[msgspec.Struct]], refined: Mapping[str, Mapping[str, Schema]]
) -> dict[str, Schema]:
    """Return the schemas of `types` and all that they hold: closed, and an answer's fields all required.

    Args:
        types: What is sent and answered; one that forbids unknown fields is sent, and says itself what it needs.
        refined: For each type by name, keywords to add to its fields.
    """
    _, components = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    for name, schema in components.items():
        if schema.get("type") != "object" or "properties" not in schema:
            continue
        if name in _ENGINE_REQUESTS:
            _allow_null(schema)
        elif schema.get("additionalProperties") is not False:
            schema["required"] = [field for field in schema["properties"] if field not in OPTIONAL.get(name, ())]
        schema["additionalProperties"] = False
        for field, keywords in refined.get(name, {}).items():
            schema["properties"][field] = refine(schema["properties"][field], keywords)
    return components


def _allow_null(schema: Schema) -> None:
    """Let null stand for absent."""
    for field, kind in schema["properties"].items():
        if field not in schema.get("required", ()) and kind:
            variants = kind.get("anyOf", [{key: value for key, value in kind.items() if key != "default"}])
            is_there = {"type": "null"} in variants
            others = {key: value for key, value in kind.items() if key in ("default", "description")}
            schema["properties"][field] = others | {"anyOf": variants if is_there else [*variants, {"type": "null"}]}


# null is the same as absent in these
_ENGINE_REQUESTS = frozenset(name for name, kind in vars(openai).items() if isinstance(kind, type) and _is_sent(kind))
OPTIONAL: dict[str, tuple[str, ...]] = {
    "ChatAnswerChoice": ("logprobs",),
    "ChatAnswerMessage": ("tool_calls",),
    "ChatCompletion": ("prompt_logprobs",),
    "CompletionChoice": ("prompt_logprobs",),
    "Report": ("parity",),
    "WarmedEngine": ("state", "problem"),
    "EngineUsage": ("began_at", "engine", "usage", "pending", "difference", "lost", "mismatches"),
    "UsageRow": ("tenant", "adapter", "version", "key", "day"),
}
"""Fields that an answer may leave out."""


def refine(schema: Schema, keywords: Schema) -> Schema:
    """Return `schema` with keywords added, to each of its variants but null where there are several."""
    if "$ref" in keywords or "anyOf" in keywords:
        return dict(keywords)
    if "anyOf" not in schema:
        return {key: value for key, value in schema.items() if key not in keywords} | keywords
    return schema | {"anyOf": [one if one.get("type") == "null" else refine(one, keywords) for one in schema["anyOf"]]}
