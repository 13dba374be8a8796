"""Tools and schemas through every door of chats, on random models: what is promised holds whatever the model wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from openai_world import ALL_DOORS, Door, OpenAIWorld

pytestmark = pytest.mark.pairs

CHAT_DOORS = [door for door in ALL_DOORS if door.endpoint == "chat"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Says the weather.", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
SEEDED: dict[str, Any] = {"temperature": 1, "max_tokens": 200}
USER = {"role": "user", "content": "How is the weather in Paris?"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris", "days": 1}'},
}


def strip(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("door", CHAT_DOORS, ids=str)
def test_b106_a_round_trip_with_null_content_keeps_the_call(world: OpenAIWorld, door: Door) -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    told = [USER, calling, {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}]
    answers = [
        world.ask(door, messages=messages, tools=[WEATHER])
        for messages in (told, [USER, {"role": "assistant", "tool_calls": [CALL]}, told[2]], [USER])
    ]
    assert [answer.status for answer in answers] == [200] * 3, answers[0].error
    counts = [answer.usage["prompt_tokens"] for answer in answers if answer.usage]
    assert counts[0] == counts[1]
    call_len = len(CALL["function"]["arguments"]) // 8  # type: ignore[index]
    assert counts[0] - counts[2] > call_len
    renamed = json.loads(json.dumps(told).replace("Paris", "Rome, or wherever it may be"))
    assert world.count_tokens(door, messages=renamed, tools=[WEATHER]) > counts[0]
    for orphan in ([USER, told[2]], [USER, calling, told[2] | {"tool_call_id": "call_2"}]):
        world.refusal(door, "messages", world.body(door, messages=orphan, tools=[WEATHER]))


@pytest.mark.parametrize("door", CHAT_DOORS, ids=str)
def test_a_required_call_is_valid_and_streams_alike(
    world: OpenAIWorld, door: Door, long: Callable[[float, float], float]
) -> None:
    for seed in range(int(long(2, 3))):
        fields = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "seed": seed, **SEEDED}
        answer = world.ask(door, messages=[USER], **fields)
        assert answer.status == 200, answer.error
        [choice] = answer.choices
        assert choice.finish_reason in ("tool_calls", "length")
        if choice.finish_reason == "length":
            continue
        assert choice.text == ""
        assert len({call["id"] for call in choice.calls}) == len(choice.calls) > 0
        for call in choice.calls:
            assert call["id"].startswith("call_")
            tool = {"weather": WEATHER, "clock": CLOCK}[call["name"]]
            jsonschema.validate(json.loads(call["arguments"]), tool["function"]["parameters"])
        other = world.ask(CHAT_DOORS[CHAT_DOORS.index(door) ^ 4], messages=[USER], **fields)
        assert strip(other.choices[0].calls) == strip(choice.calls)


@pytest.mark.parametrize("door", CHAT_DOORS, ids=str)
def test_a_named_tool_is_the_one_that_is_called(world: OpenAIWorld, door: Door) -> None:
    for name in ("weather", "clock"):
        choice = {"type": "function", "function": {"name": name}}
        answer = world.ask(door, messages=[USER], tools=[WEATHER, CLOCK], tool_choice=choice, seed=4, **SEEDED)
        assert answer.status == 200, answer.error
        assert {call["name"] for call in answer.choices[0].calls} == {name}
    unknown = {"type": "function", "function": {"name": "nobody"}}
    world.refusal(door, "tool_choice", world.body(door, tools=[WEATHER], tool_choice=unknown))
    world.refusal(door, "tool_choice", world.body(door, tool_choice="required"))


@pytest.mark.parametrize("door", CHAT_DOORS, ids=str)
def test_parallel_calls_can_be_switched_off(world: OpenAIWorld, door: Door) -> None:
    for seed in range(3):
        options = {"tools": [CLOCK], "tool_choice": "required", "seed": seed, **SEEDED}
        answer = world.ask(door, messages=[USER], parallel_tool_calls=False, **options)
        assert answer.status == 200, answer.error
        assert len(answer.choices[0].calls) == 1


@pytest.mark.parametrize("door", CHAT_DOORS, ids=str)
def test_no_tools_for_one_turn_means_no_call(world: OpenAIWorld, door: Door) -> None:
    answer = world.ask(door, messages=[USER], tools=[WEATHER], tool_choice="none", **SEEDED | {"max_tokens": 20})
    plain = world.ask(door, messages=[USER])
    assert answer.choices[0].calls == []
    assert answer.usage is not None
    assert plain.usage is not None
    assert answer.usage["prompt_tokens"] == plain.usage["prompt_tokens"]


def test_an_answer_matches_its_schema(world: OpenAIWorld, door: Door) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    for fields in ({"response_format": format_}, {"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}):
        answer = world.ask(
            door, n=2, seed=6, logprobs=2 if door.endpoint == "completions" else True, **SEEDED, **fields
        )
        assert answer.status == 200, answer.error
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), SCHEMA)
            assert choice.logprobs


def test_other_constraints_hold_as_well(world: OpenAIWorld, door: Door) -> None:
    def say(**fields: Any) -> str:
        answer = world.ask(door, seed=8, **SEEDED, **fields)
        assert answer.status == 200, answer.error
        return answer.text

    assert say(guided_choice=["yes", "no"]) in ("yes", "no")
    assert len(say(guided_regex="[ab]{5}")) == 5
    assert say(guided_grammar='start: "a" ("b" | "c") "d"') in ("abd", "acd")
    both = world.body(door, guided_choice=["a"], guided_regex="b")
    assert world.post(door, both).status_code == 400


def test_a_bad_schema_is_refused_with_its_place(world: OpenAIWorld, door: Door) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "strin"}}}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = world.refusal(door, "response_format", world.body(door, response_format=format_))
    assert "properties" in error["message"]
    assert "a" in error["message"]
    world.refusal(door, "guided_regex", world.body(door, guided_regex="[a"))
    world.refusal(door, "guided_grammar", world.body(door, guided_grammar="start: nowhere"))
    world.refusal(door, "guided_choice", world.body(door, guided_choice=[]))
    assert world.ask(door).status == 200
