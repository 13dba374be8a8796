"""Chats as the front reads them: a base's folder with a chat template, its prompt ids, and those of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from loraplex_engine.server.chat_input import ChatInput
from loraplex_engine.server.field.message import with_messages
from loraplex_engine.server.prompt import PromptReader
from loraplex_engine.server.sandbox.client import Sandbox
from loraplex_engine.server.template_library import TemplateFiles, TemplateLibrary
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.wire.openai import ChatRequest

LENGTH = 1 << 20


class Reader:
    """Prompt ids of a base's chats; `sandbox` starts only if it is needed."""

    def __init__(self, folder: Path, files: TemplateFiles | None = None) -> None:
        self.tokenizer = Tokenizer(folder)
        self.sandbox = Sandbox()
        self.templates = TemplateLibrary(self.tokenizer, self.sandbox, files)
        self.prompts = PromptReader(self.tokenizer)

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.templates.close()
        self.prompts.close()
        self.sandbox.close()

    async def ids(self, messages: Sequence[Mapping[str, Any]], digest: str | None = None, **fields: Any) -> list[int]:
        """Return the ids of a request with these messages and fields."""
        body = json.loads(json.dumps({"model": "m", "messages": messages} | fields))
        chat = ChatInput.of(msgspec.convert(with_messages(body), ChatRequest))
        template = await self.templates.get(digest, has_tools=bool(chat.tools))
        return await self.prompts.read_chat(template, chat, LENGTH)


async def read_ids(folder: Path, messages: Sequence[Mapping[str, Any]], **fields: Any) -> list[int]:
    """Return the ids of a chat with a base of its own."""
    async with Reader(folder) as reader:
        return await reader.ids(messages, **fields)


def reference_ids(
    folder: Path, messages: Sequence[Mapping[str, Any]], *, takes_text: bool = False, **options: Any
) -> list[int]:
    """Return what transformers makes of a chat; `takes_text`: hand it the arguments of calls as text."""
    chat = [dict(message) for message in messages] if takes_text else as_objects(messages)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True} | options
    ids: list[int] = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
    return ids


def as_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as one hands them to transformers: arguments of calls are objects."""
    copied: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(messages))
    for message in copied:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return copied
