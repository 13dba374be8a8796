"""Which constraint a request carries, and what is refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint.field import (
    MAX_CHOICE_CHARS,
    MAX_CHOICE_COUNT,
    MAX_GRAMMAR_CHARS,
    MAX_SCHEMA_BYTES,
    read_constraint,
)
from loraplex_engine.server.constraint.task import ChoiceTask, GrammarTask, JsonSchema, LarkTask, RegexTask, SchemaTask
from loraplex_engine.wire.openai import SamplingFields

SCHEMA = {"type": "object", "properties": {"a": {"default": None}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": SCHEMA, "strict": True}}


def read(**fields: Any) -> GrammarTask | None:
    return read_constraint(msgspec.convert({"model": "m", **fields}, SamplingFields))


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": FORMAT},
            SchemaTask("response_format", JsonSchema(SCHEMA, "response_format.json_schema.schema")),
        ),
        (
            {"response_format": {"type": "json_object"}},
            SchemaTask("response_format", JsonSchema({"type": "object"}, "response_format")),
        ),
        ({"guided_json": SCHEMA}, SchemaTask("guided_json", JsonSchema(SCHEMA, "guided_json"))),
        (
            {"guided_json": msgspec.json.encode(SCHEMA).decode()},
            SchemaTask("guided_json", JsonSchema(SCHEMA, "guided_json")),
        ),
        ({"guided_regex": "a+"}, RegexTask("guided_regex", "a+")),
        ({"guided_choice": ["a", "b"]}, ChoiceTask("guided_choice", ["a", "b"])),
        ({"guided_grammar": "start: /a/"}, LarkTask("guided_grammar", "start: /a/")),
        (
            {"structured_outputs": {"json": SCHEMA}},
            SchemaTask("structured_outputs", JsonSchema(SCHEMA, "structured_outputs.json")),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            SchemaTask("structured_outputs", JsonSchema({"type": "object"}, "structured_outputs.json_object")),
        ),
        ({"structured_outputs": {"regex": "a+"}}, RegexTask("structured_outputs", "a+")),
        ({"structured_outputs": {"choice": ["a"], "json_object": False}}, ChoiceTask("structured_outputs", ["a"])),
        ({"structured_outputs": {"grammar": "start: /a/"}}, LarkTask("structured_outputs", "start: /a/")),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, RegexTask("guided_regex", "a")),
    ],
)
def test_constraint_is_read(fields: dict[str, Any], task: GrammarTask | None) -> None:
    assert read(**fields) == task


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex", "second constraint beside `guided_json`"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "beside `guided_regex`"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "holds several constraints"),
        ({"structured_outputs": {}}, "structured_outputs", "holds no constraint"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "`response_format.json_schema.schema` is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "schema` is missing",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
            "response_format",
            "needs `type` to be",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format",
            "json_schema.name` must have 1 to 64",
        ),
        ({"guided_json": "{"}, "guided_json", "is not strict JSON"),
        ({"guided_json": '{"type": "string", "type": "null"}'}, "guided_json", "is not strict JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be a schema"),
        ({"guided_json": "[" * 50_000}, "guided_json", "is not strict JSON"),
        ({"guided_json": {"a": "x" * MAX_SCHEMA_BYTES}}, "guided_json", f"may have {MAX_SCHEMA_BYTES} bytes"),
        ({"guided_json": " " * MAX_SCHEMA_BYTES + "{}"}, "guided_json", f"may have {MAX_SCHEMA_BYTES} bytes"),
        ({"guided_regex": ""}, "guided_regex", "must have 1 to 512"),
        ({"guided_regex": "a" * 513}, "guided_regex", "must have 1 to 512"),
        ({"guided_choice": []}, "guided_choice", "must hold 1 to"),
        ({"guided_choice": ["a"] * (MAX_CHOICE_COUNT + 1)}, "guided_choice", "must hold 1 to"),
        ({"guided_choice": ["a" * MAX_CHOICE_CHARS, "b"]}, "guided_choice", "must hold 1 to"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "must not hold an empty text"),
        ({"guided_grammar": ""}, "guided_grammar", "must have 1 to"),
        ({"guided_grammar": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_grammar", "must have 1 to"),
    ],
)
def test_what_is_refused_before_it_is_compiled(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert caught.value.param == param
    assert message in str(caught.value)
