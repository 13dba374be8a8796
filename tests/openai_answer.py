"""What a client makes of an answer: whole or streamed, the same `Answer`; every object is of the client's own types."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# what we send beyond OpenAI's types, as other engines of this kind do
_OUR_FIELDS = {"prompt_logprobs", "prompt_token_ids"}


@dataclass
class Choice:
    """One choice, put together from its chunks if it was streamed."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    """Entries of a chat as they come; of a completion (token, log-probability, likeliest, offset)."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """`id`, `name` and `arguments` of each tool call."""
    pieces: list[str] = field(default_factory=list)
    """The text of each chunk."""


@dataclass
class Answer:
    """An answer with its choices in order, or an error."""

    status: int
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    objects: list[dict[str, Any]] = field(default_factory=list)
    """The body, or the data of each event."""
    has_end: bool = True
    """Whether a stream ended with `[DONE]`."""

    @property
    def text(self) -> str:
        """The text of the only choice."""
        [choice] = self.choices
        return choice.text


def read_answer(endpoint: Endpoint, status: int, body: bytes, *, is_stream: bool) -> Answer:
    """Read a body to its end and hold it to the types that the `openai` package has for it."""
    if status != 200 or not is_stream:
        content = json.loads(body, parse_constant=_refuse)
        answer = Answer(status, error=content.get("error"), objects=[content] if status == 200 else [])
        _check(ChatCompletion if endpoint == "chat" else Completion, answer.objects)
        for choice in content.get("choices", ()):
            answer.choices.append(_read_whole(choice))
        answer.usage = content.get("usage")
        return answer
    answer = Answer(status)
    *events, rest = body.decode().split("\n\n")
    assert rest == "", "the last event has no end"
    datas = [event.removeprefix("data: ") for event in events if not event.startswith(":")]
    answer.has_end = datas[-1:] == ["[DONE]"]
    answer.objects = [json.loads(data, parse_constant=_refuse) for data in datas if data != "[DONE]"]
    if "error" in answer.objects[-1]:
        answer.error = answer.objects.pop()["error"]
    _check(ChatCompletionChunk if endpoint == "chat" else Completion, answer.objects)
    for chunk in answer.objects:
        _add_chunk(answer, chunk)
    return answer


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _check(kind: type[BaseModel], objects: list[dict[str, Any]]) -> None:
    for content in objects:
        unknown = {*_list_unknown(kind.model_validate(_with_finish(kind, content)))}
        assert unknown <= _OUR_FIELDS, f"the client does not know {unknown}"


def _with_finish(kind: type[BaseModel], content: dict[str, Any]) -> dict[str, Any]:
    """A completion's chunk has no finish reason until the end, though the type of both says it has."""
    if kind is not Completion:
        return content
    return content | {
        "choices": [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in content["choices"]]
    }


def _list_unknown(value: Any) -> list[str]:
    if isinstance(value, BaseModel):
        inner = [name for item in value.__dict__.values() for name in _list_unknown(item)]
        return [*(value.model_extra or {}), *inner]
    return [name for item in value for name in _list_unknown(item)] if isinstance(value, list) else []


def _read_whole(said: dict[str, Any]) -> Choice:
    if "message" not in said:
        return Choice(said["text"], said["finish_reason"], _zip(said["logprobs"]), pieces=[said["text"]])
    message = said["message"]
    text = message["content"] or ""
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
    return Choice(text, said["finish_reason"], (said["logprobs"] or {}).get("content") or [], calls, [text])


def _zip(lists: dict[str, list[Any]] | None) -> list[Any]:
    """A completion's lists of one length as entries."""
    if lists is None:
        return []
    tops = lists["top_logprobs"] or [None] * len(lists["tokens"])
    return [*zip(lists["tokens"], lists["token_logprobs"], tops, lists["text_offset"], strict=True)]


def _add_chunk(answer: Answer, chunk: dict[str, Any]) -> None:
    answer.usage = chunk.get("usage") or answer.usage
    for part in chunk["choices"]:
        while len(answer.choices) <= part["index"]:
            answer.choices.append(Choice())
        choice = answer.choices[part["index"]]
        assert choice.finish_reason is None, "something came behind the finish reason"
        choice.finish_reason = part["finish_reason"]
        delta = part["delta"] if "delta" in part else {"content": part["text"]}
        choice.pieces.append(delta.get("content") or "")
        choice.text += choice.pieces[-1]
        said = part.get("logprobs")
        choice.logprobs += ((said or {}).get("content") or []) if "delta" in part else _zip(said)
        for call in delta.get("tool_calls") or ():
            _add_call(choice.calls, call)


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    function = delta.get("function") or {}
    if delta["index"] == len(calls):
        assert delta["type"] == "function"
        calls.append({"id": delta["id"], "name": function["name"], "arguments": ""})
    call = calls[delta["index"]]
    assert "id" not in delta or delta["id"] == call["id"], "only the first delta of a call names it"
    call["arguments"] += function.get("arguments") or ""
