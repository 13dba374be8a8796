"""Tools, choice and constraint of a request: which go together, what is promised, and what is refused by name."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.constraint.compile import compile_grammar
from loraplex_engine.server.constraint.keyword import ENFORCED
from loraplex_engine.server.constraint.task import GrammarTask, JsonSchema, LarkTask, RegexTask, SchemaTask
from loraplex_engine.server.tool.format import FORMATS
from loraplex_engine.server.tool.plan import MAX_TOOLS, MAX_TOOLS_BYTES, ToolPlan, build_plan, offered_tools
from loraplex_engine.wire.openai import ChatRequest
from support_tools import MARKS, special_ids

HERMES = FORMATS["hermes"]


def function(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | fields}


TOOLS = [function("one"), function("two")]
NAMED = {"type": "function", "function": {"name": "two"}}
SCHEMA = SchemaTask("response_format", JsonSchema({"type": "object"}, "response_format.json_schema.schema"))


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def plan(constraint: GrammarTask | None = None, **fields: Any) -> ToolPlan | None:
    request = msgspec.convert({"model": "m", "messages": [], "tools": TOOLS} | fields, ChatRequest)
    return build_plan(request, HERMES, special_ids(), constraint)


def text_of(made: ToolPlan | None) -> str:
    assert made is not None
    assert isinstance(made.grammar, LarkTask)
    assert made.grammar.param == "tools"
    return made.grammar.text


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "none"}])
def test_without_tools_or_choice_there_is_no_plan_and_nothing_is_offered(fields: dict[str, Any]) -> None:
    assert plan(**fields) is None
    request = msgspec.convert({"model": "m", "messages": [], "tools": TOOLS} | fields, ChatRequest)
    assert offered_tools(request) == []


@pytest.mark.parametrize("choice", [None, "auto", allowed("auto", "one", "two")])
def test_calls_are_free_as_long_as_nothing_is_promised(choice: Any) -> None:
    made = plan(tool_choice=choice)
    assert made is not None
    assert (made.grammar, made.names) == (None, ("one", "two"))


@pytest.mark.parametrize(
    ("fields", "names", "is_required"),
    [
        ({"tool_choice": "required"}, ("one", "two"), True),
        ({"tool_choice": NAMED}, ("two",), True),
        ({"tool_choice": allowed("auto", "one")}, ("one",), False),
        ({"tool_choice": allowed("required", "one")}, ("one",), True),
        ({"parallel_tool_calls": False}, ("one", "two"), False),
        ({"tools": [*TOOLS, function("three", strict=True)]}, ("one", "two", "three"), False),
    ],
)
def test_a_promise_is_kept_by_a_grammar(fields: dict[str, Any], names: tuple[str, ...], is_required: bool) -> None:
    made = plan(**fields)
    assert made is not None
    assert (made.names, made.is_required) == (names, is_required)
    assert ("start: calls" in text_of(made)) == is_required
    assert [name for name in ("one", "two", "three") if f'\\"{name}\\"' in text_of(made)] == list(names)


@pytest.mark.parametrize("fields", [{"tool_choice": NAMED}, {"parallel_tool_calls": False, "tool_choice": "required"}])
def test_one_function_or_parallel_off_means_one_call(fields: dict[str, Any]) -> None:
    assert ")*" not in text_of(plan(**fields))
    assert ")*" in text_of(plan(tool_choice="required"))


def test_a_template_of_single_calls_means_one_call() -> None:
    request = msgspec.convert({"model": "m", "messages": [], "tools": TOOLS, "tool_choice": "required"}, ChatRequest)
    for is_single in (True, False):
        form = msgspec.structs.replace(HERMES, is_single=is_single)
        assert (")*" in text_of(build_plan(request, form, {}, None))) != is_single


def test_a_schema_of_the_answer_holds_where_no_call_is_required() -> None:
    made = plan(SCHEMA)
    assert "start: calls | answer" in text_of(made)
    assert made is not None
    assert isinstance(made.grammar, LarkTask)
    assert made.grammar.schemas["answer"] == SCHEMA.schema


@pytest.mark.parametrize(
    ("constraint", "choice"),
    [(SCHEMA, "required"), (SCHEMA, NAMED), (RegexTask("guided_regex", "a"), "auto")],
)
def test_other_constraints_do_not_go_with_tools(constraint: GrammarTask, choice: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        plan(constraint, tool_choice=choice)
    assert refused.value.param == constraint.param


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tools": [], "tool_choice": "auto"}, "tool_choice", "needs `tools`"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "needs `tools`"),
        ({"tool_choice": {"type": "function", "function": {"name": "three"}}}, "tool_choice", "'three'"),
        ({"tool_choice": allowed("auto", "one", "three")}, "tool_choice", "'three'"),
        ({"tool_choice": allowed("auto")}, "tool_choice", "must not be empty"),
        ({"tools": [function("one"), function("one")]}, "tools", r"tools\[1\].function.name"),
        ({"tools": [function("a b")]}, "tools", r"tools\[0\].function.name"),
        ({"tools": [function("")]}, "tools", "1 to 64"),
        ({"tools": [function("é")]}, "tools", "1 to 64"),
        ({"tools": [function("a" * 65)]}, "tools", "1 to 64"),
        ({"tools": [function("a", {"type": "array"})]}, "tools", r"tools\[0\].function.parameters.type"),
        ({"tools": [function(f"f{index}") for index in range(MAX_TOOLS + 1)]}, "tools", f"at most {MAX_TOOLS}"),
        ({"tools": [function("a", {"description": "x" * MAX_TOOLS_BYTES})]}, "tools", "bytes"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        plan(**fields)
    assert refused.value.param == param


def test_the_marks_that_are_special_tokens_are_shown_to_the_reader() -> None:
    request = msgspec.convert({"model": "m", "messages": [], "tools": TOOLS}, ChatRequest)
    shown = {
        name: made.visible
        for name, form in FORMATS.items()
        if (made := build_plan(request, form, special_ids(), None)) is not None
    }
    python_tag, call = special_ids()["<|python_tag|>"], special_ids()["<|tool_call|>"]
    tool_calls, args = (special_ids()[mark] for mark in MARKS[:2])
    assert shown == {
        "hermes": frozenset(),
        "llama3_json": {python_tag},
        "mistral": {tool_calls},
        "mistral_named": {tool_calls, args},
        "granite": {call},
    }


def test_each_choice_has_a_reader_of_its_own() -> None:
    made = plan()
    assert made is not None
    first, second = made.build_reader(), made.build_reader()
    first.push('<tool_call>{"name": "one"}</tool_call>')
    assert (first.num_calls, second.num_calls) == (1, 0)


def test_where_the_answer_may_be_json_an_opener_in_it_is_content() -> None:
    made = plan(SCHEMA)
    assert made is not None
    reader = made.build_reader()
    text = '"<tool_call>[{ab'
    assert reader.push(text).text + reader.flush().text == text


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1.0, -1, 0.1, 1e300, 2**70, "", "a", "#", "#/properties", "#/required/0"),
    *([], [[]], [{}], ["a", {}], {}, {"$ref": {}}, {"type": []}, {"required": [[]]}, {"$anchor": "a"}, {"enum": [{}]}),
)
WHOLE = {
    "type": "object",
    "properties": {
        "a": {"type": ["integer", "null"], "minimum": 1, "maximum": 9, "multipleOf": 0.5},
        "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "prefixItems": [{"const": 1}]},
        "c": {"anyOf": [{"type": "string", "pattern": "^a$", "maxLength": 3}, {"enum": [1, "x"]}]},
    },
    "required": ["a", "b"],
    "$defs": {"n": {"$anchor": "n", "type": "object", "patternProperties": {"^x": {"$ref": "#n"}}, "minProperties": 1}},
}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_schema_holds_is_taken_or_refused(seed: int) -> None:
    rng, params = random.Random(seed), set[str | None]()
    for _ in range(10):
        schema = mutate(rng, WHOLE)
        if not isinstance(schema, dict):
            continue
        fields = rng.choice([{"tool_choice": "required"}, {"parallel_tool_calls": False}, {}])
        tools = [function("f", schema, strict=rng.random() < 0.5)]
        answer = None if fields else SchemaTask("x", JsonSchema(schema, "x"))
        try:
            made = plan(answer, tools=tools, **fields)
            if made is not None and made.grammar is not None:
                compile_grammar(made.grammar)
        except InvalidRequestError as refused:
            params.add(refused.param)
    assert params <= {"tools", "x"}


@pytest.mark.parametrize("required", [[{}], [[]], ["a", {}]])
def test_required_that_is_no_list_of_names_is_refused(required: Any) -> None:
    made = plan(tools=[function("f", {"required": required})], tool_choice="required")
    assert made is not None
    assert made.grammar is not None
    with pytest.raises(InvalidRequestError, match="must be a list of names") as refused:
        compile_grammar(made.grammar)
    assert refused.value.param == "tools"


def mutate(rng: random.Random, value: Any) -> Any:
    """Return a copy with some odd values in it."""
    if rng.random() < 0.04:
        return rng.choice(ODD)
    if isinstance(value, dict):
        changed = {name: mutate(rng, one) for name, one in value.items() if rng.random() < 0.97}
        if rng.random() < 0.1:
            changed[rng.choice(sorted(ENFORCED))] = rng.choice(ODD)
        return changed
    return [mutate(rng, one) for one in value] if isinstance(value, list) else value
