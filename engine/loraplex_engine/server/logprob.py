"""Log-probabilities of one answer as OpenAI states them: rendered when a token comes, given out with its text.

`LogprobWriter` knows the two routes' shapes; `LogprobQueue` is the state of one choice. A token's entry goes out with
the first character that the token has a part in, so entries follow the text through everything that holds it back, and
what a stop string cuts off has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from loraplex_engine.server.detokenizer import Detokenizer
from loraplex_engine.wire import openai
from loraplex_engine.wire.messages import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks."""

_encode = msgspec.json.Encoder().encode

Entry = tuple[bytes, ...]
"""One token's JSON: a single object for chats, a value for each of the parallel lists of completions."""


class LogprobWriter(Protocol):
    """One route's shapes. Pure."""

    def write(self, token_id: int, values: TokenLogprobs | None, offset: int, text: Detokenizer, /) -> Entry:
        """Return the entry of a token that `text` is about to take; `offset` is where its text begins.

        `values` is None for the first token of a prompt, of which nothing can be said.
        """

    def join(self, entries: Sequence[Entry], /) -> msgspec.Raw:
        """Return the value of `logprobs` for some tokens in a row."""


class ChatLogprobs:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null}`."""

    def write(self, token_id: int, values: TokenLogprobs | None, _: int, text: Detokenizer, /) -> Entry:
        """Return one object."""
        assert values is not None, "chats echo no prompt"
        top = [openai.TopLogprob(*_describe(token, logprob, text)) for token, logprob in values.top]
        return (_encode(openai.TokenLogprob(*_describe(token_id, values.logprob, text), top_logprobs=top)),)

    def join(self, entries: Sequence[Entry], /) -> msgspec.Raw:
        """Return the object with all entries."""
        return msgspec.Raw(b'{"content":[%b],"refusal":null}' % b",".join(entry[0] for entry in entries))


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, lists of one length."""

    def write(self, token_id: int, values: TokenLogprobs | None, offset: int, text: Detokenizer, /) -> Entry:
        """Return one value for each list; the chosen token is among its top ones, however unlikely."""
        token = _name(token_id, text, "bytes:")
        if values is None:
            return _encode(token), b"null", b"null", b"%d" % offset
        logprob = _floor(values.logprob)
        top: dict[str, float] = {}
        for other, value in values.top:
            top.setdefault(_name(other, text, "bytes:"), _floor(value))
        top.setdefault(token, logprob)
        return _encode(token), _encode(logprob), _encode(top), b"%d" % offset

    def join(self, entries: Sequence[Entry], /) -> msgspec.Raw:
        """Return the object of lists."""
        columns = zip(*entries, strict=True) if entries else [()] * 4
        lists = tuple(b",".join(column) for column in columns)
        return msgspec.Raw(b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % lists)


class LogprobQueue:
    """The entries of one choice that wait for their text."""

    def __init__(self, writer: LogprobWriter) -> None:
        self._writer = writer
        self._waiting: deque[tuple[int, Entry]] = deque()

    def push(self, token_id: int, values: TokenLogprobs, offset: int, text: Detokenizer) -> None:
        """Take the log-probabilities of a token before `text` takes the token; `offset` as in the writer."""
        self._waiting.append((offset, self._writer.write(token_id, values, offset, text)))

    def pop(self, num_chars: int) -> list[Entry]:
        """Return the entries whose text begins within the first `num_chars` characters of the answer."""
        found: list[Entry] = []
        while self._waiting and self._waiting[0][0] < num_chars:
            found.append(self._waiting.popleft()[1])
        return found

    def flush(self) -> list[Entry]:
        """Return all that still wait: tokens at the end that have no text."""
        found = [entry for _, entry in self._waiting]
        self._waiting.clear()
        return found


def write_prompt_position(token_id: int, values: TokenLogprobs | None, text: Detokenizer) -> bytes:
    """Return one element of `prompt_logprobs`: by token id, the prompt's own first, then the likeliest."""
    if values is None:
        return b"null"
    ranks = {token: rank for rank, (token, _) in enumerate(values.top, 1)}
    found = {token_id: values.logprob} | dict(values.top)
    return _encode(
        {
            str(token): {"logprob": _floor(logprob), "rank": ranks.get(token), "decoded_token": _name(token, text)}
            for token, logprob in found.items()
        }
    )


def _describe(token_id: int, logprob: float, text: Detokenizer) -> tuple[str, float, list[int]]:
    return _name(token_id, text), _floor(logprob), list(text.get_bytes(token_id))


def _name(token_id: int, text: Detokenizer, prefix: str = "") -> str:
    """Return a token's text; a special one's name; `prefix` and escapes where its bytes are no whole characters."""
    data = text.get_bytes(token_id)
    if not data:
        return text.get_name(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + data.decode(errors="backslashreplace")


def _floor(logprob: float) -> float:
    # in this order NaN is the lowest, too
    return max(LOWEST, logprob)
