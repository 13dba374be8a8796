"""The keywords of JSON Schema: what is enforced, what forbids nothing, and what is refused as neither.

`tests/engine/server/constraint` binds this table to the docs and to what the grammar library enforces.
"""

from __future__ import annotations

SCHEMA_KEYWORDS = frozenset(("additionalItems", "additionalProperties", "items"))
"""Their value is a schema."""
SCHEMA_MAP_KEYWORDS = frozenset(("$defs", "definitions", "patternProperties", "properties"))
"""Their value maps names to schemas."""
SCHEMA_LIST_KEYWORDS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
"""Their value is a list of schemas."""
VALUE_KEYWORDS = frozenset(("const", "enum", "required", "type"))
COUNT_KEYWORDS = frozenset(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"))
NUMBER_KEYWORDS = frozenset(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"))
TEXT_KEYWORDS = frozenset(("$anchor", "$id", "$ref", "$schema", "format", "pattern"))
ENFORCED = (
    SCHEMA_KEYWORDS
    | SCHEMA_MAP_KEYWORDS
    | SCHEMA_LIST_KEYWORDS
    | VALUE_KEYWORDS
    | COUNT_KEYWORDS
    | NUMBER_KEYWORDS
    | TEXT_KEYWORDS
)
ANNOTATIONS = frozenset(
    (
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "readOnly",
        "title",
        "writeOnly",
    )
)
"""They say something about a value and forbid none; so do names that begin with `x-`."""
NEUTRAL: dict[str, object] = {"uniqueItems": False, "nullable": False}
"""Refused with any other value."""
HINTS = {
    "dependentRequired": "describe the cases with `anyOf`",
    "dependentSchemas": "describe the cases with `anyOf`",
    "else": "describe the cases with `anyOf`",
    "if": "describe the cases with `anyOf`",
    "not": "describe what is allowed, with `enum`, `pattern` or `anyOf`",
    "nullable": 'write "type": ["string", "null"]',
    "propertyNames": "use `patternProperties` with `additionalProperties` false",
    "then": "describe the cases with `anyOf`",
    "unevaluatedProperties": "use `additionalProperties`",
    "uniqueItems": "leave it out and check the answer",
}
"""What to write instead of a keyword that is refused."""
TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
DIALECTS = frozenset(
    (
        "http://json-schema.org/draft-04/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    )
)
"""Values of `$schema`, with or without `#` at the end."""
