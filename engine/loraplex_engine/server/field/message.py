"""The messages of a chat: what means nothing is dropped, and what goes with which role is checked.

*Semantics*: a message has content, but for an assistant's that calls; only assistants call; a tool's message answers a
call of the assistant before it, in any order and each once. What a client's own helpers add to an answer that they send
back is their reading of its other fields, and is dropped. A refusal is what the assistant said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex_engine.errors import InvalidRequestError, UnsupportedParameterError
from loraplex_engine.server.field.convert import drop_nulls
from loraplex_engine.wire import openai
from loraplex_engine.wire.openai import Message


def with_messages(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with messages that are fit to be converted.

    Raises:
        UnsupportedParameterError: A message has something that is known and not built.
        InvalidRequestError: Its content is an empty list.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    return body | {"messages": [_clean(message, index) for index, message in enumerate(messages)]}


def _clean(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    where = f"messages[{index}]"
    if message.get("role") == "assistant":
        message = _drop_derived(message, where)
    # a message holds parts and calls, which hold objects
    kept: dict[str, Any] = drop_nulls(message, 4)
    if kept.get("tool_calls") == []:
        del kept["tool_calls"]
    if kept.get("role") == "function" or "function_call" in kept:
        raise UnsupportedParameterError(
            f"`{where}` speaks of functions, which are not supported here; use role `tool` and `tool_calls`.",
            param="messages",
        )
    if kept.get("role") == "assistant":
        _say_refusal(kept, where)
    content = kept.get("content")
    if content == []:
        raise InvalidRequestError(f"`{where}.content` must not be an empty list.", param="messages")
    if isinstance(content, list) and any(isinstance(part, dict) and part.get("type") != "text" for part in content):
        raise UnsupportedParameterError(f"`{where}.content` may only hold parts of type text.", param="messages")
    return kept


def _drop_derived(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an answer as it was before its client's helpers read it."""
    annotations = message.get("annotations")
    if annotations is not None and not isinstance(annotations, list):
        raise InvalidRequestError(f"`{where}.annotations` must be an array.", param="messages")
    kept = {name: value for name, value in message.items() if name not in ("annotations", "parsed")}
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_drop_derived_of_call(call) for call in kept["tool_calls"]]
    return kept


def _drop_derived_of_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    # its place in a stream; an index that is no number is refused as unknown
    kept = {name: value for name, value in call.items() if name != "index" or type(value) is not int}
    if isinstance(kept.get("function"), dict):
        kept["function"] = {name: value for name, value in kept["function"].items() if name != "parsed_arguments"}
    return kept


def _say_refusal(kept: dict[str, Any], where: str) -> None:
    """Make refusals text: it is what the model said, and templates know no other way to say it."""
    content, refusal = kept.get("content"), kept.pop("refusal", None)
    if isinstance(content, list):
        content = [_say_part(part) for part in content]
    if refusal is not None and not isinstance(refusal, str):
        raise InvalidRequestError(f"`{where}.refusal` must be a string.", param="messages")
    if refusal:
        said = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        content = [*said, {"type": "text", "text": refusal}] if content else refusal
    if content is not None:
        kept["content"] = content


def _say_part(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.keys() == {"type", "refusal"} and part["type"] == "refusal"
    return {"type": "text", "text": part["refusal"]} if is_refusal else part


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse messages whose fields do not go with their role.

    Raises:
        InvalidRequestError: `param` is `messages`, the message is named in the text.
    """
    if not messages:
        raise InvalidRequestError("`messages` must hold at least one message.", param="messages")
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        _check_role(message, f"messages[{index}]")
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                raise InvalidRequestError(
                    f"`messages[{index}]` answers no call: the assistant's message before it must have it in "
                    "`tool_calls`, with this `tool_call_id`.",
                    param="messages",
                )
            open_calls.discard(message.tool_call_id)
        else:
            open_calls = _read_calls(message, index)


def _check_role(message: Message, where: str) -> None:
    if message.tool_calls is not None and message.role != "assistant":
        raise InvalidRequestError(f"`{where}.tool_calls` is for role assistant.", param="messages")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise InvalidRequestError(f"`{where}`: role tool, and no other, has a `tool_call_id`.", param="messages")
    if message.content is None and message.tool_calls is None:
        raise InvalidRequestError(f"`{where}.content` is missing.", param="messages")


def _read_calls(message: Message, index: int) -> set[str]:
    """Return the ids of what a message calls."""
    calls = message.tool_calls or ()
    if len(calls) > openai.MAX_CALLS:
        raise InvalidRequestError(
            f"`messages[{index}].tool_calls` may hold at most {openai.MAX_CALLS} calls.", param="messages"
        )
    ids = {call.id for call in calls}
    if len(ids) != len(calls):
        raise InvalidRequestError(f"`messages[{index}].tool_calls` has two calls of one id.", param="messages")
    return ids
