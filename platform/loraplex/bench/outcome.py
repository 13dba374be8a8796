"""What one client saw of one request. Instants are of `time.perf_counter`; tokens are what the server's usage says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from loraplex_registry.peft.unreadable import UNREADABLE

_MAX_MESSAGE = 300


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens, those found in a cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct):
    """A piece of a chat answer; a first one often names the role alone."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None

    @property
    def has_output(self) -> bool:
        """Whether the model wrote something of it."""
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class Choice(msgspec.Struct):
    """A piece of an answer."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def is_output(self) -> bool:
        """Whether it brings output; text may be empty where a character spans several tokens."""
        if self.delta is not None:
            return self.delta.has_output or (not self.delta.role and not self.finish_reason)
        return bool(self.text) or (self.text is not None and not self.finish_reason)


class Event(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class ErrorDetail(msgspec.Struct):
    """What OpenAI's servers say of an error; codes are words or numbers."""

    message: str = ""
    type: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct):
    """The body of a refusal."""

    error: ErrorDetail


@dataclass(slots=True)
class Outcome:
    """One request: when it was to be sent, was sent, gave its first output, gave the last, was over."""

    model: str
    planned_at: float
    started_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    end_at: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""
    """Empty where all went well; else a status with the server's code, or a word of ours."""
    message: str = ""

    @property
    def first_s(self) -> float:
        """Time to first token, from the planned moment."""
        return self.first_at - self.planned_at

    @property
    def request_s(self) -> float:
        """Time of the whole request, from the planned moment."""
        return self.end_at - self.planned_at

    @property
    def token_s(self) -> float | None:
        """Mean time of a token after the first; None where there is one token only."""
        later = self.completion_tokens - 1
        return (self.last_at - self.first_at) / later if later > 0 else None

    def take(self, event: Event, now: float) -> None:
        """Add one event of the stream."""
        if event.error is not None:
            self.fail("stream", _read_detail(event.error))
            return
        if event.usage is not None:
            details = event.usage.prompt_tokens_details
            self.prompt_tokens, self.completion_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            self.cached_tokens = (details.cached_tokens if details else None) or 0
        if event.choices and event.choices[0].is_output:
            if self.first_at:
                self.gaps_s.append(now - self.last_at)
            else:
                self.first_at = now
            self.last_at = now

    def refuse(self, status: int, body: bytes) -> None:
        """Note a status other than 200."""
        try:
            detail = msgspec.json.decode(body, type=ErrorBody).error
        except UNREADABLE:
            detail = ErrorDetail(body.decode(errors="replace"))
        self.fail(str(status), detail)

    def fail(self, kind: str, detail: ErrorDetail) -> None:
        """Note why it failed; the first reason stays."""
        if not self.error:
            self.error = f"{kind} {detail.code or detail.type or ''}".strip()
            self.message = detail.message[:_MAX_MESSAGE]

    def finish(self) -> None:
        """Judge it when nothing more will come: an answer without output or without usage is an error."""
        if not self.error and not self.first_at:
            self.fail("empty", ErrorDetail("The answer had no output."))
        elif not self.error and not self.completion_tokens:
            self.fail("no_usage", ErrorDetail("The stream ended without usage, so its tokens cannot be counted."))


def _read_detail(error: Any) -> ErrorDetail:
    try:
        return msgspec.convert(error, ErrorDetail)
    except msgspec.ValidationError:
        return ErrorDetail(str(error))
