"""Chat over the OpenAI route: `stream_chat` yields text as it arrives and fills in the facts of the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from loraplex.client.connection import Connection, check_response, decode, lost, read_error
from loraplex.client.errors import ClientError

DIGEST_DIGITS = 12


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


@dataclass
class Answer:
    """What is known of one answer; filled while it streams. Times are seconds since the request was sent."""

    text: str = ""
    model: str = ""
    digest: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    first_token_s: float = 0.0
    total_s: float = 0.0
    _started_at: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def short_digest(self) -> str:
        """`sha256:` and twelve digits, or `base`."""
        algorithm, colon, digits = self.digest.partition(":")
        return f"{algorithm}{colon}{digits[:DIGEST_DIGITS]}"

    @property
    def is_cut(self) -> bool:
        """Whether it ended at its limit of tokens rather than by itself."""
        return self.finish_reason == "length"

    def take(self, chunk: _Chunk) -> str:
        """Add one chunk and return its text."""
        self.total_s = time.perf_counter() - self._started_at
        if chunk.usage:
            self.prompt_tokens, self.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        piece = ""
        for choice in chunk.choices:
            piece += choice.delta.content or ""
            self.finish_reason = choice.finish_reason or self.finish_reason
        if piece and not self.text:
            self.first_token_s = self.total_s
        self.text += piece
        return piece


def stream_chat(
    connection: Connection, model: str, messages: list[dict[str, str]], answer: Answer, **options: Any
) -> Iterator[str]:
    """Yield the text of a chat answer piece by piece and fill `answer`.

    Args:
        connection: Where to ask.
        model: A name as `model=` takes it.
        messages: The conversation so far, `role` and `content`.
        answer: Filled as the stream runs.
        options: More fields of the OpenAI route; those that are None are left out.

    Raises:
        ConnectionFailedError: Nobody answered, or the connection broke.
        ClientError: The server refused, or failed while it answered.
    """
    body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    body |= {name: value for name, value in options.items() if value is not None}
    try:
        with connection.http.stream("POST", "/v1/chat/completions", json=body) as response:
            check_response(response)
            answer.model = response.headers.get("x-loraplex-model", model)
            answer.digest = response.headers.get("x-loraplex-digest", "")
            for chunk in _read_chunks(response):
                piece = answer.take(chunk)
                if piece:
                    yield piece
    except httpx.TransportError as error:
        raise lost(connection.url, error) from error


def _read_chunks(response: httpx.Response) -> Iterator[_Chunk]:
    """Yield the events of the stream up to `[DONE]`; a stream that ends without it was cut."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = decode(data.encode(), _Chunk)
        if chunk.error is not None:
            raise read_error(response.status_code, data.encode())
        yield chunk
    raise ClientError("The answer ended early; ask again, and look at `loraplex status` if it stays.", code="cut")
