"""Calls of tools in numbers: each is read, parses and matches its schema, whoever is asked and however."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from openai_answer import Choice
from openai_world import ALL_DOORS, OpenAIWorld

pytestmark = pytest.mark.pairs

CHAT_DOORS = [door for door in ALL_DOORS if door.endpoint == "chat"]
SCHEMAS: dict[str, dict[str, Any]] = {
    "track": {
        "type": "object",
        "properties": {"code": {"type": "string", "maxLength": 8}, "full": {"type": "boolean"}},
        "required": ["code"],
    },
    "rate": {
        "type": "object",
        "properties": {"stars": {"type": "integer", "minimum": 1, "maximum": 5}, "tags": {"enum": ["late", "kind"]}},
        "required": ["stars", "tags"],
    },
    "now": {},
}
MAX_TOKENS = 160
LEAST_SHARE_COMPLETE = 0.8


def tools(**fields: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **fields}}
        for name, schema in SCHEMAS.items()
    ]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def some(*names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named(name) for name in names]}}


def requests() -> Any:
    """Choices of tools with the names that may be called, and whether there may be several."""
    return itertools.cycle(
        [
            ({"tools": tools(), "tool_choice": "required"}, set(SCHEMAS), True),
            ({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": False}, set(SCHEMAS), False),
            ({"tools": tools(strict=True), "tool_choice": some("track", "rate")}, {"track", "rate"}, True),
            *(({"tools": tools(), "tool_choice": named(name)}, {name}, False) for name in SCHEMAS),
        ]
    )


def check_choice(choice: Choice, names: set[str], *, is_parallel: bool) -> int:
    """Check all calls of a choice and return how many are complete."""
    assert choice.text == ""
    assert len({call["id"] for call in choice.calls}) == len(choice.calls)
    complete = choice.calls if choice.finish_reason == "tool_calls" else choice.calls[:-1]
    assert choice.finish_reason in ("tool_calls", "length")
    assert is_parallel or len(choice.calls) <= 1
    for call in complete:
        assert call["name"] in names
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    return len(complete)


@pytest.mark.endure
def test_calls_that_are_required_all_parse_and_match(world: OpenAIWorld, long: Callable[[float, float], float]) -> None:
    wanted = int(long(24, 500))
    chosen = random.Random(5)
    jobs = list(itertools.islice(requests(), wanted))

    def ask(index: int) -> tuple[int, int]:
        fields, names, is_parallel = jobs[index]
        door = CHAT_DOORS[index % len(CHAT_DOORS)]
        fields = fields | {"temperature": 1, "seed": index, "max_tokens": MAX_TOKENS, "n": 1 + index % 2}
        answer = world.ask(door, f"Parcel {chosen.randint(0, 999)}?", **fields)
        assert answer.status == 200, answer.error
        assert len(answer.choices) == fields["n"]
        done = sum(check_choice(choice, names, is_parallel=is_parallel) for choice in answer.choices)
        return done, sum(choice.finish_reason == "tool_calls" for choice in answer.choices)

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(ask, range(wanted)))
    num_calls, num_ended = (sum(column) for column in zip(*counts, strict=True))
    num_choices = sum(1 + index % 2 for index in range(wanted))
    print(f"{num_calls} calls in {num_choices} answers, of which {num_ended} came to their end")
    assert num_calls >= wanted
    assert num_ended >= LEAST_SHARE_COMPLETE * num_choices
