"""Keeps text that clients write from becoming control tokens: it is marked before a template is rendered.

The marks are two private characters that nothing in the chat holds. Between them stands the text of a control token,
which is then tokenised as plain text; the template's own control tokens are outside. As transformers'
`sanitize_control_tokens`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.chat_template import Chat

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


def build_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern that matches any of these texts, longer ones first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


class Marks:
    """Two characters, and what they enclose."""

    def __init__(self, chat: Chat, source: str, pattern: re.Pattern[str]) -> None:
        """Choose characters that neither the chat nor the template's `source` holds.

        Raises:
            InvalidRequestError: They hold all.
        """
        used = {char for text in [source, *_texts(chat)] for char in text if ord(char) >= _PRIVATE_USE[0]}
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        marks = tuple(islice(free, 2))
        if len(marks) < 2:
            raise InvalidRequestError(
                "The messages hold so many private-use characters that a control token in them cannot be marked as "
                "plain text; leave some out.",
                param="messages",
            )
        self._start, self._end = marks
        self._pattern = pattern
        start, end = map(_any_spelling, (self._start, self._end))
        self._pieces = re.compile(f"{start}({pattern.pattern}){end}|{start}|{end}")

    def mark(self, chat: Chat, pattern: re.Pattern[str] | None = None, *, but: str | None = None) -> Chat:
        """Return the chat with its control tokens marked.

        Args:
            chat: as clients wrote it.
            pattern: what to mark in the messages of role `but`; the default is everything, everywhere.
            but: a role.
        """

        def enclose(text: str, what: re.Pattern[str] = self._pattern) -> str:
            return what.sub(f"{self._start}\\g<0>{self._end}", text)

        def enclose_less(text: str) -> str:
            return enclose(text, pattern or self._pattern)

        messages = [_map(message, enclose_less if message["role"] == but else enclose) for message in chat.messages]
        return msgspec.structs.replace(
            chat,
            messages=messages,
            tools=_map(chat.tools, enclose),
            options=_map(chat.options, enclose),
            argument_texts={index: _map(texts, enclose) for index, texts in chat.argument_texts.items()},
        )

    def split(self, text: str) -> list[str | None]:
        """Return a rendered text as plain piece, marked token, plain piece …; None where a mark stood alone."""
        return self._pieces.split(text)

    def strip(self, text: str) -> str:
        """Return a rendered text without marks."""
        return self._pieces.sub(lambda found: found[1] or "", text)


def _any_spelling(char: str) -> str:
    """Return a pattern for a character as it is, in JSON that is ASCII, and in what Python shows of an object."""
    spellings = (char, json.dumps(char)[1:-1], repr(char)[1:-1])
    return f"(?:{'|'.join(map(re.escape, spellings))})"


def has_control(chat: Chat, pattern: re.Pattern[str]) -> bool:
    """Whether anything that the client wrote holds the text of a control token."""
    return any(pattern.search(text) for text in _texts(chat))


def count_chars(chat: Chat) -> int:
    """Return how many characters the client wrote."""
    return sum(map(len, _texts(chat)))


def _texts(chat: Chat) -> Iterator[str]:
    yield from _walk([chat.messages, chat.tools, chat.options])
    for texts in chat.argument_texts.values():
        yield from texts


def _walk(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with every text in it changed, the keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    return value
