"""Tools in the prompt of a model whose chat template knows none: what there is, how to call it, what came back.

A template that knows tools gets them as they are, and this module changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.chat_input import ChatInput
from loraplex_engine.server.tool.format import ToolFormat, write_calls
from loraplex_engine.wire.openai import FunctionCall, Message, Tool

_INSTRUCTION = """You can call functions. Here they are, one JSON description a line:
{descriptions}

If a function helps to answer, write your calls in exactly this form and nothing else:
{example}
The name is one of the names above, and the arguments are a JSON object that its parameters allow. What a function \
returns comes back between <tool_response> and </tool_response>. If no function helps, answer in plain words."""


def prepare(chat: ChatInput, form: ToolFormat) -> ChatInput:
    """Return the chat as its template can take it: tools, calls and results as text if it knows none."""
    if not form.writes_prompt:
        return chat
    messages = _write_history(chat.messages, form)
    if chat.tools:
        messages = _instruct(messages, _write_instruction(chat.tools, form))
    return msgspec.structs.replace(chat, messages=messages, tools=())


def _write_instruction(tools: Sequence[Tool], form: ToolFormat) -> str:
    descriptions = "\n".join(_dump(_describe(tool)) for tool in tools)
    example = write_calls([("NAME", '{"ARGUMENT": "VALUE"}')], form)
    return _INSTRUCTION.format(descriptions=descriptions, example=example)


def _describe(tool: Tool) -> dict[str, Any]:
    function = tool.function
    described = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in described.items() if value is not None}


def _instruct(messages: list[Message], instruction: str) -> list[Message]:
    """Add to the first system message, or put one first."""
    for index, message in enumerate(messages):
        if message.role in ("system", "developer"):
            text = f"{_text(message)}\n\n{instruction}"
            return [*messages[:index], _replace(message, text), *messages[index + 1 :]]
    return [Message(role="system", content=instruction), *messages]


def _write_history(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    written: list[Message] = []
    called: dict[str, str] = {}
    is_result = False
    for index, message in enumerate(messages):
        was_result, is_result = is_result, message.role == "tool"
        if is_result:
            _check_name(message, index, called)
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if was_result:
                # results of one turn are one message, since turns alternate
                written[-1] = _replace(written[-1], f"{_text(written[-1])}\n{text}")
            else:
                written.append(Message(role="user", content=text))
        elif message.tool_calls:
            called |= {call.id: call.function.name for call in message.tool_calls}
            calls = write_calls([_read_call(call.function) for call in message.tool_calls], form)
            text = "\n".join(part for part in (_text(message), calls) if part)
            written.append(_replace(message, text))
        else:
            written.append(message)
    return written


def _check_name(message: Message, index: int, called: Mapping[str, str]) -> None:
    if message.name is not None and message.name != called.get(message.tool_call_id or ""):
        raise InvalidRequestError(
            f"`messages[{index}].name` is not the name of the function that was called; leave it out.", param="messages"
        )


def _read_call(call: FunctionCall) -> tuple[str, str]:
    return call.name, call.arguments.strip() or "{}"


def _replace(message: Message, text: str) -> Message:
    return msgspec.structs.replace(message, content=text, tool_calls=None)


def _text(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
