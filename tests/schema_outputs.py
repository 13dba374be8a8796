"""Asks for outputs that are held to schemas and judges each, whoever answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema

from grammar_walk import begins
from loraplex_engine.server.constraint.compile import compile_grammar
from loraplex_engine.server.constraint.task import JsonSchema, SchemaTask
from openai_answer import Answer, Choice
from schema_kinds import SchemaMaker

MAX_TOKENS = 300
LEAST_SHARE_COMPLETE = 0.6
Ask = Callable[[int, dict[str, Any]], Answer]


def forms(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields that a schema may come in."""
    return [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "S", "schema": schema, "strict": True}}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
    ]


def check_choice(choice: Choice, schema: dict[str, Any]) -> bool:
    """Check a choice and return whether it came to its end; one that did not is a beginning of a valid text."""
    if choice.finish_reason == "length":
        assert begins(compile_grammar(SchemaTask("p", JsonSchema(schema, "p"))), choice.text)
        return False
    assert choice.finish_reason == "stop"
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    checker.validate(json.loads(choice.text))
    return True


def check_many(ask: Ask, wanted: int, *, seed: int) -> None:
    """Ask for outputs of as many schemas, some at a time, until so many came to their end, and check each."""
    maker, numbers = SchemaMaker(seed), itertools.count()
    num_asked = num_complete = 0

    def run(index: int, schema: dict[str, Any]) -> bool:
        fields = forms(schema)[index % 4] | {"temperature": 1, "seed": index, "max_tokens": MAX_TOKENS}
        answer = ask(index, fields | ({"frequency_penalty": 0.2} if index % 3 else {}))
        assert (answer.status, answer.error) == (200, None), schema
        [choice] = answer.choices
        return check_choice(choice, schema)

    with ThreadPoolExecutor(8) as pool:
        while num_complete < wanted:
            jobs = [(next(numbers), maker.make()) for _ in range(min(64, wanted - num_complete))]
            num_complete += sum(pool.map(run, *zip(*jobs, strict=True)))
            num_asked += len(jobs)
            assert num_complete > LEAST_SHARE_COMPLETE * num_asked - 8
    print(f"{num_complete} whole outputs of {num_asked} schemas, all valid; the others end at `max_tokens`")
