"""Writes answers in OpenAI's shapes: whole ones and the events of streams, for chats and for completions.

What all parts of one answer repeat is encoded once, so an event costs little more than its own text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from loraplex_engine.server.choice import Update
from loraplex_engine.server.echo import SLICE, RenderedPart
from loraplex_engine.server.logprob import ChatLogprobs, CompletionLogprobs, Entry, LogprobWriter
from loraplex_engine.server.tool.delta import CallDelta
from loraplex_engine.wire import openai
from loraplex_engine.wire.done import RequestDone

_encode = msgspec.json.Encoder().encode


class AnswerFacts(msgspec.Struct, frozen=True):
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Answer(NamedTuple):
    """One choice that has ended."""

    update: Update
    """All of its updates as one."""
    part: RenderedPart | None
    """What it states of its prompt."""


class Renderer(Protocol):
    """One route's shapes. Pure."""

    writer: LogprobWriter | None
    """How log-probabilities are written; None if none were asked for."""

    def opening(self, index: int, /) -> bytes:
        """Return the event before a choice's first text; nothing if there is none."""

    def prompt(self, index: int, part: RenderedPart) -> Iterator[bytes]:
        """Return the events that state the prompt, before a choice's first text."""

    def text(self, update: Update) -> bytes:
        """Return the event for new text or calls."""

    def finish(self, index: int, reason: str) -> bytes:
        """Return the event that ends a choice."""

    def usage(self, done: RequestDone) -> bytes:
        """Return the event with the totals and no choice."""

    def whole(self, answers: Sequence[Answer], done: RequestDone) -> bytes:
        """Return the body of an answer that is not streamed."""


class ChatRenderer:
    """`chat.completion` and `chat.completion.chunk`.

    A message that is only calls has null for its content, and so has one whose first text is still to come where there
    may be calls: clients append text to null, but not null to text.
    """

    def __init__(
        self, facts: AnswerFacts, *, has_logprobs: bool = False, may_call: bool = False, nulls_usage: bool = False
    ) -> None:
        self.writer: LogprobWriter | None = ChatLogprobs() if has_logprobs else None
        self._facts = facts
        self._head = b"data: " + _build_head(facts, "chat.completion.chunk")
        self._tail = _build_tail(nulls_usage=nulls_usage)
        self._may_call = may_call
        # choices that have text or calls
        self._spoken: set[int] = set()

    def opening(self, index: int, /) -> bytes:
        """Return the chunk that names the role."""
        content = None if self._may_call else ""
        return self._chunk(openai.ChatChunkChoice(index, openai.ChatDelta(role="assistant", content=content)))

    def prompt(self, index: int, part: RenderedPart) -> Iterator[bytes]:
        """Return the chunk with the prompt's log-probabilities, once, since all choices have one prompt."""
        if part.listing is not None and index == 0:
            choice = openai.ChatChunkChoice(index, openai.ChatDelta())
            listing = bytes(part.listing)
            yield b'%b%b],"prompt_logprobs":%b%b' % (self._head, _encode(choice), listing, self._tail[1:])

    def text(self, update: Update) -> bytes:
        """Return a chunk of content, calls or both."""
        if update.text or update.calls:
            self._spoken.add(update.index)
        delta = openai.ChatDelta(
            content=update.text if update.text or not self._may_call else msgspec.UNSET,
            tool_calls=list(map(_build_delta, update.calls)) or None,
        )
        return self._chunk(openai.ChatChunkChoice(update.index, delta, logprobs=_join(self.writer, update.entries)))

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk with the reason; an answer without any text or call has empty text."""
        is_empty = self._may_call and index not in self._spoken
        delta = openai.ChatDelta(content="") if is_empty else openai.ChatDelta()
        return self._chunk(openai.ChatChunkChoice(index, delta, reason))

    def usage(self, done: RequestDone) -> bytes:
        """Return the last chunk."""
        return b'%b],"usage":%b}\n\n' % (self._head, _encode(_build_usage(done)))

    def whole(self, answers: Sequence[Answer], done: RequestDone) -> bytes:
        """Return the whole completion."""
        choices = [
            openai.ChatChoice(
                update.index, _build_message(update), update.finish or "stop", _join(self.writer, update.entries)
            )
            for update, _ in answers
        ]
        part = answers[0].part
        listing = None if part is None else part.listing
        return _build_whole(_build_head(self._facts, "chat.completion"), choices, done, listing)

    def _chunk(self, choice: openai.ChatChunkChoice) -> bytes:
        return self._head + _encode(choice) + self._tail


class CompletionRenderer:
    """`text_completion`, whole and in chunks."""

    def __init__(self, facts: AnswerFacts, *, has_logprobs: bool = False, nulls_usage: bool = False) -> None:
        self.writer: LogprobWriter | None = CompletionLogprobs() if has_logprobs else None
        self._head = _build_head(facts, "text_completion")
        self._tail = _build_tail(nulls_usage=nulls_usage)

    def opening(self, _: int, /) -> bytes:
        """Return nothing: a completion has no role."""
        return b""

    def prompt(self, index: int, part: RenderedPart) -> Iterator[bytes]:
        """Return a chunk with the prompt's log-probabilities, then chunks of its text."""
        if part.listing is not None:
            yield self._chunk(openai.CompletionChoice(index, "", prompt_logprobs=part.listing))
        if not part.entries:
            if part.text:
                yield self._chunk(openai.CompletionChoice(index, part.text))
            return
        for start in range(0, len(part.entries), SLICE):
            stop = start + SLICE
            end = part.starts[stop] if stop < len(part.starts) else len(part.text)
            text, entries = part.text[part.starts[start] : end], part.entries[start:stop]
            yield self._chunk(openai.CompletionChoice(index, text, logprobs=_join(self.writer, entries)))

    def text(self, update: Update) -> bytes:
        """Return the chunk of text."""
        return self._chunk(
            openai.CompletionChoice(update.index, update.text, logprobs=_join(self.writer, update.entries))
        )

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk with the reason."""
        return self._chunk(openai.CompletionChoice(index, "", reason))

    def usage(self, done: RequestDone) -> bytes:
        """Return the last chunk."""
        return b'data: %b],"usage":%b}\n\n' % (self._head, _encode(_build_usage(done)))

    def whole(self, answers: Sequence[Answer], done: RequestDone) -> bytes:
        """Return the whole completion."""
        choices = [self._build_choice(answer.update, answer.part) for answer in answers]
        return _build_whole(self._head, choices, done)

    def _build_choice(self, update: Update, part: RenderedPart | None) -> openai.CompletionChoice:
        if part is None:
            logprobs = _join(self.writer, update.entries)
            return openai.CompletionChoice(update.index, update.text, update.finish, logprobs)
        return openai.CompletionChoice(
            update.index,
            part.text + update.text,
            update.finish,
            _join(self.writer, [*part.entries, *update.entries]),
            msgspec.UNSET if part.listing is None else part.listing,
        )

    def _chunk(self, choice: openai.CompletionChoice) -> bytes:
        return b"data: %b%b%b" % (self._head, _encode(choice), self._tail)


def _build_delta(call: CallDelta) -> openai.ToolCallDelta:
    """Return a call's piece; the first says what it is."""
    function = openai.FunctionDelta(call.arguments, call.name)
    return openai.ToolCallDelta(call.index, function, call.id, None if call.id is None else "function")


def _build_message(update: Update) -> openai.ChatMessage:
    if not update.calls:
        return openai.ChatMessage(update.text)
    calls = [
        openai.ToolCall(call.id or "", openai.FunctionCall(call.name or "", call.arguments)) for call in update.calls
    ]
    return openai.ChatMessage(update.text or None, tool_calls=calls)


def _build_head(facts: AnswerFacts, kind: str) -> bytes:
    """Return the JSON of every part of an answer up to its first choice."""
    return b'%b,"object":"%b","choices":[' % (_encode(facts)[:-1], kind.encode())


def _build_tail(*, nulls_usage: bool) -> bytes:
    """Return the end of a chunk that has a choice: where usage is asked for, all but the last have null."""
    return b'],"usage":null}\n\n' if nulls_usage else b"]}\n\n"


def _build_whole(
    head: bytes, choices: Sequence[msgspec.Struct], done: RequestDone, listing: msgspec.Raw | None = None
) -> bytes:
    listed = b",".join(map(_encode, choices))
    tail = b"" if listing is None else b',"prompt_logprobs":%b' % bytes(listing)
    return b'%b%b],"usage":%b%b}' % (head, listed, _encode(_build_usage(done)), tail)


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
