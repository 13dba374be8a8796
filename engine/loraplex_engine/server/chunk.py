"""Writes answers in OpenAI's shapes: whole ones and the events of streams, for chats and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from loraplex_engine.server.choice import Update
from loraplex_engine.wire import openai
from loraplex_engine.wire.done import RequestDone

_encode = msgspec.json.Encoder().encode


class AnswerFacts(msgspec.Struct, frozen=True):
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Renderer(Protocol):
    """One route's shapes. Pure."""

    def opening(self, index: int, /) -> bytes | None:
        """Return the event before a choice's first text, if there is one."""

    def text(self, index: int, text: str) -> bytes:
        """Return the event for new text."""

    def finish(self, index: int, reason: str) -> bytes:
        """Return the event that ends a choice."""

    def usage(self, done: RequestDone) -> bytes:
        """Return the event with the totals and no choice."""

    def whole(self, answers: Sequence[Update], done: RequestDone) -> bytes:
        """Return the body of an answer that is not streamed."""


def build_usage(done: RequestDone) -> openai.Usage:
    """Return a request's cost as OpenAI states it."""
    return openai.Usage(
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.completion_tokens,
        total_tokens=done.prompt_tokens + done.completion_tokens,
        prompt_tokens_details=openai.PromptTokensDetails(done.cached_tokens),
    )


class ChatRenderer:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = msgspec.structs.asdict(facts)

    def opening(self, index: int, /) -> bytes | None:
        """Return the chunk that names the role."""
        return self._chunk(index, openai.ChatDelta(role="assistant", content=""))

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk of content."""
        return self._chunk(index, openai.ChatDelta(content=text))

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk with the reason."""
        return self._chunk(index, openai.ChatDelta(), reason)

    def usage(self, done: RequestDone) -> bytes:
        """Return the last chunk."""
        return _encode(openai.ChatChunk(**self._facts, choices=[], usage=build_usage(done)))

    def whole(self, answers: Sequence[Update], done: RequestDone) -> bytes:
        """Return the whole completion."""
        choices = [
            openai.ChatChoice(answer.index, openai.ChatMessage(answer.text), answer.finish or "stop")
            for answer in answers
        ]
        return _encode(openai.ChatResponse(**self._facts, choices=choices, usage=build_usage(done)))

    def _chunk(self, index: int, delta: openai.ChatDelta, reason: str | None = None) -> bytes:
        return _encode(openai.ChatChunk(**self._facts, choices=[openai.ChatChunkChoice(index, delta, reason)]))


class CompletionRenderer:
    """`text_completion`, whole and in chunks."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = msgspec.structs.asdict(facts)

    def opening(self, _: int, /) -> bytes | None:
        """Return nothing: a completion has no role."""
        return None

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk of text."""
        return self._build([openai.CompletionChoice(index, text)])

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk with the reason."""
        return self._build([openai.CompletionChoice(index, "", reason)])

    def usage(self, done: RequestDone) -> bytes:
        """Return the last chunk."""
        return self._build([], done)

    def whole(self, answers: Sequence[Update], done: RequestDone) -> bytes:
        """Return the whole completion."""
        return self._build([openai.CompletionChoice(item.index, item.text, item.finish) for item in answers], done)

    def _build(self, choices: list[openai.CompletionChoice], done: RequestDone | None = None) -> bytes:
        usage = None if done is None else build_usage(done)
        return _encode(openai.Completion(**self._facts, choices=choices, usage=usage))
