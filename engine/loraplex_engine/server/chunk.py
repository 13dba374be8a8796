"""Writes answers in OpenAI's shapes: whole ones and the events of streams, for chats and for completions.

What all parts of one answer repeat is encoded once, so an event costs little more than its own text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from loraplex_engine.server.choice import Update
from loraplex_engine.server.logprob import ChatLogprobs, CompletionLogprobs, Entry, LogprobWriter
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

    writer: LogprobWriter | None
    """How log-probabilities are written; None if none were asked for."""

    def opening(self, index: int, /) -> bytes:
        """Return the event before a choice's first text; nothing if there is none."""

    def text(self, index: int, text: str, entries: Sequence[Entry]) -> bytes:
        """Return the event for new text."""

    def finish(self, index: int, reason: str) -> bytes:
        """Return the event that ends a choice."""

    def usage(self, done: RequestDone) -> bytes:
        """Return the event with the totals and no choice."""

    def whole(self, answers: Sequence[Update], done: RequestDone) -> bytes:
        """Return the body of an answer that is not streamed."""


class ChatRenderer:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, facts: AnswerFacts, *, has_logprobs: bool = False) -> None:
        self.writer: LogprobWriter | None = ChatLogprobs() if has_logprobs else None
        self._facts = facts
        self._head = b"data: " + _build_head(facts, "chat.completion.chunk")

    def opening(self, index: int, /) -> bytes:
        """Return the chunk that names the role."""
        return self._chunk(openai.ChatChunkChoice(index, openai.ChatDelta(role="assistant", content="")))

    def text(self, index: int, text: str, entries: Sequence[Entry]) -> bytes:
        """Return a chunk of content."""
        delta = openai.ChatDelta(content=text)
        return self._chunk(openai.ChatChunkChoice(index, delta, logprobs=_join(self.writer, entries)))

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk with the reason."""
        return self._chunk(openai.ChatChunkChoice(index, openai.ChatDelta(), reason))

    def usage(self, done: RequestDone) -> bytes:
        """Return the last chunk."""
        return b'%b],"usage":%b}\n\n' % (self._head, _encode(_build_usage(done)))

    def whole(self, answers: Sequence[Update], done: RequestDone) -> bytes:
        """Return the whole completion."""
        choices = [
            openai.ChatChoice(
                answer.index,
                openai.ChatMessage(answer.text),
                answer.finish or "stop",
                _join(self.writer, answer.entries),
            )
            for answer in answers
        ]
        return _build_whole(_build_head(self._facts, "chat.completion"), choices, done)

    def _chunk(self, choice: openai.ChatChunkChoice) -> bytes:
        return b"%b%b]}\n\n" % (self._head, _encode(choice))


class CompletionRenderer:
    """`text_completion`, whole and in chunks."""

    def __init__(self, facts: AnswerFacts, *, has_logprobs: bool = False) -> None:
        self.writer: LogprobWriter | None = CompletionLogprobs() if has_logprobs else None
        self._head = _build_head(facts, "text_completion")

    def opening(self, _: int, /) -> bytes:
        """Return nothing: a completion has no role."""
        return b""

    def text(self, index: int, text: str, entries: Sequence[Entry]) -> bytes:
        """Return a chunk of text."""
        return self._chunk(openai.CompletionChoice(index, text, logprobs=_join(self.writer, entries)))

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk with the reason."""
        return self._chunk(openai.CompletionChoice(index, "", reason))

    def usage(self, done: RequestDone) -> bytes:
        """Return the last chunk."""
        return b'data: %b],"usage":%b}\n\n' % (self._head, _encode(_build_usage(done)))

    def whole(self, answers: Sequence[Update], done: RequestDone) -> bytes:
        """Return the whole completion."""
        choices = [
            openai.CompletionChoice(answer.index, answer.text, answer.finish, _join(self.writer, answer.entries))
            for answer in answers
        ]
        return _build_whole(self._head, choices, done)

    def _chunk(self, choice: openai.CompletionChoice) -> bytes:
        return b"data: %b%b]}\n\n" % (self._head, _encode(choice))


def _build_head(facts: AnswerFacts, kind: str) -> bytes:
    """Return the JSON of every part of an answer up to its first choice."""
    return b'%b,"object":"%b","choices":[' % (_encode(facts)[:-1], kind.encode())


def _build_whole(head: bytes, choices: Sequence[msgspec.Struct], done: RequestDone) -> bytes:
    listed = b",".join(map(_encode, choices))
    return b'%b%b],"usage":%b}' % (head, listed, _encode(_build_usage(done)))


def _build_usage(done: RequestDone) -> openai.Usage:
    """Return a request's cost as OpenAI states it."""
    return openai.Usage(
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.completion_tokens,
        total_tokens=done.prompt_tokens + done.completion_tokens,
        prompt_tokens_details=openai.PromptTokensDetails(done.cached_tokens),
    )


def _join(writer: LogprobWriter | None, entries: Sequence[Entry]) -> msgspec.Raw | None:
    return None if writer is None else writer.join(entries)
