"""Reads whole and streamed answers of the generation routes into the same plain data, and holds streams to their rules.

A stream is read a byte at a time by the official client's own decoder, and each chunk by its types.
"""

from __future__ import annotations

import json
import re
from typing import Any

from openai._streaming import SSEDecoder
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

Answer = dict[str, Any]
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")
_CALL_ID = re.compile(r"call_[A-Za-z0-9]{8,64}|[A-Za-z0-9]{9}")


def read_whole(body: bytes) -> Answer:
    """Choices and usage of an answer that was not streamed."""
    answer = json.loads(body)
    _check_type(answer, ChatCompletion if answer["object"] == "chat.completion" else Completion)
    choices = {choice["index"]: _read_choice(choice) for choice in answer["choices"]}
    assert list(choices) == list(range(len(choices)))
    return {"choices": choices, "usage": _read_usage(answer["usage"]), "model": answer["model"]}


def _read_choice(choice: dict[str, Any]) -> Answer:
    message = choice.get("message", {})
    calls = [_read_call(call) for call in message.get("tool_calls") or []]
    text = message["content"] if "message" in choice else choice["text"]
    if calls and text is None:
        text = ""
    return {
        "text": text,
        "calls": calls,
        "finish": choice["finish_reason"],
        "logprobs": _read_logprobs(choice["logprobs"]),
        "prompt_logprobs": choice.get("prompt_logprobs"),
    }


def _read_logprobs(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """The lists that have something in them; a stream says nothing of an answer without tokens."""
    return {name: logprobs[name] for name in _LISTS if logprobs.get(name)} or None if logprobs else None


def _read_call(call: dict[str, Any]) -> tuple[str, str]:
    assert _CALL_ID.fullmatch(call["id"]), call
    assert call["type"] == "function"
    return call["function"]["name"], call["function"]["arguments"]


def _read_usage(usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens; how many were cached depends on what came before."""
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def read_stream(body: bytes) -> Answer:
    """The same of a stream that must have ended well and told its usage."""
    events = [event.data for event in SSEDecoder().iter_bytes(bytes([byte]) for byte in body)]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    is_chat = chunks[0]["object"] == "chat.completion.chunk"
    for chunk in chunks:
        _check_type(chunk, ChatCompletionChunk if is_chat else Completion)
    assert len({(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == []
    choices: dict[int, Answer] = {}
    for chunk in chunks:
        assert chunk.get("usage") is None
        for choice in chunk["choices"]:
            _add(choices, choice, is_chat=is_chat)
    assert all(choice["finish"] for choice in choices.values())
    for choice in choices.values():
        choice["calls"] = [tuple(call) for call in choice["calls"]]
    ordered = {index: choices[index] for index in sorted(choices)}
    return {"choices": ordered, "usage": _read_usage(usage["usage"]), "model": usage["model"]}


def _check_type(answer: dict[str, Any], kind: type[BaseModel]) -> None:
    """Fail unless the client's type takes it; OpenAI's own completions have nulls where the type has none."""
    if kind is Completion:
        answer = answer | {"choices": [_fill(choice) for choice in answer["choices"]]}
    kind.model_validate(answer)


def _fill(choice: dict[str, Any]) -> dict[str, Any]:
    """The chunks before the last have no reason, and the first token of an echoed prompt no log-probability."""
    logprobs = dict(choice["logprobs"] or {})
    if logprobs.get("text_offset", [1])[:1] == [0]:
        logprobs["token_logprobs"] = [value or 0.0 for value in logprobs["token_logprobs"]]
        logprobs["top_logprobs"] = [value or {} for value in logprobs["top_logprobs"]]
    return choice | {"finish_reason": choice["finish_reason"] or "stop", "logprobs": logprobs or None}


def _add(choices: dict[int, Answer], part: dict[str, Any], *, is_chat: bool) -> None:
    index = part["index"]
    if index not in choices:
        assert not is_chat or part["delta"].get("role") == "assistant"
        choices[index] = {"text": "", "calls": [], "finish": None, "logprobs": None, "prompt_logprobs": None}
    found = choices[index]
    assert found["finish"] is None, "nothing comes after a choice's end"
    delta = part["delta"] if is_chat else {"content": part["text"]}
    found["text"] += delta.get("content") or ""
    for call in delta.get("tool_calls") or []:
        _add_call(found["calls"], call)
    for name, values in (part["logprobs"] or {}).items():
        if name in _LISTS and values:
            found["logprobs"] = (found["logprobs"] or {}) | {name: ((found["logprobs"] or {}).get(name) or []) + values}
    if part.get("prompt_logprobs") is not None:
        assert found["prompt_logprobs"] is None
        found["prompt_logprobs"] = part["prompt_logprobs"]
    found["finish"] = part["finish_reason"]


def _add_call(calls: list[Any], delta: dict[str, Any]) -> None:
    if delta["index"] == len(calls):
        assert _CALL_ID.fullmatch(delta["id"]), delta
        assert delta["type"] == "function"
        calls.append([delta["function"]["name"], ""])
    calls[delta["index"]][1] += delta["function"].get("arguments") or ""
