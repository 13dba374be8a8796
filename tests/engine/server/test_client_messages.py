"""The official client's helpers: whole and streamed give one message, and it may be sent back in each of its forms."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.lib._parsing._completions import type_to_response_format_param
from openai.types.chat import ParsedChatCompletion
from pydantic import BaseModel

from chats import read_ids
from loraplex_engine.server.field.request import read_chat
from scripted_core import BASE, Rig, running_rig, sign
from toy_tokenizers import write_byte_level

USER: dict[str, Any] = {"role": "user", "content": "hi"}
NEXT: dict[str, Any] = {"role": "user", "content": "and?"}
CALL_TEXT = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Bern"}}\n</tool_call>'


class Weather(BaseModel):
    """Says the weather."""

    city: str


TOOL = openai.pydantic_function_tool(Weather)
TOOLS: dict[str, Any] = {"tools": [TOOL]}
FORMAT: dict[str, Any] = {"response_format": Weather}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base"), max_model_len=4096) as running:
        yield running


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.AsyncHTTPTransport(uds=rig.uds)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://engine/v1", api_key=sign(), http_client=http, max_retries=0) as found,
    ):
        yield found


async def parse(client: openai.AsyncOpenAI, **fields: Any) -> ParsedChatCompletion[Any]:
    return await client.chat.completions.parse(model=BASE, messages=[USER], **fields)  # type: ignore[list-item]


async def stream(client: openai.AsyncOpenAI, **fields: Any) -> ParsedChatCompletion[Any]:
    asked: Any = {"model": BASE, "messages": [USER], **fields}
    async with client.chat.completions.stream(**asked) as running:
        return await running.get_final_completion()


def without_ids(message: BaseModel) -> dict[str, Any]:
    """What a message says, without what differs from answer to answer and the place in a stream."""
    found = message.model_dump()
    for call in found["tool_calls"] or ():
        call["id"] = ""
        call.pop("index", None)
    return found


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of what it parsed
@pytest.mark.parametrize(
    ("answer", "fields", "content"),
    [
        ('{"city":"Bern"}', FORMAT, '{"city":"Bern"}'),
        (CALL_TEXT, TOOLS, None),
        (CALL_TEXT, TOOLS | {"logprobs": True}, None),
        ("Let me look." + CALL_TEXT, TOOLS, "Let me look."),
        ("It rains.", TOOLS, "It rains."),
        ([], TOOLS, ""),
        ("It rains.", {}, "It rains."),
    ],
    ids=["parsed", "call", "logprobs", "text-and-call", "text", "empty", "plain"],
)
async def test_the_clients_messages_agree_and_may_be_sent_back(
    rig: Rig, client: openai.AsyncOpenAI, answer: str | list[int], fields: dict[str, Any], content: str | None
) -> None:
    rig.core.answer = answer
    found = [(await ask(client, **fields)).choices[0].message for ask in (parse, stream)]
    assert [message.content for message in found] == [content, content]
    assert without_ids(found[0]) == without_ids(found[1])
    if fields is FORMAT:
        assert found[0].parsed == Weather(city="Bern")
    if content != answer and answer and "logprobs" not in fields:
        assert found[0].tool_calls is not None
        assert found[0].tool_calls[0].function.parsed_arguments == Weather(city="Bern")
    prompts = []
    for message in found:
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls or ()]
        plain: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.tool_calls:
            names = {call.id: call.function for call in message.tool_calls}
            calls = [
                {"id": number, "type": "function", "function": {"name": called.name, "arguments": called.arguments}}
                for number, called in names.items()
            ]
            plain["tool_calls"] = calls
        forms = (plain, message, message.model_dump(), message.to_dict(), message.model_dump(exclude_none=True))
        for form in forms:
            rig.core.added.clear()
            asked: Any = [USER, form, *results, NEXT]
            await client.chat.completions.create(model=BASE, messages=asked)
            prompts.append(rig.core.added[0].prompt_ids)
        assert prompts[-len(forms) :] == [prompts[-1]] * len(forms)


async def test_the_schema_that_the_client_makes_is_taken(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.core.answer = '{"city":"Bern"}'
    await parse(client, response_format=Weather)
    assert rig.core.added[0].params.grammar is not None
    made: Any = type_to_response_format_param(Weather)
    read_chat({"model": "m", "messages": [USER], "response_format": made})


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"refusal": "I will not."}, {"content": "I will not."}),
        ({"refusal": "I will not.", "content": ""}, {"content": "I will not."}),
        ({"refusal": "", "content": "Yes."}, {"content": "Yes."}),
        ({"refusal": None, "content": "Yes."}, {"content": "Yes."}),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, {"content": "I will not."}),
        ({"refusal": "No.", "content": "Well"}, {"content": "Well\nNo."}),
        ({"refusal": "No.", "content": [{"type": "text", "text": "Well"}]}, {"content": "Well\nNo."}),
    ],
)
async def test_a_refusal_is_what_the_assistant_said(
    tmp_path: Path, message: dict[str, Any], same: dict[str, Any]
) -> None:
    folder = write_byte_level(tmp_path / "base")
    ids = [await read_ids(folder, [USER, {"role": "assistant"} | said, NEXT]) for said in (message, same)]
    assert ids[0] == ids[1]
