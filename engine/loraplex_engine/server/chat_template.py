"""Renders chat templates as `transformers` does: same jinja environment, same variables, sandboxed.

The source is `transformers.utils.chat_template_utils`; tests compare the two. A template of an adapter is compiled and
rendered only in the process of `server/sandbox`.
"""

from __future__ import annotations

import copy
import hashlib
import marshal
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import jinja2
import msgspec

from loraplex_engine.errors import InvalidRequestError
from loraplex_registry.peft.template_environment import build_environment
from loraplex_registry.peft.template_facts import TemplateFacts, find_facts

_MAX_REASON_CHARS = 300
_MAX_PROMPT_CHARS = 8 << 20
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_CALL_ID_CHARS = 9


class Chat(msgspec.Struct, frozen=True):
    """A chat as a template sees it."""

    messages: list[dict[str, Any]]
    """The arguments of calls are objects where they are JSON objects."""
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = {}
    """More variables; they go before the names of special tokens."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    argument_texts: dict[int, list[str]] = {}
    """The same arguments as the client wrote them, by number of the message."""


class CompiledTemplate(msgspec.Struct, frozen=True):
    """A template as code, which may be run where its source may."""

    facts: TemplateFacts
    code: CodeType

    def dump(self) -> bytes:
        """Return the code as bytes, for this version of Python."""
        return marshal.dumps(self.code)


class ChatTemplate:
    """One compiled template with the names of the base's special tokens (`bos_token` and so on)."""

    def __init__(self, code: CodeType, special_tokens: Mapping[str, str]) -> None:
        environment = build_environment()
        self._template = jinja2.Template.from_code(environment, code, environment.globals)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, code: bytes, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Return the template whose code was dumped. It runs what the bytes say: only for the sandbox's process."""
        return cls(marshal.loads(code), special_tokens)  # noqa: S302

    def render(self, chat: Chat) -> str:
        """Return the prompt's text.

        Templates differ in how they take tool calls, so what one cannot render is tried in the other shapes: arguments
        as text, then ids of nine characters.

        Raises:
            InvalidRequestError: The template refuses these messages; its own words are in the message.
        """
        refusal: Exception | None = None
        for shape in _shapes(chat):
            try:
                text = self._render_shape(shape)
            except MemoryError:
                raise
            # a template may fail in any way on messages that it does not expect
            except Exception as error:  # noqa: BLE001
                refusal = refusal or error
            else:
                _check_text(text)
                return text
        reason = str(refusal)[:_MAX_REASON_CHARS].encode(errors="replace").decode()
        raise InvalidRequestError(f"The model's chat template refuses these messages: {reason}", param="messages")

    def _render_shape(self, chat: Chat) -> str:
        messages = copy.deepcopy(chat.messages)
        continued = _tag_last(messages) if chat.continue_final_message else None
        text: str = self._template.render(
            messages=messages,
            tools=chat.tools,
            documents=None,
            add_generation_prompt=chat.add_generation_prompt,
            **(self._special_tokens | chat.options),
        )
        return text if continued is None else _cut_at_tag(text, continued)


def compile_template(source: str) -> CompiledTemplate:
    """Return a template as code.

    Raises:
        jinja2.TemplateError: It is not a template.
    """
    environment = build_environment()
    return CompiledTemplate(find_facts(environment.parse(source)), environment.compile(source))


def _check_text(text: str) -> None:
    if len(text) > _MAX_PROMPT_CHARS:
        raise InvalidRequestError(
            f"The model's chat template makes more than {_MAX_PROMPT_CHARS} characters of these messages.",
            param="messages",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("The model's chat template writes what is not text.", param="messages") from error


def _tag_last(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last text of the last message, and return that text."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        for part in reversed(content):
            if "text" in part:
                text: str = part["text"]
                part["text"] = text + _CONTINUE_TAG
                return text
    if not isinstance(content, str):
        raise jinja2.TemplateError("the last message has no text to continue")
    messages[-1]["content"] = content + _CONTINUE_TAG
    return content


def _cut_at_tag(text: str, continued: str) -> str:
    if continued.strip() not in text or _CONTINUE_TAG.strip() not in text:
        raise jinja2.TemplateError("the last message is not in the prompt, so it cannot be continued")
    end = text.rindex(_CONTINUE_TAG.strip())
    is_whole = text.startswith(_CONTINUE_TAG, end)
    return text[:end] if is_whole else text[:end].rstrip()


def _shapes(chat: Chat) -> Iterator[Chat]:
    yield chat
    if any(message.get("tool_calls") for message in chat.messages):
        with_texts = msgspec.structs.replace(chat, messages=_with_texts(chat))
        yield with_texts
        yield _with_short_ids(chat)
        yield _with_short_ids(with_texts)


def _with_texts(chat: Chat) -> list[dict[str, Any]]:
    messages = copy.deepcopy(chat.messages)
    for index, texts in chat.argument_texts.items():
        for call, text in zip(messages[index]["tool_calls"], texts, strict=True):
            call["function"]["arguments"] = text
    return messages


def _with_short_ids(chat: Chat) -> Chat:
    messages = copy.deepcopy(chat.messages)
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = _short_id(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
    return msgspec.structs.replace(chat, messages=messages)


def _short_id(call_id: str) -> str:
    if len(call_id) == _CALL_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_CALL_ID_CHARS]
