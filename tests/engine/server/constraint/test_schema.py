"""A schema is enforced as a whole or refused with the place of what is not, and nothing that it allows is invalid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from grammar_walk import allows, draw_text
from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint import keyword
from loraplex_engine.server.constraint.compile import compile_grammar
from loraplex_engine.server.constraint.field import MAX_SCHEMA_BYTES
from loraplex_engine.server.constraint.schema import MAX_ENUM_VALUES, MAX_SCHEMA_DEPTH, MAX_SCHEMA_NODES
from loraplex_engine.server.constraint.task import JsonSchema, SchemaTask
from schema_kinds import SchemaMaker

INTEGER = {"type": "integer"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def compile_schema(schema: Any, **options: bool) -> str:
    return compile_grammar(SchemaTask("response_format", JsonSchema(schema, "where", **options)))


def refuse(schema: Any, **options: bool) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        compile_schema(schema, **options)
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def nest(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "name", sorted(keyword.HINTS.keys() | {"contains", "dependencies", "minLenght", "$dynamicRef"})
)
def test_keyword_that_is_not_enforced_is_refused_with_its_place(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [INTEGER, {"type": "array", "items": {name: True}}]}}}
    message = refuse(schema)
    assert message.startswith(f"`where.properties.a.anyOf[1].items.{name}`: this keyword is not supported")
    assert keyword.HINTS.get(name, "") in message


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (True, "`where` must be an object"),
        ({"properties": {"a": 1}}, "`where.properties.a` must be a schema"),
        ({"properties": [INTEGER]}, "`where.properties` must be an object of schemas"),
        ({"anyOf": []}, "`where.anyOf` must be a list of at least one schema"),
        ({"type": "text"}, "`where.type` must be one or several of array, boolean"),
        ({"type": []}, "`where.type` must be"),
        ({"required": ["a", 1]}, "`where.required` must be a list of names"),
        ({"enum": []}, "`where.enum` must be a list of 1 to"),
        ({"enum": list(range(MAX_ENUM_VALUES + 1))}, "`where.enum` must be a list of 1 to"),
        ({"minLength": -1}, "`where.minLength` must be a whole number"),
        ({"maxItems": 1.5}, "`where.maxItems` must be a whole number"),
        ({"maxLength": 10**9}, "`where.maxLength` must be a whole number"),
        ({"minimum": "1"}, "`where.minimum` must be a number"),
        ({"minimum": 1e300}, "`where.minimum` must be a number"),
        ({"minimum": 0, "exclusiveMinimum": True}, "`where.exclusiveMinimum` must be a number"),
        ({"multipleOf": 0}, "`where.multipleOf` must be above 0"),
        ({"type": "string", "format": "colour"}, "`where.format` must be one of date, date-time"),
        ({"type": "string", "pattern": "a" * 513}, "`where.pattern` may have 512 characters"),
        ({"patternProperties": {"a" * 513: True}}, "`where.patternProperties`: a pattern may have 512"),
        ({"$ref": "https://example.com/schema"}, "`where.$ref` must begin with `#`"),
        ({"$schema": "https://example.com/dialect"}, "`where.$schema` must be one of"),
        ({"items": {"$id": "x"}}, "`where.items.$id` may only stand at the root"),
        ({"x-guidance": {"lenient": True}}, "`where.x-guidance` is not yours to set"),
        ({"nullable": True}, '`where.nullable`: this keyword is not supported; write "type": ["string", "null"]'),
        ({"type": "array", "items": [INTEGER]}, "`where.items` must be a schema; use `prefixItems`"),
        ({"type": "object", "minProperties": 2}, "`where.minProperties` may be at most one above"),
        (nest(MAX_SCHEMA_DEPTH), f"is nested deeper than {MAX_SCHEMA_DEPTH} levels"),
        ({"properties": {f"p{i}": {} for i in range(MAX_SCHEMA_NODES)}}, "is one schema too many"),
        ({"$ref": "#/$defs/nowhere"}, "Pointer '/$defs/nowhere' does not exist"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3) is greater than maxLength (2)"),
        (
            {"properties": {"a": {"type": "string", "pattern": "("}}},
            "`where.properties.a` cannot be honoured: in a regular expression: ",
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/A"}},
                "$defs": {"A": {"items": {"type": "string", "pattern": "(?=a)"}}},
            },
            "`where.$defs.A.items` cannot be honoured: in a regular expression: ",
        ),
        (
            {"items": {"oneOf": [INTEGER, {"type": "number"}]}},
            "`where.items` cannot be honoured: several alternatives of `oneOf`",
        ),
        ({"properties": {"a\n": {"not": {}}}}, '`where.properties["a\\n"].not`: this keyword'),
        (
            {"$defs": {"a": {"$anchor": "z", "type": "null"}, "b": {"$anchor": "z"}}, "$ref": "#z"},
            "`where.$defs.b.$anchor` names a schema as another one is named",
        ),
        ({"properties": {"$ref": {}, "type": True}, "$ref": "#/properties"}, "points to no schema: #/properties"),
        ({"const": {"type": "null"}, "$ref": "#/const"}, "points to no schema: #/const"),
        ({"anyOf": [INTEGER], "$ref": "#/anyOf/" + "9" * 5000}, "Failed to parse array index"),
        ({"const": 1, "type": "string"}, "Unsatisfiable"),
        ({"enum": [{"a": [2**53 + 1]}]}, "`where.enum` holds a number beyond 2^53"),
        ({"type": "integer", "enum": [-1e19]}, "`where.enum` holds a number beyond 2^53"),
        ({"const": -(2**63)}, "`where.const` holds a number beyond 2^53"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(schema: Any, message: str) -> None:
    assert message in refuse(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
                "b": {"allOf": [{"$ref": "#/$defs/a"}]},
            },
            "$ref": "#/$defs/a",
        },
        {"$defs": {"n": {"$anchor": "n", "type": "array", "items": {"$ref": "#n"}, "minItems": 1}}, "$ref": "#n"},
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        {"type": "array", "prefixItems": [INTEGER, {"$ref": "#"}], "minItems": 2},
        {"type": "object", "properties": {"a": {"$ref": "#/%70roperties/a"}}, "required": ["a"]},
        {
            "$defs": {
                "x": {"type": "string"},
                "n": {
                    "type": "object",
                    "properties": {"n": {"$ref": "#/$defs/n"}, "x": {"$ref": "#/$defs/x"}},
                    "required": ["n"],
                },
            },
            "$ref": "#/$defs/n",
        },
    ],
)
def test_schema_that_no_finite_value_matches_is_refused(schema: Any) -> None:
    assert "describes no value that ends" in refuse(schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            ['{"a":1}'],
            ['{"a":1,"b":2}', '{"a": 1}', "{}"],
        ),
        (
            {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
            ['{"a":1,"b":[{}]}'],
            ['{"a":"1"}'],
        ),
        ({"type": "object", "required": ["z"], "properties": {"a": INTEGER}}, ['{"a":1,"z":null}'], ['{"a":1}']),
        (
            {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}], "type": "object"},
            ['{"a":1,"b":2}'],
            ['{"a":""}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": INTEGER},
                "anyOf": [{"properties": {"b": INTEGER}, "required": ["b"]}, {"required": ["a"]}],
            },
            ['{"a":1,"b":2}', '{"a":1}'],
            ["{}"],
        ),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, ['{"a":{"a":{}}}'], ['{"a":1}']),
        (
            {"$schema": DRAFT_7, "type": "array", "items": [INTEGER, {"type": "null"}], "additionalItems": False},
            ["[1,null]", "[]"],
            ['["1"]', "[1,null,1]"],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "type": "integer",
                "minimum": 1,
                "exclusiveMinimum": True,
            },
            ["2"],
            ["1"],
        ),
        (
            {"type": "array", "uniqueItems": False, "items": {"type": "integer", "nullable": False}},
            ["[1,1]"],
            ["[null]"],
        ),
        ({"const": {"a": [1, None, "ü\n"]}}, ['{"a":[1,null,"ü\\n"]}'], ['{"a":[]}']),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": INTEGER}, "$ref": "#/$defs/a"}, ["1"], ['"1"']),
        ({"enum": [2**53, 1 - 2**53]}, ["9007199254740992", "-9007199254740991"], ["9007199254740991"]),
        ({"type": "number", "multipleOf": 0.1, "minimum": 0.05, "maximum": 0.15}, ["0.1"], ["0", "0.2", "0.15"]),
        ({"type": "number", "multipleOf": 0.1, "minimum": -0.35, "maximum": -0.05}, ["-0.1", "-0.3"], ["0", "-0.4"]),
        (
            {"type": "number", "multipleOf": 0.1, "exclusiveMinimum": 0, "exclusiveMaximum": 0.3},
            ["0.1", "0.2"],
            ["0", "0.3"],
        ),
        (
            {"type": "object", "minProperties": 1.0, "properties": {"a": {"type": "array", "maxItems": 1.0}}},
            ['{"a":[1]}'],
            ["{}", '{"a":[1,1]}'],
        ),
        ({"type": "string", "maxLength": 2}, ['"é🙂"'], ['"abc"', '"a\n"']),
    ],
)
def test_grammar_allows_what_the_schema_allows_in_compact_form(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = compile_schema(schema)
    assert [text for text in good if not allows(grammar, text)] == []
    assert [text for text in bad if allows(grammar, text)] == []


def test_closing_an_alternative_of_one_of_does_not_make_two_hold_at_once() -> None:
    one = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    assert "several alternatives" in refuse({"oneOf": [one, {"type": "object", "properties": {"b": INTEGER}}]})


def test_spaced_schema_writes_a_blank_after_commas_and_colons() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
    grammar = compile_schema(schema, is_spaced=True)
    assert allows(grammar, '{"a": 1, "b": 2}')
    assert not allows(grammar, '{"a":1,"b":2}')


def test_lenient_schema_passes_over_what_cannot_be_enforced_and_refuses_what_is_no_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "colour", "not": {}}}, "if": {}}
    assert allows(compile_schema(schema, is_lenient=True), '{"a":"red"}')
    assert "`where.properties.a.pattern` must be a string" in refuse(
        {"properties": {"a": {"pattern": 1}}}, is_lenient=True
    )


def test_the_clients_schema_is_not_changed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": INTEGER}}}}
    before = json.dumps(schema)
    compile_schema(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("seed", range(4))
def test_random_texts_of_random_schemas_are_valid(seed: int) -> None:
    maker, num_valid = SchemaMaker(seed), 0
    for _ in range(12):
        schema = maker.make()
        grammar = compile_schema(schema)
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        text = draw_text(grammar, random.Random(seed))
        if text is not None:
            checker.validate(json.loads(text))
            num_valid += 1
    assert num_valid >= 10


def test_schema_with_very_many_properties_is_taken() -> None:
    properties = {f"property_{i}": {"type": "string"} for i in range(1000)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    assert len(json.dumps(schema)) < MAX_SCHEMA_BYTES
    compile_schema(schema)
