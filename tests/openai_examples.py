"""Tools, schemas and messages of which the rows of the table make their examples."""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


def with_tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [TOOL | {"function": TOOL["function"] | changes}]}


def with_format(**changes: Any) -> dict[str, Any]:
    return {"response_format": FORMAT | {"json_schema": {"name": "place", "schema": SCHEMA} | changes}}


def says(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages]}


def part_of(kind: str, **fields: Any) -> dict[str, Any]:
    return says({"role": "user", "content": [{"type": kind, **fields}]})
