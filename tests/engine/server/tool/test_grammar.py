"""What is written under a grammar of calls is read back as calls of the tools, with arguments that they allow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint.compile import compile_grammar
from loraplex_engine.server.constraint.task import JsonSchema
from loraplex_engine.server.tool.format import FORMATS, ToolFormat, write_calls
from loraplex_engine.server.tool.grammar import build_grammar
from loraplex_engine.server.tool.reader import CallReader
from loraplex_engine.wire.openai import Tool
from support_tools import MARKS, TOOLS, RandomModel, special_ids, tool

NUM_CALLS = 500
NAME_TO_SCHEMA: dict[str, dict[str, Any]] = {
    one.function.name: one.function.parameters or {"type": "object", "maxProperties": 0} for one in TOOLS
}
WEATHER_CALL = ("get_weather", '{"city": "Oslo", "unit": "celsius"}')
TIME_CALL = ("get_time", "{}")


def model(
    form: ToolFormat, tools: tuple[Tool, ...] = TOOLS, seed: int = 0, *, required: bool = True, **options: Any
) -> RandomModel:
    options = {"is_parallel": True} | options
    task = build_grammar(list(enumerate(tools)), form, special_ids(), is_required=required, **options)
    return RandomModel(compile_grammar(task), seed)


def read(form: ToolFormat, text: str, *, is_only_calls: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls, the text cut into pieces of seven."""
    reader = CallReader(form, NAME_TO_SCHEMA, is_only_calls=is_only_calls)
    parts = [reader.push(text[begin : begin + 7]) for begin in range(0, len(text), 7)] + [reader.flush()]
    calls: dict[int, tuple[str, str]] = {}
    for delta in (delta for part in parts for delta in part.calls):
        name, arguments = calls.get(delta.index, (delta.name or "", ""))
        calls[delta.index] = name, arguments + delta.arguments
    return "".join(part.text for part in parts), list(calls.values())


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), NAME_TO_SCHEMA[name])


@pytest.mark.endure
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_is_written_under_a_grammar_is_calls_and_nothing_else(
    name: str, long: Callable[[float, float], float]
) -> None:
    form, num_calls, names = FORMATS[name], 0, set[str]()
    wanted = NUM_CALLS // int(len(FORMATS) * long(3, 1))
    for seed in range(NUM_CALLS):
        text, is_ended = model(form, seed=seed).write(4000)
        content, calls = read(form, text)
        assert is_ended
        assert content == ""
        assert calls
        check(calls)
        names |= {call for call, _ in calls}
        num_calls += len(calls)
        if num_calls >= wanted:
            break
    assert names == set(NAME_TO_SCHEMA)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_answer_that_is_cut_off_has_beginnings_of_calls_and_no_marks(name: str) -> None:
    form = FORMATS[name]
    for max_tokens in range(1, 80, 3):
        text, is_ended = model(form, TOOLS[:1], max_tokens).write(max_tokens, end_chance=0)
        content, calls = read(form, text)
        assert not is_ended
        assert content == ""
        assert {call for call, _ in calls} <= {"get_weather"}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_there_may_be_one_call_or_several(name: str) -> None:
    form = FORMATS[name]
    two = write_calls([WEATHER_CALL, TIME_CALL], form)
    for required in (True, False):
        assert model(form, required=required).accepts(write_calls([TIME_CALL], form))
        assert model(form, required=required).accepts(two)
        assert not model(form, required=required, is_parallel=False).accepts(two)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_where_no_call_is_required_there_may_be_text(name: str) -> None:
    form = FORMATS[name]
    assert not model(form).accepts("hello")
    for text in ("hello", "", "a < b, {x} and\n<tool>"):
        assert model(form, required=False).accepts(text)
    if not form.is_opener_optional:
        assert model(form, required=False).accepts("Well.\n" + write_calls([TIME_CALL], form) + "\nDone.")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_call_that_is_begun_must_be_one_of_a_tool(name: str) -> None:
    form = FORMATS[name]
    for call in (("get_tim", "{}"), ("get_weather", '{"city": "Oslo"}'), ("get_time", '{"a": 1}')):
        assert not model(form, required=False).accepts(write_calls([call], form))


def test_an_answer_without_calls_must_match_its_schema() -> None:
    answer = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "schema")
    form = FORMATS["hermes"]
    assert model(form, required=False, answer=answer).accepts('{"a":1}')
    assert model(form, required=False, answer=answer).accepts(write_calls([TIME_CALL], form))
    assert not model(form, required=False, answer=answer).accepts("hello")


def test_marks_that_are_no_special_tokens_are_text() -> None:
    form = FORMATS["mistral"]
    task = build_grammar([(0, TOOLS[2])], form, {}, is_required=True, is_parallel=False)
    assert '"[TOOL_CALLS]"' in task.text
    assert MARKS[0] in special_ids()


def test_arguments_are_closed_only_where_that_leaves_something() -> None:
    def schema(parameters: dict[str, Any] | None) -> Any:
        task = build_grammar([(3, tool("f", parameters))], FORMATS["hermes"], {}, is_required=True, is_parallel=True)
        assert task.schemas["args_0"].where == "tools[3].function.parameters"
        return task.schemas["args_0"].schema

    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema(None) == closed
    assert schema({}) == closed
    for open_ in ({"required": ["a"]}, {"additionalProperties": True}, {"anyOf": [{"required": ["a"]}]}):
        assert schema(open_) == {"type": "object"} | open_


def test_only_a_strict_tool_needs_a_schema_that_can_be_enforced() -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 1}}}
    form = FORMATS["hermes"]
    assert model(form, (tool("f", unique),)).accepts(write_calls([("f", '{"a": [1]}')], form))
    with pytest.raises((InvalidRequestError, AssertionError), match="uniqueItems"):
        model(form, (tool("f", unique, strict=True),))
