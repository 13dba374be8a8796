"""Every field of OpenAI's request types, and of ours, is decided, and what was decided is what happens."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from typing_extensions import TypedDict

from loraplex_engine.wire import field as field_rules
from loraplex_engine.wire.openai import ChatRequest, CompletionRequest
from openai_answer import PATHS, Answer, Endpoint, read_answer
from openai_page import PAGE, ROWS, render_page
from openai_table import Decision
from openai_types import TYPES, list_paths, list_returned_paths
from scripted_core import BASE, Rig, running_rig
from toy_tokenizers import write_byte_level

TESTS = Path(__file__).resolve().parents[2]
ENDPOINTS: tuple[Endpoint, ...] = ("chat", "completions")
OURS = {"chat": ChatRequest, "completions": CompletionRequest}
NEUTRAL = {"chat": field_rules.NEUTRAL_CHAT, "completions": field_rules.NEUTRAL_COMPLETION}
PLAIN: dict[Endpoint, dict[str, Any]] = {
    "chat": {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "seed": 7, "max_tokens": 40},
    "completions": {"model": BASE, "prompt": "hi", "seed": 7, "max_tokens": 40},
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + (message.name or '') + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base", TEMPLATE), max_model_len=2000) as running:
        yield running


def rows_of(endpoint: Endpoint) -> dict[str, Decision]:
    found = {row.path: row for row in ROWS if endpoint in row.endpoints}
    assert len(found) == sum(endpoint in row.endpoints for row in ROWS), "a path has two rows"
    return found


def list_above(path: str) -> Iterator[str]:
    """What a path lies in, the path itself first."""
    while path:
        yield path
        path = re.sub(r"(^|=[^=.]*|\[\]|\.?[^.\[=]+)$", "", path)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_the_official_client_is_decided(endpoint: Endpoint) -> None:
    rows = rows_of(endpoint)
    refused = {path for path, row in rows.items() if row.verdict == "refused"}
    undecided = [path for path in list_paths(endpoint) if path not in rows and refused.isdisjoint(list_above(path))]
    assert undecided == [], "decide these in tests/openai_rows*.py, and run tests/openai_page.py"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_ours_is_decided_and_no_other(endpoint: Endpoint) -> None:
    rows, ours = rows_of(endpoint), {*OURS[endpoint].__struct_fields__}
    assert {name for name in ours if name not in rows} == set()
    assert {path for path in rows if path not in list_paths(endpoint)} <= {*ours, *list_returned_paths()}


def test_every_field_that_the_clients_helpers_add_to_a_message_is_decided() -> None:
    decided = {path for path, row in rows_of("chat").items() if row.verdict in ("refused", "inert")}
    returned = list_returned_paths()
    assert {"messages[].parsed", "messages[].tool_calls[].index", "messages[].annotations"} <= {*returned}
    assert [path for path in returned if path not in rows_of("chat") and decided.isdisjoint(list_above(path))] == []


def test_a_new_field_of_the_client_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner(TypedDict):
        mode: Literal["old", "new"]

    class Newer(TYPES["chat"]):  # type: ignore[misc]
        inner: list[Inner]

    Inner.__annotations__["mode"] = Literal["old", "new"]
    Newer.__annotations__["inner"] = list[Inner]
    monkeypatch.setitem(TYPES, "chat", Newer)
    new = {"inner", "inner[].mode", "inner[].mode=old", "inner[].mode=new"}
    assert {path for path in list_paths("chat") if path not in rows_of("chat")} >= new


def test_every_row_names_a_test_that_exists() -> None:
    named = {row.test for row in ROWS}
    absent = {
        test
        for test in named
        for file, _, name in [test.partition("::")]
        if not (TESTS / file).exists() or f"def {name}(" not in (TESTS / file).read_text(encoding="utf-8")
    }
    assert absent == set()


def test_the_page_says_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(), "run .venv/bin/python tests/openai_page.py"


async def ask(rig: Rig, endpoint: Endpoint, body: dict[str, Any]) -> tuple[Answer, list[dict[str, Any]]]:
    """Send one request; return the answer and what the core was asked."""
    rig.core.added.clear()
    response = await rig.post(PATHS[endpoint], {name: value for name, value in body.items() if value is not None})
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    answer = read_answer(endpoint, response.status_code, response.content, is_stream=is_stream)
    return answer, [msgspec.to_builtins(added) | {"request_id": "", "deadline_s": 0} for added in rig.core.added]


def strip(answer: Answer) -> list[Any]:
    """An answer without what differs from request to request."""
    choices = [[choice.text, choice.finish_reason, choice.logprobs, len(choice.calls)] for choice in answer.choices]
    is_stream = bool(answer.objects) and "chunk" in answer.objects[0]["object"]
    extra = [{"prompt_logprobs": one["prompt_logprobs"]} for one in answer.objects if "prompt_logprobs" in one]
    return [choices, answer.usage, is_stream, extra]


async def judge(rig: Rig, endpoint: Endpoint, row: Decision, body: dict[str, Any]) -> str | None:
    """Say what is wrong with one decision."""
    answer, asked = await ask(rig, endpoint, body | row.context | row.example)
    if row.verdict == "refused":
        error = answer.error or {}
        is_right = (answer.status, error.get("param"), asked) == (400, row.param, [])
        return None if is_right else f"is not refused by its name: {answer.status} {error}"
    if answer.status != 200:
        return f"is refused: {answer.error}"
    plain, asked_plainly = await ask(rig, endpoint, body | row.context)
    assert plain.status == 200, (row, plain.error)
    is_same = (strip(answer), asked) == (strip(plain), asked_plainly)
    if row.verdict == "inert":
        return None if is_same else "changes something"
    return "is accepted and ignored" if is_same else None


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_the_decision_is_what_happens(rig: Rig, endpoint: Endpoint, is_stream: bool) -> None:
    wrong = {}
    for path, row in rows_of(endpoint).items():
        if row.verdict == "part" or (path == "stream" and is_stream):
            continue
        body = PLAIN[endpoint] | ({"stream": True} if is_stream else {})
        said = await judge(rig, endpoint, row, body)
        if said:
            wrong[path] = said
    assert wrong == {}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_what_only_other_engines_know_is_refused_by_name(rig: Rig, endpoint: Endpoint) -> None:
    for name in sorted((field_rules.UNSUPPORTED | NEUTRAL[endpoint].keys()) - {*OURS[endpoint].__struct_fields__}):
        answer, asked = await ask(rig, endpoint, PLAIN[endpoint] | {name: {"odd": 1}})
        assert answer.error is not None
        assert (answer.status, answer.error["param"], asked) == (400, name, [])
        assert answer.error["code"] == "unsupported_parameter"
        for value in NEUTRAL[endpoint].get(name, ()):
            assert (await ask(rig, endpoint, PLAIN[endpoint] | {name: value}))[0].status == 200
