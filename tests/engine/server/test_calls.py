"""Tools and constraints through the front, against a scripted core: what the core is told, what the client gets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraplex_engine.wire.messages import ErrorInfo
from scripted_core import BASE, Rig, running_rig
from toy_tokenizers import CHATML, write_byte_level

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name in ("weather", "time")
]
CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
WITH_TOOLS = CHAT | {"tools": TOOLS}
PROMPT: dict[str, Any] = {"model": BASE, "prompt": "hi", "max_tokens": 50}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def write_call(name: str, place: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"place": "{place}"}}}}\n</tool_call>'


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base"), max_model_len=4096) as running:
        yield running


async def stream(rig: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await rig.post(CHAT_PATH, body | {"stream": True})
    assert response.status_code == 200, response.text
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


def join(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that a client puts together, as OpenAI's does: null until there is text."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        [choice] = event["choices"]
        message = found.setdefault(choice["index"], {"content": None, "calls": [], "finish": None, "tokens": []})
        delta = choice["delta"]
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(message["calls"]):
                assert piece["type"] == "function"
                message["calls"].append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
            message["calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
        message["finish"] = choice["finish_reason"]
        message["tokens"] += (choice["logprobs"] or {"content": []})["content"]
    return [found[index] for index in sorted(found)]


async def chat(rig: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of an answer, which are the same streamed, but for the ids of calls."""
    whole = await rig.post(CHAT_PATH, body)
    assert whole.status_code == 200, whole.text
    messages = [
        {
            "content": choice["message"]["content"],
            "calls": [{"id": call["id"], **call["function"]} for call in choice["message"].get("tool_calls", [])],
            "finish": choice["finish_reason"],
            "tokens": (choice["logprobs"] or {"content": []})["content"],
        }
        for choice in whole.json()["choices"]
    ]
    streamed = join(await stream(rig, body))
    assert [strip(message) for message in streamed] == [strip(message) for message in messages]
    return messages


def strip(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message["calls"]]
    return message | {"calls": calls}


async def test_a_call_in_the_text_becomes_a_call_in_the_message(rig: Rig) -> None:
    rig.core.answer = write_call("weather", "Bern \U0001fae0")
    [message] = await chat(rig, WITH_TOOLS)
    assert message["content"] is None
    assert message["finish"] == "tool_calls"
    [call] = message["calls"]
    assert call["id"].startswith("call_")
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"place": "Bern \U0001fae0"})
    assert rig.core.added[0].params.grammar is None


async def test_words_before_calls_are_content_and_calls_are_counted(rig: Rig) -> None:
    rig.core.answer = "Let me look.\n" + write_call("weather", "Bern") + "\n" + write_call("time", "Rome")
    messages = await chat(rig, WITH_TOOLS | {"n": 2, "logprobs": True})
    assert [message["content"].strip() for message in messages] == ["Let me look."] * 2
    assert [[call["name"] for call in message["calls"]] for message in messages] == [["weather", "time"]] * 2
    assert len({call["id"] for message in messages for call in message["calls"]}) == 4
    assert b"".join(bytes(token["bytes"]) for token in messages[0]["tokens"]).decode() == rig.core.answer


@pytest.mark.parametrize(
    "body", [CHAT, WITH_TOOLS, WITH_TOOLS | {"logprobs": True}], ids=["plain", "tools", "logprobs"]
)
async def test_an_answer_without_text_or_calls_is_empty_text(rig: Rig, body: dict[str, Any]) -> None:
    rig.core.answer = []
    [message] = await chat(rig, body | {"n": 1})
    assert (message["content"], message["calls"], message["finish"]) == ("", [], "stop")


async def test_a_stream_opens_with_null_only_where_calls_may_follow(rig: Rig) -> None:
    rig.core.answer = write_call("weather", "Bern")
    opened = {"role": "assistant", "content": None}
    for fields in ({}, {"logprobs": True, "top_logprobs": 1}, {"tool_choice": "required"}):
        deltas = [event["choices"][0]["delta"] for event in await stream(rig, WITH_TOOLS | fields)]
        assert (deltas[0], [delta for delta in deltas[1:] if "content" in delta]) == (opened, [])
    for body in (CHAT, WITH_TOOLS | {"tool_choice": "none"}):
        assert (await stream(rig, body))[0]["choices"][0]["delta"] == opened | {"content": ""}


async def test_an_answer_in_words_stays_one(rig: Rig) -> None:
    rig.core.answer = "It is <b>sunny</b> in Bern."
    [message] = await chat(rig, WITH_TOOLS)
    assert message["content"] == rig.core.answer
    assert message["finish"] == "stop"
    assert "tool_calls" not in (await rig.post(CHAT_PATH, WITH_TOOLS)).json()["choices"][0]["message"]


async def test_a_call_that_max_tokens_cuts_ends_with_length(rig: Rig) -> None:
    rig.core.answer = write_call("weather", "Bern")
    size = len(rig.core.encode(rig.core.answer))
    [message] = await chat(rig, WITH_TOOLS | {"max_tokens": size - 12})
    assert message["finish"] == "length"


async def test_a_stop_string_ends_an_answer_with_tools(rig: Rig) -> None:
    rig.core.answer = "first STOP second"
    [message] = await chat(rig, WITH_TOOLS | {"stop": "STOP"})
    assert (message["content"], message["finish"]) == ("first ", "stop")


async def test_without_tools_on_offer_the_text_is_the_answer(rig: Rig) -> None:
    rig.core.answer = write_call("weather", "Bern")
    for body in (CHAT, WITH_TOOLS | {"tool_choice": "none"}):
        [message] = await chat(rig, body)
        assert (message["content"], message["calls"], message["finish"]) == (rig.core.answer, [], "stop")
    plain, none = [(await rig.post(CHAT_PATH, body)).json() for body in (CHAT, WITH_TOOLS | {"tool_choice": "none"})]
    assert plain["usage"] == none["usage"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"parallel_tool_calls": False},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]},
            }
        },
    ],
)
async def test_what_is_promised_about_calls_is_a_grammar(rig: Rig, fields: dict[str, Any]) -> None:
    rig.core.answer = write_call("time", "Bern")
    [message] = await chat(rig, WITH_TOOLS | fields)
    assert [call["name"] for call in message["calls"]] == ["time"]
    assert message["finish"] == "tool_calls"
    assert rig.core.added[0].params.grammar
    assert rig.core.added[0].params.grammar == rig.core.added[1].params.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "response_format"),
        ({"response_format": FORMAT, "guided_regex": "a"}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_cannot_be_honoured_is_refused_by_name(
    rig: Rig, fields: dict[str, Any], param: str | None, *, is_stream: bool
) -> None:
    answer = await rig.post(CHAT_PATH, CHAT | fields | {"stream": is_stream})
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"] == param
    assert not rig.core.added


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", FORMAT),
        ("response_format", {"type": "json_object"}),
        ("guided_json", SCHEMA),
        ("guided_json", json.dumps(SCHEMA)),
        ("guided_regex", "[ab]+"),
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", 'start: "a" | "b"'),
        ("structured_outputs", {"regex": "[ab]+", "json": None}),
    ],
)
async def test_a_constraint_reaches_the_core_as_a_grammar(rig: Rig, path: str, name: str, value: Any) -> None:
    body = CHAT if path == CHAT_PATH else PROMPT
    answer = await rig.post(path, body | {name: value, "n": 2})
    assert answer.status_code == 200, answer.text
    assert all(request.params.grammar for request in rig.core.added)
    rig.core.errors = {0: ErrorInfo("invalid_grammar", "too hard")}
    refused = await rig.post(path, body | {name: value})
    assert refused.status_code == 400
    assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("invalid_grammar", name)


async def test_text_is_no_constraint(rig: Rig) -> None:
    await rig.post(CHAT_PATH, CHAT | {"response_format": {"type": "text"}})
    assert rig.core.added[0].params.grammar is None


async def test_a_prompt_too_large_for_the_cache_names_its_field(rig: Rig) -> None:
    rig.core.errors = {0: ErrorInfo("context_length_exceeded", "too large")}
    for path, body, param in ((CHAT_PATH, CHAT, "messages"), (COMPLETION_PATH, PROMPT, "prompt")):
        answer = await rig.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tokenize_and_chat_agree_about_tools_and_options(tmp_path: Path) -> None:
    template = "{{ mood }}" + CHATML
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base", template), max_model_len=4096) as rig:
        calls = [{"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"place": "Rome"}'}}]
        messages = [
            *CHAT["messages"],
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
            {"role": "assistant", "content": "It is"},
        ]
        fields = {
            "messages": messages,
            "tools": TOOLS,
            "chat_template_kwargs": {"mood": "glad"},
            "add_generation_prompt": False,
            "continue_final_message": True,
        }
        answer = await rig.post(CHAT_PATH, {"model": BASE} | fields)
        tokens = await rig.post("/v1/tokenize", {"model": BASE} | fields)
        assert tokens.status_code == answer.status_code == 200, tokens.text
        assert tokens.json()["tokens"] == rig.core.added[0].prompt_ids
        table = rig.front._tokenizer.table
        text = b"".join(table.get(token) for token in rig.core.added[0].prompt_ids).decode()
        assert text.startswith("glad")
        assert text.endswith("It is")
        assert "noon" in text
        assert '"Rome"' in text
        assert "weather" in text
