"""What a reader makes of an answer's text: content, and calls piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class CallDelta(msgspec.Struct, frozen=True):
    """What is new of one call: its first piece has `id` and `name`, every piece some of the arguments' JSON text."""

    index: int
    """Among the calls of one choice."""
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Parsed(msgspec.Struct, frozen=True):
    """Content and calls that a piece of text has brought, in the order content, calls."""

    text: str = ""
    calls: Sequence[CallDelta] = ()


class ToolReader(Protocol):
    """The state of one choice: splits its text into content and calls as it arrives."""

    def push(self, text: str, /) -> Parsed:
        """Take more text; return what it settles. What may yet become a call is held back."""

    def flush(self) -> Parsed:
        """Return what was held back, since no more text comes."""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""

    @property
    def has_broken_call(self) -> bool:
        """Whether the arguments of a call that has begun have not come to their end."""
