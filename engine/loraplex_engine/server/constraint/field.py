"""Reads from a request what its text must match: `response_format`, `guided_*` or `structured_outputs`, one at most.

Only sizes and conflicts are judged here, in the front; the schema or grammar itself is judged in the sandbox.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint.schema import MAX_PATTERN_CHARS
from loraplex_engine.server.constraint.task import ChoiceTask, GrammarTask, JsonSchema, LarkTask, RegexTask, SchemaTask
from loraplex_engine.wire.openai import ResponseFormat, SamplingFields
from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.strict_json import parse_json

MAX_SCHEMA_BYTES = 64 * 1024
MAX_GRAMMAR_CHARS = 32 * 1024
MAX_CHOICE_COUNT = 1000
MAX_CHOICE_CHARS = 32 * 1024
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_constraint(request: SamplingFields) -> GrammarTask | None:
    """Return what the answer's text must match, None for anything.

    Raises:
        InvalidRequestError: Two constraints at once, a too large one, or one without its schema; `param` names it.
    """
    found = [task for task in (*_read_guided(request), *_read_structured(request), *_read_format(request)) if task]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequestError(
            f"`{second}` is a second constraint beside `{first}`; send one of them."
            if first != second
            else f"`{first}` holds several constraints; send one of them.",
            param=second,
        )
    return found[0] if found else None


def check_schema_size(schema: dict[str, Any] | bool, where: str, param: str) -> None:
    """Refuse a schema whose JSON text is too long to be judged in time. Raises as `read_constraint`."""
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(f"`{where}` may have {MAX_SCHEMA_BYTES} bytes of JSON.", param=param)


def _read_format(request: SamplingFields) -> list[GrammarTask | None]:
    given = request.response_format
    if given is None:
        return []
    param, where = "response_format", "response_format.json_schema"
    if given.type != "json_schema":
        if given.json_schema is not None:
            raise InvalidRequestError(f"`{where}` needs `type` to be json_schema.", param=param)
        return [_any_object(param, param)] if given.type == "json_object" else []
    return [_read_schema_format(given, param, where)]


def _read_schema_format(given: ResponseFormat, param: str, where: str) -> GrammarTask:
    wanted = given.json_schema
    if wanted is None or wanted.schema is None:
        raise InvalidRequestError(f"`{where}.schema` is missing; send a schema, or the type json_object.", param=param)
    if _NAME.fullmatch(wanted.name) is None:
        raise InvalidRequestError(
            f"`{where}.name` must have 1 to 64 letters, digits, underscores and hyphens.", param=param
        )
    return _schema_task(wanted.schema, f"{where}.schema", param)


def _read_guided(request: SamplingFields) -> list[GrammarTask | None]:
    return [
        _json_task(request.guided_json, "guided_json", "guided_json"),
        _regex_task(request.guided_regex, "guided_regex", "guided_regex"),
        _choice_task(request.guided_choice, "guided_choice", "guided_choice"),
        _lark_task(request.guided_grammar, "guided_grammar", "guided_grammar"),
    ]


def _read_structured(request: SamplingFields) -> list[GrammarTask | None]:
    given, param = request.structured_outputs, "structured_outputs"
    if given is None:
        return []
    found = [
        _json_task(given.json, f"{param}.json", param),
        _any_object(f"{param}.json_object", param) if given.json_object else None,
        _regex_task(given.regex, f"{param}.regex", param),
        _choice_task(given.choice, f"{param}.choice", param),
        _lark_task(given.grammar, f"{param}.grammar", param),
    ]
    if not any(found):
        raise InvalidRequestError(f"`{param}` holds no constraint; leave it out.", param=param)
    return found


def _any_object(where: str, param: str) -> SchemaTask:
    return SchemaTask(param, JsonSchema({"type": "object"}, where))


def _json_task(schema: Any, where: str, param: str) -> GrammarTask | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_BYTES:
            raise InvalidRequestError(f"`{where}` may have {MAX_SCHEMA_BYTES} bytes of JSON.", param=param)
        try:
            schema = parse_json(schema.encode())
        except JsonError as error:
            raise InvalidRequestError(f"`{where}` is not strict JSON: {error}.", param=param) from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"`{where}` must be a schema: a JSON object.", param=param)
    return _schema_task(schema, where, param)


def _schema_task(schema: dict[str, Any], where: str, param: str) -> SchemaTask:
    check_schema_size(schema, where, param)
    return SchemaTask(param, JsonSchema(schema, where))


def _regex_task(pattern: str | None, where: str, param: str) -> GrammarTask | None:
    if pattern is None:
        return None
    if not 1 <= len(pattern) <= MAX_PATTERN_CHARS:
        raise InvalidRequestError(f"`{where}` must have 1 to {MAX_PATTERN_CHARS} characters.", param=param)
    return RegexTask(param, pattern)


def _choice_task(choices: list[str] | None, where: str, param: str) -> GrammarTask | None:
    if choices is None:
        return None
    if not 1 <= len(choices) <= MAX_CHOICE_COUNT or sum(map(len, choices)) > MAX_CHOICE_CHARS:
        raise InvalidRequestError(
            f"`{where}` must hold 1 to {MAX_CHOICE_COUNT} texts of {MAX_CHOICE_CHARS} characters in all.", param=param
        )
    if not all(choices):
        raise InvalidRequestError(f"`{where}` must not hold an empty text.", param=param)
    return ChoiceTask(param, choices)


def _lark_task(text: str | None, where: str, param: str) -> GrammarTask | None:
    if text is None:
        return None
    if not 1 <= len(text) <= MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"`{where}` must have 1 to {MAX_GRAMMAR_CHARS} characters.", param=param)
    return LarkTask(param, text)
