"""Where a chat template knows no tools they are written into the prompt, calls and results included."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.chat_input import ChatInput
from loraplex_engine.server.tool.format import FORMATS, choose_format
from loraplex_engine.server.tool.prompt import prepare
from loraplex_engine.server.tool.reader import CallReader
from loraplex_engine.wire.openai import Message
from support_tools import TOOLS

OURS = choose_format(None, knows_tools=False)
ASK = {"role": "user", "content": "Weather?"}


def call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [call("a", "get_weather", '{"city": "Oslo"}'), call("b", "get_time", "")],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "a", "content": "4 degrees"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}], "name": "get_time"},
]


def chat(*messages: dict[str, Any], tools: Any = TOOLS) -> ChatInput:
    return ChatInput(msgspec.convert(list(messages), list[Message]), tools)


def prepared(*messages: dict[str, Any], tools: Any = TOOLS) -> list[tuple[str, Any]]:
    made = prepare(chat(*messages, tools=tools), OURS)
    assert list(made.tools) == []
    assert all(message.tool_calls is None and message.tool_call_id is None for message in made.messages)
    return [(message.role, message.content) for message in made.messages]


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    given = chat(ASK, CALLS, *RESULTS)
    assert prepare(given, FORMATS["hermes"]) is given


def test_tools_come_first_in_a_system_message() -> None:
    (role, text), asked = prepared(ASK)
    assert (role, asked) == ("system", ("user", "Weather?"))
    described = [json.loads(line) for line in text.splitlines() if line.startswith('{"name": "') and "ARGU" not in line]
    assert [one["name"] for one in described] == ["get_weather", "search", "get_time"]
    assert described[0]["parameters"] == TOOLS[0].function.parameters


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_are_added_to_a_system_message_wherever_it_is(role: str) -> None:
    asked, (found, text) = prepared(ASK, {"role": role, "content": [{"type": "text", "text": "Be brief."}]})
    assert asked == ("user", "Weather?")
    assert found == role
    assert text.startswith("Be brief.\n\nYou can call functions.")


def test_calls_and_results_are_written_as_the_model_is_told_to_write_them() -> None:
    calls = (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    )
    results = "<tool_response>\n4 degrees\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    written = prepared(ASK, CALLS, *RESULTS, tools=())
    assert written == [("user", "Weather?"), ("assistant", calls), ("user", results)]


def test_what_an_assistant_said_beside_its_calls_stays() -> None:
    said = prepared(ASK, CALLS | {"content": "Let me see."}, *RESULTS, tools=())[1][1]
    assert said.startswith("Let me see.\n<tool_call>")


def test_the_example_in_the_prompt_is_what_the_reader_reads() -> None:
    for name, form in FORMATS.items():
        made = prepare(chat(ASK), msgspec.structs.replace(form, writes_prompt=True))
        text = made.messages[0].content
        assert isinstance(text, str)
        example = text.split("nothing else:\n", 1)[1].split("\nThe name is", 1)[0]
        reader = CallReader(form, ["NAME"])
        parsed = reader.push(example)
        assert (name, reader.num_calls, parsed.text) == (name, 1, "")
        assert [delta.arguments for delta in parsed.calls] == ['{"ARGUMENT": "VALUE"}']


def test_a_name_that_contradicts_the_call_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[2\].name") as refused:
        prepared(ASK, CALLS, RESULTS[0] | {"name": "get_time"})
    assert refused.value.param == "messages"
