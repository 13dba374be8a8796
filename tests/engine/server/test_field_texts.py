"""What a refusal of a field says: its whole path, what was sent and what is allowed, in JSON's words."""

# ruff: noqa: E501

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.field.request import read_chat, read_tokenize
from loraplex_engine.wire.misfit import find_misfit
from openai_page import ROWS

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {}}


def says(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, USER | message]}


def refuse(fields: dict[str, Any], read: Any = read_chat) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refusal:
        read(CHAT | fields)
    return refusal.value


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (says(foo=1), "messages[1].foo"),
        (says(content=[{"type": "text", "text": "x", "foo": 1}]), "messages[1].content[0].foo"),
        (
            says(role="assistant", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}", "foo": 1}}]),
            "messages[1].tool_calls[0].function.foo",
        ),
        ({"tools": [{"type": "function", "function": FUNCTION | {"foo": 1}}]}, "tools[0].function.foo"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}, "foo": 1}}, "tool_choice.foo"),
        ({"response_format": {"type": "text", "foo": 1}}, "response_format.foo"),
        ({"structured_outputs": {"foo": 1}}, "structured_outputs.foo"),
        ({"stream": True, "stream_options": {"foo": True}}, "stream_options.foo"),
    ],
)
def test_an_unknown_name_within_a_field_is_an_unknown_parameter(fields: dict[str, Any], path: str) -> None:
    error = refuse(fields)
    assert (error.code, error.param) == ("unknown_parameter", re.split(r"[.\[]", path, maxsplit=1)[0])
    assert str(error) == f"Nobody knows the parameter `{path}`; check its spelling."
    long = refuse({"structured_outputs": {"f" * 1000: 1}})
    assert (long.param, len(str(long)) < 200) == ("structured_outputs", True)


def test_what_openai_knows_is_not_called_unknown_at_any_depth() -> None:
    rows = [row for row in ROWS if row.verdict == "refused" and "chat" in row.endpoints]
    assert len(rows) > 30
    codes = {row.path: refuse(row.context | row.example).code for row in rows}
    assert {path: code for path, code in codes.items() if code == "unknown_parameter"} == {}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": "2"}, "`n` must be an integer, not a string."),
        ({"n": 1.0}, "`n` must be an integer, not a decimal number."),
        ({"temperature": "1"}, "`temperature` must be a number, not a string."),
        ({"temperature": True}, "`temperature` must be a number, not a boolean."),
        ({"stream": 1}, "`stream` must be true or false, not an integer."),
        ({"stop": 5}, "`stop` must be a string or an array, not an integer."),
        ({"stop": ["a", 1]}, "`stop[1]` must be a string, not an integer."),
        ({"user": []}, "`user` must be a string, not an array."),
        ({"logit_bias": []}, "`logit_bias` must be an object, not an array."),
        ({"logit_bias": {"5": 1, "7": "x"}}, '`logit_bias["7"]` must be a number, not a string.'),
        ({"logit_bias": {"5": 101}}, '`logit_bias["5"]` is 101, but must be from -100 to 100.'),
        ({"logit_bias": {"\u0667": 1}}, 'The key "\\u0667" of `logit_bias` is no token id.'),
        ({"metadata": {"a": "b", "c": 1}}, '`metadata["c"]` must be a string, not an integer.'),
        ({"messages": None}, "`messages` is missing."),
        (says(role="banana"), '`messages[1].role` must be "assistant", "developer", "system", "tool" or "user", not "banana".'),
        (says(content=[{"type": "text"}]), "`messages[1].content[0].text` is missing."),
        ({"tools": [{"type": "custom"}]}, '`tools[0].type` must be "function", not "custom".'),
        ({"tools": [{"function": FUNCTION}]}, "`tools[0].type` is missing."),
        ({"tool_choice": "any"}, '`tool_choice` must be "auto", "none", "required" or an object, not "any".'),
        ({"tool_choice": {"type": "x"}}, '`tool_choice.type` must be "function" or "allowed_tools", not "x".'),
        ({"response_format": {"type": "xml"}}, '`response_format.type` must be "json_object", "json_schema" or "text", not "xml".'),
        ({"response_format": {"type": "x" * 900}}, f'`response_format.type` must be "json_object", "json_schema" or "text", not "{"x" * 63}....'),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_allowed(fields: dict[str, Any], text: str) -> None:
    error = refuse(fields)
    assert (str(error), error.param, error.code) == (text, next(iter(fields)), "invalid_request_error")
    if fields.get("messages") or "tools" in fields:
        assert str(refuse(fields, read_tokenize)) == text


def test_an_error_that_is_not_known_is_passed_on() -> None:
    misfit = find_misfit(msgspec.ValidationError("Too odd - at `$.a[0].b`"), {}, dict)
    assert (misfit.path, misfit.field, misfit.reason) == ("a[0].b", "a", "is not right: Too odd")
    whole = find_misfit(msgspec.ValidationError("Expected `object`, got `int`"), 5, dict)
    assert (whole.path, whole.field, whole.reason) == ("", None, "must be an object, not an integer")
