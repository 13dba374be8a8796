"""Random JSON schemas of every kind that is enforced, seeded; their values are short, as the models of tests babble."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("id", "name", "größe", "a b", "items", "tags", "price", "is_open", 'q"uote', "type", "x.y", "note")
PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][a-z]?-[0-9]{1,3}$", "^(yes|no|maybe)$", r"^\d{3}$", "^.{0,4}$", "^[^x]{1,3}$")
FORMATS = ("date", "date-time", "time", "ipv4", "uuid", "duration")
VALUES = ("red", 'a"b', "ü", 3, 2.5, None, True, [1, "x"], {"k": "v"}, "", -7, 1e15)


class SchemaMaker:
    """Draws schemas, each with its own definitions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.definitions: Schema = {}

    def make(self) -> Schema:
        """Return one schema; its root is an object more often than not."""
        self.definitions = {}
        schema = self.make_object(3) if self.random.random() < 0.7 else self.make_any(3)
        return schema | ({"$defs": self.definitions} if self.definitions else {})

    def make_any(self, depth: int) -> Schema:
        kinds = [self.make_string, self.make_number, self.make_literal, self.make_scalar]
        if depth:
            kinds += [self.make_object, self.make_array, self.make_map, self.make_choice, self.make_tagged]
            kinds += [self.make_list_of_nodes, self.make_both, self.make_tuple]
        return self.random.choice(kinds)(depth - 1)

    def make_string(self, depth: int) -> Schema:
        kind = self.random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self.random.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.random.choice(FORMATS)}
        least = self.random.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + self.random.randrange(6)}

    def make_number(self, depth: int) -> Schema:
        low = self.random.randrange(-50, 50)
        schema: Schema = {"type": self.random.choice(("integer", "number")), "minimum": low, "maximum": low + 40}
        if self.random.random() < 0.3:
            schema["exclusiveMinimum"] = schema.pop("minimum")
        if self.random.random() < 0.3:
            schema["multipleOf"] = self.random.choice((1, 3, 7) if schema["type"] == "integer" else (0.25, 0.5, 2))
        return schema

    def make_literal(self, depth: int) -> Schema:
        values = self.random.sample(VALUES, self.random.randrange(1, 4))
        return {"const": values[0]} if len(values) == 1 else {"enum": values}

    def make_scalar(self, depth: int) -> Schema:
        return {
            "type": self.random.choice(("boolean", "null", ["boolean", "null"], ["integer", "null"])),
            "maximum": 99,
        }

    def make_object(self, depth: int) -> Schema:
        names = self.random.sample(NAMES, self.random.randrange(1, 5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.make_any(depth) for name in names},
            "required": [name for name in names if self.random.random() < 0.7],
        }
        if self.random.random() < 0.6:
            schema["additionalProperties"] = False
        return schema | self.random.choice(({}, {"title": "T", "description": "D", "default": None, "x-note": 1}))

    def make_array(self, depth: int) -> Schema:
        least = self.random.randrange(3)
        most = least + self.random.randrange(3)
        return {"type": "array", "items": self.make_any(depth), "minItems": least, "maxItems": most}

    def make_map(self, depth: int) -> Schema:
        if self.random.random() < 0.5:
            patterns = {"^[a-c]{1,3}$": self.make_any(depth)}
            return {"type": "object", "patternProperties": patterns, "additionalProperties": False, "maxProperties": 2}
        return {"type": "object", "additionalProperties": self.make_any(depth), "maxProperties": 2}

    def make_choice(self, depth: int) -> Schema:
        return {"anyOf": [self.make_any(depth) for _ in range(self.random.randrange(2, 4))]}

    def make_tagged(self, depth: int) -> Schema:
        branches = []
        for tag in ("cat", "dog"):
            properties = {"kind": {"const": tag}, self.random.choice(NAMES[:3]): self.make_any(depth)}
            branches.append(
                {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
            )
        return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}

    def make_list_of_nodes(self, depth: int) -> Schema:
        name = f"node{len(self.definitions)}"
        reference = {"$ref": f"#/$defs/{name}"}
        self.definitions[name] = {}
        self.definitions[name] = {
            "type": "object",
            "properties": {"value": self.make_any(0), "next": {"anyOf": [{"type": "null"}, reference]}},
            "required": ["value", "next"],
        }
        return reference

    def make_both(self, depth: int) -> Schema:
        first, second = self.random.sample(NAMES, 2)
        return {
            "allOf": [
                {"type": "object", "properties": {first: self.make_any(0)}, "required": [first]},
                {"type": "object", "properties": {second: self.make_any(0)}, "additionalProperties": True},
            ],
            "type": "object",
            "maxProperties": 2,
            "properties": {first: True, second: True},
            "required": [first, second],
        }

    def make_tuple(self, depth: int) -> Schema:
        first = [self.make_any(depth) for _ in range(2)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": self.random.randrange(3)}
