"""Judges a JSON schema before it becomes a grammar: each keyword is enforced, an annotation, or refused with its place.

The checks are about the form of a schema and about what the grammar library would pass over in silence; whether any
text can satisfy it is found out by `compile.py`. Source: JSON Schema, draft 2020-12 and those before it.
"""

from __future__ import annotations

from typing import Any

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint import keyword
from loraplex_engine.server.constraint.closing import close_objects
from loraplex_engine.server.constraint.node import Schema
from loraplex_engine.server.constraint.place import join
from loraplex_engine.server.constraint.steps import move_bounds
from loraplex_engine.server.constraint.task import JsonSchema

MAX_SCHEMA_DEPTH = 64
"""Objects and lists within each other; the grammar library reads twice as many."""
MAX_SCHEMA_NODES = 5000
MAX_ENUM_VALUES = 1000
MAX_PATTERN_CHARS = 512
_LARGEST_COUNT = 1_000_000
# beyond, a bound no longer fits the whole numbers of the grammar library
_LARGEST_BOUND = 2**53


class _FaultError(Exception):
    """What is wrong, and where."""


def prepare_schema(part: JsonSchema, param: str) -> Schema:
    """Return the schema that is compiled: checked, without what changes nothing, its objects closed where that is safe.

    An object that names its properties and does not say whether there may be others gets no others: each such answer
    is valid, and a model that invents names would never come to an end.

    Raises:
        InvalidRequestError: A keyword is not enforced here or has a value that it cannot have; the message names the
            place, `param` the field.
    """
    if not isinstance(part.schema, dict):
        raise InvalidRequestError(f"`{part.where}` must be an object.", param=param)
    try:
        schema = _Walk(part.schema, is_lenient=part.is_lenient).read(part.schema, part.where, depth=1)
    except _FaultError as refusal:
        raise InvalidRequestError(str(refusal), param=param) from refusal
    return close_objects(schema)


class _Walk:
    """Reads one schema and counts what it has seen."""

    def __init__(self, root: Schema, *, is_lenient: bool) -> None:
        self._root = root
        self._is_lenient = is_lenient
        dialect = str(root.get("$schema", ""))
        self._has_old_items = bool(dialect) and "2020-12" not in dialect
        self._has_old_bounds = "draft-04" in dialect
        self._num_nodes = 0
        self._anchors: set[str] = set()

    def read(self, schema: Any, where: str, *, depth: int) -> Any:
        """Return a checked copy."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _FaultError(f"`{where}` must be a schema: an object, true or false.")
        self._num_nodes += 1
        if self._num_nodes > MAX_SCHEMA_NODES:
            raise _FaultError(f"`{where}` is one schema too many; there may be {MAX_SCHEMA_NODES} within each other.")
        if depth > MAX_SCHEMA_DEPTH:
            raise _FaultError(f"`{where}` is nested deeper than {MAX_SCHEMA_DEPTH} levels; use `$defs` and `$ref`.")
        kept: Schema = {}
        for name, value in schema.items():
            if self._is_kept(name, value, schema, where):
                kept[name] = self._read_value(name, value, join(where, name), depth + 1)
        _check_together(kept, where)
        self._note_anchor(kept, where)
        move_bounds(kept)
        return kept

    def _note_anchor(self, schema: Schema, where: str) -> None:
        anchor = schema.get("$anchor")
        if anchor in self._anchors:
            raise _FaultError(f"`{join(where, '$anchor')}` names a schema as another one is named.")
        if anchor is not None:
            self._anchors.add(anchor)

    def _is_kept(self, name: str, value: Any, schema: Schema, where: str) -> bool:
        """Whether a keyword goes to the grammar; raises if it may not be there."""
        if name in keyword.ENFORCED:
            if name == "$id" and schema is not self._root:
                raise _FaultError(f"`{join(where, name)}` may only stand at the root of the schema.")
            return True
        if name == "x-guidance":
            raise _FaultError(f"`{join(where, name)}` is not yours to set; leave it out.")
        if name in keyword.ANNOTATIONS or name.startswith("x-") or self._is_lenient:
            return False
        if name in keyword.NEUTRAL and value == keyword.NEUTRAL[name]:
            return False
        hint = keyword.HINTS.get(name)
        raise _FaultError(
            f"`{join(where, name)}`: this keyword is not supported{f'; {hint}' if hint else ''}. An answer must match "
            "all of its schema or none."
        )

    def _read_value(self, name: str, value: Any, where: str, depth: int) -> Any:
        if name in keyword.SCHEMA_MAP_KEYWORDS:
            if not isinstance(value, dict):
                raise _FaultError(f"`{where}` must be an object of schemas.")
            return {key: self.read(child, join(where, key), depth=depth + 1) for key, child in value.items()}
        if name in keyword.SCHEMA_LIST_KEYWORDS or (name == "items" and isinstance(value, list)):
            return self._read_list(name, value, where, depth)
        if name in keyword.SCHEMA_KEYWORDS:
            return self.read(value, where, depth=depth)
        _check_value(name, value, where, has_old_bounds=self._has_old_bounds)
        if name in keyword.COUNT_KEYWORDS:
            return int(value)
        if name == "format" and value not in keyword.FORMATS and not self._is_lenient:
            raise _FaultError(f"`{where}` must be one of {', '.join(sorted(keyword.FORMATS))}.")
        return value

    def _read_list(self, name: str, value: Any, where: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise _FaultError(f"`{where}` must be a list of at least one schema.")
        if name == "items" and not self._has_old_items:
            raise _FaultError(f"`{where}` must be a schema; use `prefixItems` for a list of them.")
        return [self.read(child, join(where, index), depth=depth + 1) for index, child in enumerate(value)]


def _check_value(name: str, value: Any, where: str, *, has_old_bounds: bool) -> None:
    if name in keyword.COUNT_KEYWORDS:
        _check_count(value, where)
    elif name in keyword.NUMBER_KEYWORDS:
        if not (has_old_bounds and isinstance(value, bool) and name.startswith("exclusive")):
            _check_number(name, value, where)
    elif name in keyword.TEXT_KEYWORDS:
        _check_text(name, value, where)
    else:
        _check_list(name, value, where)


def _check_list(name: str, value: Any, where: str) -> None:
    if name in ("const", "enum") and not _is_exact(value):
        raise _FaultError(f"`{where}` holds a number beyond 2^53, which would be rounded.")
    if name == "enum" and not (isinstance(value, list) and 1 <= len(value) <= MAX_ENUM_VALUES):
        raise _FaultError(f"`{where}` must be a list of 1 to {MAX_ENUM_VALUES} values.")
    if name == "required" and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise _FaultError(f"`{where}` must be a list of names.")
    if name == "type":
        types = value if isinstance(value, list) and value else [value]
        if not all(isinstance(one, str) and one in keyword.TYPES for one in types):
            raise _FaultError(f"`{where}` must be one or several of {', '.join(sorted(keyword.TYPES))}.")


def _is_exact(value: Any) -> bool:
    """Whether the grammar library keeps all numbers in a value as they are; far below, it even ends its process."""
    if isinstance(value, dict | list):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= _LARGEST_BOUND


def _check_count(value: Any, where: str) -> None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST_COUNT:
        raise _FaultError(f"`{where}` must be a whole number from 0 to {_LARGEST_COUNT}.")


def _check_number(name: str, value: Any, where: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _LARGEST_BOUND:
        raise _FaultError(f"`{where}` must be a number from -2^53 to 2^53.")
    if name == "multipleOf" and value <= 0:
        raise _FaultError(f"`{where}` must be above 0.")


def _check_text(name: str, value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _FaultError(f"`{where}` must be a string.")
    if name == "pattern" and len(value) > MAX_PATTERN_CHARS:
        raise _FaultError(f"`{where}` may have {MAX_PATTERN_CHARS} characters.")
    if name == "$ref" and not value.startswith("#"):
        raise _FaultError(f"`{where}` must begin with `#`: nothing outside of this schema is read.")
    if name == "$schema" and value.removesuffix("#") not in keyword.DIALECTS:
        raise _FaultError(f"`{where}` must be one of {', '.join(sorted(keyword.DIALECTS))}; or leave it out.")


def _check_together(schema: Schema, where: str) -> None:
    """Refuse what is only wrong in company."""
    patterns = schema.get("patternProperties", {})
    if any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns):
        raise _FaultError(f"`{join(where, 'patternProperties')}`: a pattern may have {MAX_PATTERN_CHARS} characters.")
    # names that the schema does not list may come twice in the text, and count once for who reads it
    num_unlisted = schema.get("minProperties", 0) - len(set(schema.get("required", ())))
    if num_unlisted > 1 and (patterns or schema.get("additionalProperties", True) is not False):
        raise _FaultError(
            f"`{join(where, 'minProperties')}` may be at most one above the number of required properties; "
            "list the names in `properties` and `required`."
        )
