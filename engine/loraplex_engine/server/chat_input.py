"""From a client's messages and tools to what a chat template takes, in the shape that this template reads.

*Semantics*: as one passes a chat to transformers' `apply_chat_template`: arguments of calls are objects. Parts of a
content stay parts where the template goes through them, else they are joined by line breaks. `developer` is `system`
where the template knows no developer. A null content is empty text, unless the template asks for null. What the
template would not read is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from loraplex_engine.errors import InvalidRequestError, UnsupportedParameterError
from loraplex_engine.server.chat_template import Chat
from loraplex_engine.wire import openai
from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.strict_json import parse_json
from loraplex_registry.peft.template_facts import TemplateFacts

_MAX_NAME_CHARS = 64
_MANY_MESSAGES, _LONG_ARGUMENTS = 256, 1 << 14
_NO_PARAMETERS = {"type": "object", "properties": {}}


class ChatInput(msgspec.Struct, frozen=True):
    """The fields of a request that make its prompt; the roles of the messages have been checked."""

    messages: Sequence[openai.Message]
    tools: Sequence[openai.Tool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = {}

    @classmethod
    def of(cls, request: openai.ChatRequest | openai.TokenizeRequest) -> ChatInput:
        """Return those fields of a request that has messages."""
        return cls(
            request.messages or (),
            request.tools,
            request.add_generation_prompt,
            request.continue_final_message,
            request.chat_template_kwargs,
        )


def is_large(chat: ChatInput) -> bool:
    """Whether building this chat may take longer than an event loop has time."""
    calls = (call for message in chat.messages for call in message.tool_calls or ())
    return len(chat.messages) > _MANY_MESSAGES or sum(len(call.function.arguments) for call in calls) > _LONG_ARGUMENTS


def build_chat(chat: ChatInput, facts: TemplateFacts, special_tokens: Mapping[str, str]) -> Chat:
    """Return a chat in the shape that a template with these facts reads.

    Raises:
        InvalidRequestError: Something in it has no meaning to the template, or contradicts the rest.
    """
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequestError(
            "`continue_final_message` needs `add_generation_prompt` to be false: the last message goes on.",
            param="continue_final_message",
        )
    if chat.tools and not facts.reads_tools:
        raise UnsupportedParameterError("This model's chat template knows no tools.", param="tools")
    names = _names_of_calls(chat.messages)
    return Chat(
        messages=[_build_message(message, index, facts, names) for index, message in enumerate(chat.messages)],
        tools=[_build_tool(tool) for tool in chat.tools] or None,
        options=_read_options(chat.chat_template_kwargs, facts, special_tokens),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        argument_texts={
            index: [call.function.arguments for call in message.tool_calls]
            for index, message in enumerate(chat.messages)
            if message.tool_calls
        },
    )


def _names_of_calls(messages: Sequence[openai.Message]) -> dict[int, str]:
    """Return what was called, by the number of the tool message that answers."""
    names, called = dict[int, str](), dict[str, str]()
    for index, message in enumerate(messages):
        if message.tool_calls:
            called |= {call.id: call.function.name for call in message.tool_calls}
        if message.tool_call_id in called:
            names[index] = called[message.tool_call_id]
    return names


def _build_message(
    message: openai.Message, index: int, facts: TemplateFacts, names: Mapping[int, str]
) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not facts.knows_developer else message.role
    built: dict[str, Any] = {"role": role, "content": _build_content(message.content, facts)}
    name = message.name if message.name is not None else names.get(index)
    if facts.reads_name and name is not None:
        built["name"] = name
    elif message.name is not None and message.name != names.get(index):
        _refuse_name(index)
    if message.tool_calls:
        built["tool_calls"] = [_build_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        built["tool_call_id"] = message.tool_call_id
    return built


def _refuse_name(index: int) -> NoReturn:
    raise UnsupportedParameterError(
        f"This model's chat template does not use `messages[{index}].name`; leave it out.", param="messages"
    )


def _build_content(content: str | list[openai.TextPart] | None, facts: TemplateFacts) -> Any:
    if content is None:
        return None if facts.tells_null else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if facts.needs_parts else content
    if facts.reads_parts:
        return [{"type": "text", "text": part.text} for part in content]
    return "\n".join(part.text for part in content)


def _build_call(call: openai.ToolCall) -> dict[str, Any]:
    arguments = read_arguments(call.function.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def read_arguments(text: str) -> Any:
    """Return the arguments of a call as an object, or as they are where they are no JSON object."""
    try:
        value = parse_json((text or "{}").encode())
    except JsonError:
        return text
    return value if isinstance(value, dict) else text


def _build_tool(tool: openai.Tool) -> dict[str, Any]:
    function = tool.function
    built: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        built["description"] = function.description
    built["parameters"] = _NO_PARAMETERS if function.parameters is None else function.parameters
    return {"type": "function", "function": built}


def _read_options(
    options: Mapping[str, Any], facts: TemplateFacts, special_tokens: Mapping[str, str]
) -> dict[str, Any]:
    for name in options:
        if name not in facts.options or name in special_tokens:
            known = ", ".join(option for option in facts.options if option not in special_tokens)
            hint = f"it knows {known}" if known else "it knows none"
            raise UnsupportedParameterError(
                f"This model's chat template has no option `{name[:_MAX_NAME_CHARS]}`; {hint}.",
                param="chat_template_kwargs",
            )
    return dict(options)
