"""Answers held to schemas, expressions, choices and grammars: whatever the schema, whoever is asked, and however."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openai_answer import Answer
from openai_world import ALL_DOORS, Door, OpenAIWorld
from schema_outputs import check_many, forms

pytestmark = pytest.mark.pairs

OBJECT = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}


@pytest.mark.endure
def test_outputs_held_to_schemas_are_valid(world: OpenAIWorld, long: Callable[[float, float], float]) -> None:
    def ask(index: int, fields: dict[str, Any]) -> Answer:
        return world.ask(ALL_DOORS[index % len(ALL_DOORS)], f"Parcel {index}?", **fields)

    check_many(ask, int(long(16, 2000)), seed=1)


def texts_of(world: OpenAIWorld, door: Door, **fields: Any) -> list[str]:
    """Texts of three sampled choices that all came to their end."""
    answer = world.ask(door, n=3, seed=5, temperature=1, max_tokens=200, **fields)
    assert answer.status == 200, answer.error
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    return [choice.text for choice in answer.choices]


def test_every_kind_of_constraint_holds(world: OpenAIWorld, door: Door) -> None:
    pattern = r"(yes|no|maybe), [A-Z][a-z]{2,5}\."
    choices = ["refund", "new parcel", 'say "sorry" 🙂']
    lark = 'start: WORD (" " WORD)~2 "!"\nWORD: /[a-f]{2,4}/'
    gbnf = 'root ::= word " " word " " word "!"\nword ::= [a-f] [a-f] [a-f]? [a-f]?'
    for fields in ({"guided_regex": pattern}, {"structured_outputs": {"regex": pattern}}):
        assert all(re.fullmatch(pattern, text) for text in texts_of(world, door, **fields))
    for fields in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        assert set(texts_of(world, door, **fields)) <= set(choices)
    for fields in ({"guided_grammar": lark}, {"structured_outputs": {"grammar": gbnf}}):
        assert all(re.fullmatch(r"([a-f]{2,4} ){2}[a-f]{2,4}!", text) for text in texts_of(world, door, **fields))
    for fields in forms(OBJECT):
        assert all(re.fullmatch(r'\{"a":[0-9]\}', text) for text in texts_of(world, door, **fields))


def test_any_object_is_an_object(world: OpenAIWorld, door: Door) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = world.ask(door, temperature=1, seed=3, max_tokens=200, **fields)
        assert answer.text.startswith("{")
        assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def bad_fields() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Fields that are refused, each with its `param` and a part of the message."""
    schema = {"type": "object", "properties": {"x": {"type": "array", "contains": {"type": "null"}}}}
    wrapped = {"type": "json_schema", "json_schema": {"name": "S", "schema": schema}}
    yield "response_format", {"response_format": wrapped}, "`response_format.json_schema.schema.properties.x.contains`"
    yield "guided_json", {"guided_json": schema}, "`guided_json.properties.x.contains`"
    yield (
        "structured_outputs",
        {"structured_outputs": {"json": schema}},
        "`structured_outputs.json.properties.x.contains`",
    )
    yield "guided_regex", {"guided_regex": "(?=a)b"}, "look-ahead"
    yield "guided_grammar", {"guided_grammar": "start: nowhere"}, "unknown name"
    yield "response_format", {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "second constraint"
    yield "response_format", {"response_format": {"type": "yaml"}}, "yaml"
    yield "guided_json", {"guided_json": {"allOf": [any_of(10, c) for c in "abcdefgh"]}}, "guided_json"


def any_of(count: int, name: str) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": {f"{name}{i}": {"const": i}}} for i in range(count)]}


def test_what_cannot_be_held_is_refused_by_name(world: OpenAIWorld, door: Door) -> None:
    for param, fields, message in bad_fields():
        assert message in world.refusal(door, param, world.body(door, **fields))["message"]


def test_a_constraint_goes_with_stops_logprobs_bias_and_short_answers(world: OpenAIWorld, door: Door) -> None:
    held = {"guided_regex": "[ab]{6} end", "temperature": 1, "seed": 1}
    log = {"logprobs": True, "top_logprobs": 2} if door.endpoint == "chat" else {"logprobs": 2}
    told = world.ask(door, max_tokens=100, **held, **log)
    assert re.fullmatch("[ab]{6} end", told.text)
    assert told.choices[0].logprobs
    assert re.fullmatch("[ab]{6}", world.ask(door, max_tokens=100, stop=" end", **held).text)
    assert world.ask(door, max_tokens=1, **held).choices[0].finish_reason == "length"
    # what the grammar wants comes, whatever else is asked
    ids = [str(token) for token in range(40)]
    pushed = world.ask(door, max_tokens=100, logit_bias=dict.fromkeys(ids, -100), min_tokens=50, **held)
    assert re.fullmatch("[ab]{6} end", pushed.text)
    assert re.fullmatch("[ab]{6} end", world.ask(door, max_tokens=100, ignore_eos=True, **held).text)


def test_the_same_seed_gives_the_same_constrained_answer_through_every_door(world: OpenAIWorld) -> None:
    fields = {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5}}
    doors = [door for door in ALL_DOORS if door.endpoint == "completions" and not door.has_adapter]
    texts = {world.ask(door, temperature=1, seed=9, max_tokens=200, **fields).text for door in doors}
    assert len(texts) == 1
    assert len(set(itertools.chain(*texts))) > 3
